"""The copies that one call of ``copy()`` makes.

::

    host memory      ──► pinned twin ──► device     where the memory is pinned and dense already, without the twin
    device           ──► pinned tensor
    device           ──► device                     on streams of both, each waiting for the other's part (torch's copy)
    host             ──► host                       no stream: on the default executor
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture._staging import (
    are_dense,
    complete,
    copy_between,
    devices_of,
    earlier_work,
    is_on_device,
    streams_after,
    twin,
    used_on,
)
from cudafuture._tensors import find_tensors
from cudafuture.executors import default_executor
from cudafuture.streams import use_streams

__all__ = ["LARGE", "Transfer"]

LARGE = 1 << 20
"""Bytes of host memory that the caller's thread copies to pinned memory by itself; more goes to the executor."""


class Transfer:
    """A value on its way to a device."""

    def __init__(self, value: object, target: torch.device, priority: int) -> None:
        self.leaves, self.spec = _pytree.tree_flatten(value)
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self.priority = priority
        self.to_host = target.type == "cpu"
        self.to_meta = target.type == "meta"
        self.target = target if self.to_host or self.to_meta else _C.pool_stream(target, priority).device  # its index
        if not self.to_meta and any(t.is_meta for t in self.tensors):
            raise RuntimeError("copy(): a tensor on the meta device has no data to copy")

    def start(self) -> CUDAFuture[Any]:
        """Enqueue what can be enqueued now, and return the future of the copy."""
        sources = devices_of(self.tensors)
        devices = sources if self.to_host or self.to_meta else list(dict.fromkeys([*sources, self.target]))
        if not devices:
            return _C.submit(self._on_host, default_executor(), self.priority, "copy")
        earlier = earlier_work([*sources, self.target] if self._reads_pinned() else sources)
        enqueue = functools.partial(self._enqueue, devices, earlier)
        if sum(_bytes_of(t) for t in self.tensors if self._is_read_by_host(t)) <= LARGE:
            return enqueue(self._read())
        read = _C.submit(self._read, default_executor(), self.priority, "copy")
        return read.then_async(lambda done: enqueue(done.value()))

    def _is_read_by_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and (self.to_host or not _can_be_sent(tensor))

    def _reads_pinned(self) -> bool:
        """Say whether a device is to read the caller's own host memory, which its streams may be writing."""
        host = [t for t in self.tensors if t.device.type == "cpu"]
        return not (self.to_host or self.to_meta) and any(_can_be_sent(t) for t in host)

    def _on_host(self) -> Any:
        return _pytree.tree_unflatten([self._to_meta_or_clone(leaf) for leaf in self.leaves], self.spec)

    def _to_meta_or_clone(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to("meta", copy=True) if self.to_meta else leaf.detach().clone()

    def _read(self) -> list[Any]:
        """Return the leaves; of what the host has to read, a copy that a device can take, or the final one."""
        leaves: list[Any] = []
        for leaf in self.leaves:
            if not isinstance(leaf, torch.Tensor) or self.to_meta or not self._is_read_by_host(leaf):
                leaves.append(leaf)
            elif self.to_host or not _is_plain(leaf):
                leaves.append(leaf.detach().clone())
            else:
                leaves.append(twin(leaf, leaf.device).copy_(leaf.detach()))
        return leaves

    def _enqueue(self, devices: list[torch.device], earlier: CUDAFuture[None], leaves: list[Any]) -> CUDAFuture[Any]:
        streams: list[torch.Stream] = []
        try:
            streams = self._streams(devices, earlier)
            with use_streams(*streams):
                copies = [self._carry(leaf, streams) for leaf in leaves]
            future: CUDAFuture[Any] = CUDAFuture(priority=self.priority, name="copy")
            complete(future, _pytree.tree_unflatten(copies, self.spec), streams, "copy.done_record")
            return future
        except Exception as e:
            return _failed(e, devices, streams, self.priority)

    def _streams(self, devices: list[torch.device], earlier: CUDAFuture[None]) -> list[torch.Stream]:
        """Return a stream for each device: those of sources wait for the caller's work, the target's for its own."""
        sources = devices_of(self.tensors)
        others = [d for d in devices if d not in sources]
        return [
            *streams_after(earlier, sources, self.priority, "copy.source_wait"),
            *streams_after(earlier, others, self.priority, "copy.target_wait"),
        ]

    def _carry(self, leaf: Any, streams: list[torch.Stream]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self.to_meta:
            return leaf.detach().to("meta", copy=True)
        if leaf.device.type == "cpu" and self.to_host:
            return leaf  # copied already
        if is_on_device(leaf):
            used_on(streams, leaf, "copy.source_record_stream")
        if not _is_plain(leaf):
            return leaf.detach().to(self.target, non_blocking=True, copy=True)
        copied = twin(leaf, self.target)
        copy_between(copied, leaf)
        return copied


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether the tensor is its memory, and no composition of others."""
    return tensor.layout is torch.strided and not tensor.is_nested and not hasattr(type(tensor), "__tensor_flatten__")


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.nbytes if _is_plain(tensor) else sum(part.nbytes for part in find_tensors(tensor))


def _can_be_sent(tensor: torch.Tensor) -> bool:
    """Say whether a device can read this host memory as it is."""
    return _is_plain(tensor) and not (tensor.is_conj() or tensor.is_neg()) and are_dense(tensor) and tensor.is_pinned()


def _failed(
    error: Exception, devices: list[torch.device], streams: list[torch.Stream], priority: int
) -> CUDAFuture[Any]:
    """Return a failed future with the events of the streams: the copies before the error may still be going on."""
    failed: CUDAFuture[Any] = CUDAFuture(devices, priority=priority, name="copy")
    with use_streams(*streams):
        failed.set_exception(error.with_traceback(None))  # whose frames would keep the copies made so far
    return failed
