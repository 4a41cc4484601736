"""Executors for host callbacks.

``inline``
    In the thread that completes the future; on the callback thread if that is a C++ thread, which never takes the
    GIL. This is the default, unless the future's producer chose another executor for its futures.
``callback_thread``
    On the library's one callback thread, in the order of completion. Callbacks there must not block: a callback that
    blocks delays the others.
``serial(name)``
    On a thread of its own, one at a time, in the order of completion. Its callbacks and the callbacks of other
    executors do not delay each other.
any ``concurrent.futures.Executor``
    For callbacks that block. ``submit`` uses ``default_executor()`` by default.

>>> from concurrent.futures import ThreadPoolExecutor
>>> from cudafuture import CUDAFuture, executors
>>> with ThreadPoolExecutor() as pool:
...     child = CUDAFuture.completed(2).then(lambda f: f.value() + 1, executor=pool)
...     child.wait()
3
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor

from cudafuture import _C
from cudafuture._arguments import expect_str
from cudafuture._C import HostExecutor
from cudafuture._submit_pool import SubmitPool
from cudafuture.config import config

__all__ = ["HostExecutor", "callback_thread", "default_executor", "inline", "serial"]

inline: HostExecutor = _C.inline_executor
callback_thread: HostExecutor = _C.callback_thread

_lock = threading.Lock()  # guards _default
_default: SubmitPool | None = None


def serial(name: str) -> HostExecutor:
    """Return an executor that runs callbacks on a thread of its own.

    Callbacks run one at a time, in the order in which their futures complete. A callback must not wait for another
    callback of the same executor. The executor has a thread while it has callbacks to run, and lives until the process
    ends: create one for a service or a component, not for a call.

    Args:
        name: shown in messages.

    >>> from cudafuture import CUDAFuture
    >>> log = serial("log")
    >>> CUDAFuture.completed(2).then(lambda f: f.value() + 1, executor=log).wait()
    3
    """
    expect_str("name", name)
    return _C.serial_executor(name)


def default_executor() -> Executor:
    """Return the thread pool that ``submit`` uses.

    The first call creates it, with CUDAFUTURE_SUBMIT_THREADS threads. The end of the process waits for its functions.
    If none of them ends for CUDAFUTURE_SUBMIT_EXIT_SECONDS, or Ctrl-C interrupts, the process ends without them, and
    logs where they block.

    >>> default_executor().submit(divmod, 7, 2).result()
    (3, 1)
    """
    global _default
    with _lock:
        if _default is None:
            _default = SubmitPool(config.submit_threads, config.submit_exit_seconds)
            _C.set_submit_pool(_default, config.submit_threads)
        return _default
