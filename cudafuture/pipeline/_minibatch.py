"""Mini-batches of any nesting: their division along the rows, and the join of outputs.

A stage may change its input in place, and the micro-batches lie in the memory of the mini-batch. Views of one tensor
have one version counter, so autograd would take a change of one micro-batch for a change of all. Therefore each
micro-batch has its own counter. The first one shares that of the mini-batch, so that autograd notices later changes by
the program; ``passing_changes`` counts changes of the others on the mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import ne
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.utils import _pytree

from cudafuture.pipeline._sharing import versions_of, with_each

__all__ = [
    "concatenate",
    "expect_tensors",
    "join",
    "map_tensors",
    "passing_changes",
    "rows_of",
    "shares_of",
    "sizes_of",
    "split",
    "split_rows",
    "split_target",
]

TensorOrTensors: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


def expect_tensors(value: object) -> None:
    """Raise TypeError unless the value is a tensor or a tuple of tensors."""
    if isinstance(value, tuple):
        for part in value:
            expect_tensors(part)
    elif not isinstance(value, torch.Tensor):
        raise TypeError(f"expected Tensor, but got {type(value).__name__}")


def map_tensors(value: TensorOrTensors, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``function(tensor)``, or a tuple of them. A tensor in two places of a tuple has one result."""
    return function(value) if isinstance(value, torch.Tensor) else tuple(with_each(value, function))


def concatenate(parts: Sequence[TensorOrTensors]) -> TensorOrTensors:
    """Return the tensors, or tuples of tensors, concatenated along the first dimension."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)  # type: ignore[arg-type]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def rows_of(batch: Any) -> int:
    """Return the number of rows: the size of the first dimension of its tensors.

    Raises:
        ValueError: there is no tensor with a dimension, or their sizes differ.
    """
    tensors = [leaf for leaf in _pytree.tree_leaves(batch) if _has_rows(leaf)]
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) != 1:
        found = "none has a dimension" if not sizes else f"they have {', '.join(map(str, sorted(sizes)))} rows"
        raise ValueError(f"the tensors of a mini-batch have the same first dimension, but {found}")
    return sizes.pop()


def split(batch: Any, count: int) -> list[Any]:
    """Return `count` micro-batches of nearly equal size, the larger ones first.

    Numbers, strings and other leaves, and tensors without a dimension, go to every micro-batch.
    """
    leaves, structure = _pytree.tree_flatten(batch)
    parts = with_each(
        leaves,
        lambda leaf: split_rows(leaf, sizes_of(len(leaf), count)) if _has_rows(leaf) else _repeat(leaf, count),
    )
    return [_pytree.tree_unflatten([part[m] for part in parts], structure) for m in range(count)]


def split_rows(tensor: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return parts of a tensor with that many rows, which a stage may change in place.

    A leaf that requires a gradient yields views, whose change torch refuses, as it refuses that of the leaf.
    """
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return _with_own_versions(tensor.split_with_sizes(list(sizes)))
    if tensor.is_leaf:
        return tensor.split_with_sizes(list(sizes))
    parts: Sequence[torch.Tensor] = _SplitRows.apply(tensor, sizes)  # type: ignore[no-untyped-call]
    return parts


@contextmanager
def passing_changes(minibatch: Any, parts: Sequence[Any]) -> Iterator[None]:
    """Count in-place changes of the parts as changes of their mini-batch, and give it their history, at the end."""
    every = zip(*(_pytree.tree_leaves(value) for value in (minibatch, *parts)), strict=True)
    columns = {id(leaf): (leaf, parts) for leaf, *parts in every if _has_rows(leaf)}.values()
    before = [(versions_of(parts), _functions_of(parts)) for _, parts in columns]
    try:
        yield
    finally:
        for (tensor, parts), (versions, _) in zip(columns, before, strict=True):
            changed = list(map(ne, versions, versions_of(parts)))
            if any(changed) and not changed[0]:
                torch.autograd.graph.increment_version(tensor)
    for (tensor, parts), (_, functions) in zip(columns, before, strict=True):
        if functions != _functions_of(parts):
            _join_rows(tensor, parts)


def split_target(target: Any, batch_rows: int, count: int) -> list[Any]:
    """Return the targets of `count` micro-batches of a mini-batch with `batch_rows` rows; none if the target is None.

    A tensor with k times the rows of the mini-batch (such as one for each token of a text) has k times the rows of
    each micro-batch, in their order. Other leaves, and tensors without a dimension, go to every micro-batch.

    Raises:
        ValueError: the number of rows of a tensor is not a multiple of `batch_rows`.
    """
    if target is None:
        return []
    sizes = sizes_of(batch_rows, count)
    leaves, structure = _pytree.tree_flatten(target)

    def split_leaf(leaf: Any) -> Sequence[Any]:
        if not _has_rows(leaf):
            return _repeat(leaf, count)
        times, rest = divmod(leaf.shape[0], batch_rows)
        if rest or not times:
            raise ValueError(
                f"a target has {leaf.shape[0]} rows for a mini-batch of {batch_rows}: it needs as many, or a multiple"
            )
        return split_rows(leaf, [times * size for size in sizes])

    parts = with_each(leaves, split_leaf)
    return [_pytree.tree_unflatten([part[m] for part in parts], structure) for m in range(count)]


def shares_of(weights: Any, rows: int, count: int, device: torch.device) -> list[Any]:
    """Return the shares of `count` micro-batches of the sum of the weights: numbers, or tensors if it is on a device.

    Raises:
        TypeError, ValueError: the weights are no tensor or do not fit the rows, or, on the host, their sum is 0.
    """
    if not isinstance(weights, torch.Tensor) or weights.dim() == 0:
        raise TypeError("weights are a tensor with as many rows as the target")
    sums = torch.stack([part.sum(dtype=torch.float64) for part in split_target(weights.detach(), rows, count)])
    if weights.is_cpu:
        total = sums.sum().item()
        if not total > 0:
            raise ValueError(f"the sum of the weights is {total}: a loss needs a positive one")
        return [share / total for share in sums.tolist()]
    return list((sums / sums.sum()).to(device, torch.float32))


def join(outputs: list[Any]) -> Any:
    """Return the outputs of the micro-batches as one: concatenated tensors, and the other leaves of the first one.

    Raises:
        ValueError: the outputs have different structures.
    """
    flat = [_pytree.tree_flatten(output) for output in outputs]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise ValueError("the micro-batches have outputs of different structure, which cannot be joined")
    leaves = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() > 0 else parts[0]
        for parts in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return _pytree.tree_unflatten(leaves, structure)


class _SplitRows(torch.autograd.Function):
    """Parts of a tensor that are no views of it for autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return tuple(_with_own_versions(tensor.split_with_sizes(list(sizes))))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.cat(gradients), None


def _functions_of(parts: Sequence[torch.Tensor]) -> list[Any]:
    return [part.grad_fn for part in parts]


def _join_rows(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Give a tensor the history of its parts from ``split_rows``, after stages have changed them in place."""
    with torch.autograd._unsafe_preserve_version_counter(tensor):  # the changes were counted when they happened
        _JoinRows.apply(tensor, *parts)  # type: ignore[no-untyped-call]


class _JoinRows(torch.autograd.Function):
    """Tensor whose memory has the values of its parts already."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [len(part) for part in parts]
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # The history of the tensor itself gets zeros: None would end that of its base, if the tensor is a view.
        return torch.zeros_like(gradient), *gradient.split_with_sizes(ctx.sizes)


def _with_own_versions(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts, each but the first with its own version counter."""
    first, others = parts[0].detach(), parts[1:]
    if first.layout is torch.strided and first.stride(0) == 0:  # expanded: the rows share memory
        return [first, *(part.clone() for part in others)]
    return [first, *(part.data for part in others)]


def _repeat(leaf: Any, count: int) -> list[Any]:
    """Return the leaf itself first, and copies of a tensor after it."""
    return [leaf, *(leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for _ in range(count - 1))]


def _has_rows(leaf: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def sizes_of(rows: int, count: int) -> list[int]:
    """Return the sizes of ``torch.tensor_split``."""
    return [rows // count + (m < rows % count) for m in range(count)]
