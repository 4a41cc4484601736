"""Norm of the gradients of all stages, on all ranks, and their scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from cudafuture.distributed import all_reduce

__all__ = ["clip_gradients"]


def clip_gradients(
    parameters: list[torch.nn.Parameter], max_norm: float, norm_type: float, error_if_nonfinite: bool, group: Any
) -> torch.Tensor:
    """Scale the gradients so that the norm of those of all ranks is at most `max_norm`; return that norm.

    `group`: of the ranks; None: this process has all gradients.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    if group is not None:
        norm = _norm_of_ranks(norm, norm_type, group)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm.item()}: they have infinite values, or none")
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _norm_of_ranks(norm: torch.Tensor, norm_type: float, group: Any) -> torch.Tensor:
    if math.isinf(norm_type):
        return all_reduce(norm, dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN, group).wait(
            non_blocking=True
        )
    power = all_reduce(norm.double().pow(norm_type), dist.ReduceOp.SUM, group).wait(non_blocking=True)
    return power.pow(1.0 / norm_type).to(norm.dtype)
