"""Layout of optimizer state: dtypes, devices, chunks, and the buffer that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cudafuture._arguments import expect_bool, expect_int
from cudafuture.swap._parameter_state import MASTER, ParameterState, UndoPlace, chunks_of, expect_shape, local_of
from cudafuture.swap._update import Update

__all__ = ["StateLayout", "SwapOptions"]


@dataclass(frozen=True)
class SwapOptions:
    """Options of ``offload()`` that select the state in the store, and the way it is moved."""

    min_bytes: int
    memory: int
    prefetch: int
    chunk_bytes: int
    buffer_bytes: int | None
    compute: Literal["parameter", "cpu"]
    master_weights: bool
    swap_gradients: bool

    def __post_init__(self) -> None:
        for name in ("min_bytes", "memory", "prefetch"):
            expect_int(name, getattr(self, name), 0)
        if self.buffer_bytes is not None:
            expect_int("buffer_bytes", self.buffer_bytes, 1)
        expect_int("chunk_bytes", self.chunk_bytes, 1 << 16)
        expect_bool("master_weights", self.master_weights)
        expect_bool("swap_gradients", self.swap_gradients)
        if self.compute not in ("parameter", "cpu"):
            raise ValueError(f"compute={self.compute!r} is neither 'parameter' nor 'cpu'")


class StateLayout:
    """Layout of each parameter's state, as the optimizer and the options determine it.

    Args:
        update: the optimizer's.
        options: of ``offload()``.
        store_may_die: True if the store is another worker's. Then old values are never in the store alone.
    """

    def __init__(self, update: Update, options: SwapOptions, store_may_die: bool) -> None:
        self._update, self._options, self._store_may_die = update, options, store_may_die

    def device(self, parameter: torch.Tensor) -> torch.device:
        """Return the device on which a parameter is updated."""
        return torch.device("cpu") if self._options.compute == "cpu" else parameter.device

    def has_master(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter has a float32 copy that is updated instead of the parameter."""
        return self._options.master_weights and parameter.is_floating_point() and parameter.element_size() < 4

    def dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a parameter is updated: that of the state tensors of its shape."""
        return torch.float32 if self.has_master(parameter) else parameter.dtype

    def dtypes(self, parameter: torch.Tensor, group: dict[str, Any]) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the state tensors that have the shape of a parameter."""
        return (self.dtype(parameter),) * (self._update.count_tensors(group) + self.has_master(parameter))

    def bounds(self, parameter: torch.Tensor) -> tuple[tuple[int, int], ...]:
        """Return the bounds of a parameter's chunks.

        Raises:
            ValueError: the parameter is a shard of one that the optimizer updates as a whole.
        """
        local = local_of(parameter)
        if local is not parameter and not self._update.is_elementwise:
            raise ValueError("this optimizer updates whole parameters, but a DTensor is a shard of one")
        return chunks_of(local, self.longest_chunk(parameter))

    def longest_chunk(self, parameter: torch.Tensor) -> int | None:
        """Return the elements of a chunk; None: the parameter is updated as a whole, in all threads of torch.

        torch rounds the last elements of a float16 or bfloat16 tensor differently from those that fill a vector
        register, so an update in chunks, or with fewer threads, would differ from that of the whole.
        """
        if not self._update.is_elementwise or self.dtype(parameter).itemsize < 4:
            return None
        return self._options.chunk_bytes // parameter.element_size()

    def undo(self, state: ParameterState, memory: int) -> UndoPlace:
        """Return the place of a parameter's old values during its update, given the available bytes of memory."""
        if self._store_may_die or state.local.nbytes <= memory:
            return UndoPlace.MEMORY
        return UndoPlace.MASTER if MASTER in state.stored else UndoPlace.STORE

    def is_swappable(self, value: object, shape: torch.Size, state: ParameterState) -> bool:
        """Return whether a value of a state belongs in the store; `shape` is that of the parameter or its chunk."""
        if not isinstance(value, torch.Tensor) or value.numel() < 2:
            return False
        return value.nbytes >= self._options.min_bytes or (state.is_chunked and value.shape == shape)

    def expect_shape(self, state: ParameterState, values: Mapping[str, Any]) -> None:
        """Raise ValueError if an element-wise optimizer gets a tensor with several elements of another shape."""
        if self._update.is_elementwise:
            expect_shape(state, values)

    def least_buffer(self, parameter: torch.Tensor, group: dict[str, Any]) -> int:
        """Return the size of a buffer for a parameter, or for one of its chunks."""
        most = max(end - begin for begin, end in self.bounds(parameter))
        others = parameter.element_size() * (1 + self._options.swap_gradients)  # the old value, and a gradient
        each = sum(dtype.itemsize for dtype in self.dtypes(parameter, group)) + others
        return most * each + 8 * 4096  # each tensor begins at a page
