"""Benchmark of calls that return futures, beside bare torch.distributed.rpc: two processes on loopback, limits as rows.

    cudafuture bench rpc [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

A process has one RPC agent, so each variant has two processes of its own: ours without a secret, ours with one, ours
with one whose seals cover the contents of tensors, torch's, and torch's again as the control. Rounds alternate between
them in a shuffled order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cudafuture.bench import Row, Suite, by_turns, control
from rpc_ext._batching import batch
from rpc_ext._bench._variants import bare_worker, groups
from rpc_ext.calls import rpc_async
from rpc_ext.session import init_rpc

__all__ = ["SUITE"]

now = time.perf_counter_ns
CALLEE = "worker1"
SECRET = "benchmarks need no secret, but one"


# ---- what is called


def empty() -> None:
    pass


def take(_tensor: torch.Tensor) -> None:
    pass


# ---- what is measured: nanoseconds for each call


def one_by_one(call: Callable[..., Any], calls: int) -> float:
    start = now()
    for _ in range(calls):
        call(CALLEE, empty).wait()
    return (now() - start) / calls


def pipeline_calls(call: Callable[..., Any], calls: int) -> float:
    start = now()
    for future in [call(CALLEE, empty) for _ in range(calls)]:
        future.wait()
    return (now() - start) / calls


def batch_calls(call: Callable[..., Any], calls: int) -> float:
    if call is not rpc_async:
        return pipeline_calls(call, calls)
    start = now()
    with batch(CALLEE):
        futures = [call(CALLEE, empty) for _ in range(calls)]
    for future in futures:
        future.wait()
    return (now() - start) / calls


def tensors(call: Callable[..., Any], calls: int, mebibytes: int) -> float:
    tensor = torch.ones(mebibytes << 18)
    start = now()
    for _ in range(calls):
        call(CALLEE, take, (tensor,)).wait()
    return (now() - start) / calls


# ---- processes


@dataclass(frozen=True)
class Calling:
    """Two workers: what is measured gets the function that calls the other."""

    name: str
    ranks: int = 2

    @contextmanager
    def __call__(self, rank: int, folder: Path) -> Iterator[Callable[..., Any]]:
        with our_worker(rank, folder, self.name) if self.name.startswith("ours") else bare_worker(rank, folder) as call:
            call(f"worker{1 - rank}", empty).wait()
            yield call


@contextmanager
def our_worker(rank: int, folder: Path, name: str) -> Iterator[Callable[..., Any]]:
    secret = None if name == "ours" else SECRET
    seal: Any = "contents" if name == "ours sealed" else "descriptions"
    with init_rpc(rank=rank, world_size=2, init_method=f"file://{folder}/store", secret=secret, seal=seal):
        yield rpc_async


def compare(name: str, what: str, measure: Callable[[Any], float], limit: float, ours: str, rounds: int) -> Row:
    variants = [Calling(name) for name in (ours, "torch", "torch again")]
    took = by_turns(rounds, *(partial(groups().of(variant).time, measure) for variant in variants))
    same = [a / b for a, b in zip(took[2], took[1], strict=True)]
    us, them = (statistics.median(figures) for figures in took[:2])
    return Row(name, what, "ns", us, them, "torch", "x", us / them, limit, *control("torch / torch", same))


def row(
    name: str, what: str, measure: Callable[[Any], float], limit: float, *, signed: bool = False
) -> Callable[[int], Row]:
    if signed:
        return partial(compare, f"{name}-signed", f"{what}, signed", measure, limit, "ours signed")
    return partial(compare, name, what, measure, limit, "ours")


EMPTY = "an empty call", partial(one_by_one, calls=200)
PIPELINED = "1,000 empty calls in flight, for one", partial(pipeline_calls, calls=1000)
BATCHED = "1,000 empty calls in a batch, for one", partial(batch_calls, calls=1000)

SIXTEEN = "a tensor of 16 MiB", partial(tensors, calls=5, mebibytes=16)

LIMITS: dict[str, Callable[[int], Row]] = {
    "empty": row("empty", *EMPTY, 1.05),
    "empty-signed": row("empty", *EMPTY, 1.15, signed=True),
    "pipelined": row("pipelined", *PIPELINED, 1.05),
    "pipelined-signed": row("pipelined", *PIPELINED, 1.15, signed=True),
    "batch": row("batch", *BATCHED, 1 / 5),
    **{
        f"{size}MiB": row(f"{size}MiB", f"a tensor of {size} MiB", partial(tensors, calls=n, mebibytes=size), 1 / 0.98)
        for size, n in ((1, 20), (16, 5), (128, 2))
    },
    "16MiB-signed": row("16MiB", *SIXTEEN, 1 / 0.96, signed=True),
    # At least 0.6 of torch's throughput: each end reads the tensor once more.
    "16MiB-contents": partial(
        compare, "16MiB-contents", f'{SIXTEEN[0]}, seal="contents"', SIXTEEN[1], 1 / 0.6, "ours sealed"
    ),
}

SUITE = Suite("rpc", "RPC beside bare torch.distributed.rpc, two processes on loopback", LIMITS, rounds=25)
