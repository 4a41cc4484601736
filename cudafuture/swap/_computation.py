"""Computation of updates: several small parameters in one call of the optimizer, or one parameter or chunk."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cudafuture._tensors import version_of
from cudafuture.store import Store
from cudafuture.swap._errors import interrupts_deferred
from cudafuture.swap._gradients import AppliedGradient
from cudafuture.swap._parameter_groups import Group
from cudafuture.swap._parameter_state import MASTER, UNDO, Chunk, ParameterState, StoredTensor, UndoPlace, copied
from cudafuture.swap._state_layout import StateLayout, SwapOptions
from cudafuture.swap._step_pipeline import StepPipeline
from cudafuture.swap._unit import Unit
from cudafuture.swap._update import Update, laid_out

__all__ = ["Computation", "UndoLog"]

_MOST = 256  # parameters in one call of the optimizer: Ctrl-C waits for it
_WHOLE = (torch.Tensor, torch.nn.Parameter)  # the types of parameters that are not shards


class UndoLog:
    """Old values of the one parameter of which some chunks have been updated, and others have not.

    If the update fails, the log restores the updated chunks. ``ParameterState.undo`` is the place of the values.
    """

    def __init__(self, store: Store, prefix: str, pipeline: StepPipeline) -> None:
        self._store, self._prefix, self._pipeline = store, prefix, pipeline
        self._old: dict[Chunk, torch.Tensor | None] = {}  # by updated chunk; None: the values are in the store
        self._unwritten: dict[int, dict[str, torch.Tensor]] | None = None  # the state's before the update

    def begin(self, state: ParameterState) -> None:
        """Begin the update of a parameter."""
        self._unwritten = state.unwritten

    def save(self, chunk: Chunk, memory: torch.Tensor | None) -> torch.Tensor | None:
        """Save the values of a chunk before its update; return them, in `memory`, if they belong in the store."""
        place = chunk.state.undo
        if place is UndoPlace.MASTER:
            self._old[chunk] = None
            return None
        part = chunk.part_of(chunk.state.local)
        self._old[chunk] = old = part.clone() if memory is None else memory.copy_(part)
        return old if place is UndoPlace.STORE else None

    def release_memory(self) -> None:
        """Drop the values that are being written to the store."""
        self._old = {chunk: None if chunk.state.undo is UndoPlace.STORE else old for chunk, old in self._old.items()}

    def clear(self) -> None:
        """End the update: its last chunk has been updated."""
        self._old.clear()

    @property
    def is_empty(self) -> bool:
        return not self._old

    def roll_back(self) -> None:
        """Restore the old values of the updated chunks; all writes have ended.

        Raises:
            SwapError: old values cannot be read. The next call retries.
        """
        while self._old:
            chunk, old = next(iter(self._old.items()))
            chunk.part_of(chunk.state.local).copy_(self._read(chunk) if old is None else old)
            del self._old[chunk]
            if not self._old:
                self._delete_new_version(chunk.state)
                chunk.state.unwritten = self._unwritten

    def _read(self, chunk: Chunk) -> torch.Tensor:
        """Return the old values of a chunk, or its old master weights."""
        state = chunk.state
        if state.undo is UndoPlace.MASTER:
            unwritten, name, version = (self._unwritten or {}).get(chunk.index), MASTER, state.version
        else:
            unwritten, name, version = chunk.unwritten(), UNDO, 1 - state.version
        if unwritten is not None:
            return unwritten[name]
        try:
            return self._store.read(chunk.key(self._prefix, name, version)).wait()
        except Exception as e:
            what = "read, which the next call on the optimizer tries again, as the parameter is updated in part"
            raise self._pipeline.error(chunk, what, e, "old values") from e

    def _delete_new_version(self, state: ParameterState) -> None:
        names = [*state.stored, UNDO]
        keys = [chunk.key(self._prefix, name, 1 - state.version) for chunk in state.chunks() for name in names]
        self._store.deletev(keys).exception()  # some were not written


class LoadedChunk(NamedTuple):
    """Chunk that is updated, with what was read for it."""

    chunk: Chunk
    tensors: dict[str, torch.Tensor] | None
    """its state from the store; None: the state is in memory, where the update changes it"""
    undo: torch.Tensor | None
    """memory for its old values"""
    gradient: torch.Tensor | None
    """its gradient, if that is in the store"""


def _copied_state(loaded: LoadedChunk) -> dict[str, Any]:
    """Return the state to update; an error leaves the values that stay in memory as they are."""
    return {**copied(loaded.chunk.state.values), **(loaded.tensors or {})}


class Computation:
    """Updates of parameters, and the division of their new state between memory and the store."""

    def __init__(
        self,
        update: Update,
        options: SwapOptions,
        layout: StateLayout,
        pipeline: StepPipeline,
        prefix: str,
        undo: UndoLog,
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
        for batch in self._batches(LoadedChunk(Chunk(state, 0), None, None, None) for state in states):
            computed: list[dict[str, torch.Tensor]] = []
            with interrupts_deferred():
                try:
                    self._compute(batch, computed)
                finally:
                    if any(computed):  # an optimizer has enlarged its state
                        chunks = [loaded.chunk for loaded in batch]
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
            for batch in self._batches(map(LoadedChunk, unit.chunks, unit.tensors, unit.undo, unit.gradients)):
                state, count = batch[0].chunk.state, len(computed)
                with one_thread_less(self._layout.longest_chunk(state.parameter) is not None):
                    if state.is_chunked:
                        versions.append(1 - state.version)
                        computed.append(self._compute_one_of_several(batch[0]))
                        if batch[0].chunk.is_last:
                            for tensors in computed:  # nothing undoes the update any more
                                tensors.pop(UNDO, None)
                    else:
                        versions += [loaded.chunk.state.version for loaded in batch]
                        self._compute(batch, computed)
                if unit.new:
                    news = zip(batch, computed[count:], strict=True)
                    computed[count:] = [unit.moved(loaded.chunk, new) for loaded, new in news]
        finally:
            self._start_write(unit, computed, versions)
        self._undo.release_memory()

    def _start_write(self, unit: Unit, computed: list[dict[str, torch.Tensor]], versions: list[int]) -> None:
        """Write the new state of the first chunks of a unit; an error has kept the others from being updated."""
        del unit.chunks[len(computed) :]
        self._pipeline.start_write(unit, computed, versions[: len(computed)])

    def _batches(self, chunks: Iterable[LoadedChunk]) -> Iterator[list[LoadedChunk]]:
        """Divide chunks into batches, each of parameters that one call of the optimizer can update, or of one chunk."""
        for _, run in itertools.groupby(chunks, self._kind):
            while batch := list(itertools.islice(run, _MOST)):
                yield batch

    def _kind(self, loaded: LoadedChunk) -> object:
        """Return a value that adjacent parts have in common if one call of the optimizer can update them."""
        parameter = loaded.chunk.state.parameter
        gradient = parameter.grad
        if (
            not self._update.is_elementwise
            or loaded.gradient is not None
            or loaded.chunk.state.is_chunked
            or (loaded.chunk.state.new and self._update.assigns_new_state_last)
            or type(parameter) not in _WHOLE
            or gradient is None
            or gradient.dtype != parameter.dtype
            or self._layout.has_master(parameter)
            or self._layout.device(parameter) != parameter.device
        ):
            return loaded.chunk
        return id(self.groups[loaded.chunk.state]), parameter.dtype, parameter.device

    def _compute(self, batch: list[LoadedChunk], computed: list[dict[str, torch.Tensor]]) -> None:
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
            loaded.chunk.state.values
            if loaded.tensors is None and not loaded.chunk.state.new
            else _copied_state(loaded)
            for loaded in batch
        ]
        # A fused optimizer counts the steps of all parameters before it updates them.
        steps = [state["step"] for state in states if "step" in state] if group.get("fused") else []
        old_steps = torch.stack(steps) if steps else ()
        parameters = [loaded.chunk.state.parameter for loaded in batch]
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
            for loaded, new in zip(batch, states, strict=False):
                self._updated.append(loaded.chunk.state)
                computed.append(self.keep(loaded.chunk, new))

    def _compute_one_of_several(self, loaded: LoadedChunk) -> dict[str, torch.Tensor]:
        """Update one of several chunks of a parameter; the undo log keeps the old values until all are updated."""
        chunk, state = loaded.chunk, loaded.chunk.state
        if chunk.index == 0:
            self._undo.begin(state)
        old = None if chunk.is_last else self._undo.save(chunk, loaded.undo)
        new = self.keep(chunk, self._compute_chunk(chunk, _copied_state(loaded), loaded))
        if chunk.is_last:
            self._undo.clear()
        return new if old is None else {**new, UNDO: old}

    def _compute_chunk(self, chunk: Chunk, state: dict[str, Any], loaded: LoadedChunk) -> dict[str, Any]:
        """Update a chunk with its state; return the new state."""
        parameter = chunk.state.parameter
        gradient = chunk.gradient(loaded.gradient)
        elements = chunk.part_of(chunk.state.local)
        device = self._layout.device(parameter)
        leaf = elements
        if self._layout.has_master(parameter):
            leaf = state.pop(MASTER) if MASTER in state else elements.to(device, torch.float32)
        elif elements.device != device:
            leaf = elements.to(device)
        leaf.grad = laid_out(gradient.to(device, leaf.dtype), leaf)
        (new,) = self._update(self.groups[chunk.state], [leaf], [state])
        leaf.grad = None
        if leaf is not elements:
            elements.copy_(leaf)
        if self._layout.has_master(parameter):
            new[MASTER] = leaf
        if chunk.is_last and loaded.gradient is not None:
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


@contextlib.contextmanager
def one_thread_less(allowed: bool) -> Iterator[None]:
    """Let the calling thread compute with one thread less, so that the store's engine has a core.

    OpenMP's threads wait for each other at the end of every operation, and GNU's keep spinning for about 10 ms after
    it. If the engine takes the core of one of them, or needs one, all lose time. The number is set for the calling
    thread only; ``torch.set_num_threads`` would also set it for threads that start meanwhile. Nothing changes if it is
    not allowed, if torch has one thread, or with another threading library.

    Args:
        allowed: True if the result of the update does not depend on the number of threads.
    """
    threads = torch.get_num_threads()
    openmp = _openmp()
    if not allowed or threads == 1 or openmp is None:
        yield
        return
    openmp.omp_set_num_threads(threads - 1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(threads)


@cache
def _openmp() -> ctypes.CDLL | None:
    """Return torch's library, which gives access to the OpenMP that it is linked with; None if it has none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    except OSError:
        return None
    return library if hasattr(library, "omp_set_num_threads") else None
