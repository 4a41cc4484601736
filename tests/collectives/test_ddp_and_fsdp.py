"""DDP and FSDP2 train as ever while collectives of ours are in flight, on their own group and on another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture
from cudafuture.testing import World

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

STEPS = 4
Wrap = Callable[[nn.Sequential], nn.Module]


class Traffic:
    """Collectives of ours, issued between those of the training, and checked when it is over."""

    def __init__(self, group: Any = None) -> None:
        self.pg = cfd.ProcessGroup(group)
        self.count = 0
        self.reduced: list[tuple[int, CUDAFuture[Tensor]]] = []
        self.gathered: list[tuple[int, CUDAFuture[Tensor]]] = []

    def issue(self) -> None:
        """Issue one collective, and one whose callback issues a second step."""
        self.count += 1
        mine = torch.full((1000,), float(self.count * (1 + self.pg.rank())))
        self.reduced.append((self.count, self.pg.all_reduce(mine.clone())))
        everyones = torch.empty(1000 * self.pg.size())
        chained = self.pg.all_reduce(mine.clone()).then_async(
            lambda total: self.pg.all_gather_into_tensor(everyones, total.value() + self.pg.rank())
        )
        self.gathered.append((self.count, chained))

    def check(self) -> None:
        """Compare each result with its own data."""
        size = self.pg.size()
        total = size * (size + 1) // 2
        for count, reduced in self.reduced:
            assert reduced.wait().tolist() == [total * count] * 1000
        for count, gathered in self.gathered:
            assert gathered.wait().view(size, 1000).tolist() == [[total * count + r] * 1000 for r in range(size)]


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 31), nn.Tanh(), nn.Linear(31, 5))


def ddp(layers: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(layers, bucket_cap_mb=0.001)


def ddp_with_our_hook(layers: nn.Sequential) -> nn.Module:
    def average(group: Any, bucket: dist.GradBucket) -> CUDAFuture[Tensor]:
        return cfd.all_reduce(bucket.buffer().div_(dist.get_world_size()))

    model = DistributedDataParallel(layers, bucket_cap_mb=0.001)
    model.register_comm_hook(None, cfd.ddp_comm_hook(average))
    return model


def fsdp2(layers: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert mesh.get_group() is dist.group.WORLD, "it does not share our group"
    for layer in layers:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    return layers


def train(wrap: Wrap, traffic: Traffic | None = None) -> list[Tensor]:
    """Train, and return this rank's gradients and parameters after each step."""
    layers = make_layers()
    model = wrap(layers)
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    issue = traffic.issue if traffic else lambda: None
    layers[1].register_full_backward_pre_hook(lambda *_: issue())  # in the midst of backward
    seen = []
    for step in range(STEPS):
        issue()
        images = torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        outputs = model(images)
        issue()
        outputs.square().sum().backward()
        issue()
        optimizer.step()
        seen += [local(t) for p in layers.parameters() for t in (p.grad, p)]
        optimizer.zero_grad()
    return seen


def local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


@pytest.mark.world(2)
@pytest.mark.parametrize("wrap", [ddp, ddp_with_our_hook, fsdp2])
@pytest.mark.parametrize("where", ["same group", "another group"])
def test_training_is_unchanged_beside_our_collectives(world: World, wrap: Wrap, where: str) -> None:
    def check() -> None:
        alone = train(wrap)
        traffic = Traffic(cfd.new_group() if where == "another group" else None)
        beside = train(wrap, traffic)
        traffic.check()
        assert len(alone) == len(beside) == STEPS * 2 * 6
        assert all(map(torch.equal, alone, beside))

    world.run(check)


@pytest.mark.world(2)
@pytest.mark.parametrize("wrap", [ddp, ddp_with_our_hook, fsdp2])
def test_training_does_not_wait_for_ours(world: World, wrap: Wrap) -> None:
    def check() -> None:
        alone = train(wrap)
        traffic = Traffic(cfd.new_group())
        waits = dist.get_rank() == 0
        if waits:
            received = cfd.recv(torch.empty(2), 1)  # on the group of the training
            traffic.issue()
        beside = train(wrap)
        if waits:
            assert not received.done()
            assert not any(future.done() for _, future in traffic.reduced + traffic.gathered)
        dist.barrier()
        if not waits:
            cfd.send(torch.ones(2), 0).wait()
            traffic.issue()
        traffic.check()
        if waits:
            assert received.wait().tensor.tolist() == [1, 1]
        assert all(map(torch.equal, alone, beside))

    world.run(check)
