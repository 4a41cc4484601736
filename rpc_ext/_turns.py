"""The order of operations on the same keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cudafuture import CUDAFuture, collect_all, executors

__all__ = ["Turns", "begun", "outcome", "without_frame"]

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
    """Return the value or the error of a future that is done; unlike ``exception()``, wait for no device."""
    try:
        return done.value(), None
    except BaseException as e:
        return None, without_frame(e)


def without_frame(error: BaseException) -> BaseException:
    """Remove the frame that has caught an error from its traceback, and return the error.

    Through its callers the frame would keep their local variables, which are tensors.
    """
    caught = error.__traceback__
    return error.with_traceback(None if caught is None else caught.tb_next)


class Turns:
    """The order of operations on the same keys. A change begins when all earlier operations on its keys have ended.

    A read begins when all earlier changes of its keys have ended; reads do not wait for each other. No thread waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._changes: dict[str, CUDAFuture[Any]] = {}  # of each key that is being changed, the end of the last change
        self._reads: dict[str, set[CUDAFuture[Any]]] = {}  # of each key, the ends of the reads since then

    def take(self, keys: Sequence[str], begin: Callable[[], CUDAFuture[T]]) -> CUDAFuture[T]:
        """Call `begin` when it is the turn of a change of all those keys, and return what its future gives."""
        mine: CUDAFuture[Any] = CUDAFuture(executor=executors.inline)
        with self._lock:
            before = self._last_changes(keys)
            for key in keys:
                before.update((id(read), read) for read in self._reads.pop(key, ()))
                self._changes[key] = mine

        def ended() -> None:
            for key in keys:
                if self._changes.get(key) is mine:
                    del self._changes[key]

        return self._begin(before, begin, mine, ended)

    def share(self, keys: Sequence[str], begin: Callable[[], CUDAFuture[T]]) -> CUDAFuture[T]:
        """Call `begin` when it is the turn of a read of all those keys, and return what its future gives."""
        mine: CUDAFuture[Any] = CUDAFuture(executor=executors.inline)
        with self._lock:
            before = self._last_changes(keys)
            for key in keys:
                self._reads.setdefault(key, set()).add(mine)

        def ended() -> None:
            for key in keys:
                reads = self._reads.get(key, set())
                reads.discard(mine)
                if not reads:
                    self._reads.pop(key, None)

        return self._begin(before, begin, mine, ended)

    def _last_changes(self, keys: Sequence[str]) -> dict[int, CUDAFuture[Any]]:
        return {id(last): last for key in keys if (last := self._changes.get(key)) is not None}

    def _begin(
        self,
        before: dict[int, CUDAFuture[Any]],
        begin: Callable[[], CUDAFuture[T]],
        mine: CUDAFuture[Any],
        ended: Callable[[], None],
    ) -> CUDAFuture[T]:
        def end(_: CUDAFuture[T]) -> None:
            with self._lock:
                ended()
            mine.set_result(None)

        if before:
            waited = collect_all(list(before.values()))
            done = waited.then_async(lambda _: begin(), executor=executors.inline)
        else:
            done = begun(begin)
        done.add_done_callback(end, executor=executors.inline)
        return done
