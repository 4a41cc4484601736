"""Functions that complement the native CUDAFuture: run a function or copy a value asynchronously."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.utils import _pytree

from cudafuture import _C
from cudafuture._arguments import parse_device
from cudafuture._C import CUDAFuture
from cudafuture.config import config
from cudafuture.executors import default_executor
from cudafuture.ownership import owns, tensors_in
from cudafuture.transfer import Transfer

__all__ = ["CUDAFuture", "copy", "fail", "packed_nbytes", "submit"]

P = ParamSpec("P")
T = TypeVar("T")

_C.set_watcher_pauses(config.watcher_first_pause, config.watcher_longest_pause)


# The first two overloads come first: calls that name neither `executor` nor `priority` are checked against `fn`.
@overload
def submit(
    fn: Callable[..., T],
    /,
    *args: Any,
    executor: Executor | _C.HostExecutor | None,
    priority: int = ...,
    **kwargs: Any,
) -> CUDAFuture[T]: ...
@overload
def submit(fn: Callable[..., T], /, *args: Any, priority: int, **kwargs: Any) -> CUDAFuture[T]: ...
@overload
def submit(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CUDAFuture[T]: ...
def submit(  # type: ignore[misc]
    fn: Callable[..., T],
    /,
    *args: Any,
    executor: Executor | _C.HostExecutor | None = None,
    priority: int = 0,
    **kwargs: Any,
) -> CUDAFuture[T]:
    """Run ``fn(*args, **kwargs)`` on an executor and return a future of its return value.

    Args:
        fn: runs with the caller's grad mode, inference mode, autocast and contextvars.
        executor: None (default): the library's thread pool, ``executors.default_executor()``. Or any
            concurrent.futures.Executor, ``executors.callback_thread``, or ``executors.inline`` (in this call).
        priority: of the future and of its callbacks' pool streams.

    Cancelling the future before `fn` starts prevents `fn` from running. After that, ``cancel()`` returns False. The
    future fails with TypeError if `fn` returns a coroutine or a future: wait for it in `fn`.

    Raises:
        TypeError: `fn` cannot be called, or `executor` cannot submit.

    >>> submit(divmod, 7, 2).wait()
    (3, 1)
    """
    if not callable(fn):
        raise TypeError(f"submit() takes a callable and its arguments, not {fn!r}")
    call = functools.partial(fn, *args, **kwargs) if args or kwargs else fn
    name = getattr(fn, "__qualname__", None)
    if not isinstance(name, str):
        name = type(fn).__qualname__
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()  # a surrogate has no UTF-8
    return _C.submit(call, executor if executor is not None else default_executor(), priority, name)


@owns("copy", lambda value, *_, **__: tensors_in(value))
def copy(
    value: T,
    device: torch.device | str | int,
    *,
    priority: int = 0,
    out: Any = None,
    stream: torch.Stream | None = None,
    pack: bool = False,
) -> CUDAFuture[T]:
    """Copy every tensor of `value` to `device` and return a future of the same structure with the copies.

    Args:
        value: a tensor, or any nesting that ``torch.utils._pytree`` knows; other leaves are passed on unchanged.
            Its tensors may be on the host and on several devices. The copies are ordered after the work that the caller
            has enqueued so far. The caller may drop the tensors at once, and must not change them until the future is
            ready.
        device: the destination.
        priority: of the streams and of the future; 0 (default), -1 high.
        out: memory for the copies; None (default): new memory. A value of the structure of `value`,
            whose tensors have the shapes and dtypes of the sources and are on `device`: they are filled and returned.
            With `pack`, one contiguous tensor of uint8 on `device` with at least ``packed_nbytes(value)`` bytes.
        stream: runs the copies; None (default): streams of the pool. It is on `device`, or on the device of the
            sources when `device` is the host.
        pack: copy host tensors to a device in one transfer, through one staging buffer. The results are views of one
            slab of device memory, which belongs to the caller's current stream. Each view starts at a multiple of 512
            bytes and keeps the whole slab alive. Pinned tensors of 64 KiB and more are not staged. The host reads the
            tensors, so device work that fills them must have finished. `pack` has no effect on other tensors, or if
            `device` is the host.

    A copy has the shape, the dtype and the order of dimensions of its source, its own memory without gaps, and no
    gradient; two views of one tensor become two tensors. The call never blocks until a device finishes:

    - From the host to a device, the data is first copied to pinned memory: in this call up to 1 MiB, on
      ``executors.default_executor()`` beyond. A device reads pinned memory without gaps directly.
    - From a device to the host, the copy is in pinned memory; the host may read it after ``wait()``.
    - Between devices, and on one device, the copy is direct.
    - Within the host, the copy runs on ``executors.default_executor()``.

    Sparse tensors, nested tensors and tensor subclasses are copied by ``Tensor.to``, which may block.
    An error during the copy, such as too little memory, fails the future.

    Raises:
        TypeError, ValueError, RuntimeError: `value` is a future, the device does not exist, a source has no data
            (meta), or `out` or `stream` does not fit.

    >>> copy({"x": torch.ones(2)}, "cpu").wait()
    {'x': tensor([1., 1.])}
    """
    if isinstance(value, CUDAFuture):
        raise TypeError(
            "value is a CUDAFuture: wait for it, or copy its value when it is done, with "
            "future.then_async(lambda done: copy(done.value(), device))"
        )
    return Transfer(value, parse_device("device", device), priority, out, stream, pack).start()


def packed_nbytes(value: object) -> int:
    """Return the bytes of device memory that ``copy(value, device, pack=True)`` takes.

    >>> packed_nbytes([torch.ones(2), torch.ones(200)])
    1536
    """
    leaves = _pytree.tree_leaves(value)
    return _C.batch_nbytes([leaves[i] for i in _C.packable(leaves)])


def fail(future: CUDAFuture[Any], exc: BaseException | type[BaseException]) -> bool:
    """Fail a future with an exception that other code raised, whatever its type; return False if the future is done.

    For producers that run a program's function. ``set_exception()`` refuses a StopIteration, and raises
    InvalidStateError where a cancellation came first.

    Args:
        exc: the exception, or its class. Callers get this object; ``await`` raises a RuntimeError from a StopIteration.

    Raises:
        TypeError: `exc` is not an exception.

    >>> future = CUDAFuture()
    >>> try:
    ...     future.set_result(next(iter([])))
    ... except BaseException as error:
    ...     fail(future, error)
    True
    >>> future.exception()
    StopIteration()
    """
    return _C.fail(future, exc)
