"""Optimizer states and gradients of parameters in a store: read, updated and written back."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cudafuture._arguments import expect_mapping
from cudafuture.errors import SwapError
from cudafuture.store import DiskStore, Store
from cudafuture.swap._computation import Computation, UndoLog
from cudafuture.swap._errors import clear_tracebacks
from cudafuture.swap._gradients import GradientMark, SwappedGradient
from cudafuture.swap._parameter_groups import Group
from cudafuture.swap._parameter_state import (
    Chunk,
    ParameterState,
    StoredTensor,
    cast,
    copied,
    is_shard,
    like,
    local_of,
)
from cudafuture.swap._state_layout import StateLayout, SwapOptions
from cudafuture.swap._step_pipeline import StepPipeline
from cudafuture.swap._unit import Unit, UnitBuffers, layout_of, places
from cudafuture.swap._update import Update

__all__ = ["Swapper"]

_UNIT = 32 << 20  # bytes of state that are read together, unless one parameter or chunk needs more
_MOST_CHUNKS = 256  # of a unit: the garbage collector visits the objects of all chunks that are in flight
_UNDO_SHARE = 8  # old values of a parameter take up to 1/8 of the bytes of the buffers, in addition
_logger = logging.getLogger("cudafuture.swap")


class Swapper:
    """States and gradients of an optimizer's parameters; an update loads them into memory while it needs them.

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
        self.layout = StateLayout(update, options, store_may_die=not isinstance(store, DiskStore))
        self.optimizer_class = update.optimizer_class
        self._states: dict[torch.Tensor, ParameterState] = {}
        self._name_of = name_of
        units = options.prefetch + 2
        self._buffers = UnitBuffers(options.buffer_bytes, units, _UNIT)
        self._unit_bytes = max(self.expect_room(parameters), min(_UNIT, self._buffers.nbytes // units))
        self.pipeline = StepPipeline(
            store, prefix, options.min_bytes, self._buffers, options.prefetch, lambda c: name_of(c.state.parameter)
        )
        self._undo = UndoLog(store, prefix, self.pipeline)
        self._computation = Computation(update, options, self.layout, self.pipeline, prefix, self._undo)

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
    def resident_bytes(self) -> int:
        """The bytes of state that could be in the store, but stays in memory."""
        return self._computation.resident_bytes

    @property
    def has_masters(self) -> bool:
        """True if parameters of less than 32 bits have master weights."""
        return self._options.master_weights

    # ---- updates

    def update(self, parameters: Iterable[torch.Tensor], group_of: Callable[[torch.Tensor], Group], once: bool) -> None:
        """Update parameters from their gradients, with the options of their groups.

        Args:
            parameters: which have gradients.
            group_of: returns the group of a parameter.
            once: note the gradients, so that no step uses them again. If False, only a step after an error skips them.

        Raises:
            SwapError: the state of a parameter cannot be read or written. Each parameter has its old value and its old
                state, or its new ones.
        """
        self._roll_back_what_is_left()
        in_memory: list[ParameterState] = []
        swapped: list[ParameterState] = []
        for parameter in parameters:
            state = self.state(parameter)
            (in_memory if self._computation.prepare(state, group_of(parameter)) else swapped).append(state)
        with self._computation.noting_updates(once):
            self._computation.update_in_memory(in_memory)
            if swapped:
                self.pipeline.drop_reads()
            try:
                self.pipeline.run(self._units(swapped), self._computation.compute_unit)
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
        with self._computation.noting_updates(True):
            if self._computation.prepare(state, group):
                self._computation.update_in_memory([state])
                return
            try:
                if not self.pipeline.is_next(state):
                    self.pipeline.drop_reads()
                    self.start_read(parameter)
                while self.pipeline.is_next(state):
                    self.pipeline.compute_next(self._computation.compute_unit)
            except BaseException as e:
                self._roll_back(e)
                raise

    def start_read(self, parameter: torch.Tensor) -> None:
        """Read the state of a parameter that will be updated after those that are being read."""
        state = self.state(parameter)
        if not self._computation.prepare(state, self._computation.groups[state]):
            for unit in list(self._units([state])):  # a list: no unit is read if another has no room
                self.pipeline.start_read(unit)

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

    def _units(self, states: Iterable[ParameterState]) -> Iterator[Unit]:
        """Divide the chunks of parameters into units of one device, and of a limited size."""
        unit, size = Unit([], torch.device("cpu")), 0
        for chunk in itertools.chain.from_iterable(state.chunks() for state in states):
            state = chunk.state
            is_known = state.stored or state.values
            state.new = () if is_known else self.layout.dtypes(state.parameter, self._computation.groups[state])
            if state.is_chunked:
                state.undo = self.layout.undo(state, self._buffers.nbytes // _UNDO_SHARE)
            layout = layout_of(chunk)
            nbytes = places(layout)[-1]
            device = self.layout.device(state.parameter)
            if nbytes > self._unit_bytes and device.type == "cpu":  # state may be larger than its parameter
                self._buffers.expect_room(nbytes, partial(self._name_of, state.parameter))
            is_full = size + nbytes > self._unit_bytes or len(unit.chunks) == _MOST_CHUNKS
            if unit.chunks and (is_full or device != unit.device):
                yield unit
                unit, size = Unit([], device), 0
            unit.device = device
            unit.chunks.append(chunk)
            unit.layout += layout
            size += nbytes
        if unit.chunks:
            yield unit

    def state(self, parameter: torch.Tensor) -> ParameterState:
        """Return the state of a parameter; create an empty one if it has none yet."""
        state = self._states.get(parameter)
        if state is None:
            state = ParameterState(len(self._states), parameter, self.layout.bounds(parameter), {}, {})
            self._states[parameter] = state
        return state

    # ---- gradients

    def write_gradient(self, parameter: torch.Tensor) -> None:
        """Move the gradient of this backward, or the part that it has added, into the store."""
        gradient = parameter.grad
        try:
            if gradient is None or self.has_swapped_gradient(parameter) or isinstance(gradient, GradientMark):
                return
        except SwapError as e:  # an error would end this backward; the added part stays in memory
            _logger.warning("the added part of a gradient stays in memory until it is used: %s", e)
            return
        if gradient.is_sparse or is_shard(parameter) or not parameter.is_contiguous():
            return
        if gradient.nbytes < self._options.min_bytes:
            return  # it stays in memory
        parameter.grad = SwappedGradient(parameter)
        self.pipeline.write_gradient(self.state(parameter), gradient)

    def has_swapped_gradient(self, parameter: torch.Tensor) -> bool:
        """Return whether the gradient is in the store, after moving the added part there.

        Raises:
            SwapError: the added part cannot be added, because the gradient cannot be read.
        """
        state, mark = self.state(parameter), parameter.grad
        if not isinstance(mark, SwappedGradient):
            self.pipeline.forget_gradient(state)  # the program has replaced or dropped it
            return False
        if state.gradient is None:
            return False
        if mark.added is not None:
            total = self.pipeline.read_gradient(state)
            total += mark.added
            mark.added = None
            self.pipeline.write_gradient(state, total)
        return True

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the gradient of a parameter, from the store if it is there; None if there is none.

        Raises:
            SwapError: the gradient cannot be read.
        """
        if self.has_swapped_gradient(parameter):
            return self.pipeline.read_gradient(self.state(parameter))
        return None if parameter.grad is None else parameter.grad.clone()

    def multiply_gradient(self, parameter: torch.Tensor, factor: torch.Tensor) -> None:
        """Multiply a gradient: in memory at once, in the store when it is read."""
        stored = self.state(parameter).gradient
        if stored is not None:
            stored.factors.append(factor)
        elif parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))

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
        expect_mapping("state", state, "{name: value}")
        self._roll_back_what_is_left()
        known = self.state(parameter)
        self.layout.expect_shape(known, state)
        self.pipeline.drop_reads()
        self.pipeline.settle()
        known.applied, known.unwritten = None, None
        self._computation.resident_bytes -= known.resident_bytes
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
        tensors = self._computation.keep(chunk, new)
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
