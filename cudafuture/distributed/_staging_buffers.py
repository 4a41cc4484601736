"""Staging buffers for the tensors of one operation, and torch's call of it, recorded until it is issued."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.streams import use_streams
from cudafuture.transfer import (
    copy_between,
    devices_of,
    earlier_work,
    empty_on,
    enqueued_work,
    is_on_device,
    streams_after,
    used_on,
)

__all__ = ["StagingBuffers", "are_on_host", "each", "record"]

Call = Callable[..., Any]
_HOST = torch.device("cpu")


def are_on_host(tensors: Any) -> bool:
    """Return True if all tensors in arguments are on the host, as they nearly always are."""
    for one in tensors:
        if isinstance(one, torch.Tensor):
            if not one.is_cpu:
                return False
        elif isinstance(one, (list, tuple)) and not are_on_host(one):
            return False
    return True


def each(tensors: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments that are tensors, lists of tensors, or other objects."""
    for one in tensors:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from each(one)


class StagingBuffers:
    """Tensors of one operation, with their staging buffers on the host.

    `roles` has one letter for each argument in `tensors`: "r" is read, "w" written, "x" both, "-" neither.
    """

    def __init__(self, tensors: tuple[Any, ...], roles: str) -> None:
        self._buffers: dict[int, torch.Tensor] = {}
        self._read: list[torch.Tensor] = []
        self._written: list[torch.Tensor] = []
        self.arguments = [self._on_host(t) for t in tensors]
        """The arguments for torch in place of the tensors."""
        for argument, role in zip(tensors, roles, strict=True):
            staged = [t for t in each((argument,)) if is_on_device(t)]
            self._read += staged if role in "rx" else []
            self._written += staged if role in "wx" else []
        self._written_buffers = [self._buffers[id(t)] for t in self._written]
        self._earlier = earlier_work(devices_of(each(tensors)))

    def _on_host(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self._buffer(argument) if is_on_device(argument) else argument
        if isinstance(argument, (list, tuple)):
            return [self._on_host(t) for t in argument]
        return argument

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise ValueError(f"a {tensor.layout} tensor on {tensor.device} cannot go through the host")
        known = self._buffers.get(id(tensor))  # given twice, as in an in-place collective
        if known is None:
            known = self._buffers[id(tensor)] = empty_on(tensor, _HOST)
        return known

    def fetch(self) -> CUDAFuture[None]:
        """Enqueue the copies to the host; return a future with the events of their streams."""
        streams = streams_after(self._earlier, devices_of(self._read), 0, "staging.out_wait")
        try:
            with use_streams(*streams):
                for tensor in self._read:
                    used_on(streams, tensor, "staging.out_record_stream")
                    copy_between(self._buffers[id(tensor)], tensor)
        except BaseException:
            for stream, current in zip(streams, _C.current_streams([s.device for s in streams]), strict=True):
                current.wait_stream(stream)  # later work on the tensors comes after the copies that were enqueued
            raise
        fetched = enqueued_work(streams)
        self._read.clear()
        self._buffers.clear()
        return fetched

    def store(self) -> list[torch.Stream]:
        """Enqueue the copies into the written tensors, and return their streams."""
        streams = streams_after(self._earlier, devices_of(self._written), 0, "staging.in_wait")
        try:
            with use_streams(*streams):
                for tensor, host in zip(self._written, self._written_buffers, strict=True):
                    used_on(streams, tensor, "staging.in_record_stream")
                    copy_between(tensor, host)
        except BaseException:
            for stream in streams:
                with contextlib.suppress(RuntimeError):  # the device may be broken
                    stream.synchronize()  # the future that fails now has no events
            raise
        return streams


class _Recorder:
    """Stand-in for a process group while torch's own function checks its arguments and creates the options."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._rank, self._size = process_group.rank(), process_group.size()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def __getattr__(self, method: str) -> Call:
        def note(*arguments: Any, **keywords: Any) -> str:
            self.calls.append((method, arguments, keywords))
            return "noted"

        return note


def record(process_group: dist.ProcessGroup, function: Call, arguments: list[Any]) -> Call:
    """Call torch's function on a stand-in group, and return a function that issues the same call on a given group.

    Errors of torch's function are raised here; nothing was issued then.
    """
    recorder = _Recorder(process_group)
    function(*arguments, group=recorder)
    ((method, given, keywords),) = recorder.calls

    def issue(group: dist.ProcessGroup) -> Any:
        return getattr(group, method)(*given, **keywords)

    return issue
