"""Offloaded optimizers of which each rank has a shard: DTensors, and checkpoints for other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cudafuture.swap import OffloadedOptimizer, offload
from support.ranks import run_ranks
from support.soak import in_soak_alone

pytestmark = pytest.mark.world

SHAPES = ((301, 100), (70_001,), (1, 5))  # in which one rank of three has other sizes than the others, or nothing
STEPS = 3


def parameters_of(world: int) -> list[nn.Parameter]:
    """Return the same parameters on every number of ranks, each a shard."""
    numbers = torch.Generator().manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    return [nn.Parameter(distribute_tensor(torch.randn(s, generator=numbers), mesh, [Shard(0)])) for s in SHAPES]


def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], number: int, placed: Any = None) -> None:
    numbers = torch.Generator().manual_seed(number)
    for parameter in parameters:
        whole: Any = parameter
        gradient = torch.randn(parameter.shape, generator=numbers)
        parameter.grad = distribute_tensor(gradient, whole.device_mesh, [placed or Shard(0)])
    optimizer.step()


def offload_adamw(parameters: list[nn.Parameter], folder: str, **options: Any) -> OffloadedOptimizer:
    return offload(torch.optim.AdamW(parameters, lr=0.1, foreach=False), folder, min_bytes=0, **options)


def shards_of(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all parameters and states."""
    states = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
    return [p.detach() for p in parameters] + states


def save(rank: int, folder: str, world: int) -> list[torch.Tensor]:
    """Save after some steps, all of which a plain optimizer makes too; return what one more step makes of it."""
    plain, swapped = parameters_of(world), parameters_of(world)
    optimizer = torch.optim.AdamW(plain, lr=0.1, foreach=False)
    with offload_adamw(swapped, f"{folder}/of {rank}", chunk_bytes=1 << 16) as other:
        for number in range(STEPS):
            step(optimizer, plain, number)
            step(other, swapped, number, Replicate() if number == 1 else None)
        for found, expected in zip(shards_of(swapped, other), shards_of(plain, optimizer), strict=True):
            assert torch.equal(found.to_local(), expected.to_local())
        model = {str(i): p.detach() for i, p in enumerate(swapped)}
        dcp.save({"model": model, "optimizer": other.state_dict()}, checkpoint_id=f"{folder}/checkpoint")
        step(other, swapped, STEPS)
        with pytest.raises(ValueError, match="updates whole parameters"):
            offload(torch.optim.Adafactor([swapped[0]]), f"{folder}/refused {rank}")
        return [shard.full_tensor() for shard in shards_of(swapped, other)]


def load(rank: int, folder: str, world: int) -> list[torch.Tensor]:
    """Load into an optimizer with other chunks and buffers; return what one more step makes of it."""
    parameters = parameters_of(world)
    with offload_adamw(parameters, f"{folder}/in {rank}", chunk_bytes=1 << 17, prefetch=0) as optimizer:
        step(optimizer, parameters, 100)  # so that there are states to be replaced
        model = {str(i): p.detach() for i, p in enumerate(parameters)}
        states = {"model": model, "optimizer": optimizer.state_dict()}
        dcp.load(states, checkpoint_id=f"{folder}/checkpoint")
        optimizer.load_state_dict(states["optimizer"])
        step(optimizer, parameters, STEPS)
        return [shard.full_tensor() for shard in shards_of(parameters, optimizer)]


@pytest.mark.parametrize("world", [3, pytest.param(1, marks=in_soak_alone)])
def test_distributed_checkpoint_loads_on_other_world_size(tmp_path: Path, world: int) -> None:
    expected = run_ranks(2, save, str(tmp_path), 2)[0]
    for found in run_ranks(world, load, str(tmp_path), world):
        assert len(found) == 3 * len(SHAPES)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def train(rank: int, folder: str) -> None:
    """Let backward update shards, or write their gradients, as a plain optimizer updates them."""
    ways: tuple[dict[str, Any], ...] = ({"when": "backward"}, {"swap_gradients": True})
    for number, options in enumerate(ways):
        plain, swapped = parameters_of(2), parameters_of(2)
        optimizer = torch.optim.AdamW(plain, lr=0.1, foreach=False)
        with offload_adamw(swapped, f"{folder}/{number} of {rank}", chunk_bytes=1 << 16, **options) as other:
            for _ in range(STEPS):
                for each, parameters in ((optimizer, plain), (other, swapped)):
                    each.zero_grad()
                    for parameter in parameters:
                        shard: Any = parameter
                        shard.to_local().square().sum().backward()  # as FSDP computes: with plain tensors
                    each.step()
            for found, expected in zip(shards_of(swapped, other), shards_of(plain, optimizer), strict=True):
                assert torch.equal(found.to_local(), expected.to_local())


def test_backward_of_shards_equals_plain_optimizer(tmp_path: Path) -> None:
    run_ranks(2, train, str(tmp_path))
