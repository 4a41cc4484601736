"""Pipeline of a step: reads run ahead of the computation, writes behind it.

    read of unit i + prefetch  ──►  computation of unit i  ──►  write of unit i - 1
            (store)                    (the caller)                (store)

A unit is a few chunks of state that are read together and written together. On the host its memory is a buffer of a
``BufferPool``: the read of a unit waits until a write has released enough of the pool. Units on a device use the memory
of the device, and the prefetch depth limits their number in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from cudafuture._C import CUDAFuture
from cudafuture.combine import collect_all
from cudafuture.errors import SwapError
from cudafuture.io import Buffer
from cudafuture.store import DiskStore, Store
from cudafuture.swap._errors import clear_tracebacks, error_of, interrupts_deferred
from cudafuture.swap._gradients import FIRST, Gradients, StoredGradient
from cudafuture.swap._parameter_state import Chunk, ParameterState, StoredTensor
from cudafuture.swap._unit import Unit, UnitBuffers, UnitWrite, by_parameter, copies, cut

__all__ = ["StepPipeline"]


class StepPipeline:
    """Reads and writes of a swapped optimizer that are in flight, and keys that no parameter needs any more.

    Args:
        store: of the state.
        prefix: of its keys.
        min_bytes: smaller pieces of gradients stay in memory.
        buffers: host memory of the units.
        prefetch: the number of units that are read ahead of the computation, and written behind it.
        name_of: the name of a chunk's parameter, for errors.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        min_bytes: int,
        buffers: UnitBuffers,
        prefetch: int,
        name_of: Callable[[Chunk], str],
    ) -> None:
        self._store, self._prefix, self._prefetch, self._name_of = store, prefix, prefetch, name_of
        self._buffers, self.gradients = buffers, Gradients(store, prefix, min_bytes, buffers.nbytes)
        self.counters = self.gradients.counters
        self._reading: deque[Unit] = deque()
        self._writing: deque[UnitWrite] = deque()
        self.obsolete: dict[str, ParameterState] = {}  # keys that are deleted when their parameter has been written
        self._deletions: deque[CUDAFuture[None]] = deque()
        self._error_of_write: SwapError | None = None

    def error(self, chunk: Chunk, what: str, error: BaseException, of: str = "optimizer state") -> SwapError:
        """Return an error that names the parameter; its cause is the store's error."""
        message = f"the {of} of {self._name_of(chunk)} cannot be {what}: {error}"
        failure = SwapError(message, parameter=chunk.state.parameter)
        failure.__cause__ = error
        return failure

    def run(self, units: Iterator[Unit], compute: Callable[[Unit], None]) -> None:
        """Read and compute units in order; `compute` starts their writes, some of which are in flight on return.

        When it raises, reads are in flight too.
        """
        for unit in units:
            self.start_read(unit)
            while len(self._reading) > self._prefetch:
                self.compute_next(compute)
        while self._reading:
            self.compute_next(compute)

    def compute_next(self, compute: Callable[[Unit], None]) -> None:
        """Wait for the oldest read, and compute its unit.

        Raises:
            SwapError: it cannot be read.
        """
        unit = self.finish_read()
        self._limit_writes()  # so that start_write() need not wait
        with self.counters.timed("compute_seconds"), interrupts_deferred():  # an updated unit must also be written
            compute(unit)

    # ---- reads

    def start_read(self, unit: Unit) -> None:
        """Read the state of a unit, after the units that are being read."""
        states = {chunk.state for chunk in unit.chunks}
        self._finish_writes_of(states)
        for state in states:
            if state.gradient is not None:
                self.gradients.settle(state.gradient)
        if unit.device.type != "cpu":
            there = [chunk for chunk in unit.chunks if chunk.unwritten() is None]
            unit.read = there, self._store.readv(self._keys(there), device=unit.device, priority=FIRST)
            for chunk in unit.chunks:
                gradient = chunk.state.gradient
                unit.gradients.append(
                    None
                    if gradient is None
                    else torch.empty(chunk.end - chunk.begin, dtype=gradient.dtype, device=unit.device)
                )
            unit.begun = self._all_reads(unit)
        elif unit.size(self._buffers.nbytes):
            self._request(unit)
        else:
            cut(unit)
            unit.begun = CUDAFuture.completed(None)
        self._reading.append(unit)

    def _request(self, unit: Unit) -> None:
        """Request the memory of a unit; its reads begin when the request completes."""
        unit.taken = taken = self._buffers.take(unit.size(self._buffers.nbytes))
        unit.begun = taken.then_async(lambda taken: self._begin(unit, taken.value()))

    def _begin(self, unit: Unit, buffer: Buffer) -> CUDAFuture[Any]:
        """Start the reads of a unit whose memory is available."""
        unit.buffer, unit.taken = buffer, None
        chunks, outs = cut(unit)
        if outs:
            unit.read = chunks, self._store.readv(self._keys(chunks), outs, priority=FIRST)
        return self._all_reads(unit)

    def _all_reads(self, unit: Unit) -> CUDAFuture[Any]:
        """Start to read the gradients of a unit; return a future of all its reads."""
        for chunk, out in zip(unit.chunks, unit.gradients, strict=True):
            if out is not None and chunk.state.gradient is not None:
                unit.gradient_reads.append((chunk, self.gradients.read(chunk.state.gradient, chunk.begin, out)))
        return collect_all(self._reads_of(unit))

    def _reads_of(self, unit: Unit) -> list[CUDAFuture[Any]]:
        state = [] if unit.read is None else [unit.read[1]]
        return [*state, *(future for _, future in unit.gradient_reads)]

    def _keys(self, chunks: Sequence[Chunk]) -> list[str]:
        return [self._key(chunk, name) for chunk in chunks for name in chunk.state.stored]

    def _key(self, chunk: Chunk, name: str) -> str:
        return chunk.key(self._prefix, name, chunk.state.version)

    def _give_memory_to(self, unit: Unit) -> None:
        """Finish writes, which hold memory of the pool, until the oldest read has its buffer.

        No other operation of the pipeline holds memory. If the program does, through a tensor or an exception whose
        frames have tensors, this and later reads get a new pool.
        """
        while unit.taken is not None and self._writing:
            self._finish_write()
        taken = unit.taken
        if taken is not None and not self._buffers.expect(taken):
            for waiting in self._reading:
                if waiting is unit or waiting.cancel_request():
                    self._request(waiting)

    def finish_read(self) -> Unit:
        """Wait for the oldest read, and return its unit.

        Raises:
            SwapError: it cannot be read.
        """
        unit = self._reading[0]
        assert unit.begun is not None
        self._give_memory_to(unit)
        with self.counters.timed("read_wait_seconds"):
            unit.begun.wait()
        self._release()
        read = {} if unit.read is None else self._tensors_read(unit, *unit.read)
        for chunk, future in unit.gradient_reads:
            if (error := error_of(future)) is not None:
                raise self.error(chunk, "read", error, "gradient") from error
            future.wait()
            self.gradients.note_read(chunk.state.gradient, chunk.begin, chunk.end)
        self._reading.popleft()
        if unit.device.type != "cpu":
            for chunk in unit.chunks:
                unwritten = copies(chunk, unit.device)
                unit.tensors.append(read[chunk] if unwritten is None else unwritten)
                unit.undo.append(None)
        return unit

    def _tensors_read(
        self, unit: Unit, chunks: list[Chunk], future: CUDAFuture[list[torch.Tensor]]
    ) -> dict[Chunk, dict[str, torch.Tensor]]:
        """Return the tensors of the chunks of a read that has ended, by name, if the unit is on a device.

        Raises:
            SwapError: it has failed.
        """
        if (error := error_of(future)) is not None:
            raise self._error_of_read(chunks, error)
        tensors = future.wait()
        self.counters.bytes_read += sum(tensor.nbytes for tensor in tensors)
        if unit.device.type == "cpu":
            return {}
        each = iter(tensors)
        return {chunk: dict(zip(chunk.state.stored, each, strict=False)) for chunk in chunks}

    def _error_of_read(self, chunks: list[Chunk], error: BaseException) -> SwapError:
        """Return the error of a read; it names the first parameter that cannot be read alone either."""
        each = by_parameter(chunks)
        if len(each) == 1:
            return self.error(chunks[0], "read", error)
        for of_one in each:
            try:
                self._store.readv(self._keys(of_one), priority=FIRST).wait()
            except Exception as alone:
                clear_tracebacks(alone)
                return self.error(of_one[0], "read", alone)
        return self.error(chunks[0], f"read together with that of {len(each) - 1} more parameters", error)

    @property
    def reads(self) -> int:
        """The number of units that are being read."""
        return len(self._reading)

    def bytes_of_reads(self) -> int:
        """Return the bytes of buffers of the units that are being read."""
        return sum(unit.size(self._buffers.nbytes) for unit in self._reading)

    def last_read(self) -> ParameterState | None:
        """Return the state of the newest read that is still in flight, or None."""
        return self._reading[-1].chunks[-1].state if self._reading else None

    def is_next(self, state: ParameterState) -> bool:
        """Return whether the oldest read belongs to a parameter."""
        return bool(self._reading) and self._reading[0].chunks[0].state is state

    def is_reading(self, state: ParameterState) -> bool:
        """Return whether a unit of a parameter is being read."""
        return any(chunk.state is state for unit in self._reading for chunk in unit.chunks)

    def drop_reads(self) -> None:
        """Cancel or finish all reads, and drop their units, when the store no longer uses their memory."""
        while self._reading:
            self._drop(self._reading.popleft())

    def _drop(self, unit: Unit) -> None:
        assert unit.begun is not None
        unit.cancel_request()
        with self.counters.timed("read_wait_seconds"):
            error_of(unit.begun)
        for future in self._reads_of(unit):
            error_of(future)  # retrieves the error, so that it is not logged
        unit.forget()

    # ---- writes

    def start_write(
        self, unit: Unit, tensors: list[dict[str, torch.Tensor]], versions: list[int]
    ) -> CUDAFuture[int] | None:
        """Write the new state of the chunks of a unit, and free its memory when the write has ended.

        Returns:
            the future of the write, or None if there is nothing to write.
        """
        self._limit_writes()
        keys: dict[str, torch.Tensor] = {}
        for chunk, named, version in zip(unit.chunks, tensors, versions, strict=True):
            for name, tensor in named.items():
                keys[chunk.key(self._prefix, name, version)] = tensor
        if not keys:
            return None
        if self.obsolete:
            for key in keys:
                self.obsolete.pop(key, None)
        outcomes = torch.zeros(len(keys), dtype=torch.bool, device="cpu")
        try:
            future = self._store.writev(keys, written=outcomes)
        except Exception as e:  # the new state stays in memory, as after any failed write
            future = CUDAFuture.failed(e)
        self._writing.append(UnitWrite(unit, tensors, future, outcomes))
        return future

    def _limit_writes(self) -> None:
        """Wait until no more units are being written than are read ahead."""
        while len(self._writing) > self._prefetch:
            self._finish_write()

    def _finish_writes_of(self, states: set[ParameterState]) -> None:
        """Wait for the writes of some parameters: a read that overtakes a write returns the old tensor."""
        while any(not states.isdisjoint(write.states) for write in self._writing):
            self._finish_write()

    def _finish_write(self) -> None:
        write = self._writing[0]
        with self.counters.timed("write_wait_seconds"):
            error = error_of(write.future)
        self._writing.popleft()
        chunks = write.unit.chunks
        failed = set() if error is None else write.failed()
        for chunk, new in zip(chunks, write.tensors, strict=True):
            state = chunk.state
            if state.unwritten:
                state.unwritten = {index: old for index, old in state.unwritten.items() if index != chunk.index}
            if chunk in failed:
                copies = {name: tensor.clone() for name, tensor in new.items()}
                state.unwritten = {**(state.unwritten or {}), chunk.index: copies}
            else:
                self.counters.bytes_written += sum(tensor.nbytes for tensor in new.values())
        if error is not None and self._error_of_write is None:
            culprit = next((chunk for chunk in chunks if chunk in failed), chunks[0])
            self._error_of_write = self.error(
                culprit, "written, and stays in memory until a step has written it", error
            )
        write.unit.forget()

    def delete_later(self, state: ParameterState, keys: Iterable[str]) -> None:
        """Delete keys of a parameter when the tensors that replace them have been written."""
        self.obsolete |= dict.fromkeys(keys, state)

    def _delete_obsolete(self) -> None:
        """Delete the obsolete keys of all parameters that are not being written; ``drain`` waits for the deletion."""
        written = set().union(*(write.states for write in self._writing))
        keys = [key for key, state in self.obsolete.items() if state not in written]
        self.obsolete = {key: state for key, state in self.obsolete.items() if state in written}
        if keys:
            self._deletions.append(self._store.deletev(keys))

    def reap(self) -> None:
        """Finish the writes that have ended, without waiting for others.

        Raises:
            SwapError: a write has failed.
        """
        self._release()
        self._delete_obsolete()
        while self._deletions and self._deletions[0].done():
            self._deletions.popleft().exception()
        self.raise_error()

    def _release(self) -> None:
        """Release the memory of the writes that have ended: reads of later units wait for it."""
        while self._writing and self._writing[0].future.done():
            self._finish_write()

    def settle(self) -> None:
        """Wait until every write has ended, and keep the first error for ``drain``."""
        while self._writing:
            self._finish_write()

    def raise_error(self) -> None:
        """Raise the error of the first write that has failed since the last call, if any."""
        if self._error_of_write is not None:
            error, self._error_of_write = self._error_of_write, None
            raise error

    def drain(self) -> None:
        """Wait until all state is written.

        Raises:
            SwapError: a write has failed. Its state stays in memory until a later write succeeds.
        """
        self.settle()
        self._delete_obsolete()
        while self._deletions:
            self._deletions.popleft().exception()  # some keys may not exist, because their writes have failed
        self.raise_error()

    # ---- gradients

    def write_gradient(self, state: ParameterState, gradient: torch.Tensor) -> None:
        """Write a gradient, and replace the stored one; the tensor must not change any more."""
        self.forget_gradient(state)
        state.gradient = StoredGradient(gradient.dtype)
        flat = gradient.detach().contiguous().view(-1)
        for begin, end in state.bounds:
            self.gradients.write(state.gradient, state.number, begin, flat[begin:end])
        for piece in state.gradient.pieces.values():
            self.obsolete.pop(piece.key, None)

    def read_gradient(self, state: ParameterState) -> torch.Tensor:
        """Return a copy of a gradient that is in the store, with its factors applied.

        Raises:
            SwapError: the gradient cannot be read.
        """
        gradient, parameter = state.gradient, state.parameter
        assert gradient is not None
        self.gradients.settle(gradient)
        out = torch.empty(parameter.numel(), dtype=gradient.dtype, device=parameter.device)
        try:
            with self.counters.timed("read_wait_seconds"):
                self.gradients.read(gradient, 0, out).wait()
        except Exception as e:
            raise self.error(state.chunks()[0], "read", e, "gradient") from e
        self.gradients.note_read(gradient, 0, out.numel())
        return gradient.scaled(out).view(parameter.shape)

    def forget_gradient(self, state: ParameterState) -> None:
        """Drop a gradient, if it is in the store."""
        if state.gradient is not None:
            self.delete_later(state, self.gradients.forget(state.gradient))
            state.gradient = None

    # ---- single tensors

    def read_whole(
        self, state: ParameterState, name: str, stored: StoredTensor, device: torch.device, mapped: bool
    ) -> torch.Tensor:
        """Return a state tensor of all chunks: a copy, or with `mapped` a mapping whose pages are read on access.

        Only a store on this machine can map. No write may be in flight.
        """
        chunks = state.chunks()
        try:
            if mapped and device.type == "cpu" and not state.unwritten and isinstance(self._store, DiskStore):
                return self._store.map([self._key(chunk, name) for chunk in chunks]).view(stored.shape)
            if state.is_chunked:
                whole = torch.empty(stored.shape, dtype=stored.dtype, device=device)
                for chunk in chunks:
                    self._read_part(chunk, name, chunk.part_of(whole))
                return whole
            return self._read_part(chunks[0], name, torch.empty(stored.shape, dtype=stored.dtype, device=device))
        except Exception as e:
            raise self.error(chunks[0], "read", e) from e

    def _read_part(self, chunk: Chunk, name: str, out: torch.Tensor) -> torch.Tensor:
        unwritten = chunk.unwritten()
        if unwritten:
            return out.copy_(unwritten[name])
        with self.counters.timed("read_wait_seconds"):
            return self._store.read(self._key(chunk, name), out).wait()
