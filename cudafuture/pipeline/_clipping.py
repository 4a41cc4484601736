"""Norm of the gradients of all stages, on all ranks, and their scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from cudafuture.distributed import all_reduce

__all__ = ["clip_gradients"]


def clip_gradients(
    parameters: list[torch.nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    group: Any,
    device: torch.device,
) -> torch.Tensor:
    """Scale the gradients so that the norm of those of all ranks is at most `max_norm`; return that norm.

    `group`: of the ranks, each on its `device`; None: this process has all gradients.
    """
    norm_type = float(norm_type)
    if norm_type == 0 and group is not None:
        raise ValueError("a norm of type 0 is not that of its parts: it cannot be taken over ranks")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    if group is not None:
        norm = _norm_of_ranks(norm.to(device), norm_type, group)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm.item()}: they have infinite or NaN values")
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _norm_of_ranks(norm: torch.Tensor, norm_type: float, group: Any) -> torch.Tensor:
    if math.isinf(norm_type):  # of another dtype on another rank
        operation = dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN
        return all_reduce(norm.double(), operation, group).wait(non_blocking=True).to(norm.dtype)
    power = all_reduce(norm.double().pow(norm_type), dist.ReduceOp.SUM, group).wait(non_blocking=True)
    return power.pow(1.0 / norm_type).to(norm.dtype)
