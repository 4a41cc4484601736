"""Benchmark of a step with optimizer state on a disk, beside its own bounds and DeepSpeed's pipelined swapper.

    cudafuture bench swap [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

The folder is CUDAFUTURE_BENCH_DIR, or the current one; it needs 12 GiB and a file system with O_DIRECT. All contenders
update the same bfloat16 parameters with Adam, from float32 master weights: a step reads and writes three float32
tensors of each parameter. "bound" is the larger of the same updates in memory and the same reads and writes by our
store alone. A round runs each once, in a shuffled order. DeepSpeed is left out where it is not installed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cudafuture.bench._rows import Row, Skipped, Suite, by_turns, control, disk_folder
from cudafuture.bench._swap_peers import DeepSpeedSwapper, missing_deepspeed
from cudafuture.combine import wait_all
from cudafuture.future import CUDAFuture
from cudafuture.io import empty
from cudafuture.store import DiskStore
from cudafuture.swap import offload

__all__ = ["SUITE"]

now = time.perf_counter_ns
MIB = 1 << 20
ROUNDS = 5
WIDTH = 768


def gpt() -> list[int]:
    """Return the sizes of the parameters of a GPT of 124 million: 12 layers of width 768, 50,257 tokens."""
    layer = [3 * WIDTH * WIDTH, 3 * WIDTH, WIDTH * WIDTH, WIDTH, 4 * WIDTH * WIDTH, 4 * WIDTH, 4 * WIDTH * WIDTH]
    return [50_257 * WIDTH, 1024 * WIDTH, *(layer + [WIDTH] * 5) * 12, WIDTH, WIDTH]


SETS: dict[str, list[int]] = {"64x16MiB": [4 * MIB] * 64, "512x1MiB": [MIB // 4] * 512, "gpt": gpt()}
FASTER = {"64x16MiB": 1.5, "512x1MiB": 3.0, "gpt": 1.0}  # than DeepSpeed, at least


def timer(call: Callable[[], Any], clock: Callable[[], int] = now) -> Callable[[], float]:
    """Return a function that returns the nanoseconds of a call."""

    def measure() -> float:
        start = clock()
        call()
        return clock() - start

    return measure


class Updates:
    """The updates alone: each from its float32 state in memory, which all parameters of a size share."""

    def __init__(self, halves: list[torch.Tensor]) -> None:
        self.halves = halves
        self.masters = {half.numel(): torch.nn.Parameter(half.float().flatten()) for half in halves}
        self.optimizers = {size: torch.optim.Adam([m], foreach=False) for size, m in self.masters.items()}

    def step(self, gradients: list[torch.Tensor]) -> None:
        """Update all parameters."""
        for half, gradient in zip(self.halves, gradients, strict=True):
            master = self.masters[half.numel()]
            master.grad = gradient.float()
            self.optimizers[half.numel()].step()
            half.copy_(master.detach())


class Transfers:
    """The reads and writes alone: a float32 tensor of each name for each parameter, several parameters at a time."""

    AT_ONCE = 128 * MIB

    def __init__(self, store: DiskStore, sizes: list[int], names: str = "abc") -> None:
        self.store = store
        large = [size for size in sizes if 4 * size >= MIB]
        self.keys = [[f"{i}/{name}" for name in names] for i in range(len(large))]
        count = max(2, self.AT_ONCE // (4 * len(names) * max(large)))
        self.buffers = [[empty(max(large), torch.float32) for _ in names] for _ in range(count)]
        self.parts = [[t[:size] for t in self.buffers[i % count]] for i, size in enumerate(large)]
        for keys, parts in zip(self.keys, self.parts, strict=True):
            store.writev(dict(zip(keys, parts, strict=True))).wait()

    def write(self, keys: list[str], read: CUDAFuture[list[torch.Tensor]]) -> CUDAFuture[int]:
        """Write what was read."""
        return self.store.writev(dict(zip(keys, read.value(), strict=True)))

    def step(self) -> None:
        """Read and write the state of every parameter."""
        pending: deque[CUDAFuture[Any]] = deque()
        for keys, parts in zip(self.keys, self.parts, strict=True):
            if len(pending) == len(self.buffers):
                pending.popleft().wait()
            pending.append(self.store.readv(keys, parts).then_async(partial(self.write, keys)))
        wait_all(pending)


def prepare(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return parameters and gradients."""
    numbers = torch.Generator().manual_seed(0)
    halves = [torch.nn.Parameter(torch.randn(size, generator=numbers).bfloat16()) for size in SETS[name]]
    return list(halves), [torch.randn(half.shape, generator=numbers).bfloat16() for half in halves]


@contextmanager
def ours(name: str, place: Path, **options: Any) -> Iterator[Callable[[], Any]]:
    """Give a function that makes a step of an offloaded optimizer."""
    halves, gradients = prepare(name)
    optimizer = torch.optim.Adam(halves)
    with offload(optimizer, place, master_weights=True, **options) as offloaded:

        def step() -> None:
            for half, gradient in zip(halves, gradients, strict=True):
                half.grad = gradient
            offloaded.step()

        step()
        step()
        yield step


def beside_bound(name: str, rounds: int) -> Row:
    """Compare a step with the larger of its updates and its reads and writes."""
    with disk_folder() as place, ours(name, place / "ours") as step, DiskStore(place / "alone", direct=True) as store:
        halves, gradients = prepare(name)
        updates, transfers = Updates([half.detach() for half in halves]), Transfers(store, SETS[name])
        each = [
            timer(step),
            timer(partial(updates.step, gradients)),
            timer(transfers.step),
            timer(transfers.step),
        ]
        steps, computing, moving, again = by_turns(rounds, *each)
    taken, compute, io = map(statistics.median, (steps, computing, moving))
    bound, what = max((compute, "updates"), (io, "reads and writes"))
    same = control("transfers / transfers", [a / b for a, b in zip(again, moving, strict=True)])
    return Row(f"bound-{name}", f"step, {name}", "ms", taken / 1e6, bound / 1e6, what, "x", taken / bound, 1.1, *same)


def beside_deepspeed(name: str, rounds: int) -> Row:
    """Compare a step with DeepSpeed's."""
    if why := missing_deepspeed():
        raise Skipped(why)
    with ExitStack() as stack:
        place = stack.enter_context(disk_folder())
        step = stack.enter_context(ours(name, place / "ours"))
        halves, gradients = prepare(name)
        theirs = DeepSpeedSwapper(place / "deepspeed", [half.detach() for half in halves])
        peer = timer(partial(theirs.step, gradients))
        steps, others, again = by_turns(rounds, timer(step), peer, peer)
    taken, their = statistics.median(steps), statistics.median(others)
    same = control("DeepSpeed / DeepSpeed", [a / b for a, b in zip(again, others, strict=True)])
    what, limit = f"step, {name}", 1 / FASTER[name]
    return Row(f"deepspeed-{name}", what, "ms", taken / 1e6, their / 1e6, "DeepSpeed", "x", taken / their, limit, *same)


def saving(rounds: int) -> Row:
    """Compare a checkpoint with writing the state."""
    name = "64x16MiB"
    with disk_folder() as place, DiskStore(place / "store", durable=True) as store:
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SETS[name]]
        with offload(torch.optim.Adam(parameters), store) as optimizer:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            state = {f"copy {i}": empty(SETS[name][0], torch.float32).zero_() for i in range(2 * len(parameters))}

            def write() -> None:
                store.writev(state).wait()

            saved, written = by_turns(rounds, timer(partial(optimizer.save, "latest")), timer(write))
    taken, whole = statistics.median(saved), statistics.median(written)
    return Row("save", "save 2 GiB of state", "ms", taken / 1e6, whole / 1e6, "writing it", "x", taken / whole, 0.01)


def during_backward(rounds: int) -> Row:
    """Measure the part of a step in which a program waits for I/O, where updates run during backward.

    The batch is as large as it takes for forward and backward to last as long as the reads and writes.
    """
    layers, width = 24, 2048
    with disk_folder() as place, DiskStore(place / "alone", direct=True) as store:
        transfers = Transfers(store, [width * width] * layers, "ab")
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        inputs = torch.randn(64, width)

        def train() -> None:
            model(inputs).square().mean().backward()

        moving, computing = by_turns(3, timer(transfers.step), timer(train))
        longer = 1.2 * statistics.median(moving) / statistics.median(computing)
        inputs = torch.randn(max(64, int(64 * longer)), width)
        model.zero_grad()
        exposed: list[float] = []
        with offload(torch.optim.Adam(model.parameters()), place / "ours", when="backward") as optimizer:

            def step() -> None:
                start = now()
                train()
                optimizer.step()
                optimizer.zero_grad()
                exposed.append(1e9 * optimizer.statistics(last_step=True).exposed_io_seconds / (now() - start))

            step()
            steps, moving = by_turns(rounds, timer(step), timer(transfers.step))
        model.zero_grad()
        (computing,) = by_turns(rounds, timer(train))
    taken, io, compute = map(statistics.median, (steps, moving, computing))
    what = f'I/O exposed, when="backward" ({io / compute:.2f} of forward and backward)'
    measured = statistics.median(exposed[-rounds:])
    return Row("backward", what, "ms", measured * taken / 1e6, taken / 1e6, "the step", "x", measured, 0.05)


def small(place: str, rounds: int) -> Row:
    """Measure the processor time of all threads for a step of many small parameters, against the plain optimizer's."""
    rows: dict[str, tuple[str, dict[str, Any], float]] = {
        "memory": ("in memory", {}, 1.5),
        "disk": ("on disk", {"min_bytes": 0}, 3.0),
    }
    where, options, limit = rows[place]
    with ExitStack() as stack:
        steps: list[Callable[[], Any]] = []
        for plain in (False, True, True):
            parameters = [torch.nn.Parameter(torch.ones(1024)) for _ in range(20_000)]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, foreach=False)
            if not plain:
                optimizer = stack.enter_context(offload(optimizer, stack.enter_context(disk_folder()), **options))
            steps.append(timer(optimizer.step, time.process_time_ns))
        ours, peer, again = by_turns(rounds, *steps)
    taken, their = statistics.median(ours), statistics.median(peer)
    same = control("plain / plain", [a / b for a, b in zip(again, peer, strict=True)])
    what = f"processor time, 20,000 parameters of 4 KiB, state {where}"
    return Row(f"small-{place}", what, "ms", taken / 1e6, their / 1e6, "plain Adam", "x", taken / their, limit, *same)


def memory(rounds: int) -> Row:
    """Measure the memory that a step takes beside its buffers, for one parameter of 1 GiB."""
    buffers = 128 * MIB
    with disk_folder() as place:
        command = [sys.executable, "-m", "cudafuture.bench._swap_memory", str(place), str(buffers)]
        taken = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    beside = (taken - buffers) / MIB
    return Row("memory", "memory, 1 GiB parameter", "MiB", taken / MIB, buffers / MIB, "buffers", "MiB", beside, 64)


def limits() -> dict[str, Callable[[int], Row]]:
    """Return all rows."""
    smalls = {f"small-{place}": partial(small, place) for place in ("memory", "disk")}
    rows: dict[str, Callable[[int], Row]] = {f"bound-{name}": partial(beside_bound, name) for name in SETS}
    rows |= {f"deepspeed-{name}": partial(beside_deepspeed, name) for name in SETS}
    return rows | {"save": saving, "backward": during_backward, "memory": memory, **smalls}


SUITE = Suite("swap", "Steps of offloaded optimizers", limits(), rounds=ROUNDS)
