"""Writes of a pipeline: the new state of units, and the deletion of keys that they replace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from cudafuture._C import CUDAFuture
from cudafuture.errors import SwapError
from cudafuture.store import Store
from cudafuture.swap._counters import SwapCounters
from cudafuture.swap._parameter_state import Chunk, ParameterState
from cudafuture.swap._tracebacks import error_of
from cudafuture.swap._unit import Unit, Write

__all__ = ["Writes"]


class Writes:
    """Writes in flight, in the order of their start, and keys that no parameter needs any more.

    Args:
        store: of the state.
        prefix: of its keys.
        prefetch: the number of units that are written behind the computation.
        name_of: the name of a chunk's parameter, for errors.
        counters: of bytes and seconds.
    """

    def __init__(
        self, store: Store, prefix: str, prefetch: int, name_of: Callable[[Chunk], str], counters: SwapCounters
    ) -> None:
        self.counters = counters
        self._store, self._prefix, self._prefetch, self._name_of = store, prefix, prefetch, name_of
        self._writing: deque[Write] = deque()
        self.obsolete: dict[str, ParameterState] = {}  # keys that are deleted when their parameter has been written
        self._deletions: deque[CUDAFuture[None]] = deque()
        self._error_of_write: SwapError | None = None

    def error(self, chunk: Chunk, what: str, error: BaseException, of: str = "optimizer state") -> SwapError:
        """Return an error that names the parameter; its cause is the store's error."""
        message = f"the {of} of {self._name_of(chunk)} cannot be {what}: {error}"
        failure = SwapError(message, parameter=chunk.state.parameter)
        failure.__cause__ = error
        return failure

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
        self._writing.append(Write(unit, tensors, future, outcomes))
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
            self._error_of_write = self.error(culprit, "written", error)
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
