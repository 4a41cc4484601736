"""Each operation of torch.distributed, with the value of its future on the backend "cudafuture"."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import cudafuture.distributed as cfd


def ones() -> torch.Tensor:
    return torch.ones(2)


def issue_each(rank: int) -> dict[str, tuple[Any, Any]]:
    """Issue each operation of torch; return its Work, and the value that its future is to have."""
    out, pair, wide = ones(), [ones(), ones()], torch.zeros(4)
    here = rank == 0
    world: Any = dist.group.WORLD
    t = [ones() for _ in range(4)]
    return {
        "all_reduce": (dist.all_reduce(t[0], async_op=True), t[0]),
        "broadcast": (dist.broadcast(t[1], 0, async_op=True), t[1]),
        "reduce": (dist.reduce(t[2], 0, async_op=True), t[2] if here else None),
        "all_gather": (dist.all_gather(pair, ones(), async_op=True), pair),
        "all_gather_into_tensor": (world._allgather_base(wide, ones()), wide),
        "gather": (dist.gather(ones(), pair if here else None, 0, async_op=True), pair if here else None),
        "scatter": (dist.scatter(out, pair if here else None, 0, async_op=True), out),
        "reduce_scatter": (dist.reduce_scatter(out, [ones(), ones()], async_op=True), out),
        "reduce_scatter_tensor": (world._reduce_scatter_base(out, torch.ones(4)), out),
        "all_to_all": (dist.all_to_all(pair, [ones(), ones()], async_op=True), pair),
        "all_to_all_single": (dist.all_to_all_single(out, ones(), async_op=True), out),
        "barrier": (dist.barrier(async_op=True), None),
        "send": (dist.isend(ones(), 1 - rank), None),
        "recv": (dist.irecv(t[3], 1 - rank), cfd.Received(t[3], 1 - rank)),
    }
