"""Parameters, and their optimizer states, that have memory while they are swapped in."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cudafuture._arguments import expect_tensor
from cudafuture._C import CUDAFuture
from cudafuture.combine import gather
from cudafuture.compat.deepspeed._swap_order import SwapOrder
from cudafuture.errors import InvalidStateError, SwapError
from cudafuture.store import Store
from cudafuture.swap._errors import clear_tracebacks
from cudafuture.swap._gradients import StoredGradient
from cudafuture.swap._parameter_state import Chunk, ParameterState, StoredTensor, copied
from cudafuture.swap._step_pipeline import StepPipeline
from cudafuture.swap._unit import Unit, UnitBuffers, layout_of, places
from cudafuture.swap._update import Update

__all__ = ["ParameterSwapper"]

PARAMETER = "parameter"  # the name of a parameter's values beside the names of its state
_LEAST_UNIT = 32 << 20  # bytes for each parameter in flight, where the buffers have their default size
_STATE, _GRADIENT = "optimizer state", "gradient"  # the two kinds of writes, as messages name them
_logger = logging.getLogger("cudafuture.compat.deepspeed")


class ReturnedFutures:
    """Futures that may be pending, oldest first. A call that waits for the writes waits for them, too."""

    def __init__(self) -> None:
        self._futures: deque[CUDAFuture[Any]] = deque()

    def add(self, future: CUDAFuture[Any]) -> None:
        """Add a future, and drop the oldest ones that are done."""
        while self._futures and self._futures[0].done():
            self._futures.popleft()
        self._futures.append(future)

    def finish(self) -> None:
        """Wait for all of them; the caller raises the errors of the writes."""
        while self._futures:
            self._futures.popleft().exception()


class ParameterSwapper:
    """Registered parameters, in the order of their registration.

    The ``data`` of a parameter that is swapped out, and of its state tensors, is empty. While the parameter is swapped
    in, they are parts of a buffer. Only one thread at a time may call the methods.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: Store,
        prefix: str,
        min_bytes: int,
        buffer_bytes: int | None,
        prefetch: int,
    ) -> None:
        self._optimizer, self._store, self._prefix = optimizer, store, prefix
        self._update, self._min_bytes, self._prefetch = Update(optimizer), min_bytes, prefetch
        self.optimizer_class = self._update.optimizer_class
        self.buffers = UnitBuffers(buffer_bytes, prefetch + 2, _LEAST_UNIT)
        self.pipeline = StepPipeline(
            store, prefix, min_bytes, self.buffers, prefetch, lambda chunk: self._name(chunk.state)
        )
        self._states: dict[torch.Tensor, ParameterState] = {}
        self._shapes: dict[ParameterState, torch.Size] = {}
        self._bound: dict[ParameterState, Unit] = {}
        self._order, self._returned = SwapOrder(), {_STATE: ReturnedFutures(), _GRADIENT: ReturnedFutures()}

    # ---- registration

    def register(self, parameters: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> list[ParameterState]:
        """Register parameters, whose values are not in the store yet.

        Raises:
            ValueError: a parameter is registered already, or its state needs larger buffers.
        """
        if len(set(parameters)) < len(parameters):
            raise ValueError("a parameter is given twice")
        for parameter, shape in zip(parameters, shapes, strict=True):
            if parameter in self._states:
                raise ValueError(f"{self._name(self._states[parameter])} is registered already")
            self._expect_room(parameter, shape)
        states: list[ParameterState] = []
        for parameter, shape in zip(parameters, shapes, strict=True):
            state = ParameterState(len(self._states), parameter, ((0, shape.numel()),), {}, {})
            self._states[parameter], self._shapes[state] = state, shape
            self._order.register(state)
            states.append(state)
        return states

    def unregister(self, states: Sequence[ParameterState]) -> None:
        """Undo the registration of parameters whose values cannot be written, the newest ones."""
        self._order.unregister(len(states))
        for state in states:
            del self._states[state.parameter], self._shapes[state]
            self._store.deletev(state.keys(self._prefix)).exception()  # some were not written

    def _expect_room(self, parameter: torch.Tensor, shape: torch.Size) -> None:
        """Make the buffers large enough for a parameter, its gradient and its state, if their size was not given."""
        options = next(iter(self._optimizer.param_groups), self._optimizer.defaults)
        options = {name: value for name, value in options.items() if name != "params"}
        tensors = [StoredTensor(parameter.dtype, shape)] * (2 + self._update.count_tensors(options))
        if parameter.device.type == "cpu":
            self.buffers.expect_room(places(tensors, self.buffers.nbytes)[-1], lambda: "one parameter")

    def is_swappable(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor belongs in the store."""
        return tensor.nbytes >= self._min_bytes and tensor.numel() > 0 and getattr(tensor, "swappable", True)

    def find(self, parameter: torch.Tensor) -> ParameterState | None:
        """Return the record of a parameter, or None if it is not registered."""
        expect_tensor("parameter", parameter)
        return self._states.get(parameter)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters, by number."""
        return list(self._states)

    def _name(self, state: ParameterState) -> str:
        return f"parameter {state.number}"

    # ---- access for checkpoints

    def state(self, parameter: torch.Tensor) -> ParameterState:
        """Return the record of a parameter, with the values of its state that stay in memory."""
        state = self._states[parameter]
        self._expect_swapped_out(state)
        in_memory = self._optimizer.state.get(parameter, {})
        state.values = copied({name: value for name, value in in_memory.items() if name not in state.stored})
        if PARAMETER not in state.stored:
            state.values[PARAMETER] = parameter.detach().clone()
        return state

    def like(self, parameter: torch.Tensor) -> StoredTensor:
        """Return the dtype and shape of a parameter, which is empty while it is swapped out."""
        return StoredTensor(parameter.dtype, self._shapes[self._states[parameter]])

    def key(self, chunk: Chunk, name: str) -> str:
        """Return the key of a tensor in the store."""
        return chunk.key(self._prefix, name, chunk.state.version)

    def write_state(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Replace the values of a parameter and its state.

        Raises:
            SwapError: they cannot be written.
        """
        record = self._states[parameter]
        self._expect_swapped_out(record)
        self.pipeline.drop_reads()
        self.purge(record)
        parameter.data = state[PARAMETER].to(parameter.device, parameter.dtype)
        self._optimizer.state[parameter] = {
            name: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.numel() > 1 else value
            for name, value in copied(state).items()
            if name != PARAMETER
        }
        self._bound[record] = Unit([Chunk(record, 0)], parameter.device)
        self.swap_out(record)
        self.flush()

    def _expect_swapped_out(self, state: ParameterState) -> None:
        if state in self._bound:
            raise InvalidStateError(f"{self._name(state)} is swapped in; swap it out first")

    # ---- swapping in and out

    def is_bound(self, state: ParameterState) -> bool:
        """Return whether a parameter is swapped in."""
        return state in self._bound

    @property
    def stored_bytes(self) -> int:
        """The bytes of all parameters and states in the store."""
        return sum(tensor.nbytes for state in self._states.values() for tensor in state.stored.values())

    def empty(self, state: ParameterState) -> None:
        """Empty a parameter whose values were written."""
        if PARAMETER in state.stored:
            state.parameter.data = state.parameter.data.new_empty(0)

    def write_first(self, state: ParameterState, values: torch.Tensor) -> CUDAFuture[int] | None:
        """Write the values of a parameter that was registered, or keep them in memory if they are few."""
        parameter = state.parameter
        values = values.detach().to(parameter.device, parameter.dtype).view(self._shapes[state])
        if not self.is_swappable(values):
            parameter.data = values.clone()
            return None
        state.stored = {PARAMETER: StoredTensor(values.dtype, values.shape)}
        return self._store.writev({self.key(Chunk(state, 0), PARAMETER): values})

    def swap_in(self, state: ParameterState, following: ParameterState | None) -> None:
        """Read a parameter and its state, and bind them to memory; read ahead those that follow.

        Raises:
            SwapError: they cannot be read, or an earlier write has failed.
            InvalidStateError: the parameter is swapped in.
            ValueError: the buffers have no room for this parameter beside those that are swapped in.
        """
        self.pipeline.raise_error()
        self._expect_swapped_out(state)
        chunk = Chunk(state, 0)
        if not self.pipeline.is_next(state):
            self.pipeline.drop_reads()
            unit = Unit([chunk], state.parameter.device, layout_of(chunk))
            self._expect_free(unit)
            self.pipeline.start_read(unit)
        try:
            unit = self.pipeline.finish_read()
        except BaseException as e:
            clear_tracebacks(e)
            self.pipeline.drop_reads()
            raise
        self._bound[state] = unit
        (tensors,), (gradient,) = unit.tensors, unit.gradients
        parameter = state.parameter
        for name, tensor in tensors.items():
            if name == PARAMETER:
                parameter.data = tensor
            else:
                self._bind(parameter, name, tensor)
            _logger.debug("swapped in: %r of %s, %d bytes", name, self._name(state), tensor.nbytes)
        if gradient is not None and state.gradient is not None:
            parameter.grad = state.gradient.scaled(gradient).view(self._shapes[state])
        self._order.swap_in(state, following)
        self._read_ahead(state)

    def _bind(self, parameter: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
        bound = self._optimizer.state[parameter]
        if isinstance(bound.get(name), torch.Tensor):
            bound[name].data = tensor
        else:
            bound[name] = tensor

    def _expect_free(self, unit: Unit) -> None:
        needed = unit.size(self.buffers.nbytes)
        if unit.device.type == "cpu" and self._bytes_bound() + needed > self.buffers.nbytes:
            names = ", ".join(map(self._name, self._bound)) or "none"
            raise ValueError(
                f"{self._name(unit.chunks[0].state)} needs {needed} bytes of the buffers' {self.buffers.nbytes}; "
                f"swapped in are: {names}. Swap some out, or give buffer_bytes={self._bytes_bound() + needed} or more"
            )

    def _bytes_bound(self) -> int:
        return sum(unit.buffer.tensor.nbytes for unit in self._bound.values() if unit.buffer is not None)

    def _read_ahead(self, after: ParameterState) -> None:
        """Start to read the parameters that follow one, as long as the buffers have room beside those in use."""
        taken = self._bytes_bound() + self.pipeline.bytes_of_reads()
        for _ in range(self._prefetch - self.pipeline.reads):
            last = self.pipeline.last_read() or after
            state = self._order.next_after(last, is_first=not self.pipeline.reads)
            if state is None or state in self._bound or self.pipeline.is_reading(state):
                return
            chunk = Chunk(state, 0)
            unit = Unit([chunk], state.parameter.device, layout_of(chunk))
            if unit.device.type == "cpu":
                taken += unit.size(self.buffers.nbytes)
                if taken > self.buffers.nbytes:
                    return
            self.pipeline.start_read(unit)

    def swap_out(self, state: ParameterState) -> CUDAFuture[None]:
        """Write a parameter and its state, and empty them; their memory is freed when the write has completed.

        A failure keeps them in memory. The future raises SwapError, and so does the next call that swaps in.

        Raises:
            InvalidStateError: the parameter is not swapped in.
        """
        parameter, unit = state.parameter, self._bound_unit(state)
        tensors = {PARAMETER: parameter.detach()} if self.is_swappable(parameter) else {}
        bound = self._optimizer.state.get(parameter, {})
        tensors |= {n: t.detach() for n, t in bound.items() if isinstance(t, torch.Tensor) and self.is_swappable(t)}
        state.stored = {name: StoredTensor(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        future = self.pipeline.start_write(unit, [tensors], [state.version])
        self._unbind(state)
        for name, tensor in tensors.items():
            _logger.debug("swapped out: %r of %s, %d bytes", name, self._name(state), tensor.nbytes)
        del tensors, unit  # views of the buffer keep its memory
        self._read_ahead(state)
        return self._ended(state, [] if future is None else [future], _STATE)

    def _ended(self, state: ParameterState, futures: Sequence[CUDAFuture[int]], of: str) -> CUDAFuture[None]:
        """Return a future that completes when writes have ended, and fails with an error that names the parameter."""

        def see(written: CUDAFuture[list[int]]) -> None:
            if (error := written.exception()) is not None:
                raise self.pipeline.error(Chunk(state, 0), "written", error, of)

        ended = gather(*futures, cancel_parts=False).then(see)
        self._returned[of].add(ended)
        return ended

    def flush(self) -> None:
        """Wait until all state is written, and the futures of the writes are done.

        Raises:
            SwapError: a write has failed; its state stays in memory.
        """
        self._settle()
        self.pipeline.drain()

    def _settle(self) -> None:
        """Wait until all writes of state have ended, and their futures are done."""
        self.pipeline.settle()
        self._returned[_STATE].finish()

    def _bound_unit(self, state: ParameterState) -> Unit:
        if state not in self._bound:
            raise InvalidStateError(f"{self._name(state)} is not swapped in")
        return self._bound[state]

    def release(self, state: ParameterState) -> None:
        """Discard a parameter and its state in memory; the store has the values of the last write.

        Raises:
            InvalidStateError: the parameter is not swapped in.
        """
        unit = self._bound_unit(state)
        self._unbind(state)
        unit.forget()

    def _unbind(self, state: ParameterState) -> None:
        """Empty a parameter and those of its state tensors that are in the store."""
        parameter = state.parameter
        del self._bound[state]
        parameter.grad = None
        bound = self._optimizer.state.get(parameter, {})
        for name in state.stored:
            tensor = parameter if name == PARAMETER else bound.get(name)
            if isinstance(tensor, torch.Tensor):
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def purge(self, state: ParameterState) -> None:
        """Delete the state of a parameter and its gradient, but not its values."""
        keys = [self.key(Chunk(state, 0), name) for name in state.stored if name != PARAMETER]
        self._settle()
        self._store.deletev(keys).exception()  # some could not be written
        state.stored = {name: tensor for name, tensor in state.stored.items() if name == PARAMETER}
        for chunk, unwritten in (state.unwritten or {}).items():
            state.unwritten = {chunk: {name: t for name, t in unwritten.items() if name == PARAMETER}}
        self._optimizer.state.pop(state.parameter, None)
        self.pipeline.forget_gradient(state)
        self._returned[_GRADIENT].finish()

    # ---- gradients

    def write_gradients(
        self, state: ParameterState, offsets: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> CUDAFuture[None]:
        """Store pieces of a gradient, large ones in the store; return a future of the writes.

        Raises:
            ValueError: a piece lies outside the parameter, or overlaps another one.
        """
        if self.pipeline.is_reading(state):
            self.pipeline.drop_reads()
        count = self._shapes[state].numel()
        gradient = state.gradient or StoredGradient(state.parameter.dtype)
        futures: list[CUDAFuture[int]] = []
        for offset, tensor in zip(offsets, tensors, strict=True):
            if offset < 0 or offset + tensor.numel() > count:
                raise ValueError(
                    f"a piece of {tensor.numel()} elements at {offset} lies outside {self._name(state)} of {count}"
                )
            if not tensor.numel():
                continue
            own = tensor.detach().reshape(-1).to(state.parameter.device, gradient.dtype, copy=True)
            futures.append(self.pipeline.gradients.write(gradient, state.number, offset, own))
            self.pipeline.obsolete.pop(gradient.pieces[offset].key, None)
            state.gradient = gradient
        return self._ended(state, futures, _GRADIENT)

    def flush_gradients(self) -> None:
        """Wait until all pieces of gradients were written.

        Raises:
            SwapError: a piece cannot be written; it stays in memory.
        """
        error = self.pipeline.gradients.flush()
        self._returned[_GRADIENT].finish()
        if error is not None:
            raise SwapError(f"a gradient cannot be written, and stays in memory: {error}") from error

    def write_back_gradients(self, state: ParameterState) -> None:
        """Write the elements of the bound gradient back to the pieces of the gradient."""
        gradient, bound = state.gradient, state.parameter.grad
        if gradient is None or bound is None:
            return
        flat = bound.detach().reshape(-1)
        pieces = sorted((piece.begin, piece.end) for piece in gradient.pieces.values())
        gradient.factors.clear()
        self.write_gradients(state, [begin for begin, _ in pieces], [flat[begin:end] for begin, end in pieces])

    def close(self) -> None:
        """Wait for operations in flight, and delete all tensors. Parameters that are swapped out stay empty."""
        self.pipeline.drop_reads()
        self._settle()
        self.pipeline.gradients.flush()
        self._returned[_GRADIENT].finish()
        keys = [key for state in self._states.values() for key in state.keys(self._prefix)]
        for state in self._states.values():
            self.pipeline.forget_gradient(state)
        self._store.deletev([*keys, *self.pipeline.obsolete]).exception()
