"""Train a small GPT in two processes, each with Adam's state on the disk of the other, with and without overlap.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt_remote.py

Both loops train the same model on the same text, and read and write the state by the same signed calls. The blocking
loop waits for each all_reduce, read and write. The overlapped loop reads ahead while forward and backward compute, and
updates and writes a bucket as soon as its gradients are reduced: see `_buckets.py` and `_remote_state.py`.

The loops take turns, a few steps each, so that whatever else the machine does meets both. The size of a batch is chosen
so that computing takes about as long as the state's way to the disk and back: overlap can hide no more than the lesser
of the two. The program prints the time of a step of each loop, the ratio with its spread over the rounds, and the
memory that the state does not take. If a machine shows no gain, it says so, and the reason.

It exits with an error unless both loops end with the same parameters and the same state on the disk, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from _buckets import Bucket, Overlap, blocking_step
from _remote_state import MIB, Disk, next_workers_disk, read_states, write_first
from cudafuture import trace, wait_all
from train_gpt_nvme import GPT, batches

LARGEST_BATCH = 32
Batch = tuple[Tensor, Tensor]


def make_buckets(model: GPT, loop: str) -> list[Bucket]:
    """Make a bucket of each block, in the order in which backward fills them; `loop` is in the keys of their states."""
    groups: list[dict[str, nn.Module]] = [
        {"head": model.head, "norm": model.norm},
        *({f"blocks.{index}": block} for index, block in reversed(list(enumerate(model.blocks)))),
        {"bytes": model.bytes, "positions": model.positions},
    ]
    return [
        Bucket(index, {f"{loop}.{name}": layer for name, layer in group.items()}, learning_rate=1e-3)
        for index, group in enumerate(groups)
    ]


@dataclass
class Loop:
    """One of the two ways to train, with a model of its own."""

    name: str
    model: GPT
    buckets: list[Bucket]
    step: Callable[[Callable[[], Tensor]], None]
    wait: Callable[[], None]
    seconds: list[float] = field(default_factory=list)
    """Of a step, one for each round."""
    busy: list[float] = field(default_factory=list)
    """Part of all cores that this process used, one for each round."""

    def run(self, some: Sequence[Batch]) -> None:
        """Train on batches, and note the time of a step."""
        dist.barrier()
        start, used = time.perf_counter(), processor_seconds()
        for number, (text, following) in enumerate(some):
            with trace.step(number):
                self.step(partial(loss_of, self.model, text, following))
                if number == len(some) - 1:
                    self.wait()
        dist.barrier()
        seconds = time.perf_counter() - start
        self.seconds.append(seconds / len(some))
        self.busy.append((processor_seconds() - used) / seconds / len(os.sched_getaffinity(0)))


def processor_seconds() -> float:
    """Return the processor time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def loss_of(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return functional.cross_entropy(model(text).flatten(0, 1), following.flatten())


def make_loops(args: argparse.Namespace, disk: Disk) -> dict[str, Loop]:
    """Make both loops, each with a model from the same seed, and write the states with which Adam begins."""

    def make(name: str) -> tuple[GPT, list[Bucket]]:
        torch.manual_seed(args.seed)
        model = GPT(args.width, args.layers, args.positions)
        return model, make_buckets(model, name)

    model, buckets = make("blocking")
    wait_all([write_first(disk.store, bucket) for bucket in buckets])
    blocking = Loop("blocking", model, buckets, partial(blocking_step, buckets, disk), lambda: None)
    model, buckets = make("overlapped")
    overlap = Overlap(buckets, disk, args.ahead)
    return {"blocking": blocking, "overlapped": Loop("overlapped", model, buckets, overlap.step, overlap.wait)}


def choose_batch(args: argparse.Namespace, loop: Loop) -> tuple[int, float, float]:
    """Return the number of texts for which computing takes as long as the state's way to the disk and back.

    Beside it the seconds of computing and of the state in a step. A blocking step takes its time for the state, and its
    time for each text: two sizes tell both.
    """
    seconds = []
    for size in (1, 4):
        for _ in range(2):  # the first one of a size allocates
            args.batch_size, args.steps = size, 1
            loop.run(list(batches(args)))
        seconds.append(loop.seconds[-1])
    loop.seconds.clear()
    loop.busy.clear()
    told = torch.tensor([max((seconds[1] - seconds[0]) / 3, 1e-4), seconds[0]], dtype=torch.float64)
    dist.broadcast(told, 0)
    each, first = told.tolist()
    state = max(first - each, 0.0)
    size = round(max(1.0, min(LARGEST_BATCH, state / each)))
    return size, size * each, state


def train(args: argparse.Namespace, disk: Disk) -> dict[str, Any]:
    """Train by turns, and return the figures and the checks of this rank."""
    loops = make_loops(args, disk)
    parts = None
    if args.batch_size is None:
        args.batch_size, *parts = choose_batch(args, loops["blocking"])
    dist.barrier()
    loops = make_loops(args, disk)  # the measurement trained one of them
    args.steps = args.rounds * args.round_steps
    every = list(batches(args))
    for number in range(args.rounds):
        some = every[number * args.round_steps : (number + 1) * args.round_steps]
        for loop in list(loops.values())[:: 1 if number % 2 else -1]:
            loop.run(some)
    same_model = all(map(torch.equal, *(loop.model.parameters() for loop in loops.values())))
    same_state = all(map(torch.equal, *(read_states(disk.store, loop.buckets) for loop in loops.values())))
    same = torch.tensor([same_model, same_state])
    dist.all_reduce(same, dist.ReduceOp.MIN)  # on every rank
    same_model, same_state = same.tolist()
    if args.trace:
        for name, loop in loops.items():
            with trace.record(args.trace / name):
                loop.run(every[:2])
    sizes = sorted((2 * bucket.values.nbytes for bucket in loops["overlapped"].buckets), reverse=True)
    return {
        "ranks": dist.get_world_size(),
        "batch": args.batch_size,
        "parts": parts,
        "parameters": sum(p.numel() for p in loops["overlapped"].model.parameters()),
        "seconds": {name: loop.seconds[: args.rounds] for name, loop in loops.items()},
        "busy": statistics.median(loops["blocking"].busy),
        "state_bytes": sum(sizes),
        "most_bytes": sum(sizes[: args.ahead]),
        "disk": disk.statistics(),
        "checks": {"same parameters as with blocking calls": same_model, "same state on the disk": same_state},
    }


def conclusion(results: dict[str, Any]) -> str:
    """Return the sentences about time and memory."""
    blocking, overlapped = (results["seconds"][name] for name in ("blocking", "overlapped"))
    ratios = [ours / theirs for ours, theirs in zip(overlapped, blocking, strict=True)]
    told = (
        f"a step takes {statistics.median(blocking) * 1e3:,.0f} ms with blocking calls, "
        f"{statistics.median(overlapped) * 1e3:,.0f} ms overlapped: {statistics.median(ratios):.2f} of the time "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds)"
    )
    if statistics.median(ratios) >= 1:
        told += f", so no gain on this machine: its cores were {results['busy'] * results['ranks']:.0%} busy"
        if results["parts"]:
            computing, state = results["parts"]
            told += (
                f" with blocking calls, where computing took {computing * 1e3:,.0f} ms of a step, and the state "
                f"{state * 1e3:,.0f} ms; overlap hides waits for the disk, and needs idle cores"
            )
    saved = 1 - results["most_bytes"] / results["state_bytes"]
    return (
        f"{told}; each rank reads at most {results['most_bytes'] / MIB:.0f} of the {results['state_bytes'] / MIB:.0f} "
        f"MiB of its state ahead, and {saved:.0%} of it is not in the memory of the training"
    )


def is_in_memory(folder: Path) -> bool:
    """Return True if a folder is in memory, as /tmp is on some systems."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    return bool(above) and max(above, key=lambda mount: len(mount[1]))[2] in ("ramfs", "tmpfs")


def arguments() -> argparse.Namespace:
    """Read the command line, and refuse to run alone."""
    parser = argparse.ArgumentParser(description="A small GPT with Adam's state on the disk of another worker.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--round-steps", type=int, default=3, help="steps of each loop in a round")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--batch-size", type=int, help="default: computing then takes as long as the disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ahead", type=int, default=2, help="buckets whose state may be in memory at a time")
    parser.add_argument("--folder", type=Path, help="on the disk that is served; default: where temporary files go")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="record two more steps of each loop there")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 examples/train_gpt_remote.py")
    return args


def main() -> int:
    """Train, check and report; return the number of failed checks."""
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("cudafuture")  # so that traces have the collectives of torch, too
    with next_workers_disk(args.folder) as disk:
        results = train(args, disk)
        dist.barrier()
    results["conclusion"] = conclusion(results)
    if dist.get_rank() == 0:
        print(f"{results['parameters']:,} parameters, batches of {results['batch']} texts on each rank")
        if is_in_memory(args.folder or Path(tempfile.gettempdir())):
            print("the folder is in memory, and not on a disk: name one with --folder")
        print(results["conclusion"])
        for check, passed in results["checks"].items():
            print(f"{'passed' if passed else 'FAILED'}  {check}")
        if args.json:
            args.json.write_text(json.dumps(results, indent=2) + "\n")
    dist.barrier()  # a rank that fails first must not end the others before their report
    dist.destroy_process_group()
    return list(results["checks"].values()).count(False)


if __name__ == "__main__":
    sys.exit(main())
