"""The device work that calls have enqueued on the callee, by caller.

::

    call 1 of a caller ──► fill a tensor that stays here ──► events ─┐   reply: None
    call 2 of a caller ◄── its streams wait for the events ◄─────────┘

A reply without tensors carries no events, so the caller cannot order its next call after such work. The callee does
so: the streams of a call wait for all calls of the same caller that had a reply before it began. No thread blocks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from cudafuture import CUDAFuture, current_streams, has_context

__all__ = ["DeviceOrder"]

T = TypeVar("T")
S = TypeVar("S")


class _Thread(threading.local):
    caller = -1  # caller of the function that this thread runs; -1: unknown


_thread = _Thread()


class DeviceOrder:
    """The order of each caller's calls on the devices that calls may use."""

    def __init__(self) -> None:
        self._devices: tuple[torch.device, ...] = ()
        self._lock = threading.Lock()  # guards _work; a leaf
        # By caller, and by identity: completed futures with events.
        self._work: dict[int, dict[int, CUDAFuture[None]]] = {}

    def set_devices(self, devices: Iterable[torch.device]) -> None:
        """Set the devices on which calls are ordered."""
        self._devices = tuple(dict.fromkeys(devices))

    def close(self) -> None:
        """Release the events, and stop ordering calls."""
        self._devices = ()
        with self._lock:
            self._work.clear()

    def call(self, caller: int, fn: Any, args: Any, kwargs: Any) -> Any:
        """Call a function on streams that wait for the earlier calls of its caller."""
        if not self._devices:
            return fn(*args, **kwargs)
        outer, _thread.caller = _thread.caller, caller
        try:
            with self._after_earlier_calls(caller):
                return fn(*args, **kwargs)
        finally:
            _thread.caller = outer

    def part_of_call(self, callback: Callable[[T], S]) -> Callable[[T], S]:
        """Return a callback that is ordered like the call that this thread runs."""
        caller = _thread.caller

        def run(value: T) -> S:
            with self._after_earlier_calls(caller):
                return callback(value)

        return run if self._devices else callback

    def add_future(self, caller: int, future: CUDAFuture[Any]) -> None:
        """Order later calls of the caller after a future's events. Called in a callback of the future."""
        if self._devices and future.devices:
            self._add(caller, [current_streams(future.devices)], ())

    @contextlib.contextmanager
    def _after_earlier_calls(self, caller: int) -> Iterator[None]:
        """Run a call of the caller: its streams wait for the earlier calls, and later calls wait for its streams."""
        with self._lock:
            earlier = tuple(self._work.get(caller, {}).values())
        for work in earlier:
            with contextlib.suppress(RuntimeError):  # of a broken device: the call itself will fail
                work.wait(non_blocking=True)
        before = self._streams()
        try:
            yield
        finally:
            after = self._streams()
            self._add(caller, [before] if after == before else [before, after], earlier)

    def _streams(self) -> list[torch.Stream]:
        """Return the current streams of the devices with a context. Devices without one have no work."""
        return current_streams([device for device in self._devices if has_context(device)])

    def _add(self, caller: int, recorded: list[list[torch.Stream]], superseded: tuple[CUDAFuture[None], ...]) -> None:
        added: list[CUDAFuture[None]] = []
        for streams in recorded:
            if not streams:
                continue
            work: CUDAFuture[None] = CUDAFuture()
            work.set_result(None, stream=streams)
            if work.events:
                added.append(work)
            else:
                work.exception()  # of a broken device, which has no work to order: mark the error as retrieved
        with self._lock:
            if not self._devices:
                return  # the session has ended
            kept = self._work.setdefault(caller, {})
            for old in superseded:
                kept.pop(id(old), None)
            kept.update((id(work), work) for work in added)
