"""Train with FSDP2 over the backend "cudafuture", and report the exposed communication of each bucket.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_unchanged.py [--prefetch] [--backend gloo]

The training, :func:`train`, is a plain FSDP2 program: it imports nothing of cudafuture. Only the name of the backend is
new. FSDP2 issues its collectives itself and keeps the Works to itself, so an observer, :class:`Observer`, takes the
times around the training:

    issue        a TorchDispatchMode sees every operation of the namespace c10d, with the Work that it returns
    completion   FutureWork.add_done_callback
    wait         a replacement of FutureWork.wait, while the observer is active

The exposed communication of a collective is the time in which the training is blocked in its wait. On the host, FSDP2
waits for each collective as soon as it has issued it, so all communication is exposed. With --prefetch, the training
calls FSDP2's ``unshard(async_op=True)`` for all layers before forward: their all_gathers then overlap with compute.
What is in flight and not exposed without --prefetch is the cost of the observer: it makes a future before FSDP2 waits,
and the callback that takes the time of completion runs on another thread.

At the end the program trains the same model over Gloo, and exits with an error if a parameter differs in one bit.
The observer is for tensors on the host: over NCCL, a Work completes when it is enqueued, and its wait() blocks nothing.
The idea: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023,
https://arxiv.org/abs/2304.11277.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from cudafuture import executors
from cudafuture.distributed import FutureWork


def train(mesh: DeviceMesh, args: argparse.Namespace) -> list[Tensor]:
    """Train with FSDP2, and return this rank's shards of the parameters."""
    torch.manual_seed(args.seed)
    blocks = [nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU()) for _ in range(args.layers)]
    model = nn.Sequential(*blocks, nn.Linear(args.width, 10))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.Generator().manual_seed(args.seed + dist.get_rank())
    for _ in range(args.steps):
        images = torch.randn(args.batch_size, args.width, generator=inputs)
        if args.prefetch:
            for layer in model:
                assert isinstance(layer, FSDPModule)
                layer.unshard(async_op=True)
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


@dataclass
class Collective:
    """Times of one collective, in seconds of time.perf_counter."""

    name: str
    nbytes: int  # of the output and the input
    issued: float
    completed: float = 0.0
    waited: float = 0.0  # duration


class Observer(TorchDispatchMode):
    """Records the collectives that a program issues over the backend "cudafuture" while this context is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: dict[tuple[str, int], Collective] = {}
        """By group and sequence number."""

    def __enter__(self) -> Observer:
        FutureWork.wait = self._timed(FutureWork.wait)  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        del FutureWork.wait  # the method of torch's class is visible again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record it if it returns a FutureWork."""
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        issued = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        work = dist.Work.unbox(result[-1] if isinstance(result, tuple | list) else result)
        if isinstance(work, FutureWork):
            self._record(work, sum(one.nbytes for one in args if isinstance(one, Tensor)), issued)
        return result

    def _record(self, work: FutureWork, nbytes: int, issued: float) -> None:
        def complete(_: object) -> None:
            collective.completed = time.perf_counter()

        collective = Collective(work.name, nbytes, issued)
        self.collectives[work.group_name, work.sequence] = collective
        work.add_done_callback(complete, executor=executors.inline)  # outside the order of the group's callbacks

    def _timed(self, wait: Callable[..., bool]) -> Callable[..., bool]:
        def timed_wait(work: FutureWork, *args: Any, **kwargs: Any) -> bool:
            start = time.perf_counter()
            try:
                return wait(work, *args, **kwargs)
            finally:
                collective = self.collectives.get((work.group_name, work.sequence))
                if collective is not None:
                    collective.waited += time.perf_counter() - start

        return timed_wait


@dataclass
class Bucket:
    """One collective of a step, as the mean over the steps."""

    name: str
    nbytes: int
    in_flight_ms: float
    exposed_ms: float


def by_bucket(collectives: list[Collective], steps: int) -> list[Bucket]:
    """Group collectives by their place in the step; every step must issue the same ones. The first step is left out.

    Raises:
        ValueError: the steps differ.
    """
    per_step, rest = divmod(len(collectives), steps)
    if rest:
        raise ValueError(f"{len(collectives)} collectives are no multiple of {steps} steps")
    buckets = []
    for place in range(per_step):
        same = collectives[place::per_step]
        if len({(one.name, one.nbytes) for one in same}) != 1:
            raise ValueError(f"collective {place} is not the same in all steps")
        in_flight = fmean(one.completed - one.issued for one in same[1:])
        exposed = fmean(one.waited for one in same[1:])
        buckets.append(Bucket(same[0].name, same[0].nbytes, in_flight * 1e3, exposed * 1e3))
    return buckets


@dataclass
class Results:
    """Report of the program."""

    backend: str
    buckets: list[Bucket]
    checks: dict[str, bool]

    def __str__(self) -> str:
        lines = [
            f"FSDP2 on {dist.get_world_size()} ranks, backend {self.backend}: times of rank 0, means over the steps"
        ]
        if self.buckets:
            in_flight = sum(one.in_flight_ms for one in self.buckets)
            exposed = sum(one.exposed_ms for one in self.buckets)
            lines += [
                f"{'collective':<24} {'bytes':>10} {'in flight, ms':>14} {'exposed, ms':>12}",
                *(
                    f"{one.name:<24} {one.nbytes:>10,} {one.in_flight_ms:>14.2f} {one.exposed_ms:>12.2f}"
                    for one in self.buckets
                ),
                f"{'sum':<35} {in_flight:>14.2f} {exposed:>12.2f}",
            ]
        lines += [f"{'passed' if passed else 'FAILED'}  {check}" for check, passed in self.checks.items()]
        return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Read the command line, and refuse to run alone."""
    parser = argparse.ArgumentParser(description="FSDP2 over the backend cudafuture.")
    parser.add_argument("--backend", choices=["cudafuture", "gloo"], default="cudafuture")
    parser.add_argument("--prefetch", action="store_true", help="unshard all layers ahead of forward")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=128, help="rows per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 examples/fsdp_unchanged.py")
    if args.steps < 2:
        parser.error("--steps is at least 2: the first step is left out of the report")
    return args


def main() -> int:
    """Train over the backend and over Gloo, compare and report; return the number of failed checks."""
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)  # the only change to the program
    with Observer() as observer:
        shards = train(DeviceMesh("cpu", list(range(dist.get_world_size()))), args)
    plain = dist.new_group(backend="gloo")
    reference = train(DeviceMesh.from_group(plain, "cpu"), args)
    collectives = list(observer.collectives.values())
    checks = {"same as over Gloo": all(map(torch.equal, shards, reference))}
    if args.backend == "cudafuture":
        checks["every collective has completed"] = all(one.completed for one in collectives)
    results = Results(args.backend, by_bucket(collectives, args.steps), checks)
    if dist.get_rank() == 0:
        print(results, flush=True)
        if args.json:
            args.json.write_text(json.dumps(asdict(results), indent=2) + "\n")
    dist.barrier()  # a rank that fails first must not end the others before their report
    dist.destroy_process_group()
    return list(results.checks.values()).count(False)


if __name__ == "__main__":
    sys.exit(main())
