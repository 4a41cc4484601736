"""Tensors of one value that share memory: one object in several places, or views of the same elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from cudafuture._tensors import version_of

__all__ = ["distinct", "expect_sendable", "refuse_overlap", "versions_of", "with_each"]


def distinct(leaves: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the leaves without repeated objects, and for each of the given leaves its index among them."""
    if len(leaves) == 1:
        return list(leaves), [0]
    found = {id(leaf): leaf for leaf in leaves}
    if len(found) == len(leaves):
        return list(leaves), list(range(len(leaves)))
    order = {key: i for i, key in enumerate(found)}
    return list(found.values()), [order[id(leaf)] for leaf in leaves]


def with_each(leaves: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    """Return ``function(leaf)`` for each leaf. Leaves that are one object have one result."""
    found, indices = distinct(leaves)
    results = [function(leaf) for leaf in found]
    return [results[i] for i in indices]


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the version counters of tensors."""
    return [version_of(tensor) for tensor in tensors]


def refuse_overlap(tensors: Sequence[torch.Tensor], has_changed: Sequence[bool], name: str) -> None:
    """Raise RuntimeError if a stage has changed a tensor whose elements another one has too.

    A stage gets each of its tensors with a history of its own, so a change of one would have no gradient in the other.
    """
    for i, changed in enumerate(has_changed):
        if changed and any(_overlap(tensors[i], other) for k, other in enumerate(tensors) if k != i):
            raise RuntimeError(
                f"{name} changes a tensor in place that shares memory with another tensor of its input: pass one "
                "tensor twice, or a clone() of the other one"
            )


def expect_sendable(tensors: Sequence[torch.Tensor]) -> None:
    """Raise TypeError for a tensor that cannot go to another process."""
    for tensor in tensors:
        kind = type(tensor).__name__
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_nested:
            raise TypeError(f"a {kind}, or a nested tensor, cannot go to a stage of another process: send its parts")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            what = f"a tensor of {tensor.dtype} and {tensor.layout} on {tensor.device.type}"
            raise TypeError(f"{what} cannot go to a stage of another process: send a dense tensor with data")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have an element in common."""
    if not (one.layout is other.layout is torch.strided and one.numel() and other.numel()):
        return False
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    (first, end), (other_first, other_end) = _span(one), _span(other)
    if end <= other_first or other_end <= first:
        return False
    start = min(first, other_first)
    marks = torch.zeros(max(end, other_end) - start, dtype=torch.bool, device="cpu")  # of the bytes
    _bytes_of(one, marks, first - start).fill_(True)
    return bool(_bytes_of(other, marks, other_first - start).any())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor and of the byte after its last one."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def _bytes_of(tensor: torch.Tensor, marks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the marks of the bytes of a tensor whose first one is at index `at`."""
    size = tensor.element_size()
    return marks.as_strided((*tensor.shape, size), (*(size * stride for stride in tensor.stride()), 1), at)
