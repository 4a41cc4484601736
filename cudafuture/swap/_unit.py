"""Unit of state that a pipeline reads, updates and writes at one time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cudafuture._C import CUDAFuture
from cudafuture.storage import Buffer
from cudafuture.storage.engine import PAGE
from cudafuture.swap._parameter_state import UNDO, Chunk, StoredTensor, UndoPlace

__all__ = ["Unit", "Write", "by_parameter", "copies", "cut", "places", "size_of"]


@dataclass(eq=False)
class Unit:
    """Chunks that are read together, updated one by one, and written together."""

    chunks: Sequence[Chunk]
    device: torch.device
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
    reads: list[tuple[list[Chunk], CUDAFuture[list[torch.Tensor]]]] = field(default_factory=list)
    """for each parameter: the chunks to read, and their tensors"""
    gradient_reads: list[tuple[Chunk, CUDAFuture[Any]]] = field(default_factory=list)

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
        self.reads, self.gradient_reads, self.begun = [], [], None


@dataclass(eq=False)
class Write:
    """Write in flight of the new state of chunks of one parameter."""

    unit: Unit
    chunks: list[Chunk]
    tensors: list[dict[str, torch.Tensor]]
    future: CUDAFuture[int]


def by_parameter(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Return a list of the adjacent chunks of each parameter."""
    return [list(group) for _, group in itertools.groupby(chunks, key=lambda chunk: chunk.state)]


def copies(chunk: Chunk, device: torch.device) -> dict[str, torch.Tensor] | None:
    """Return copies of the state of a chunk whose write failed, or None if the state is in the store."""
    unwritten = chunk.unwritten()
    if unwritten is None:
        return None
    return {name: tensor.to(device, copy=True) for name, tensor in unwritten.items() if name != UNDO}


# ---- the parts of a buffer


def size_of(chunks: Sequence[Chunk], room: float = math.inf) -> int:
    """Return the buffer size for all reads of chunks, and for the old values of chunks that need them.

    Args:
        chunks: the chunks.
        room: the largest buffer, for ``places``.
    """
    return places([tensor for chunk in chunks for tensor in _layout(chunk)], room)[-1]


def _layout(chunk: Chunk) -> Iterator[StoredTensor]:
    yield from chunk.stored().values()
    if _has_undo(chunk):
        yield _flat(chunk, chunk.state.parameter.dtype)
    if chunk.state.gradient is not None:
        yield _flat(chunk, chunk.state.gradient.dtype)
    for dtype in chunk.state.new:
        yield _flat(chunk, dtype)


def _has_undo(chunk: Chunk) -> bool:
    return chunk.state.is_chunked and chunk.state.undo is UndoPlace.STORE


def _flat(chunk: Chunk, dtype: torch.dtype) -> StoredTensor:
    return StoredTensor(dtype, torch.Size([chunk.end - chunk.begin]))


def places(tensors: Sequence[StoredTensor], room: float = math.inf) -> list[int]:
    """Return the first byte of each tensor in a buffer, and the size that the buffer needs.

    Each tensor takes whole pages, which a disk reads without a copy, if they fit into `room` bytes. If not, the tensors
    are adjacent.
    """
    begins = [0, *itertools.accumulate(-(-tensor.nbytes // PAGE) * PAGE for tensor in tensors)]
    if begins[-1] <= room:
        return begins
    begins, end = [], 0
    for tensor in tensors:
        begins.append(-(-end // tensor.dtype.itemsize) * tensor.dtype.itemsize)
        end = begins[-1] + tensor.nbytes
    return [*begins, end]


def cut(unit: Unit) -> list[tuple[list[Chunk], list[torch.Tensor]]]:
    """Give each tensor of a unit a part of its buffer; return the state tensors to read, by parameter."""
    layout = [tensor for chunk in unit.chunks for tensor in _layout(chunk)]
    begins = iter(places(layout, 0 if unit.buffer is None else unit.buffer.tensor.nbytes))

    def part(tensor: StoredTensor) -> torch.Tensor:
        begin = next(begins)
        if not tensor.nbytes:  # a shard may be empty, and a unit of empty shards has no buffer
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        assert unit.buffer is not None
        return unit.buffer.tensor[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    found: list[tuple[list[Chunk], list[torch.Tensor]]] = []
    for chunks in by_parameter(unit.chunks):
        read: list[Chunk] = []
        outs: list[torch.Tensor] = []
        for chunk in chunks:
            tensors = copies(chunk, unit.device)
            if tensors is None:
                tensors = {name: part(tensor) for name, tensor in chunk.stored().items()}
                read.append(chunk)
                outs += tensors.values()
            else:  # their places stay free
                next(itertools.islice(begins, len(tensors), len(tensors)), None)
            state = chunk.state
            unit.tensors.append(tensors)
            unit.undo.append(part(_flat(chunk, state.parameter.dtype)) if _has_undo(chunk) else None)
            unit.gradients.append(None if state.gradient is None else part(_flat(chunk, state.gradient.dtype)))
            unit.new[chunk] = [part(_flat(chunk, dtype)) for dtype in state.new]
        if outs:
            found.append((read, outs))
    return found
