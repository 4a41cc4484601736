"""The pipeline of a step: reads run ahead of the computation, writes behind it.

    read of unit i + prefetch  ──►  computation of unit i  ──►  write of unit i - 1
            (store)                    (the caller)                (store)

A unit is a few chunks of state that are read together and written together. On the host its memory is a buffer of a
``BufferPool``: the read of a unit waits until a write has released enough of the pool. Units on a device use the memory
of the device, and so many are in flight as the prefetch depth allows.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cudafuture._C import CUDAFuture
from cudafuture.combine import collect_all
from cudafuture.errors import SwapError
from cudafuture.storage import Buffer, BufferPool, Offloader, Store
from cudafuture.swap._parameter_state import Chunk, ParameterState, StoredTensor

__all__ = ["UNDO", "Pipeline", "SwapCounters", "Unit", "size_of"]

UNDO = "undo"  # the name of the old values of a chunk beside the names of its state
_PAGE = 4096
_FIRST = -10  # the priority of reads that the computation waits for


@dataclass
class SwapCounters:
    """Sums over all steps so far."""

    bytes_read: int = 0
    bytes_written: int = 0
    compute_seconds: float = 0.0
    read_wait_seconds: float = 0.0
    write_wait_seconds: float = 0.0


@dataclass(eq=False)
class Unit:
    """Chunks that are read together, updated one by one, and written together."""

    chunks: Sequence[Chunk]
    device: torch.device
    tensors: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """the state tensors of each chunk, once they were read"""
    undo: list[torch.Tensor | None] = field(default_factory=list)
    """memory for the old values of each chunk of a parameter with several"""
    buffer: Buffer | None = None
    waits_for_memory: bool = False
    begun: CUDAFuture[Any] | None = None
    """completes when all reads have ended; fails if there is no buffer"""
    reads: list[tuple[list[Chunk], CUDAFuture[list[torch.Tensor]]]] = field(default_factory=list)
    """of each parameter: its chunks that are read, and their tensors"""

    def forget(self) -> None:
        """Let go of the memory."""
        self.tensors, self.undo, self.reads, self.begun, self.buffer = [], [], [], None, None


@dataclass(eq=False)
class Write:
    """The new state of chunks of one parameter, which is being written."""

    unit: Unit
    chunks: list[Chunk]
    tensors: list[dict[str, torch.Tensor]]
    future: CUDAFuture[int]


def size_of(chunks: Sequence[Chunk]) -> int:
    """Return the bytes of a buffer for the state tensors of chunks, and for the old values of those that need them."""
    return sum(_pages(tensor.nbytes) for chunk in chunks for tensor in _layout(chunk))


def _layout(chunk: Chunk) -> Iterator[StoredTensor]:
    yield from chunk.stored().values()
    if chunk.state.is_chunked:
        yield StoredTensor(chunk.state.parameter.dtype, torch.Size([chunk.end - chunk.begin]))


def _pages(nbytes: int) -> int:
    return math.ceil(nbytes / _PAGE) * _PAGE


def _by_parameter(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Return neighbouring chunks of one parameter in a list each."""
    return [list(group) for _, group in itertools.groupby(chunks, key=lambda chunk: chunk.state)]


def _copies(chunk: Chunk, device: torch.device) -> dict[str, torch.Tensor] | None:
    """Return copies of the state of a chunk that could not be written; None: it is in the store."""
    unwritten = chunk.unwritten()
    if unwritten is None:
        return None
    return {name: tensor.to(device, copy=True) for name, tensor in unwritten.items() if name != UNDO}


class Pipeline:
    """The reads and writes of a swapped optimizer that are in flight."""

    def __init__(
        self, store: Store, prefix: str, buffer_bytes: int, prefetch: int, name_of: Callable[[Chunk], str]
    ) -> None:
        self.counters = SwapCounters()
        self._store, self._prefix, self._prefetch, self._name_of = store, prefix, prefetch, name_of
        self._buffer_bytes = buffer_bytes
        self._pool: BufferPool | None = None  # allocated with the first read into the memory of the host
        self._reading: deque[Unit] = deque()
        self._writing: deque[Write] = deque()
        self.obsolete: list[str] = []  # keys that are deleted when what replaces them was written
        self._error_of_write: SwapError | None = None

    def run(self, units: Iterator[Unit], compute: Callable[[Unit], None]) -> None:
        """Read and compute units in their order; `compute` starts their writes, some of which are in flight afterwards.

        When it raises, reads are in flight, too.
        """
        for unit in units:
            self.start_read(unit)
            while len(self._reading) > self._prefetch:
                self.compute_next(compute)
        while self._reading:
            self.compute_next(compute)

    def compute_next(self, compute: Callable[[Unit], None]) -> None:
        """Wait for the unit that was read first, and compute it.

        Raises:
            SwapError: it cannot be read.
        """
        unit = self._finish_read()
        waited = self.counters.write_wait_seconds
        begin = time.perf_counter()
        compute(unit)
        waited = self.counters.write_wait_seconds - waited
        self.counters.compute_seconds += time.perf_counter() - begin - waited

    # ---- reads

    def start_read(self, unit: Unit) -> None:
        """Read the state of a unit, which comes after the units that are being read."""
        self._finish_writes_of({chunk.state for chunk in unit.chunks})
        self._reading.append(unit)
        if unit.device.type != "cpu":
            for chunks in _by_parameter(unit.chunks):
                there = [chunk for chunk in chunks if chunk.unwritten() is None]
                unit.reads.append((there, self._store.readv(self._keys(there), device=unit.device, priority=_FIRST)))
            unit.begun = collect_all([future for _, future in unit.reads])
            return
        size = size_of(unit.chunks)
        if not size:
            self._cut(unit)
            unit.begun = CUDAFuture.completed(None)
            return

        def begin(taken: CUDAFuture[Buffer]) -> CUDAFuture[Any]:
            unit.buffer = taken.value()
            unit.waits_for_memory = False
            for chunks, outs in self._cut(unit):
                unit.reads.append((chunks, self._store.readv(self._keys(chunks), outs, priority=_FIRST)))
            return collect_all([future for _, future in unit.reads])

        self._pool = BufferPool(self._buffer_bytes) if self._pool is None else self._pool
        unit.waits_for_memory = True
        unit.begun = self._pool.take(size).then_async(begin)

    def _keys(self, chunks: Sequence[Chunk]) -> list[str]:
        return [self._key(chunk, name) for chunk in chunks for name in chunk.state.stored]

    def _key(self, chunk: Chunk, name: str) -> str:
        return chunk.key(self._prefix, name, chunk.state.version)

    def _cut(self, unit: Unit) -> list[tuple[list[Chunk], list[torch.Tensor]]]:
        """Give each state tensor of a unit a part of its buffer; return those that are to be read, by parameter."""
        end = 0

        def part(tensor: StoredTensor) -> torch.Tensor:
            nonlocal end
            assert unit.buffer is not None
            begin, end = end, end + _pages(tensor.nbytes)
            return unit.buffer.tensor[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        cut: list[tuple[list[Chunk], list[torch.Tensor]]] = []
        for chunks in _by_parameter(unit.chunks):
            read: list[Chunk] = []
            outs: list[torch.Tensor] = []
            for chunk in chunks:
                tensors = _copies(chunk, unit.device)
                if tensors is None:
                    tensors = {name: part(tensor) for name, tensor in chunk.stored().items()}
                    read.append(chunk)
                    outs += tensors.values()
                unit.tensors.append(tensors)
                size = torch.Size([chunk.end - chunk.begin])
                undo = part(StoredTensor(chunk.state.parameter.dtype, size)) if chunk.state.is_chunked else None
                unit.undo.append(undo)
            if outs:
                cut.append((read, outs))
        return cut

    def _give_memory_to(self, unit: Unit) -> None:
        """Finish writes, which hold memory of the pool, until the unit that was read first has its buffer."""
        while unit.waits_for_memory and self._writing:
            self._finish_write()

    def _finish_read(self) -> Unit:
        unit = self._reading[0]
        assert unit.begun is not None
        self._give_memory_to(unit)
        begin = time.perf_counter()
        unit.begun.wait()
        self.counters.read_wait_seconds += time.perf_counter() - begin
        for chunks, future in unit.reads:
            if (error := future.exception()) is not None:
                raise self._error(chunks[0], "read", error) from error
        read: dict[Chunk, list[torch.Tensor]] = {}
        for chunks, future in unit.reads:
            tensors = iter(future.wait())
            read.update({chunk: [next(tensors) for _ in chunk.state.stored] for chunk in chunks})
        self._reading.popleft()
        self.counters.bytes_read += sum(tensor.nbytes for tensors in read.values() for tensor in tensors)
        if unit.device.type != "cpu":
            for chunk in unit.chunks:
                copies = _copies(chunk, unit.device)
                named = zip(chunk.state.stored, read.get(chunk, []), strict=False)
                unit.tensors.append(dict(named) if copies is None else copies)
                unit.undo.append(None)
        return unit

    @property
    def reads(self) -> int:
        """The number of units that are being read."""
        return len(self._reading)

    def is_next(self, state: ParameterState) -> bool:
        """Return whether the unit that was read first belongs to a parameter."""
        return bool(self._reading) and self._reading[0].chunks[0].state is state

    def _error(self, chunk: Chunk, what: str, error: BaseException) -> SwapError:
        """Return an error that names the parameter; its cause is the store's error."""
        message = f"the optimizer state of {self._name_of(chunk)} cannot be {what}: {error}"
        failure = SwapError(message, parameter=chunk.state.parameter)
        failure.__cause__ = error
        return failure

    def drop_reads(self) -> None:
        """Forget the units that are being read, when the store no longer uses their memory."""
        while self._reading:
            self._drop(self._reading.popleft())

    def _drop(
        self, unit: Unit
    ) -> None:  # no local variable of it outlives it: memory is free when the last tensor dies
        assert unit.begun is not None
        self._give_memory_to(unit)
        unit.begun.exception()
        for _, future in unit.reads:
            future.exception()  # so that a failure counts as seen
        unit.forget()

    # ---- writes

    def start_write(self, unit: Unit, tensors: list[dict[str, torch.Tensor]], versions: list[int]) -> None:
        """Write the new state of the chunks of a unit; its memory is free when that has ended."""
        while len({id(write.unit) for write in self._writing}) > self._prefetch:
            self._finish_write()
        new = iter(zip(tensors, versions, strict=True))
        for chunks in _by_parameter(unit.chunks):
            written: list[dict[str, torch.Tensor]] = []
            keys: dict[str, torch.Tensor] = {}
            for chunk, (named, version) in zip(chunks, new, strict=False):
                written.append(named)
                keys |= {chunk.key(self._prefix, name, version): tensor for name, tensor in named.items()}
            if keys:
                self._writing.append(Write(unit, chunks, written, self._store.writev(keys)))

    def _finish_writes_of(self, states: set[ParameterState]) -> None:
        """Wait for the writes of some parameters: a read that overtakes a write gets the old tensor."""
        while any(write.chunks[0].state in states for write in self._writing):
            self._finish_write()

    def _finish_write(self) -> None:
        write = self._writing.popleft()
        begin = time.perf_counter()
        error = write.future.exception()
        self.counters.write_wait_seconds += time.perf_counter() - begin
        state = write.chunks[0].state
        unwritten = dict(state.unwritten or {})
        for chunk, new in zip(write.chunks, write.tensors, strict=True):
            unwritten.pop(chunk.index, None)
            if error is None:
                self.counters.bytes_written += sum(tensor.nbytes for tensor in new.values())
            else:
                unwritten[chunk.index] = {name: tensor.clone() for name, tensor in new.items()}
        state.unwritten = unwritten or None
        if error is not None and self._error_of_write is None:
            self._error_of_write = self._error(write.chunks[0], "written", error)
        if not self._writing or self._writing[0].unit is not write.unit:
            write.unit.forget()

    def delete_later(self, keys: Sequence[str]) -> None:
        """Delete keys when what replaces them was written."""
        self.obsolete += keys

    def reap(self) -> None:
        """Forget the writes that have ended, without waiting for others.

        Raises:
            SwapError: something cannot be written.
        """
        while self._writing and self._writing[0].future.done():
            self._finish_write()
        self.raise_error()

    def settle(self) -> None:
        """Wait until every write has ended, and keep the first error for ``drain``."""
        while self._writing:
            self._finish_write()

    def raise_error(self) -> None:
        """Raise the error of the first write that has failed since the last call, if there is one."""
        if self._error_of_write is not None:
            error, self._error_of_write = self._error_of_write, None
            raise error

    def drain(self) -> None:
        """Wait until everything was written.

        Raises:
            SwapError: something cannot be written. Its state is in memory until it can be.
        """
        self.settle()
        if self.obsolete:
            obsolete, self.obsolete = self.obsolete, []
            self._store.deletev(obsolete).exception()  # some may not be there: their writes have failed
        self.raise_error()

    # ---- single tensors

    def read_whole(
        self, state: ParameterState, name: str, stored: StoredTensor, device: torch.device, mapped: bool
    ) -> torch.Tensor:
        """Return a state tensor of all chunks: a copy, or with `mapped` one whose pages are read when they are touched.

        Only a store on this machine maps, and only a tensor of one chunk. No write is in flight.
        """
        chunks = state.chunks()
        try:
            if state.is_chunked:
                whole = torch.empty(stored.shape, dtype=stored.dtype, device=device)
                for chunk in chunks:
                    self._read_part(chunk, name, chunk.part_of(whole))
                return whole
            key = self._key(chunks[0], name)
            if mapped and device.type == "cpu" and chunks[0].unwritten() is None and isinstance(self._store, Offloader):
                return self._store.map(key)
            return self._read_part(chunks[0], name, torch.empty(stored.shape, dtype=stored.dtype, device=device))
        except Exception as e:
            raise self._error(chunks[0], "read", e) from e

    def _read_part(self, chunk: Chunk, name: str, out: torch.Tensor) -> torch.Tensor:
        unwritten = chunk.unwritten()
        return out.copy_(unwritten[name]) if unwritten else self._store.read(self._key(chunk, name), out).wait()

    # ---- the old values of a parameter that was updated in part

    def undo_of(self, chunk: Chunk, version: int) -> torch.Tensor:
        """Return the old values of a chunk, whose writes have ended."""
        unwritten = chunk.unwritten()
        if unwritten is not None:
            return unwritten[UNDO]
        return self._store.read(chunk.key(self._prefix, UNDO, version)).wait()

    def forget(self, state: ParameterState, version: int) -> None:
        """Delete the keys of a version that is not complete."""
        names = [*state.stored, UNDO]
        self._store.deletev([c.key(self._prefix, name, version) for c in state.chunks() for name in names]).exception()
