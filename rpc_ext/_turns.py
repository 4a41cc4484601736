"""What changes the same keys, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cudafuture import CUDAFuture, collect_all, executors

__all__ = ["Turns", "begun", "outcome"]

T = TypeVar("T")


def begun(begin: Callable[..., CUDAFuture[T]], *args: Any, **kwargs: Any) -> CUDAFuture[T]:
    """Return the future of what may not even begin.

    Of what Ctrl-C has cut short, too: whoever counts on its end hears of that. Whoever called for it raises that again.
    """
    try:
        return begin(*args, **kwargs)
    except BaseException as e:
        return CUDAFuture.failed(e)


def outcome(done: CUDAFuture[Any]) -> tuple[Any, BaseException | None]:
    """Return what a future that is done has come to, without waiting for a device, as ``exception()`` would."""
    try:
        return done.value(), None
    except BaseException as e:
        return None, e


class Turns:
    """Begins what changes keys when all that was to change them before has ended. Nobody waits meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._last: dict[str, CUDAFuture[Any]] = {}  # of each key that is being changed, the end of that

    def take(self, keys: Sequence[str], begin: Callable[[], CUDAFuture[T]]) -> CUDAFuture[T]:
        """Call `begin` when the turn of all those keys has come, and return what its future gives."""
        mine: CUDAFuture[Any] = CUDAFuture(executor=executors.inline)
        with self._lock:
            before = {id(last): last for key in keys if (last := self._last.get(key)) is not None}
            for key in keys:
                self._last[key] = mine

        def ended(_: CUDAFuture[T]) -> None:
            with self._lock:
                for key in keys:
                    if self._last.get(key) is mine:
                        del self._last[key]
            mine.set_result(None)

        if before:
            waited = collect_all(list(before.values()))
            done = waited.then_async(lambda _: begin(), executor=executors.inline)
        else:
            done = begun(begin)
        done.add_done_callback(ended, executor=executors.inline)
        return done
