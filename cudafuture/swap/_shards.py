"""Sharded parameters (``torch.distributed.tensor.DTensor``), and tensors with the same placement."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["is_shard", "like", "local_of"]


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
