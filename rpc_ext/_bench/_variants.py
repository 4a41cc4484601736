"""Processes that are measured by turns: one for each rank of a variant, which run only while it is their turn.

TensorPipe polls shared memory for messages without a pause, so those whose turn it is not are stopped (SIGSTOP).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import rpc

__all__ = ["Measure", "Variant", "VariantProcesses", "bare_worker", "groups"]

_PR_SET_PDEATHSIG = 1

Measure = Callable[[Any], float]  # takes what a variant makes of a process; what it returns is sent


class Variant(Protocol):
    """Context of a process that is measured; can be pickled."""

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    def __call__(self, rank: int, folder: Path) -> AbstractContextManager[Any]:
        """Enter the context on a rank; the folder is the variant's own."""
        ...


@contextmanager
def bare_worker(rank: int, folder: Path, transports: list[str] | None = None) -> Iterator[Callable[..., Any]]:
    """Run worker0 or worker1 of torch.distributed.rpc itself; yield its rpc_async."""
    bare: Any = rpc  # has few types
    options = bare.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", _transports=transports)
    bare.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    yield bare.rpc_async
    bare.shutdown()


def _be(variant: Variant, rank: int, folder: Path, requests: Connection) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))  # a stopped process sees no end of its pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that measures
    torch.set_num_threads(1)
    with variant(rank, folder) as thing:
        gc.collect()
        gc.freeze()  # keeps the collector from scanning torch's own objects in the middle of a round
        requests.send(None)
        while (measure := requests.recv()) is not None:
            requests.send(measure(thing))


def _processor_time(_: Any) -> float:
    return time.process_time_ns()


class VariantProcesses:
    """The processes of a variant. Rank 0 is measured."""

    def __init__(self, folder: Path, variant: Variant) -> None:
        spawning = multiprocessing.get_context("spawn")
        folder.mkdir()
        self.cpu: list[float] = []
        """nanoseconds of processor time that each turn has cost, of all processes"""
        self._ends, self._processes = [], []
        for rank in range(variant.ranks):
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=_be, args=(variant, rank, folder, theirs))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        for end in self._ends:
            end.recv()
        self._signal(signal.SIGSTOP)

    def _signal(self, what: signal.Signals) -> None:
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, what)

    def _ask_all(self, measure: Measure) -> list[float]:
        for end in self._ends:
            end.send(measure)
        return [end.recv() for end in self._ends]

    def time(self, measure: Measure) -> float:
        """Let rank 0 measure."""
        self._signal(signal.SIGCONT)
        began = sum(self._ask_all(_processor_time))
        self._ends[0].send(measure)
        took: float = self._ends[0].recv()
        self.cpu.append(sum(self._ask_all(_processor_time)) - began)
        self._signal(signal.SIGSTOP)
        return took

    def end(self) -> None:
        """End the processes, also those that are dead or stopped."""
        for process, end in zip(self._processes, self._ends, strict=True):
            with contextlib.suppress(OSError):
                os.kill(process.pid or 0, signal.SIGCONT)
                end.send(None)
        deadline = time.monotonic() + 20
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()


class Groups:
    """Groups of processes, started when they are first needed."""

    def __init__(self) -> None:
        where = os.environ.get("CUDAFUTURE_BENCH_DIR", ".")
        self._folder = tempfile.TemporaryDirectory(dir=where, prefix="pairs-")
        self._made: dict[str, VariantProcesses] = {}
        atexit.register(self._end)

    def of(self, variant: Variant) -> VariantProcesses:
        if variant.name not in self._made:
            self._made[variant.name] = VariantProcesses(Path(self._folder.name).absolute() / variant.name, variant)
        return self._made[variant.name]

    def _end(self) -> None:
        for group in self._made.values():
            group.end()
        self._folder.cleanup()


@cache
def groups() -> Groups:
    """Return all groups of this program."""
    return Groups()
