"""Optimizer state of one parameter: scalars in memory, tensors in a store, split into chunks."""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cudafuture._tensors import version_of
from cudafuture.swap._gradients import StoredGradient

__all__ = [
    "MASTER",
    "UNDO",
    "Chunk",
    "ParameterState",
    "StoredTensor",
    "UndoPlace",
    "cast",
    "chunks_of",
    "copied",
    "expect_shape",
    "is_shard",
    "key_of",
    "like",
    "local_of",
]


MASTER = "master"  # the name of the float32 copy of a parameter beside the names of its state
UNDO = "undo"  # the name of the old values of a chunk

_PAGE = 4096  # elements: whole pages for every dtype


@dataclass(frozen=True)
class StoredTensor:
    """Dtype and shape of a state tensor that is in the store."""

    dtype: torch.dtype
    shape: torch.Size

    @cached_property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class UndoPlace(enum.Enum):
    """Place of the old values of a chunk, while other chunks of its parameter have not been updated."""

    MEMORY = enum.auto()
    STORE = enum.auto()
    """beside the new state"""
    MASTER = enum.auto()
    """the old master weights, of which the parameter is a copy"""


@dataclass(eq=False)
class ParameterState:
    """State of one parameter.

    A parameter with several chunks has two versions of its keys: an update writes the one that is not current, and the
    last chunk's update makes it the current one. Until then the old state is complete.
    """

    number: int
    """of the parameter, in registration order; part of every key"""
    parameter: torch.Tensor
    bounds: tuple[tuple[int, int], ...]
    """the first element of each chunk and the first one after it"""
    values: dict[str, Any]
    """scalars and small tensors by name, which stay in memory"""
    stored: dict[str, StoredTensor]
    """tensors in the store by name"""
    resident_bytes: int = 0
    """bytes of tensors that could be in the store, but stay in memory in ``values``; 0: the state is in the store"""
    new: tuple[torch.dtype, ...] = ()
    """the dtypes of the tensors that the first update allocates; empty if the parameter has state"""
    undo: UndoPlace = UndoPlace.MEMORY
    """the place of the old values while an update is not complete"""
    version: int = 0
    unwritten: dict[int, dict[str, torch.Tensor]] | None = None
    """tensors of chunks whose write failed, kept in memory until a write succeeds: by chunk, then by name"""
    gradient: StoredGradient | None = None
    """the gradient, if it is in the store"""
    applied: tuple[weakref.ref[torch.Tensor], int] | None = None
    """the gradient that the last update used, and its version"""

    @property
    def local(self) -> torch.Tensor:
        """The elements of the parameter on this rank."""
        return local_of(self.parameter.detach())

    @property
    def is_resident(self) -> bool:
        return self.resident_bytes > 0

    @property
    def is_chunked(self) -> bool:
        return len(self.bounds) > 1

    def chunks(self) -> list[Chunk]:
        return [Chunk(self, i) for i in range(len(self.bounds))]

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of the state in the store."""
        return [chunk.key(prefix, name, self.version) for chunk in self.chunks() for name in self.stored]

    def has_applied(self, gradient: torch.Tensor) -> bool:
        """Return whether the last update used this gradient, and it has not changed since."""
        return self.applied is not None and self.applied[0]() is gradient and self.applied[1] == version_of(gradient)

    def note_applied(self, gradient: torch.Tensor) -> None:
        self.applied = (weakref.ref(gradient), version_of(gradient))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Range of a parameter's elements, with their state."""

    state: ParameterState
    index: int

    @property
    def begin(self) -> int:
        return self.state.bounds[self.index][0]

    @property
    def end(self) -> int:
        return self.state.bounds[self.index][1]

    @property
    def is_last(self) -> bool:
        return self.index == len(self.state.bounds) - 1

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the chunk's elements of a tensor like the parameter: a flat view, or the whole tensor if unchunked."""
        if not self.state.is_chunked:
            return tensor
        if not tensor.is_contiguous():
            raise RuntimeError("a parameter was contiguous when its optimizer was offloaded, but no longer is")
        if tensor.numel() != self.state.bounds[-1][1]:
            count = self.state.bounds[-1][1]
            raise RuntimeError(
                f"a parameter had {count} elements when its optimizer was offloaded, not {tensor.numel()}"
            )
        return tensor.view(-1)[self.begin : self.end]

    def copy_of(self, value: Any, device: torch.device) -> Any:
        """Return the chunk's part of a value of a state: tensors like the parameter are split, others copied."""
        if not isinstance(value, torch.Tensor):
            return value
        value = local_of(value, self.state.parameter)
        if value.shape == self.state.local.shape and value.numel() > 1:
            value = value.contiguous() if self.state.is_chunked else value
            return self.part_of(value).to(device, copy=not self.state.is_chunked)
        return value.clone()

    def stored(self) -> dict[str, StoredTensor]:
        """Return the chunk's part of each tensor in the store."""
        if not self.state.is_chunked:
            return self.state.stored
        shape = torch.Size([self.end - self.begin])
        return {name: StoredTensor(tensor.dtype, shape) for name, tensor in self.state.stored.items()}

    def gradient(self, swapped: torch.Tensor | None) -> torch.Tensor:
        """Return the chunk's part of the gradient; `swapped` is the part that was read from the store, if any."""
        stored = self.state.gradient
        if swapped is not None and stored is not None:
            shape = swapped.shape if self.state.is_chunked else self.state.local.shape
            return stored.scaled(swapped).view(shape)
        gradient = self.state.parameter.grad
        assert gradient is not None
        gradient = local_of(gradient, self.state.parameter)
        return self.part_of(gradient.contiguous() if self.state.is_chunked else gradient)

    def unwritten(self) -> dict[str, torch.Tensor] | None:
        return (self.state.unwritten or {}).get(self.index)

    def key(self, prefix: str, name: str, version: int) -> str:
        """Return the key of the chunk's part of a state tensor."""
        return key_of(prefix, self.state.number, name, self.index, version)


def key_of(prefix: str, number: int, name: str, index: int, version: int) -> str:
    """Return the key of a chunk's part of a state tensor, from the numbers of the parameter and the chunk."""
    return f"{prefix}{number}/{name}/{index}.{version}"


def chunks_of(parameter: torch.Tensor, most: int | None) -> tuple[tuple[int, int], ...]:
    """Return the bounds of chunks of about `most` elements, or of one chunk if `most` is None.

    Only a contiguous parameter is split: the elements of a chunk must be one range of memory. All chunks but the last
    are whole pages, and the last has at least one page, so that the store can map them next to each other.
    """
    count = parameter.numel()
    if most is None or count <= most or not parameter.is_contiguous():
        return ((0, count),)
    size = max(most // _PAGE, 1) * _PAGE
    begins = list(range(0, count - _PAGE + 1, size))
    return tuple(itertools.pairwise([*begins, count]))


def expect_shape(state: ParameterState, values: Mapping[str, Any]) -> None:
    """Raise ValueError if a tensor with several elements has another shape than the parameter."""
    wanted = tuple(state.local.shape)
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            shape = tuple(local_of(value, state.parameter).shape)
            if shape != wanted:
                raise ValueError(f"{name!r} has the shape {shape}, but the parameter has {wanted}")


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary with copies of its tensors."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def cast(state: Mapping[str, Any], like: StoredTensor, saved: torch.dtype | None = None) -> dict[str, Any]:
    """Return a state whose floating-point tensors of a parameter's shape have its dtype.

    If `saved` is given, only tensors of that dtype are cast. "step" is never cast, as in torch.
    """

    def is_cast(name: str, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or name == "step" or value.shape != like.shape:
            return False
        return value.dtype == saved if saved is not None else value.is_floating_point()

    return {name: value.to(like.dtype) if is_cast(name, value) else value for name, value in state.items()}


def is_shard(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local_of(tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> torch.Tensor:
    """Return this rank's shard of a DTensor; return any other tensor unchanged.

    If `parameter` has another placement, the tensor is first redistributed to the parameter's placement.
    """
    if not is_shard(tensor):
        return tensor
    sharded: Any = tensor
    if parameter is not None and is_shard(parameter) and sharded.placements != parameter.placements:  # type: ignore[attr-defined]
        sharded = sharded.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    local: torch.Tensor = sharded.to_local()
    return local


def like(parameter: torch.Tensor, local: Any) -> Any:
    """Return a DTensor with `local` as this rank's shard, if the parameter is one and the shapes are the same."""
    if not is_shard(parameter) or not isinstance(local, torch.Tensor) or local_of(parameter).shape != local.shape:
        return local
    from torch.distributed.tensor import DTensor  # slow to import

    given: Any = parameter
    return DTensor.from_local(
        local, given.device_mesh, given.placements, run_check=False, shape=given.shape, stride=given.stride()
    )
