"""Mini-batches of any nesting: their division along the rows, and the join of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["join", "rows_of", "split", "split_target"]


def rows_of(batch: Any) -> int:
    """Return the number of rows: the size of the first dimension of its tensors.

    Raises:
        ValueError: there is no tensor with a dimension, or their sizes differ.
    """
    tensors = [leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
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
    parts = [
        leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else [leaf] * count
        for leaf in leaves
    ]
    return [_pytree.tree_unflatten([part[m] for part in parts], structure) for m in range(count)]


def split_target(target: Any, batch_rows: int, count: int) -> list[Any]:
    """Return the targets of `count` micro-batches of a mini-batch with `batch_rows` rows; none if the target is None.

    A tensor with k times the rows of the mini-batch (such as one for each token of a text) has k times the rows of
    each micro-batch, in their order. Other leaves, and tensors without a dimension, go to every micro-batch.

    Raises:
        ValueError: the number of rows of a tensor is not a multiple of `batch_rows`.
    """
    if target is None:
        return []
    sizes = [batch_rows // count + (m < batch_rows % count) for m in range(count)]  # the sizes of tensor_split
    leaves, structure = _pytree.tree_flatten(target)
    parts: list[Sequence[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            parts.append([leaf] * count)
            continue
        times, rest = divmod(leaf.shape[0], batch_rows)
        if rest or not times:
            raise ValueError(
                f"a target has {leaf.shape[0]} rows for a mini-batch of {batch_rows}: it needs as many, or a multiple"
            )
        parts.append(leaf.split_with_sizes([times * size for size in sizes]))
    return [_pytree.tree_unflatten([part[m] for part in parts], structure) for m in range(count)]


def join(outputs: list[Any]) -> Any:
    """Return the outputs of the micro-batches as one: concatenated tensors, and the other leaves of the first one."""
    flat = [_pytree.tree_flatten(output) for output in outputs]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise ValueError("the micro-batches have outputs of different structure, which cannot be joined")
    leaves = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() > 0 else parts[0]
        for parts in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return _pytree.tree_unflatten(leaves, structure)
