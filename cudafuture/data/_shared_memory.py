"""Tensors in memory that a DataLoader's workers share with their parent."""

from __future__ import annotations

import math

import torch
from torch.utils.data import get_worker_info

from cudafuture._modes import outside_inference

__all__ = ["batch_memory", "shared_zeros"]


def shared_zeros(*shape: int) -> torch.Tensor:
    """Return integers (int64) in memory that all processes share, and that can be changed in any mode."""
    with outside_inference():
        return _shared(torch.int64, shape).zero_()


def batch_memory(*shape: int) -> torch.Tensor:
    """Return memory (uint8) for a minibatch; in a worker it is shared, so that the DataLoader does not copy it."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8, device="cpu")
    return _shared(torch.uint8, shape)


def _shared(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    storage = torch.UntypedStorage._new_shared(size)  # as torch's collation does
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(shape)
