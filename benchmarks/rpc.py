"""What calls that return futures cost beside bare torch.distributed.rpc: two processes on loopback, every limit a row.

    python benchmarks/rpc.py [--only NAME ...] [--rounds N] [--json [PATH]] [--check]

A process has one RPC agent, so each variant has two processes of its own: ours without a secret, ours with one,
torch's, and torch's again as the control. Rounds alternate between them in a shuffled order; those whose turn it is not
are stopped (SIGSTOP): TensorPipe polls shared memory for messages without a pause.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import rpc

import rpc_ext
from _rows import Row, by_turns, control, run

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


def pipelined(call: Callable[..., Any], calls: int) -> float:
    start = now()
    for future in [call(CALLEE, empty) for _ in range(calls)]:
        future.wait()
    return (now() - start) / calls


def batched(call: Callable[..., Any], calls: int) -> float:
    if call is not rpc_ext.rpc_async:
        return pipelined(call, calls)
    start = now()
    with rpc_ext.batch(CALLEE):
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


def worker(rank: int, folder: str, variant: str, requests: Connection) -> None:
    torch.set_num_threads(1)
    where = f"file://{folder}/{variant}"
    call: Callable[..., Any]
    if variant.startswith("ours"):
        secret = SECRET if variant == "ours signed" else None
        rpc_ext.init_rpc(rank=rank, world_size=2, init_method=where, secret=secret)
        call, end = rpc_ext.rpc_async, rpc_ext.shutdown
    else:
        bare: Any = rpc
        options = bare.TensorPipeRpcBackendOptions(init_method=where)
        bare.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        call, end = bare.rpc_async, bare.shutdown
    call(f"worker{1 - rank}", empty).wait()
    gc.collect()
    gc.freeze()  # what torch has made at import is not to be looked through in the middle of a round
    requests.send(None)
    while (measure := requests.recv()) is not None:
        requests.send(measure(call))
    end()


class Pair:
    """A caller and a callee, which run only while it is their turn."""

    def __init__(self, folder: str, variant: str) -> None:
        spawning = multiprocessing.get_context("spawn")
        self.ends, self.processes = [], []
        for rank in range(2):
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=worker, args=(rank, folder, variant, theirs))
            process.start()
            self.ends.append(ours)
            self.processes.append(process)
        for end in self.ends:
            end.recv()
        self.send(signal.SIGSTOP)

    def send(self, what: signal.Signals) -> None:
        for process in self.processes:
            assert process.pid is not None
            os.kill(process.pid, what)

    def time(self, measure: Callable[[Any], float]) -> float:
        self.send(signal.SIGCONT)
        self.ends[0].send(measure)
        took: float = self.ends[0].recv()
        self.send(signal.SIGSTOP)
        return took

    def end(self) -> None:
        self.send(signal.SIGCONT)
        for end in self.ends:
            end.send(None)
        for process in self.processes:
            process.join(60)
            process.kill()


class Pairs:
    """Those that were needed so far."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.made: dict[str, Pair] = {}
        atexit.register(self.end)

    def of(self, variant: str) -> Pair:
        if variant not in self.made:
            self.made[variant] = Pair(self.folder.name, variant)
        return self.made[variant]

    def end(self) -> None:
        for pair in self.made.values():
            pair.end()
        self.folder.cleanup()


@cache
def pairs() -> Pairs:
    return Pairs()


def compare(name: str, what: str, measure: Callable[[Any], float], limit: float, ours: str, rounds: int) -> Row:
    took = by_turns(rounds, *(partial(pairs().of(variant).time, measure) for variant in (ours, "torch", "torch again")))
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
PIPELINED = "1,000 empty calls under way, for one", partial(pipelined, calls=1000)
BATCHED = "1,000 empty calls in a batch, for one", partial(batched, calls=1000)

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
}


if __name__ == "__main__":
    sys.exit(run("rpc", "RPC beside bare torch.distributed.rpc, two processes on loopback", LIMITS, rounds=25))
