"""The time of a pipeline's step against the prediction of its table, its memory, and its threads; every limit is a row.

    cudafuture bench pipeline [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

The rows of tables run on the simulated accelerator, in its virtual time: each layer spends the milliseconds that the
row names, so that the prediction of ``Schedule.check`` has the same figures. Each row shows GPipe's time beside it. The
rows of a task are real time; their peer is the worker of fairscale, which comes from torchgpipe:

    pip install --no-deps --no-build-isolation fairscale==0.4.13

Those of ranks are steps over processes, in real time, beside torch.distributed.pipelining.
"""

from __future__ import annotations

import importlib.util
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cudafuture.bench._ranks import on_ranks
from cudafuture.bench._rows import Row, Skipped, Suite, control
from cudafuture.pipeline import Costs, Pipeline, Workers
from cudafuture.testing import sim

__all__ = ["SUITE"]

CPU = torch.device("cpu")
WIDTH = 16
TASKS = 400
PAUSE = 0.01  # seconds of a cell
RANK_MICROBATCHES = 8
now = time.perf_counter_ns


class Spend(torch.autograd.Function):
    """Identity that takes milliseconds of the device, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
        ctx.backward_ms = backward_ms
        if forward_ms:
            sim.sleep(forward_ms, torch.accelerator.current_stream(x.device))
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sim.sleep(ctx.backward_ms, torch.accelerator.current_stream(gradients[0].device))
        return gradients[0] * 1, None, None


def spend(x: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
    spent: torch.Tensor = Spend.apply(x, forward_ms, backward_ms)  # type: ignore[no-untyped-call]
    return spent


class Layer(nn.Module):
    """A layer with given milliseconds of forward, input gradient and weight gradient."""

    def __init__(self, forward_ms: float, input_ms: float, weight_ms: float) -> None:
        super().__init__()
        self.times = (forward_ms, input_ms, weight_ms)
        self.parameter = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward_ms, input_ms, weight_ms = self.times
        return spend(x, forward_ms, input_ms) + spend(self.parameter, 0, weight_ms)


def costs_of(times: list[tuple[float, float, float]]) -> Costs:
    """Return the costs of stages; the first one computes no gradient of its input."""
    inputs = [0.0, *(i for _, i, _ in times[1:])]
    weights = [w for _, _, w in times]
    return Costs([f for f, _, _ in times], [i + w for i, w in zip(inputs, weights, strict=True)], inputs, weights)


def virtual_ms(
    table: str, devices: int, times: list[tuple[float, float, float]]
) -> tuple[float, float, tuple[int, ...], tuple[int, ...]]:
    """Return the virtual milliseconds of a step, the predicted ones, and the peaks of both."""
    sim.enable(devices=devices, speeds=sim.Speeds(launch=0), detect=False, memory=1 << 28)
    places = [f"sim:{i}" for i in range(devices)]
    microbatches = 2 * devices
    layers = [Layer(*each) for each in times]
    pipeline = Pipeline(layers, places, microbatches=microbatches, schedule=table, loss=torch.sum, loss_reduction="sum")
    batch = torch.ones(microbatches, WIDTH, device=places[0])
    predicted = pipeline.schedule.check(costs_of(times))
    pipeline.step(batch)
    began = _clock_ms(places)
    pipeline.step(batch)
    took = _clock_ms(places) - began
    peaks = pipeline.peak_activations
    pipeline.close()
    sim.disable()
    return took, predicted.seconds, peaks, predicted.peak_activations


def _clock_ms(places: list[str]) -> float:
    for place in places:
        sim.synchronize(place)
    return sim.clock() * 1e3


def _times(devices: int, table: str, is_equal: bool) -> list[tuple[float, float, float]]:
    stages = 2 * devices if table == "interleaved_1f1b" else devices
    each = 10 * devices / stages
    return [(each, each, each) if is_equal else (each + s % 3, each / 2 + s % 2, each + s % 5) for s in range(stages)]


def step_time(table: str, devices: int, is_equal: bool, _rounds: int) -> Row:
    """Return the time of a step over the prediction; virtual, so that one round is enough."""
    times = _times(devices, table, is_equal)
    took, predicted, peaks, expected = virtual_ms(table, devices, times)
    gpipe = virtual_ms("gpipe", devices, _times(devices, "gpipe", is_equal))[0]
    kind = "equal" if is_equal else "unequal"
    what = f"{table}, {devices} devices, {len(times)} {kind} stages, peaks {peaks}, predicted {expected}"
    measured = took / predicted if peaks == expected else float("inf")
    return Row(f"{table}-{devices}-{kind}", what, "ms", took, gpipe, "gpipe", "x predicted", measured, 1.05)


# ---- threads


def _ours(workers: Workers) -> int:
    """Return the nanoseconds from submit to the start of a task."""
    started: list[int] = []
    began = now()
    future = workers.submit(CPU, lambda: started.append(now()))
    future.wait()
    return started[0] - began


def _theirs(module: Any, queues: tuple[Any, Any]) -> int:
    started: list[int] = []
    task = module.Task(None, compute=lambda: started.append(now()), finalize=None)
    began = now()
    queues[0].put(task)
    queues[1].get()
    return started[0] - began


@contextmanager
def pin(to: dict[threading.Thread, int]) -> Iterator[None]:
    """Keep threads on cores: where the kernel puts them decides more than what they do."""
    before = os.sched_getaffinity(0)
    for thread, core in to.items():
        os.sched_setaffinity(thread.native_id or 0, {sorted(before)[core % len(before)]})
    yield
    os.sched_setaffinity(0, before)


def submit(cores: int, rounds: int) -> Row:
    """Measure from submit to the start of an empty task, with the worker on the program's core or on another."""
    try:
        module = importlib.import_module("fairscale.nn.pipe.worker")
    except ModuleNotFoundError as e:
        raise Skipped("the peer is fairscale, which is not installed; docs/benchmarks.md says how") from e
    program = threading.current_thread()
    shuffle = random.Random(0).sample
    with Workers(["cpu"]) as workers, module.spawn_workers([CPU]) as ((in_queue,), (out_queue,)):
        workers.submit(CPU, int).wait()
        others = [thread for thread in threading.enumerate() if thread is not program]
        ours: list[int] = []
        theirs: list[int] = []
        again: list[int] = []
        with pin({program: 0} | dict.fromkeys(others, cores - 1)):
            for _ in range(TASKS * rounds):
                timed = [
                    (ours, partial(_ours, workers)),
                    (theirs, partial(_theirs, module, (in_queue, out_queue))),
                    (again, partial(_theirs, module, (in_queue, out_queue))),
                ]
                for times, each in shuffle(timed, len(timed)):
                    times.append(each())
    mine, peer = statistics.median(ours), statistics.median(theirs)
    ratios = [statistics.median(again[i::20]) / statistics.median(theirs[i::20]) for i in range(20)]
    what = f"submit to the start of an empty task, {'one core' if cores == 1 else 'two cores'}"
    same = control("fairscale / fairscale", ratios)
    return Row(f"submit-{cores}", what, "ns", mine, peer, "fairscale", "x", mine / peer, 1.0, *same)


# ---- processes


class Pause(torch.autograd.Function):
    """Identity that waits, forward and backward, as a host waits for its device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE)
        return gradients[0]


class Pausing(nn.Module):
    """Stage whose cells take 10 ms and no core."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Pause.apply(x * self.scale)  # type: ignore[no-untyped-call]
        return result


def computing() -> nn.Sequential:
    """Return a stage whose cells take some milliseconds of a core."""
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(512, 512, device="cpu"), nn.Tanh())])


def steps_of_ranks(make: Callable[[], nn.Module], rounds: int) -> list[list[float]]:
    """Return the milliseconds of steps of 1F1B: ours, and twice those of torch.distributed.pipelining, in turn."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = (torch.randn(16 * RANK_MICROBATCHES, 512, device="cpu") for _ in range(2))
    ours = Pipeline(
        [make() for _ in range(size)],
        "cpu",
        microbatches=RANK_MICROBATCHES,
        loss=nn.functional.mse_loss,
        group=dist.group.WORLD,
    )
    stage = PipelineStage(make(), rank, size, torch.device("cpu"), group=dist.group.WORLD)
    theirs = Schedule1F1B(stage, RANK_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    given: dict[str, Any] = {"target": y} if rank == size - 1 else {}
    steps = (partial(ours.step, x, y), *[partial(theirs.step, *[x][: rank == 0], **given)] * 2)
    took: list[list[float]] = [[] for _ in steps]
    for _ in range(5 * rounds):
        for times, step in zip(took, steps, strict=True):
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            times.append((time.perf_counter() - began) * 1e3)
    ours.close()
    return [times[2:] for times in took]


def ranks(make: Callable[[], nn.Module], size: int, rounds: int) -> Row:
    """Measure a step of 1F1B over processes, beside torch's with the same table over Gloo."""
    ours, theirs, again = on_ranks(partial(steps_of_ranks, make), rounds, size=size)
    mine, peer = statistics.median(ours), statistics.median(theirs)
    kind, predicted = "that compute", ""
    if make is Pausing:
        table = Pipeline([nn.Identity() for _ in range(size)], microbatches=RANK_MICROBATCHES).schedule
        kind, predicted = "of 10 ms", f", predicted {table.check(Costs(PAUSE, PAUSE)).seconds * 1e3:.0f}"
    what = f"step of 1f1b, {size} processes, {RANK_MICROBATCHES} micro-batches, cells {kind}{predicted}"
    same = control("torch / torch", [b / a for a, b in zip(theirs, again, strict=True)])
    return Row("ranks", what, "ms", mine, peer, "torch.distributed.pipelining", "x", mine / peer, 1.0, *same)


TABLES = ("gpipe", "1f1b", "interleaved_1f1b", "zb1p")
ROWS: dict[str, Callable[[int], Row]] = {
    f"{table}-{devices}-{'equal' if is_equal else 'unequal'}": partial(step_time, table, devices, is_equal)
    for devices in (2, 4, 8)
    for table in TABLES
    for is_equal in (True, False)
}

SUBMIT = {"submit-1": partial(submit, 1), "submit-2": partial(submit, 2)}

RANKS = {
    "ranks-compute-2": partial(ranks, computing, 2),
    "ranks-pause-2": partial(ranks, Pausing, 2),
    "ranks-pause-4": partial(ranks, Pausing, 4),
}

SUITE = Suite("pipeline", "Steps of a pipeline", ROWS | SUBMIT | RANKS, rounds=5, prepare=sim.prepare)
