"""The cost of collectives that return futures, beside torch's own: two ranks, a row for each limit.

Over Gloo; one row is over NCCL, where torch has two CUDA devices. `python -m cudafuture.testing.fakecuda` makes some.

    cudafuture bench collectives [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

Single calls, in several worlds, alternate in a shuffled order that both ranks share: ours, raw, and raw again as the
control. A round is 100 of them for small sizes. The training steps have a model each, of the same weights, and
alternate as well.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cudafuture.distributed as cfd
from cudafuture.bench._ranks import Measure, on_ranks
from cudafuture.bench._rows import Row, Suite, by_turns, control
from cudafuture.combine import gather
from cudafuture.future import CUDAFuture

__all__ = ["SUITE"]

now = time.perf_counter_ns
WORLDS = 7  # for single calls


def differences(measure: Measure, rounds: int, backend: str = "gloo") -> tuple[list[float], list[float], float, float]:
    """Return ours - raw and raw - raw for each of several worlds, and the medians of ours and of raw.

    Where the code and the buffers of a process happen to lie moves such a difference by up to 5 us, the same in all its
    rounds: one world shows nothing.
    """
    worlds = [on_ranks(measure, max(1, rounds // WORLDS), backend) for _ in range(WORLDS)]

    def beside_raw(which: int) -> list[float]:
        return [statistics.median(a - b for a, b in zip(world[which], world[1], strict=True)) for world in worlds]

    ours, raw = (statistics.median(figure for world in worlds for figure in world[which]) for which in range(2))
    return beside_raw(0), beside_raw(2), ours, raw


# ---- one call


def all_reduces(length: int, calls: int, rounds: int) -> list[list[float]]:
    tensor = torch.zeros(length)

    def raw() -> float:
        start = now()
        dist.all_reduce(tensor, async_op=True).wait()
        return now() - start

    def ours() -> float:
        start = now()
        cfd.all_reduce(tensor).wait()
        return now() - start

    figures = [by_turns(calls, ours, raw, raw) for _ in range(rounds)]
    return [[statistics.median(turn[which]) for turn in figures] for which in range(3)]


def single(name: str, length: int, calls: int, limit: float | None, rounds: int) -> Row:
    """Measure the time that ours adds to one call. Without a limit, the limit is the error of the control."""
    differ, same, us, them = differences(partial(all_reduces, length, calls), rounds)
    added = statistics.median(differ)
    what = f"all_reduce of {name}, and wait"
    if limit is None:
        middle = statistics.median(same)
        spread = 1.4826 * statistics.median(abs(d - middle) for d in same)
        words = f"raw - raw, ns: {middle:,.0f}, spread {spread:,.0f}"
        return Row(name, what, "ns", us, them, "raw", "more", added, spread, 0.0, words)
    return Row(name, what, "ns", us, them, "raw", "more", added, limit, *control("raw - raw, ns", same))


def all_reduces_over_nccl(calls: int, rounds: int) -> list[list[float]]:
    tensor = torch.zeros(1024, device="cuda")

    def raw() -> float:
        torch.cuda.synchronize()
        start = now()
        dist.all_reduce(tensor, async_op=True).wait()
        return now() - start

    def ours() -> float:
        torch.cuda.synchronize()
        start = now()
        cfd.all_reduce(tensor).wait(non_blocking=True)
        return now() - start

    figures = [by_turns(calls, ours, raw, raw) for _ in range(rounds)]
    return [[statistics.median(turn[which]) for turn in figures] for which in range(3)]


def over_nccl(limit: float, rounds: int) -> Row:
    """Measure the host time that ours adds to one call over NCCL, which returns before the other rank arrives."""
    differ, same, us, them = differences(partial(all_reduces_over_nccl, 100), rounds, "nccl")
    what = "all_reduce of 4 KiB over NCCL, and non-blocking wait"
    added = statistics.median(differ)
    return Row("nccl", what, "ns", us, them, "raw", "more", added, limit, *control("raw - raw, ns", same))


# ---- the backend "cudafuture" beside the backend that it wraps


def three_groups(alone: bool = False) -> list[Any]:
    """Return a group of the backend, and two of the backend that it wraps: the second is for the control."""
    ranks = [dist.get_rank()] if alone else [0, 1]
    kinds = ["cudafuture", dist.get_backend(), dist.get_backend()]
    return [dist.new_group(ranks, backend=kind, use_local_synchronization=True) for kind in kinds]


def all_reduces_of_backend(length: int, calls: int, alone: bool, rounds: int) -> list[list[float]]:
    over_nccl = dist.get_backend() == "nccl"
    tensor = torch.zeros(length, device="cuda" if over_nccl else "cpu")

    def one(group: Any) -> float:
        if over_nccl:
            torch.cuda.synchronize()
        start = now()
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        return now() - start

    groups = three_groups(alone)
    figures = [by_turns(calls, *[partial(one, group) for group in groups]) for _ in range(rounds)]
    return [[statistics.median(turn[which]) for turn in figures] for which in range(3)]


def backend_single(
    name: str, length: int, calls: int, limit: float, wrapped: str, rounds: int, alone: bool = False
) -> Row:
    """Measure the time that the backend adds to a call of torch; the control is a second group of the wrapped one.

    `alone`: in groups of one rank, so that only the time of the host counts.
    """
    differ, same, us, them = differences(partial(all_reduces_of_backend, length, calls, alone), rounds, wrapped)
    added = statistics.median(differ)
    what = f'all_reduce of {name} by torch on backend "cudafuture" over {wrapped}, and wait'
    words = f"{wrapped} - {wrapped}, ns"
    return Row(f"backend {wrapped} {name}", what, "ns", us, them, wrapped, "more", added, limit, *control(words, same))


def distributed(group: Any) -> nn.Module:
    return DistributedDataParallel(model_of(512), bucket_cap_mb=1, gradient_as_bucket_view=True, process_group=group)


def sharded(group: Any) -> nn.Module:
    model, mesh = model_of(512), DeviceMesh.from_group(group, "cpu")
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def backend_steps(make_model: Callable[[Any], nn.Module], rounds: int) -> list[list[float]]:
    """Measure steps of a framework on the backend and on Gloo, twice."""
    data, target = torch.randn(64, 512), torch.randn(64, 512)

    def make_step(group: Any) -> Callable[[], float]:
        model = make_model(group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> float:
            start = now()
            nn.functional.mse_loss(model(data), target).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return now() - start

        return step

    return by_turns(10 * rounds, *[make_step(group) for group in three_groups()])


def backend_step(name: str, make_model: Callable[[Any], nn.Module], rounds: int) -> Row:
    ours, raw, again = on_ranks(partial(backend_steps, make_model), rounds)
    ratio = statistics.median(a / b for a, b in zip(ours, raw, strict=True))
    same = [a / b for a, b in zip(again, raw, strict=True)]
    us, them = statistics.median(ours), statistics.median(raw)
    what = f'a step of {name} on backend "cudafuture", six layers of 1 MiB'
    return Row(f"backend {name}", what, "ns", us, them, "gloo", "x", ratio, 1.0, *control("gloo / gloo", same))


def memory_of_backend(rounds: int) -> list[list[float]]:
    """Return the KiB by which 10,000 all_reduces let a rank grow: of the backend with futures, and of Gloo."""
    tensor = torch.zeros(1)
    mine, raw, _ = three_groups()

    def with_future() -> object:
        return dist.all_reduce(tensor, group=mine, async_op=True).future.wait()

    def plain() -> object:
        return dist.all_reduce(tensor, group=raw, async_op=True).wait()

    figures = []
    for call in (with_future, plain):
        for _ in range(2_000):
            call()
        before = resident_kib()
        for _ in range(10_000):
            call()
        figures.append([resident_kib() - before])
    return figures


def resident_kib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def backend_memory(rounds: int) -> Row:
    ours, raw = on_ranks(memory_of_backend, rounds)
    what = 'growth by 10,000 all_reduces on backend "cudafuture", each with its future'
    return Row("backend memory", what, "KiB", max(ours), max(raw), "gloo", "KiB", max(ours), 512)


# ---- many in flight


def in_flight(rounds: int) -> list[list[float]]:
    tensors = [torch.zeros(1024) for _ in range(100)]

    def raw() -> float:
        start = now()
        for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()
        return (now() - start) / len(tensors)

    def ours() -> float:
        start = now()
        gather(*[cfd.all_reduce(t) for t in tensors]).wait()
        return (now() - start) / len(tensors)

    return by_turns(10 * rounds, ours, raw, raw)


def many(rounds: int) -> Row:
    """Measure 100 all_reduces of 4 KiB at once, waited for together."""
    ours, raw, again = on_ranks(in_flight, rounds)
    same = [a / b for a, b in zip(again, raw, strict=True)]
    us, them = statistics.median(ours), statistics.median(raw)
    what = "100 all_reduces of 4 KiB, then gather; for one"
    return Row("in-flight", what, "ns", us, them, "raw", "x", us / them, 1.0, *control("raw / raw", same))


# ---- training


class Bucketed:
    """Data parallelism by hand: a bucket is reduced as soon as its gradients are there, and averaged in then()."""

    def __init__(self, model: nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer], overlap: bool) -> None:
        self.overlap = overlap
        self.futures: list[CUDAFuture[Any]] = []
        self.buckets = [list(layer.parameters()) for layer in model.modules() if isinstance(layer, nn.Linear)]
        self.missing = [len(bucket) for bucket in self.buckets]
        self.flat = []  # each bucket as one parameter, with one gradient
        for index, bucket in enumerate(self.buckets):
            whole = nn.Parameter(torch.cat([p.detach().flatten() for p in bucket]))
            whole.grad = torch.zeros_like(whole)
            sizes = [p.numel() for p in bucket]
            parts = zip(bucket, torch.split(whole.detach(), sizes), torch.split(whole.grad, sizes), strict=True)
            for parameter, values, gradient in parts:
                parameter.data = values.view_as(parameter)
                parameter.grad = gradient.view_as(parameter)
                parameter.register_post_accumulate_grad_hook(partial(self.count_gradient, index))
            self.flat.append(whole)
        self.optimizer = make_optimizer(self.flat)
        self.optimizers = [make_optimizer([whole]) for whole in self.flat]

    def gradient(self, index: int) -> torch.Tensor:
        gradient = self.flat[index].grad
        assert gradient is not None
        return gradient

    def count_gradient(self, index: int, _parameter: torch.Tensor) -> None:
        self.missing[index] -= 1
        if self.missing[index] == 0:
            self.missing[index] = len(self.buckets[index])
            self.futures.append(cfd.all_reduce(self.gradient(index)).then(partial(self.step_bucket, index)))

    def step_bucket(self, index: int, future: CUDAFuture[torch.Tensor]) -> None:
        future.value().div_(2)
        if self.overlap:
            self.optimizers[index].step()

    def finish(self) -> None:
        gather(*self.futures).wait()
        self.futures.clear()
        if not self.overlap:
            self.optimizer.step()
        torch._foreach_zero_([self.gradient(index) for index in range(len(self.flat))])


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def training(adam: bool, rounds: int) -> list[list[float]]:
    """Measure steps of DDP, of buckets by hand with the optimizer behind them, and with it in their callbacks."""
    width = 512
    data, target = torch.randn(64, width), torch.randn(64, width)
    make: Callable[[Any], torch.optim.Optimizer] = (
        partial(torch.optim.Adam, lr=1e-3, fused=True) if adam else partial(torch.optim.SGD, lr=1e-3)
    )
    megabytes = 4 * (width + 1) * width / 2**20  # a layer
    ddp = DistributedDataParallel(model_of(width), bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    optimizer = make(ddp.parameters())

    def step_ddp() -> float:
        start = now()
        nn.functional.mse_loss(ddp(data), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return now() - start

    def make_bucketed_step(overlap: bool) -> Callable[[], float]:
        model = model_of(width)
        buckets = Bucketed(model, make, overlap)

        def step() -> float:
            start = now()
            nn.functional.mse_loss(model(data), target).backward()
            buckets.finish()
            return now() - start

        return step

    return by_turns(10 * rounds, make_bucketed_step(False), step_ddp, step_ddp, make_bucketed_step(True))


def steps(name: str, adam: bool, overlap: bool, rounds: int) -> Row:
    plain, ddp, again, overlapped = on_ranks(partial(training, adam), rounds)
    ours = overlapped if overlap else plain
    same = [a / b for a, b in zip(again, ddp, strict=True)]
    us, them = statistics.median(ours), statistics.median(ddp)
    optimizer = "Adam" if adam else "SGD"
    what = f"a training step, six buckets of 1 MiB, {optimizer} {'in then()' if overlap else 'behind them'}"
    return Row(name, what, "ns", us, them, "DDP", "x", us / them, 1.0, *control("DDP / DDP", same))


LIMITS: dict[str, Callable[[int], Row]] = {
    "4B": partial(single, "4 B", 1, 100, 5_000),
    "64KiB": partial(single, "64 KiB", 16 * 1024, 100, 5_000),
    "1MiB": partial(single, "1 MiB", 256 * 1024, 20, None),
    "16MiB": partial(single, "16 MiB", 4 * 1024 * 1024, 3, None),
    "backend-4B": partial(backend_single, "4 B", 1, 100, 2_000, "gloo"),
    "backend-host": partial(backend_single, "4 B on one rank", 1, 100, 2_000, "gloo", alone=True),
    "backend-64KiB": partial(backend_single, "64 KiB", 16 * 1024, 100, 2_000, "gloo"),
    "backend-DDP": partial(backend_step, "DDP", distributed),
    "backend-FSDP2": partial(backend_step, "FSDP2", sharded),
    "backend-memory": backend_memory,
    "in-flight": many,
    "step": partial(steps, "step", False, False),
    "overlap": partial(steps, "overlap", True, True),
}
if torch.cuda.device_count() > 1 and dist.is_nccl_available():
    LIMITS["nccl"] = partial(over_nccl, 5_000)
    LIMITS["backend-nccl"] = partial(backend_single, "4 KiB", 1024, 100, 3_000, "nccl")

SUITE = Suite("collectives", "Collectives beside torch's own, two ranks", LIMITS, rounds=25)
