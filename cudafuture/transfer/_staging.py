"""Staging: the streams of copies between the host and devices, their events and their pinned buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    "enqueued_work",
    "is_on_device",
    "memory_of",
    "plain_view",
    "streams_after",
    "used_on",
]

T = TypeVar("T")
_HOSTS = ("cpu", "meta")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return True if work on the tensor is enqueued in streams.

    >>> is_on_device(torch.ones(2))
    False
    """
    return tensor.device.type not in _HOSTS


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the devices with streams that hold the tensors, each once.

    >>> devices_of([torch.ones(2), torch.ones(2)])
    []
    """
    return list(dict.fromkeys(t.device for t in tensors if is_on_device(t)))


def earlier_work(devices: Iterable[torch.device]) -> CUDAFuture[None]:
    """Return a future with one event per device, recorded on this thread's current stream there.

    >>> earlier_work([]).done()
    True
    """
    return enqueued_work(_C.current_streams(devices))


def enqueued_work(streams: torch.Stream | list[torch.Stream], name: str = "") -> CUDAFuture[None]:
    """Return a future with the events of the work that is enqueued on a stream, or on several, so far.

    >>> enqueued_work([], "copies").name
    'copies'
    """
    enqueued: CUDAFuture[None] = CUDAFuture(name=name) if name else CUDAFuture()
    enqueued.set_result(None, stream=streams)
    return enqueued


def streams_after(
    earlier: CUDAFuture[None],
    devices: Iterable[torch.device],
    priority: int,
    edge: str,
    given: torch.Stream | None = None,
) -> list[torch.Stream]:
    """Return one stream per device, which waits for the event that `earlier` has on that device.

    Args:
        earlier: the result of ``earlier_work``.
        devices: with streams.
        priority: of the streams.
        edge: name of the sync edge.
        given: the stream on its device; the others are of the pool.

    >>> streams_after(earlier_work([]), [], 0, "copy.source_wait")
    []
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


def used_on(streams: Sequence[torch.Stream], tensor: torch.Tensor, edge: str) -> None:
    """Record in the allocator that the streams use the tensor's memory, which its owner may drop at any time.

    Args:
        streams: at most one of each device.
        tensor: on any device, with memory of its own or in parts.
        edge: name of the sync edge.

    >>> used_on([], torch.ones(2), "copy.source_record_stream")
    """
    if not _C.has_sync_edge(edge):
        return
    for memory in memory_of(tensor):
        for stream in streams:
            if stream.device == memory.device:
                memory.record_stream(stream)
                break


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return views of exactly the memory of a tensor, or of its parts if it is sparse, nested or a wrapper of others.

    >>> memory_of(torch.ones(2))
    [tensor([1., 1.])]
    """
    parts = [tensor] if type(tensor) in _PLAIN and tensor.layout is torch.strided else find_tensors(tensor)
    return [plain_view(part) for part in parts]


def plain_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of exactly the tensor's memory, or the tensor itself.

    Call ``record_stream`` on it: of a conjugated or negated view, torch records a temporary copy and frees the memory
    early.

    >>> plain_view(torch.ones(2, dtype=torch.complex64).conj()).is_conj()
    False
    """
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    view = tensor.detach()
    view = view.conj() if view.is_conj() else view
    return torch._neg_view(view) if view.is_neg() else view


def complete(
    future: CUDAFuture[T],
    value: T,
    streams: list[torch.Stream],
    edge: str,
    tensors: Iterable[torch.Tensor] | None = None,
) -> None:
    """Complete the future with events of the streams that produce its value.

    Args:
        future: pending.
        value: of the future.
        streams: at most one of each device.
        edge: name of the sync edge.
        tensors: of the value; None: the future finds them.

    >>> future = CUDAFuture()
    >>> complete(future, 7, [], "copy.done_record")
    >>> future.wait()
    7
    """
    future.set_result(value, stream=streams if _C.has_sync_edge(edge) else None, tensors=tensors)


def are_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill a range of memory, each once, in any order.

    >>> are_dense(torch.ones(2, 3).t()), are_dense(torch.ones(2, 3)[:, :2])
    (True, False)
    """
    if tensor.is_contiguous():
        return True
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).is_contiguous()


def empty_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a new tensor of the same shape, dtype and order of dimensions; one on the host is pinned.

    >>> empty_on(torch.ones(2, 3).t(), torch.device("meta")).stride()
    (1, 3)
    """
    if device.type != "cpu":
        return torch.empty_like(tensor.detach(), device=device)
    with _C.PinnedMemoryScope():
        return torch.empty_like(tensor.detach(), device=device, pin_memory=True)


def copy_between(target: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue a copy on the current streams as one transfer of plain bytes, so that the host never blocks.

    A source with gaps, or a conjugated or negated one, is first written out on its own device. A target with gaps is
    filled from such a tensor on its own device.

    >>> target = torch.zeros(2)
    >>> copy_between(target, torch.ones(2))
    >>> target
    tensor([1., 1.])
    """
    source, target = source.detach(), target.detach()
    if not are_dense(source) or source.is_conj() or source.is_neg():
        source = torch.empty_like(source).copy_(source)
    if not are_dense(target):
        source = torch.empty_like(target).copy_(source, non_blocking=True)
    target.copy_(source, non_blocking=True)
