"""Parameters of which each rank has a shard (``torch.distributed.tensor.DTensor``), and tensors like them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["is_shard", "like", "local_of"]


def is_shard(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor; this imports nothing."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local_of(tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> torch.Tensor:
    """Return the shard of a DTensor that this rank has; any other tensor itself.

    Where `parameter` is given and is placed otherwise, the tensor is brought to the parameter's placement first.
    """
    if not is_shard(tensor):
        return tensor
    sharded: Any = tensor
    if parameter is not None and is_shard(parameter) and sharded.placements != parameter.placements:  # type: ignore[attr-defined]
        sharded = sharded.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    local: torch.Tensor = sharded.to_local()
    return local


def like(parameter: torch.Tensor, local: Any) -> Any:
    """Return a DTensor of which `local` is this rank's shard, if the parameter is one and the shapes are the same."""
    if not is_shard(parameter) or not isinstance(local, torch.Tensor) or local_of(parameter).shape != local.shape:
        return local
    from torch.distributed.tensor import DTensor  # takes long to import

    given: Any = parameter
    return DTensor.from_local(
        local, given.device_mesh, given.placements, run_check=False, shape=given.shape, stride=given.stride()
    )
