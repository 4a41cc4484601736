"""Computation of updates: several small parameters in one call of the optimizer, or one parameter or chunk."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from cudafuture._tensors import version_of
from cudafuture.swap._gradient_marks import AppliedGradient
from cudafuture.swap._interrupts import interrupts_deferred
from cudafuture.swap._options import SwapOptions
from cudafuture.swap._parameter_state import MASTER, UNDO, Chunk, ParameterState, StoredTensor, UndoPlace, copied
from cudafuture.swap._pipeline import Pipeline
from cudafuture.swap._state_layout import StateLayout
from cudafuture.swap._threads import one_thread_less
from cudafuture.swap._undo_log import UndoLog
from cudafuture.swap._unit import Unit
from cudafuture.swap._update import Update

__all__ = ["Computation", "Group"]

_MOST = 256  # parameters in one call of the optimizer: Ctrl-C waits for it
_WHOLE = (torch.Tensor, torch.nn.Parameter)  # the types of parameters that are not shards

Group = dict[str, Any]


class Part(NamedTuple):
    """Chunk that is updated, with what was read for it."""

    chunk: Chunk
    tensors: dict[str, torch.Tensor] | None
    """its state from the store; None: the state is in memory, where the update changes it"""
    undo: torch.Tensor | None
    """memory for its old values"""
    gradient: torch.Tensor | None
    """its gradient, if that is in the store"""


def _copied_state(part: Part) -> dict[str, Any]:
    """Return the state to update; an error leaves the values that stay in memory as they are."""
    return {**copied(part.chunk.state.values), **(part.tensors or {})}


class Computation:
    """Updates of parameters, and the division of their new state between memory and the store."""

    def __init__(
        self, update: Update, options: SwapOptions, layout: StateLayout, pipeline: Pipeline, prefix: str, undo: UndoLog
    ) -> None:
        self._update, self._options, self._layout = update, options, layout
        self._pipeline, self._prefix, self._undo = pipeline, prefix, undo
        self.groups: dict[ParameterState, Group] = {}
        self.resident_bytes = 0
        self._updated: list[ParameterState] = []  # in this step, without a note of the gradients

    def prepare(self, state: ParameterState, group: Group) -> bool:
        """Record the group of a parameter that is updated next; return whether its state is, or will be, in memory.

        The first state of a parameter stays in memory if there is room for it; then the parameter has one chunk. A
        parameter whose gradient may be in the store keeps its chunks: the buffers have room for one chunk's gradient.
        """
        self.groups[state] = group
        if state.stored or state.gradient is not None:
            return False
        if state.is_resident or (state.values and not state.is_chunked):
            return True
        if state.values or (state.is_chunked and self._options.swap_gradients):
            return False
        state.new = dtypes = self._layout.dtypes(state.parameter, group)
        count = state.local.numel()
        nbytes = count * sum(dtype.itemsize for dtype in dtypes)
        if 0 < nbytes <= self._options.memory - self.resident_bytes:
            state.bounds = ((0, count),)
            state.resident_bytes = nbytes
            self.resident_bytes += nbytes
            return True
        return not state.is_chunked and all(count * dtype.itemsize < self._options.min_bytes for dtype in dtypes)

    # ---- updates

    def update_in_memory(self, states: Iterable[ParameterState]) -> None:
        """Update parameters whose state is in memory; their gradients are, too."""
        for batch in self._batches(Part(Chunk(state, 0), None, None, None) for state in states):
            computed: list[dict[str, torch.Tensor]] = []
            with interrupts_deferred():
                try:
                    self._compute(batch, computed)
                finally:
                    if any(computed):  # an optimizer has enlarged its state
                        chunks = [part.chunk for part in batch]
                        unit = Unit(chunks, self._layout.device(chunks[0].state.parameter))
                        self._start_write(unit, computed, [chunk.state.version for chunk in chunks])

    @contextlib.contextmanager
    def noting_updates(self, once: bool) -> Iterator[None]:
        """Record the gradients of the parameters that the block updates: always, or only if it raises."""
        is_noted = True
        try:
            yield
            is_noted = once
        finally:
            for state in self._updated if is_noted else ():
                if state.parameter.grad is not None:
                    state.note_applied(state.parameter.grad)
            self._updated.clear()

    def compute_unit(self, unit: Unit) -> None:
        """Update the chunks of a unit, and start to write their new state.

        After an error, the new state of the chunks that were updated before it is written.
        """
        computed: list[dict[str, torch.Tensor]] = []
        versions: list[int] = []
        try:
            for batch in self._batches(map(Part, unit.chunks, unit.tensors, unit.undo, unit.gradients)):
                state, count = batch[0].chunk.state, len(computed)
                with one_thread_less(self._layout.longest_chunk(state.parameter) is not None):
                    if state.is_chunked:
                        versions.append(1 - state.version)
                        computed.append(self._compute_part(batch[0]))
                    else:
                        versions += [part.chunk.state.version for part in batch]
                        self._compute(batch, computed)
                if unit.new:
                    news = zip(batch, computed[count:], strict=True)
                    computed[count:] = [unit.moved(part.chunk, new) for part, new in news]
        finally:
            self._start_write(unit, computed, versions)
        self._undo.release_memory()

    def _start_write(self, unit: Unit, computed: list[dict[str, torch.Tensor]], versions: list[int]) -> None:
        """Write the new state of the first chunks of a unit; an error has kept the others from being updated."""
        del unit.chunks[len(computed) :]
        self._pipeline.start_write(unit, computed, versions[: len(computed)])

    def _batches(self, parts: Iterable[Part]) -> Iterator[list[Part]]:
        """Divide parts into batches, each of parameters that one call of the optimizer can update, or of one part."""
        for _, run in itertools.groupby(parts, self._kind):
            while batch := list(itertools.islice(run, _MOST)):
                yield batch

    def _kind(self, part: Part) -> object:
        """Return a value that adjacent parts have in common if one call of the optimizer can update them."""
        parameter = part.chunk.state.parameter
        gradient = parameter.grad
        if (
            not self._update.is_elementwise
            or part.gradient is not None
            or part.chunk.state.is_chunked
            or (part.chunk.state.new and self._update.assigns_new_state_last)
            or type(parameter) not in _WHOLE
            or gradient is None
            or gradient.dtype != parameter.dtype
            or self._layout.has_master(parameter)
            or self._layout.device(parameter) != parameter.device
        ):
            return part.chunk
        return id(self.groups[part.chunk.state]), parameter.dtype, parameter.device

    def _compute(self, batch: list[Part], computed: list[dict[str, torch.Tensor]]) -> None:
        """Update the parameters of a batch; add to `computed` the parts of their new states that go to the store.

        After an error, `computed` has the states of the first parameters, whose updates are complete.
        """
        first = batch[0].chunk
        if self._kind(batch[0]) is first:
            state = _copied_state(batch[0]) if batch[0].tensors is not None else dict(first.state.values)
            computed.append(self.keep(first, self._compute_chunk(first, state, batch[0])))
            return
        group = self.groups[first.state]
        states = [
            part.chunk.state.values if part.tensors is None and not part.chunk.state.new else _copied_state(part)
            for part in batch
        ]
        # A fused optimizer counts the steps of all parameters before it updates them.
        steps = [state["step"] for state in states if "step" in state] if group.get("fused") else []
        old_steps = torch.stack(steps) if steps else ()
        parameters = [part.chunk.state.parameter for part in batch]
        versions = [version_of(parameter) for parameter in parameters]
        try:
            self._update(group, parameters, states)
        except BaseException:
            for step, old in zip(steps, old_steps, strict=True):
                step.copy_(old)
            changes = self._update.count_changes(group)
            counts = (version_of(parameter) - before for parameter, before in zip(parameters, versions, strict=True))
            batch = batch[: sum(1 for _ in itertools.takewhile(lambda count: count == changes, counts))]
            raise
        finally:
            for part, new in zip(batch, states, strict=False):
                self._updated.append(part.chunk.state)
                computed.append(self.keep(part.chunk, new))

    def _compute_part(self, part: Part) -> dict[str, torch.Tensor]:
        """Update one of several chunks of a parameter; the undo log keeps the old values until all are updated."""
        chunk, state = part.chunk, part.chunk.state
        if chunk.index == 0:
            self._undo.begin(state)
        old = None if chunk.is_last else self._undo.save(chunk, part.undo)
        new = self.keep(chunk, self._compute_chunk(chunk, _copied_state(part), part))
        if chunk.is_last:
            self._undo.clear()
        return new if old is None else {**new, UNDO: old}

    def _compute_chunk(self, chunk: Chunk, state: dict[str, Any], part: Part) -> dict[str, Any]:
        """Update a chunk with its state; return the new state."""
        parameter = chunk.state.parameter
        gradient = chunk.gradient(part.gradient)
        elements = chunk.part_of(chunk.state.local)
        device = self._layout.device(parameter)
        leaf = elements
        if self._layout.has_master(parameter):
            leaf = state.pop(MASTER) if MASTER in state else elements.to(device, torch.float32)
        elif elements.device != device:
            leaf = elements.to(device)
        leaf.grad = gradient.to(device, leaf.dtype)
        (new,) = self._update(self.groups[chunk.state], [leaf], [state])
        leaf.grad = None
        if leaf is not elements:
            elements.copy_(leaf)
        if self._layout.has_master(parameter):
            new[MASTER] = leaf
        if chunk.is_last and part.gradient is not None:
            self._pipeline.forget_gradient(chunk.state)
            parameter.grad = AppliedGradient(parameter)
        elif chunk.is_last and parameter.grad is not None:
            chunk.state.note_applied(parameter.grad)
        return new

    # ---- new state

    def _is_as_before(self, state: ParameterState, new: dict[str, Any]) -> bool:
        """Return whether a known optimizer has updated the state of a whole parameter that is in the store."""
        is_whole = bool(state.stored) and not state.is_chunked and self._update.is_elementwise
        return is_whole and len(new) == len(state.stored) + len(state.values)

    def keep(self, chunk: Chunk, new: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Keep the part of a chunk's new state that stays in memory; return the tensors that go to the store."""
        state = chunk.state
        if new is state.values:
            return {}  # a known optimizer has updated it in place
        if self._is_as_before(state, new):
            for name in state.values:
                state.values[name] = new[name]
            return {name: new[name] for name in state.stored}
        shape = torch.Size([chunk.end - chunk.begin]) if state.is_chunked else state.local.shape
        tensors = {name: value for name, value in new.items() if self._layout.is_swappable(value, shape, state)}
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
        state.new = ()
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
        self._pipeline.delete_later(state, sorted(old))
        return tensors
