"""Sender of batches to their device.

::

    host memory ──► staging buffer ──► slab in memory of the consumer's stream ──► transform ──► event of the future
                                       └───────────── on the sender's own stream ─────────┘
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture._modes import outside_inference
from cudafuture._tensors import find_tensors
from cudafuture.prefetch._options import PrefetchOptions
from cudafuture.prefetch._structure import find_all_tensors, find_leaves, map_leaves
from cudafuture.streams import own_stream, use_streams
from cudafuture.transfer import complete, empty_on, enqueued_work, plain_view, send_packed

__all__ = ["Sender", "SentBatch", "keep_from_parent"]

_of_parent: list[object] = []
_REMEMBERED = 8  # batches; the largest of them is the size of reserved slabs


@dataclass(eq=False)
class SentBatch:
    """One item of the iterable, or its end, in flight to the consumer."""

    future: CUDAFuture[Any]
    taken: CUDAFuture[None]
    """Completes when the consumer takes the batch."""
    state: Any = None
    """The state_dict() of the iterable after this batch."""
    is_end: bool = False
    packing_since: float | None = None
    """Time at which the device had room for the copy, in seconds of ``time.perf_counter()``."""
    owner: torch.Stream | None = None
    """The stream that the memory of the copies belongs to; None: nothing was copied."""
    memory: list[torch.Tensor] = field(default_factory=list)
    """Tensors in the memory that was allocated on the owner's stream for the copies, one for each storage."""
    others: list[torch.Tensor] = field(default_factory=list)
    """Tensors in memory of other streams: results of the transform, and tensors that were on the device before."""

    def record_use(self, stream: torch.Stream) -> None:
        """Prevent the reuse of memory that does not belong to `stream` before the stream has reached this point."""
        _record_use(self.others if stream == self.owner else [*self.others, *self.memory], stream)

    def drop(self) -> None:
        """Drop a batch that is not taken: its memory is reused when the copy into it has finished."""
        if _C.has_sync_edge("prefetch.drop_wait"):
            self.future.add_done_callback(functools.partial(_order_owner, self), executor=_C.inline_executor)

    def forget(self) -> None:
        """Drop a failed future: the traceback of its error has frames that keep this batch alive."""
        if self.future.done():
            self.future = CUDAFuture.completed(None)


def _order_owner(batch: SentBatch, future: CUDAFuture[Any]) -> None:
    """Make the stream that the memory belongs to wait for the copy."""
    for event in future.events.values() if batch.owner is not None else ():
        event.wait(batch.owner)


def keep_from_parent(owner: object) -> None:
    """Keep what a forked child has from its parent: a thread there may have locked the allocator of the device."""
    _of_parent.append(owner)


class Sender:
    """Sender that copies batches to one device, on its own stream.

    Args:
        device: with streams.
        options: of the prefetcher. A consumer of futures may drop a batch without having waited for it.
    """

    def __init__(self, device: torch.device, options: PrefetchOptions) -> None:
        self.device = device
        self.stream = own_stream(device, options.priority)
        self._pin = _can_pin() if options.pin == "auto" else options.pin
        self._pack, self._transform, self._shares = options.pack, options.transform, options.futures
        self._slabs: deque[tuple[_C.DeviceSlab, torch.Stream]] = deque()
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)
        self._pid = os.getpid()
        self._wanted = 0  # bytes of the slab to reserve
        self.nbytes = 0  # of tensors that were copied to the device

    def reserve(self, most: int) -> None:
        """Allocate a slab for a later batch, on the current stream of the calling thread, which is the consumer's.

        A copy into the slab waits for the work that the consumer has enqueued until now. Memory allocated when the
        batch arrives would make the copy wait for more.
        """
        if not self._wanted or len(self._slabs) >= most:
            return
        try:
            with outside_inference():  # a batch of another loop may get this slab
                slab = _C.DeviceSlab(self._wanted, self.device)
        except torch.OutOfMemoryError:  # the batch may be smaller
            return
        self._slabs.append((slab, _C.current_streams([self.device])[0]))

    def release_slabs(self) -> None:
        """Free the reserved slabs."""
        if os.getpid() != self._pid:
            keep_from_parent([*self._slabs])
        self._slabs.clear()

    def send(self, batch: SentBatch, item: Any, consumer: torch.Stream | None) -> int:
        """Enqueue the copies of `item` and complete the batch's future with their events.

        Return the bytes of all tensors of the item. Block while the host copies to the staging buffer. An error fails
        the future.
        """
        leaves, others = find_leaves(item)
        packed = [leaves[i] for i in _C.packable(leaves)]
        in_pack = {id(leaf) for leaf in packed}
        moved = find_all_tensors([leaf for leaf in leaves if id(leaf) not in in_pack])
        loose = [*moved, *find_all_tensors(others)]
        batch.owner = consumer
        copies: list[torch.Tensor] = []
        if packed:
            copies = self._copy(batch, packed)
            batch.memory = copies[:1] if self._pack else copies
        elif not leaves and not loose and self._transform is None:
            batch.owner = None
            batch.future.set_result(item)
            return 0
        self._wait_for_loader(loose)
        copy_of = {id(leaf): copied for leaf, copied in zip(packed, copies, strict=True)}
        with use_streams(self.stream), outside_inference(), torch.no_grad():
            value = map_leaves(item, lambda leaf: copy_of[id(leaf)] if id(leaf) in copy_of else self._move(leaf))
        if self._transform is not None:
            with use_streams(self.stream):
                value = self._transform(value)
        if self._transform is not None or loose:
            batch.others = self._others(value, batch.memory)
        complete(batch.future, value, [self.stream], "prefetch.ready_record", [*batch.memory, *batch.others])
        nbytes: int = sum(tensor.nbytes for tensor in packed)
        self.nbytes += nbytes + sum(tensor.nbytes for tensor in moved if tensor.device != self.device)
        return nbytes + sum(tensor.nbytes for tensor in loose)

    def enqueued(self) -> CUDAFuture[None]:
        """Return a future of all work that is enqueued on the sender's stream."""
        return enqueued_work(self.stream, "prefetch")

    def keep_memory(self, batch: SentBatch) -> None:
        """Prevent the reuse of a failed batch's memory before the copy into it has finished."""
        for tensor in batch.memory:
            tensor.record_stream(self.stream)

    def _copy(self, batch: SentBatch, packed: list[torch.Tensor]) -> list[torch.Tensor]:
        """Enqueue the copies of the packed tensors, into a reserved slab if one is large enough."""
        slab: _C.DeviceSlab | None = None
        wanted = _C.batch_nbytes(packed) if self._pack else 0
        while self._pack and (slab is None or slab.nbytes < wanted):
            try:
                slab, batch.owner = self._slabs.popleft()
            except IndexError:  # there is none, or the consumer has just released them
                slab = None
                break
        owners: list[Any] = [batch.owner]
        with outside_inference():
            copies = send_packed(
                packed, self.stream, owners, slab, pack=self._pack, pin=self._pin, may_drop_unordered=self._shares
            )
        if self._pack:
            self._sizes.append(wanted)
            self._wanted = max(self._sizes)
        return copies

    def _wait_for_loader(self, loose: list[torch.Tensor]) -> None:
        """Order the sender's stream after the loader's work on tensors of the device, and keep their memory."""
        on_device = [tensor for tensor in loose if tensor.device == self.device]
        if on_device and _C.has_sync_edge("prefetch.loader_wait"):
            self.stream.wait_stream(_C.current_streams([self.device])[0])
        _record_use(on_device, self.stream)

    def _move(self, leaf: Any) -> Any:
        """Return a leaf that is not packed on the device; the sender's stream is current."""
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.device == self.device else leaf.to(self.device, non_blocking=True)
        if self._pin and callable(getattr(leaf, "pin_memory", None)):
            with _C.PinnedMemoryScope():
                leaf = leaf.pin_memory()
        return leaf.to(self.device, **({"non_blocking": True} if _takes_non_blocking(leaf.to) else {}))

    def _others(self, value: Any, memory: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors on the device that are in other memory than the copies, one for each storage."""
        ours = {tensor.untyped_storage()._cdata for tensor in memory}
        on_device = [tensor for tensor in find_tensors(value) if tensor.device == self.device]
        by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in on_device}
        return [tensor for storage, tensor in by_storage.items() if storage not in ours]


def _record_use(tensors: list[torch.Tensor], stream: torch.Stream) -> None:
    if tensors and _C.has_sync_edge("prefetch.record_stream"):
        for tensor in tensors:
            plain_view(tensor).record_stream(stream)


def _takes_non_blocking(to: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(to).parameters
    except (TypeError, ValueError):  # native code
        return True
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or "non_blocking" in parameters


def _can_pin() -> bool:
    try:
        return empty_on(torch.empty(1, dtype=torch.uint8, device="meta"), torch.device("cpu")).is_pinned()
    except (RuntimeError, NotImplementedError) as error:
        logging.getLogger("cudafuture.prefetch").warning(
            "prefetch() copies from memory that is not pinned, so the copies may block: %s", error
        )
        return False
