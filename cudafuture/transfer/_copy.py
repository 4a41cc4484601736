"""Copies that one call of ``copy()`` makes.

::

    host memory      ──► staging buffer ──► device  without a staging buffer where the memory is pinned and dense
    host memory, pack=True: all tensors ──► one staging buffer ──► one slab on the device (``_C/core/batch_copy.h``)
    device           ──► pinned tensor
    device           ──► device                     on streams of both, each waits for the other's part (torch's copy)
    host             ──► host                       no stream: on the default executor
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture._tensors import find_tensors
from cudafuture.executors import default_executor
from cudafuture.streams import use_streams
from cudafuture.transfer._packing import described, expect_slab, send_packed
from cudafuture.transfer._staging import (
    are_dense,
    complete,
    copy_between,
    devices_of,
    earlier_work,
    empty_on,
    is_on_device,
    streams_after,
    used_on,
)

__all__ = ["LARGE", "Transfer"]

LARGE = 1 << 20
"""Bytes of host memory up to which the caller's thread copies to pinned memory itself; more goes to the executor."""


class Transfer:
    """Copy of one value to one device.

    Args:
        value, priority, out, stream, pack: as for ``cudafuture.copy``.
        target: the destination; an accelerator without a number is the current one.

    Raises:
        TypeError, ValueError, RuntimeError: as ``cudafuture.copy``.

    >>> Transfer([torch.ones(2), "label"], torch.device("cpu"), 0)
    <Transfer of 1 tensor to cpu>
    """

    def __init__(
        self,
        value: object,
        target: torch.device,
        priority: int,
        out: object = None,
        stream: torch.Stream | None = None,
        pack: bool = False,
    ) -> None:
        self.leaves, self.rebuild, packable = _flatten(value)
        self.priority = priority
        self.stream = stream
        self.to_host = target.type == "cpu"
        self.to_meta = target.type == "meta"
        self.target = target if self.to_host or self.to_meta else _C.with_index(target)
        packs = pack and not (self.to_host or self.to_meta)
        self.packed = packable if packs else []  # indices of leaves
        self.sources = self._leaves_at(self.packed)
        self.tensors = [leaf for leaf in self._other_leaves() if isinstance(leaf, torch.Tensor)]  # not packed
        if not self.to_meta and any(t.is_meta for t in self.tensors):
            raise RuntimeError("copy(): a tensor on the meta device has no data to copy")
        if not self.to_meta:
            for tensor in (*self.sources, *self.tensors):
                for part in [tensor] if type(tensor) is torch.Tensor else find_tensors(tensor):
                    _C.expect_storage(part)
        self.slab: torch.Tensor | None = None  # given by the caller, for the packed tensors
        self.targets: list[Any] = []  # given by the caller, one for each leaf, or empty
        self._expect_stream()
        if out is not None and pack and not self.to_host:
            self.slab = self._expect_slab(out)
        elif out is not None:
            self.targets = self._expect_targets(value, out)
        self.caller = _C.current_streams([] if self.to_host or self.to_meta else [self.target])

    def _expect_stream(self) -> None:
        devices = {t.device for t in self.tensors if is_on_device(t)} if self.to_host else {self.target}
        if self.stream is not None and self.stream.device not in devices:
            where = ", ".join(map(str, devices)) or "no device"
            raise ValueError(f"copy(): stream is on {self.stream.device}, but the copies run on {where}")

    def _expect_slab(self, out: object) -> torch.Tensor:
        if isinstance(out, torch.Tensor) and self.tensors:
            raise ValueError("copy(pack=True, out=...): a tensor of the value cannot be packed; omit out")
        return expect_slab(out, self.target, self.sources)

    def _expect_targets(self, value: object, out: object) -> list[Any]:
        """Return the leaves of `out`; raise ValueError unless the copies fit into them."""
        leaves, spec = _pytree.tree_flatten(out)
        if spec != _pytree.tree_structure(value) or self.to_meta:
            raise ValueError("copy(): out must have the structure of the value and tensors on the target device")
        for leaf, target in zip(self.leaves, leaves, strict=True):
            if not isinstance(leaf, torch.Tensor):
                continue
            if (
                not isinstance(target, torch.Tensor)
                or (target.device, target.dtype, target.shape) != (self.target, leaf.dtype, leaf.shape)
                or not (_is_plain(leaf) and _is_plain(target))
            ):
                is_of = "no tensor" if not isinstance(target, torch.Tensor) else described(target)
                raise ValueError(f"copy(): out for {described(leaf)} must be the same on {self.target}, not {is_of}")
        return leaves

    def __repr__(self) -> str:
        count = len(self.sources) + len(self.tensors)
        return f"<Transfer of {count} tensor{'' if count == 1 else 's'} to {self.target}>"

    def start(self, most: float = LARGE) -> CUDAFuture[Any]:
        """Enqueue every copy that can be enqueued now, and return the future of the whole copy.

        Args:
            most: bytes of host memory that this call copies to pinned memory itself; more goes to the executor.

        >>> Transfer([torch.ones(2), "label"], torch.device("cpu"), 0).start().wait()
        [tensor([1., 1.]), 'label']
        """
        sources = devices_of(self.tensors)
        devices = sources if self.to_host or self.to_meta else list(dict.fromkeys([*sources, self.target]))
        if not devices:
            return _C.submit(self._on_host, default_executor(), self.priority, "copy")
        uses_target = self._reads_pinned() or any(is_on_device(t) for t in self.targets if isinstance(t, torch.Tensor))
        earlier = earlier_work([*sources, self.target] if uses_target else sources)
        enqueue = functools.partial(self._enqueue, devices, earlier)
        read = sum(_bytes_of(t) for t in self.tensors if self._is_read_by_host(t))
        if read + _C.batch_nbytes(self.sources) <= most:
            return enqueue(self._read())
        reading = _C.submit(self._read, default_executor(), self.priority, "copy")
        return reading.then_async(lambda done: enqueue(done.value()))

    def _leaves_at(self, indices: list[int]) -> list[Any]:
        return self.leaves if len(indices) == len(self.leaves) else [self.leaves[i] for i in indices]

    def _other_leaves(self) -> list[Any]:
        """Return the leaves that are not packed."""
        if len(self.packed) == len(self.leaves):
            return []
        packed = frozenset(self.packed)
        return [leaf for i, leaf in enumerate(self.leaves) if i not in packed]

    def _target_of(self, i: int) -> Any:
        return self.targets[i] if self.targets else None

    def _is_read_by_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and (self.to_host or not _can_be_sent(tensor))

    def _reads_pinned(self) -> bool:
        """Return True if a device will read the caller's own host memory, which the caller's streams may be writing."""
        host = [t for t in self.tensors if t.device.type == "cpu"]
        return not (self.to_host or self.to_meta) and any(_can_be_sent(t) for t in host)

    def _on_host(self) -> Any:
        return self.rebuild([self._to_meta_or_clone(leaf, self._target_of(i)) for i, leaf in enumerate(self.leaves)])

    def _to_meta_or_clone(self, leaf: Any, target: Any = None) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if target is not None:
            return target.copy_(leaf.detach())
        return leaf.detach().to("meta", copy=True) if self.to_meta else leaf.detach().clone()

    def _read(self) -> list[Any]:
        """Return the leaves; replace each leaf that the host must read by the final copy or by a staged one."""
        if not self.tensors:
            return self.leaves
        leaves: list[Any] = []
        packed = frozenset(self.packed)
        for i, leaf in enumerate(self.leaves):
            if i in packed or not isinstance(leaf, torch.Tensor) or self.to_meta or not self._is_read_by_host(leaf):
                leaves.append(leaf)
            elif self.to_host and self._target_of(i) is not None:
                leaves.append(self._target_of(i).copy_(leaf.detach()))
            elif self.to_host or not _is_plain(leaf):
                leaves.append(leaf.detach().clone())
            else:
                leaves.append(empty_on(leaf, leaf.device).copy_(leaf.detach()))
        return leaves

    def _enqueue(self, devices: list[torch.device], earlier: CUDAFuture[None], leaves: list[Any]) -> CUDAFuture[Any]:
        streams: list[torch.Stream] = []
        try:
            streams = self._streams(devices, earlier)
            copies = self._send_packed(streams)
            if len(copies) != len(leaves):
                copy_of = dict(zip(self.packed, copies, strict=True))
                with use_streams(*streams):
                    copies = [
                        copy_of[i] if i in copy_of else self._carry(leaf, self._target_of(i), streams)
                        for i, leaf in enumerate(leaves)
                    ]
            future: CUDAFuture[Any] = CUDAFuture(priority=self.priority, name="copy")
            complete(future, self.rebuild(copies), streams, "copy.done_record")
            return future
        except Exception as e:
            return _failed(e, devices, streams, self.priority)

    def _streams(self, devices: list[torch.device], earlier: CUDAFuture[None]) -> list[torch.Stream]:
        """Return a stream per device: those of sources wait for the caller's work, the target's for its own."""
        sources = devices_of(self.tensors)
        others = [d for d in devices if d not in sources]
        return [
            *streams_after(earlier, sources, self.priority, "copy.source_wait", self.stream),
            *streams_after(earlier, others, self.priority, "copy.target_wait", self.stream),
        ]

    def _send_packed(self, streams: list[torch.Stream]) -> list[Any]:
        """Copy the packed tensors to the device; return the copies."""
        if not self.packed:
            return []
        stream = next(stream for stream in streams if stream.device == self.target)
        slab: _C.DeviceSlab | None = None
        if self.slab is not None:
            with use_streams(*self.caller):  # the slab belongs to these streams
                slab = _C.DeviceSlab.of(self.slab)
        return send_packed(self.sources, stream, self.caller, slab)

    def _carry(self, leaf: Any, target: Any, streams: list[torch.Stream]) -> Any:
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
        copied = empty_on(leaf, self.target) if target is None else target
        if target is not None:
            used_on(streams, target, "copy.target_record_stream")
        copy_between(copied, leaf)
        return copied


def _flatten(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any], list[int]]:
    """Return the leaves of a value, a function that rebuilds its structure from other leaves, and the packable indices.

    torch's pytree takes a microsecond per leaf, so a plain list, tuple or dict of tensors is flattened without it.
    """
    cls = type(value)
    if cls is dict and len(packable := _C.packable(value.values())) == len(value):
        keys = list(value)
        return list(value.values()), lambda leaves: dict(zip(keys, leaves, strict=True)), packable
    if (cls is list or cls is tuple) and len(packable := _C.packable(value)) == len(value):
        return list(value), cls, packable
    leaves, spec = _pytree.tree_flatten(value)
    return leaves, functools.partial(_pytree.tree_unflatten, treespec=spec), _C.packable(leaves)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is its own memory, not a composition of other tensors."""
    return tensor.layout is torch.strided and not tensor.is_nested and not hasattr(type(tensor), "__tensor_flatten__")


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.nbytes if _is_plain(tensor) else sum(part.nbytes for part in find_tensors(tensor))


def _can_be_sent(tensor: torch.Tensor) -> bool:
    """Return True if a device can read this host memory directly."""
    return _is_plain(tensor) and not (tensor.is_conj() or tensor.is_neg()) and are_dense(tensor) and tensor.is_pinned()


def _failed(
    error: Exception, devices: list[torch.device], streams: list[torch.Stream], priority: int
) -> CUDAFuture[Any]:
    """Return a failed future with the events of the streams: copies enqueued before the error may still run."""
    failed: CUDAFuture[Any] = CUDAFuture(devices, priority=priority, name="copy")
    with use_streams(*streams):
        failed.set_exception(error.with_traceback(None))  # its frames would keep the copies made so far
    return failed
