"""Log of old values, which undoes the update of a parameter that is updated chunk by chunk."""

from __future__ import annotations

import torch

from cudafuture.store import Store
from cudafuture.swap._parameter_state import MASTER, UNDO, Chunk, ParameterState, UndoPlace
from cudafuture.swap._pipeline import Pipeline

__all__ = ["UndoLog"]


class UndoLog:
    """Old values of the one parameter of which some chunks have been updated, and others have not.

    If the update fails, the log restores the updated chunks. ``ParameterState.undo`` is the place of the values.
    """

    def __init__(self, store: Store, prefix: str, pipeline: Pipeline) -> None:
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
