"""Optimizer states of parameters in a store: read, updated and written back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cudafuture.errors import SwapError
from cudafuture.store import Offloader, Store
from cudafuture.swap._buffers import Buffers
from cudafuture.swap._gradient_marks import AppliedGradient
from cudafuture.swap._gradients import Gradients
from cudafuture.swap._interrupts import interrupts_deferred
from cudafuture.swap._options import SwapOptions
from cudafuture.swap._parameter_state import (
    MASTER,
    UNDO,
    Chunk,
    ParameterState,
    StoredTensor,
    UndoPlace,
    cast,
    copied,
)
from cudafuture.swap._pipeline import Pipeline
from cudafuture.swap._shards import like, local_of
from cudafuture.swap._state_layout import StateLayout
from cudafuture.swap._threads import one_thread_less
from cudafuture.swap._tracebacks import clear_tracebacks
from cudafuture.swap._undo_log import UndoLog
from cudafuture.swap._unit import Unit, size_of
from cudafuture.swap._update import Update

__all__ = ["Swapper"]

_UNIT = 32 << 20  # bytes of state that are read together, unless one parameter or chunk needs more
_UNDO_SHARE = 8  # old values of a parameter take up to 1/8 of the bytes of the buffers, in addition

Group = dict[str, Any]


class Swapper:
    """States of an optimizer's parameters; an update loads them into memory for as long as it needs them.

    Only one thread at a time may call it, without gradient mode.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        update: Update,
        options: SwapOptions,
        parameters: Sequence[tuple[torch.Tensor, Group]],
        name_of: Callable[[torch.Tensor], str],
    ) -> None:
        self._store, self._prefix, self._update, self._options = store, prefix, update, options
        self.layout = StateLayout(update, options, store_may_die=not isinstance(store, Offloader))
        self.optimizer_class = update.optimizer_class
        self._states: dict[torch.Tensor, ParameterState] = {}
        self._groups: dict[ParameterState, Group] = {}
        self.resident_bytes = 0
        self._name_of = name_of
        units = options.prefetch + 2
        self._buffers = Buffers(options.buffer_bytes, units, _UNIT)
        self._unit_bytes = max(self.expect_room(parameters), min(_UNIT, self._buffers.nbytes // units))
        gradients = Gradients(store, prefix, options.min_bytes, self._buffers.nbytes)
        self.pipeline = Pipeline(
            store, prefix, self._buffers, options.prefetch, lambda c: name_of(c.state.parameter), gradients
        )
        self._undo = UndoLog(store, prefix, self.pipeline)

    def key(self, chunk: Chunk, name: str) -> str:
        """Return the key of the chunk's part of a state tensor in the store."""
        return chunk.key(self._prefix, name, chunk.state.version)

    def completed(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` and ``param_groups`` of a state dict, completed and in the dtypes of the updates."""
        completed = self._update.completed(saved)
        if self._options.master_weights:
            completed["state"] = {
                parameter: cast(state, self.like(parameter)) for parameter, state in completed["state"].items()
            }
        return completed

    def like(self, parameter: torch.Tensor) -> StoredTensor:
        """Return the dtype and shape of the state tensors of a parameter, or of this rank's shard."""
        return StoredTensor(self.layout.dtype(parameter), local_of(parameter).shape)

    def known(self) -> list[ParameterState]:
        """Return the states that are not empty."""
        return [state for state in self._states.values() if state.values or state.stored]

    def has_state(self, parameter: torch.Tensor) -> bool:
        """Return whether the state of a parameter is not empty."""
        state = self._states.get(parameter)
        return state is not None and bool(state.values or state.stored)

    @property
    def has_masters(self) -> bool:
        """True if parameters of less than 32 bits have master weights."""
        return self._options.master_weights

    # ---- updates

    def update(self, work: Iterable[tuple[torch.Tensor, Group]]) -> None:
        """Update parameters from their gradients, with the options of their groups.

        Raises:
            SwapError: the state of a parameter cannot be read or written. Each parameter has its old value and its old
                state, or its new ones.
        """
        self._roll_back_what_is_left()
        swapped: list[ParameterState] = []
        for parameter, group in work:
            state = self.state(parameter)
            self._groups[state] = group
            self._keep_resident(state)
            if state.is_resident and state.gradient is None:
                self._update_resident(state)
            else:
                swapped.append(state)
        if swapped:
            self.pipeline.drop_reads()
        try:
            self.pipeline.run(self._units(swapped), self._compute_unit)
        except BaseException as e:
            self._roll_back(e)
            raise
        self.pipeline.drain()

    def update_now(self, parameter: torch.Tensor, group: Group) -> None:
        """Update one parameter, whose state may have been read ahead. Its writes are in flight on return.

        Raises:
            SwapError: the state cannot be read; the parameter does not change.
        """
        self._roll_back_what_is_left()
        state = self.state(parameter)
        self._groups[state] = group
        self._keep_resident(state)
        if state.is_resident:
            self._update_resident(state)
            return
        try:
            if not self.pipeline.is_next(state):
                self.pipeline.drop_reads()
                self.start_read(parameter)
            while self.pipeline.is_next(state):
                self.pipeline.compute_next(self._compute_unit)
        except BaseException as e:
            self._roll_back(e)
            raise

    def start_read(self, parameter: torch.Tensor) -> None:
        """Read the state of a parameter that will be updated after those that are being read."""
        state = self.state(parameter)
        if not state.is_resident:
            for unit in list(self._units([state])):  # a list: no unit is read if another has no room
                self.pipeline.start_read(unit)

    def _keep_resident(self, state: ParameterState) -> None:
        """Keep the first state of a parameter in memory if there is room for it; then the parameter has one chunk.

        A parameter whose gradient may be in the store keeps its chunks: the buffers have room for one chunk's gradient.
        """
        if state.values or state.stored or state.is_resident or (state.is_chunked and self._options.swap_gradients):
            return
        dtypes = self.layout.dtypes(state.parameter, self._groups[state])
        nbytes = state.local.numel() * sum(dtype.itemsize for dtype in dtypes)
        if 0 < nbytes <= self._options.memory - self.resident_bytes:
            state.bounds = ((0, state.local.numel()),)
            state.resident_bytes = nbytes
            self.resident_bytes += nbytes

    def _update_resident(self, state: ParameterState) -> None:
        (chunk,) = state.chunks()
        with interrupts_deferred():
            self._keep(chunk, self._compute_chunk(chunk, state.values, None))

    def _compute_unit(self, unit: Unit) -> None:
        """Update the chunks of a unit, and start to write their new state."""
        written: list[dict[str, torch.Tensor]] = []
        versions: list[int] = []
        parts = zip(unit.chunks, unit.tensors, unit.undo, unit.gradients, strict=True)
        for chunk, tensors, undo, gradient in parts:
            state = chunk.state
            versions.append(state.version)
            with one_thread_less(self.layout.longest_chunk(state.parameter) is not None):
                if chunk.index == 0:
                    self._undo.begin(state)
                old = None
                if state.is_chunked:
                    versions[-1] = 1 - state.version
                    old = None if chunk.is_last else self._undo.save(chunk, undo)
                values = copied(state.values) if state.is_chunked else state.values
                new = unit.moved(chunk, self._keep(chunk, self._compute_chunk(chunk, {**values, **tensors}, gradient)))
            if old is not None:
                new[UNDO] = old
            if chunk.is_last:
                self._undo.clear()
            written.append(new)
        self.pipeline.start_write(unit, written, versions)
        self._undo.release_memory()

    def _roll_back(self, error: BaseException | None = None) -> None:
        """Finish operations in flight after an error, and restore the old values of a partially updated parameter.

        Raises:
            SwapError: the old values cannot be read. The next call retries before it does anything else.
        """
        clear_tracebacks(error)
        self.pipeline.drop_reads()
        self.pipeline.settle()
        self._undo.roll_back()

    def _roll_back_what_is_left(self) -> None:
        if not self._undo.is_empty:
            self._roll_back()

    def flush(self) -> None:
        """Wait until all state is written.

        Raises:
            SwapError: some state cannot be written, or the old values of a parameter cannot be read.
        """
        self._roll_back_what_is_left()
        self.pipeline.drain()

    def _compute_chunk(self, chunk: Chunk, state: dict[str, Any], swapped: torch.Tensor | None) -> dict[str, Any]:
        """Update a chunk with its state, and with the gradient that was read from the store; return the new state."""
        parameter = chunk.state.parameter
        gradient = chunk.gradient(swapped)
        part = chunk.part_of(chunk.state.local)
        device = self.layout.device(parameter)
        leaf = part
        if self.layout.has_master(parameter):
            leaf = state.pop(MASTER) if MASTER in state else part.to(device, torch.float32)
        elif part.device != device:
            leaf = part.to(device)
        leaf.grad = gradient.to(device, leaf.dtype)
        new = self._update(self._groups[chunk.state], leaf, state)
        leaf.grad = None
        if leaf is not part:
            part.copy_(leaf)
        if self.layout.has_master(parameter):
            new[MASTER] = leaf
        if chunk.is_last and swapped is not None:
            self.pipeline.forget_gradient(chunk.state)
            parameter.grad = AppliedGradient(parameter)
        elif chunk.is_last and parameter.grad is not None:
            chunk.state.note_applied(parameter.grad)
        return new

    def _keep(self, chunk: Chunk, new: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Keep the part of a chunk's new state that stays in memory; return the tensors that go to the store."""
        state = chunk.state
        shape = torch.Size([chunk.end - chunk.begin]) if state.is_chunked else state.local.shape
        tensors = {name: value for name, value in new.items() if self.layout.is_swappable(value, shape, state)}
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        may_be_resident = not state.is_chunked and not state.stored and nbytes > 0
        if may_be_resident and (state.is_resident or nbytes <= self._options.memory - self.resident_bytes):
            self.resident_bytes += nbytes - state.resident_bytes
            state.resident_bytes = nbytes
            tensors = {}
        if not chunk.is_last:
            return tensors
        whole = state.local.shape
        old = {chunk.key(self._prefix, name, state.version) for chunk in state.chunks() for name in state.stored}
        state.values = {name: value for name, value in new.items() if name not in tensors}
        state.stored = {
            name: StoredTensor(tensor.dtype, whole if tensor.shape == shape else tensor.shape)
            for name, tensor in tensors.items()
        }
        if state.is_chunked:
            state.version = 1 - state.version
            if state.undo is UndoPlace.STORE:
                old |= {chunk.key(self._prefix, UNDO, state.version) for chunk in state.chunks() if not chunk.is_last}
        old -= {chunk.key(self._prefix, name, state.version) for chunk in state.chunks() for name in state.stored}
        self.pipeline.delete_later(state, sorted(old))
        return tensors

    def _units(self, states: Iterable[ParameterState]) -> Iterator[Unit]:
        """Divide the chunks of parameters into units of one device and at most `unit_bytes`."""
        chunks: list[Chunk] = []
        size, device = 0, torch.device("cpu")
        for chunk in itertools.chain.from_iterable(state.chunks() for state in states):
            state, known = chunk.state, chunk.state.stored or chunk.state.values
            state.new = () if known else self.layout.dtypes(state.parameter, self._groups[state])
            state.undo = self.layout.undo(state, self._buffers.nbytes // _UNDO_SHARE)
            nbytes = size_of(chunk)
            next_device = self.layout.device(state.parameter)
            if next_device.type == "cpu":  # state may be larger than its parameter
                self._buffers.expect_room(nbytes, partial(self._name_of, state.parameter))
            if chunks and (size + nbytes > self._unit_bytes or next_device != device):
                yield Unit(chunks, device)
                chunks, size = [], 0
            chunks.append(chunk)
            size, device = size + nbytes, next_device
        if chunks:
            yield Unit(chunks, device)

    def state(self, parameter: torch.Tensor) -> ParameterState:
        """Return the state of a parameter; create an empty one if it has none yet."""
        state = self._states.get(parameter)
        if state is None:
            state = ParameterState(len(self._states), parameter, self.layout.bounds(parameter), {}, {})
            self._states[parameter] = state
        return state

    # ---- access

    def read_state(self, parameter: torch.Tensor, mapped: bool) -> dict[str, Any]:
        """Return a copy of the state of a parameter; with `mapped`, tensors whose pages are read on access.

        Raises:
            SwapError: the state cannot be read.
        """
        self._roll_back_what_is_left()
        state = self.state(parameter)
        self.pipeline.drop_reads()
        self.pipeline.settle()
        found = copied(state.values)
        for name, stored in state.stored.items():
            found[name] = self.pipeline.read_whole(state, name, stored, self.layout.device(parameter), mapped)
        return {name: like(parameter, value) for name, value in found.items()}

    def write_state(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Replace the state of a parameter.

        Raises:
            ValueError: a tensor has another shape than the parameter, and the optimizer is element-wise.
            SwapError: the state cannot be written.
        """
        self._roll_back_what_is_left()
        known = self.state(parameter)
        self.layout.expect_shape(known, state)
        self.pipeline.drop_reads()
        self.pipeline.settle()
        known.applied, known.unwritten = None, None
        self.resident_bytes -= known.resident_bytes
        known.resident_bytes = 0
        device = self.layout.device(parameter)
        for chunk in known.chunks():
            self._write_chunk(chunk, {name: chunk.copy_of(value, device) for name, value in state.items()})
        self.pipeline.drain()

    def discard_state(self, parameter: torch.Tensor) -> None:
        """Drop the state of a parameter, some of which may not have been written."""
        with contextlib.suppress(SwapError):  # concerns another parameter, whose state stays in memory
            self.write_state(parameter, {})

    def make_state(
        self, parameter: torch.Tensor, group: Group, make: Callable[[list[Any]], torch.optim.Optimizer]
    ) -> bool:
        """Store the state that an optimizer allocates on creation for a parameter; return whether there is any."""
        state = self.state(parameter)
        device, dtype = self.layout.device(parameter), self.layout.dtype(parameter)
        for chunk in state.chunks():
            leaf = chunk.part_of(state.local).to(device, dtype).requires_grad_(parameter.requires_grad)
            made = make([{**group, "params": [leaf]}]).state.get(leaf, {})
            if not made:
                return False
            self._write_chunk(chunk, made)
        self.pipeline.drain()
        return True

    def _write_chunk(self, chunk: Chunk, new: dict[str, Any]) -> None:
        version = 1 - chunk.state.version if chunk.state.is_chunked else chunk.state.version
        tensors = self._keep(chunk, new)
        self.pipeline.start_write(Unit([chunk], self.layout.device(chunk.state.parameter)), [tensors], [version])

    def close(self) -> None:
        """Wait for operations in flight, and delete all states.

        Raises:
            SwapError: a parameter is partially updated, and its old values cannot be read.
        """
        try:
            self._roll_back_what_is_left()
        finally:
            self.pipeline.drop_reads()
            self.pipeline.settle()
            for state in self._states.values():
                self.pipeline.forget_gradient(state)
            keys = [key for state in self._states.values() for key in state.keys(self._prefix)]
            self._store.deletev([*keys, *self.pipeline.obsolete]).exception()  # some writes have failed

    def expect_room(self, parameters: Iterable[tuple[torch.Tensor, Group]]) -> int:
        """Make room in the buffers for the state of some parameters; return the bytes that the largest needs.

        Raises:
            ValueError: the buffers have a given size, and one of the parameters needs more.
        """
        least = {parameter: self.layout.least_buffer(parameter, group) for parameter, group in parameters}
        for parameter in sorted(least, key=least.__getitem__)[-1:]:
            self._buffers.expect_room(least[parameter], partial(self._name_of, parameter))
        return max(least.values(), default=0)
