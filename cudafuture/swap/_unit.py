"""Units of state that a step reads, updates and writes at one time, and the host memory that they are in."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from cudafuture._C import CUDAFuture
from cudafuture.combine import wait
from cudafuture.io import Buffer, BufferPool
from cudafuture.io.engine import PAGE
from cudafuture.swap._parameter_state import UNDO, Chunk, ParameterState, StoredTensor, UndoPlace

__all__ = ["Unit", "UnitBuffers", "UnitWrite", "by_parameter", "copies", "cut", "layout_of", "places"]

_PATIENCE = 1.0  # seconds that a request waits for memory which nothing in flight holds
_logger = logging.getLogger("cudafuture.swap")


@dataclass(eq=False)
class Unit:
    """Chunks that are read together, updated one by one, and written together."""

    chunks: list[Chunk]
    device: torch.device
    layout: list[StoredTensor] = field(default_factory=list)
    """the tensors that have places in its buffer"""
    tensors: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """the state tensors of each chunk, after the read"""
    undo: list[torch.Tensor | None] = field(default_factory=list)
    """memory for the old values of each chunk whose parameter keeps them in the store"""
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    """the gradient of each chunk that has one in the store, flat, after the read"""
    new: dict[Chunk, list[torch.Tensor]] = field(default_factory=dict)
    """memory for the state of each chunk that has none yet, flat"""
    buffer: Buffer | None = None
    taken: CUDAFuture[Buffer] | None = None
    """the buffer, while the unit waits for it"""
    begun: CUDAFuture[Any] | None = None
    """completes when all reads have ended; fails if there is no buffer"""
    read: tuple[list[Chunk], CUDAFuture[list[torch.Tensor]]] | None = None
    """the chunks to read, and their tensors, one after another"""
    gradient_reads: list[tuple[Chunk, CUDAFuture[Any]]] = field(default_factory=list)

    def size(self, room: float) -> int:
        """Return the size of its buffer, given the largest one; see ``places``."""
        return places(self.layout, room)[-1]

    def cancel_request(self) -> bool:
        """Cancel the request for the buffer; return False if there is none, or it has completed."""
        taken = self.taken  # another thread sets it to None when the buffer is available
        return taken is not None and taken.cancel()

    def moved(self, chunk: Chunk, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy the first state of a chunk into the unit's memory, and return it; return other state unchanged."""
        rooms = self.new.pop(chunk, [])
        found = dict(tensors)
        for name, tensor in tensors.items():
            if rooms and tensor.nbytes == rooms[-1].nbytes:
                found[name] = rooms.pop().view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return found

    def forget(self) -> None:
        """Release the memory."""
        self.new = {}
        self.tensors, self.undo, self.gradients, self.buffer = [], [], [], None
        self.read, self.gradient_reads, self.begun = None, [], None


@dataclass(eq=False)
class UnitWrite:
    """Write in flight of the new state of a unit."""

    unit: Unit
    tensors: list[dict[str, torch.Tensor]]
    """of each chunk"""
    future: CUDAFuture[int]
    outcomes: torch.Tensor
    """for each tensor: True if it is in the store, when the future is done"""

    @cached_property
    def states(self) -> set[ParameterState]:
        """The states of its parameters."""
        return {chunk.state for chunk in self.unit.chunks}

    def failed(self) -> set[Chunk]:
        """Return the chunks of which a tensor was not written."""
        chunks = (chunk for chunk, named in zip(self.unit.chunks, self.tensors, strict=True) for _ in named)
        return {chunk for chunk, written in zip(chunks, self.outcomes.tolist(), strict=True) if not written}


def by_parameter(chunks: Iterable[Chunk]) -> list[list[Chunk]]:
    """Return a list of the adjacent chunks of each parameter."""
    return [list(group) for _, group in itertools.groupby(chunks, key=lambda chunk: chunk.state)]


def copies(chunk: Chunk, device: torch.device) -> dict[str, torch.Tensor] | None:
    """Return copies of the state of a chunk whose write failed, or None if the state is in the store."""
    unwritten = chunk.unwritten()
    if unwritten is None:
        return None
    return {name: tensor.to(device, copy=True) for name, tensor in unwritten.items() if name != UNDO}


# ---- the parts of a buffer


def layout_of(chunk: Chunk) -> list[StoredTensor]:
    """Return the tensors of a chunk that have places in a buffer: those to read, old values, and new ones."""
    state = chunk.state
    layout = list(chunk.stored().values())
    if _has_undo(chunk):
        layout.append(_flat(chunk, state.parameter.dtype))
    if state.gradient is not None:
        layout.append(_flat(chunk, state.gradient.dtype))
    if state.new:
        layout += [_flat(chunk, dtype) for dtype in state.new]
    return layout


def _has_undo(chunk: Chunk) -> bool:
    return chunk.state.is_chunked and chunk.state.undo is UndoPlace.STORE


def _flat(chunk: Chunk, dtype: torch.dtype) -> StoredTensor:
    return StoredTensor(dtype, torch.Size([chunk.end - chunk.begin]))


def places(tensors: Sequence[StoredTensor], room: float = math.inf) -> list[int]:
    """Return the first byte of each tensor in a buffer, and the size that the buffer needs.

    Each tensor takes whole pages, which a disk reads without a copy, if they fit into `room` bytes. If not, the tensors
    are adjacent.
    """
    begins = [0, *itertools.accumulate([-(-tensor.nbytes // PAGE) * PAGE for tensor in tensors])]
    if begins[-1] <= room:
        return begins
    begins, end = [], 0
    for tensor in tensors:
        begins.append(-(-end // tensor.dtype.itemsize) * tensor.dtype.itemsize)
        end = begins[-1] + tensor.nbytes
    return [*begins, end]


def cut(unit: Unit) -> tuple[list[Chunk], list[torch.Tensor]]:
    """Give each tensor of a unit a part of its buffer; return the chunks to read, and their tensors."""
    memory = None if unit.buffer is None else unit.buffer.tensor
    size = 0 if memory is None else memory.numel()
    parts = (
        _part(memory, tensor, begin) for tensor, begin in zip(unit.layout, places(unit.layout, size), strict=False)
    )
    read: list[Chunk] = []
    outs: list[torch.Tensor] = []
    for chunk in unit.chunks:
        state = chunk.state
        tensors = dict(zip(state.stored, parts, strict=False))
        if (unwritten := copies(chunk, unit.device)) is None:
            read.append(chunk)
            outs += tensors.values()
        unit.tensors.append(tensors if unwritten is None else unwritten)
        unit.undo.append(next(parts) if _has_undo(chunk) else None)
        unit.gradients.append(None if state.gradient is None else next(parts))
        if state.new:
            unit.new[chunk] = [next(parts) for _ in state.new]
    return read, outs


def _part(memory: torch.Tensor | None, tensor: StoredTensor, begin: int) -> torch.Tensor:
    if memory is None or not tensor.nbytes:  # a shard may be empty, and a unit of empty shards has no buffer
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    part = memory[begin : begin + tensor.nbytes].view(tensor.dtype)
    return part if len(tensor.shape) == 1 else part.view(tensor.shape)


# ---- the pool of buffers


class UnitBuffers:
    """Pool that the first request allocates, and that is replaced if the program does not release its memory.

    Args:
        given: the size that the user has given. None: the largest unit's size, times `units`.
        units: the number of units that are read, computed or written at one time.
        least_unit: the minimum size of a unit.
    """

    def __init__(self, given: int | None, units: int, least_unit: int) -> None:
        self._given, self._units = given, units
        self.nbytes = units * least_unit if given is None else given
        self._pool: BufferPool | None = None

    def expect_room(self, nbytes: int, name: Callable[[], str]) -> None:
        """Use a larger pool from the next request on, if a unit of `nbytes` bytes needs it.

        Raises:
            ValueError: the user has given fewer bytes than the unit needs; `name` is called for the message.
        """
        if self._given is not None and nbytes > self._given:
            raise ValueError(
                f"buffer_bytes={self._given} is less than {name()} needs: {nbytes} bytes; a smaller chunk_bytes, or a "
                "smaller prefetch, needs less"
            )
        if self._given is None and self._units * nbytes > self.nbytes:
            self.nbytes, self._pool = self._units * nbytes, None

    def take(self, nbytes: int) -> CUDAFuture[Buffer]:
        """Request a buffer, at most as large as the pool."""
        self._pool = BufferPool(self.nbytes) if self._pool is None else self._pool
        return self._pool.take(nbytes)

    def expect(self, request: CUDAFuture[Buffer]) -> bool:
        """Wait shortly for memory that nothing in flight holds; return True if the request has completed.

        If not, it is cancelled, and the next request creates a new pool: the program keeps tensors of the old one, or
        an exception whose frames have such tensors. The old pool's memory is freed when those are freed.
        """
        wait([request], timeout=_PATIENCE)  # another thread may still release the memory of ended operations
        if request.done() or not request.cancel():
            return True
        _logger.warning("tensors or exceptions that the program keeps hold the swap buffers; new ones are allocated")
        self._pool = None
        return False
