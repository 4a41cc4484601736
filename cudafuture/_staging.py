"""Shared steps of copies between the host and devices: streams after the caller's work, and pinned staging buffers.

::

    the caller's current streams ──► earlier_work() ──► streams_after() ──► copies ──► the events of a future
                                                              │
                                                              └── used_on(): memory that the caller may drop meanwhile
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture._tensors import find_tensors

__all__ = [
    "are_dense",
    "complete",
    "copy_between",
    "devices_of",
    "earlier_work",
    "empty_on",
    "is_on_device",
    "streams_after",
    "used_on",
]

T = TypeVar("T")
_HOSTS = ("cpu", "meta")


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return True if work on the tensor is enqueued in streams."""
    return tensor.device.type not in _HOSTS


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the devices with streams that hold the tensors, each once."""
    return list(dict.fromkeys(t.device for t in tensors if is_on_device(t)))


def earlier_work(devices: Iterable[torch.device]) -> CUDAFuture[None]:
    """Return a future with one event per device, recorded on this thread's current stream there."""
    earlier: CUDAFuture[None] = CUDAFuture()
    earlier.set_result(None, stream=_C.current_streams(devices))
    return earlier


def streams_after(
    earlier: CUDAFuture[None],
    devices: Iterable[torch.device],
    priority: int,
    edge: str,
    given: torch.Stream | None = None,
) -> list[torch.Stream]:
    """Return one stream per device, which waits for the event that `earlier` has on that device.

    The stream is `given` on the device of `given`, and a pool stream on the others.
    """
    events = earlier.events
    streams = [
        given if given is not None and given.device == device else _C.pool_stream(device, priority, earlier)
        for device in devices
    ]
    if events and _C.has_sync_edge(edge):
        for stream in streams:
            event = events.get(stream.device)
            if event is not None:
                event.wait(stream)
    return streams


def used_on(streams: Iterable[torch.Stream], tensor: torch.Tensor, edge: str) -> None:
    """Record in the allocator that the streams use the tensor's memory, which its owner may drop at any time."""
    if not _C.has_sync_edge(edge):
        return
    of_device = {stream.device: stream for stream in streams}
    parts = [tensor] if tensor.layout is torch.strided else find_tensors(tensor)
    for part in parts:
        stream = of_device.get(part.device)
        if stream is not None:
            _plain_view(part).record_stream(stream)


def _plain_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of exactly the tensor's memory: for other views, torch records a temporary copy and frees early."""
    view = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(view) if view.is_neg() else view


def complete(future: CUDAFuture[T], value: T, streams: list[torch.Stream], edge: str) -> None:
    """Complete the future with events of the streams that produce its value."""
    future.set_result(value, stream=streams if _C.has_sync_edge(edge) else None)


def are_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill a range of memory, each once, in any order."""
    if tensor.is_contiguous():
        return True
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).is_contiguous()


def empty_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a new tensor of the same shape, dtype and order of dimensions; one on the host is pinned."""
    if device.type != "cpu":
        return torch.empty_like(tensor.detach(), device=device)
    with _C.PinnedMemoryScope():
        return torch.empty_like(tensor.detach(), device=device, pin_memory=True)


def copy_between(target: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue a copy on the current streams as one transfer of plain bytes, so that the host never blocks.

    A source with gaps, or a conjugated or negated one, is first written out on its own device. A target with gaps is
    filled from such a tensor on its own device.
    """
    source, target = source.detach(), target.detach()
    if not are_dense(source) or source.is_conj() or source.is_neg():
        source = torch.empty_like(source).copy_(source)
    if not are_dense(target):
        source = torch.empty_like(target).copy_(source, non_blocking=True)
    target.copy_(source, non_blocking=True)
