"""Benchmark of stores on another worker, beside their parts and peers: two processes on loopback, each limit a row.

    cudafuture bench remote [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

The folder is CUDAFUTURE_BENCH_DIR, or the current one; it needs 3 GiB and a file system with O_DIRECT. Each
contender has processes of its own, which run by turns: ours; a local DiskStore; and bare torch.distributed.rpc, where
the callee drops the tensors that it gets, returns tensors that it keeps, or, as the peer for small tensors, writes and
reads each with DeepSpeed's aio_handle, or as a plain file where that is not installed. All overwrite their own files.

Large tensors cannot go faster than the disk nor than TensorPipe: the slower of the two is the peer. Processor time is
that of all processes of a variant, and compared with the sum of both. TensorPipe's shared memory is polled, so there it
is twice the wall time, whatever is done; by sockets it is what the work costs. "torch again" is the control.
"""

from __future__ import annotations

import importlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from cudafuture.bench import Row, Suite, by_turns, control
from cudafuture.combine import wait_all
from cudafuture.store import DiskStore
from rpc_ext._bench._variants import Measure, Variant, bare_worker, groups
from rpc_ext.calls import rpc_sync
from rpc_ext.session import init_rpc
from rpc_ext.store import RemoteStore, serve_store

__all__ = ["SUITE"]

now = time.perf_counter_ns
OTHER = "worker1"
MIB = 1 << 20
GIB = 1 << 30
PIECE = 16 * MIB
SMALL = 64 << 10
SMALL_COUNT = 1024
PAGE = 4096
LATENCIES = 300  # one after the other


# ---- tensors, of a process that measures


@cache
def tensors(count: int, size: int) -> list[torch.Tensor]:
    """Return the tensors that are written, and filled again by reads."""
    return [torch.full((size,), i % 251 + 1, dtype=torch.uint8) for i in range(count)]


def prove(held: list[torch.Tensor]) -> None:
    """Check that reads have returned the written tensors."""
    for i, tensor in enumerate(held):
        if not int(tensor[0]) == int(tensor[-1]) == i % 251 + 1:
            raise RuntimeError(f"tensor {i} was not read as it was written")


# ---- what is measured: nanoseconds


def write_store(store: Any, count: int, size: int) -> float:
    held = tensors(count, size)
    os.sync()  # no contender pays for the dirty pages of others
    start = now()
    wait_all([store.write(f"{size}/{i}", tensor) for i, tensor in enumerate(held)])
    return now() - start


def read_store(store: Any, count: int, size: int) -> float:
    held = tensors(count, size)
    os.sync()
    start = now()
    wait_all([store.read(f"{size}/{i}", tensor) for i, tensor in enumerate(held)])
    took = now() - start
    prove(held)
    return took


def write_store_at_once(store: Any, count: int, size: int) -> float:
    held = {f"{size}/{i}": tensor for i, tensor in enumerate(tensors(count, size))}
    os.sync()
    start = now()
    store.writev(held).wait()
    return now() - start


def read_store_at_once(store: Any, count: int, size: int) -> float:
    held = tensors(count, size)
    keys = [f"{size}/{i}" for i in range(count)]
    os.sync()
    start = now()
    store.readv(keys, held).wait()
    took = now() - start
    prove(held)
    return took


def read_page(store: Any) -> float:
    out = torch.zeros(PAGE, dtype=torch.uint8)
    store.write("page", out).wait()
    start = now()
    for _ in range(LATENCIES):
        store.read("page", out).wait()
    return (now() - start) / LATENCIES


def send(call: Callable[..., Any], fn: Callable[..., Any], count: int, size: int) -> float:
    held = tensors(count, size)
    os.sync()
    start = now()
    for future in [call(OTHER, fn, (i, tensor)) for i, tensor in enumerate(held)]:
        future.wait()
    return now() - start


def receive(call: Callable[..., Any], fn: Callable[..., Any], count: int, size: int) -> float:
    os.sync()
    start = now()
    got = [future.wait() for future in [call(OTHER, fn, (i, size)) for i in range(count)]]
    took = now() - start
    prove(got)
    return took


def call_empty(call: Callable[..., Any]) -> float:
    start = now()
    for _ in range(LATENCIES):
        call(OTHER, empty).wait()
    return (now() - start) / LATENCIES


# ---- what the callee of torch's does


def empty() -> None:
    pass


def drop(_i: int, _tensor: torch.Tensor) -> None:
    pass


@cache
def make_kept(i: int, size: int) -> torch.Tensor:
    return torch.full((size,), i % 251 + 1, dtype=torch.uint8)


FOLDER: list[Path] = []
HANDLES: dict[int, Any] = {}  # by thread: one handle is for one at a time; RPC's have no thread-local values of Python


@cache
def async_io() -> Any:
    """Return DeepSpeed's native part, compiled at first use; None where it is not installed."""
    try:
        return importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load(verbose=False)
    except Exception:
        return None


def handle() -> Any:
    me = threading.get_ident()
    if me not in HANDLES:
        HANDLES[me] = async_io().aio_handle(MIB, 8, False, True, 1)  # its own defaults
    return HANDLES[me]


def write_by_deepspeed(i: int, tensor: torch.Tensor) -> None:
    handle().sync_pwrite(tensor, str(FOLDER[0] / f"{i}.swp"), 0)


def read_by_deepspeed(i: int, size: int) -> torch.Tensor:
    tensor = torch.empty(size, dtype=torch.uint8)
    handle().sync_pread(tensor, str(FOLDER[0] / f"{i}.swp"), 0)
    return tensor


def write_file(i: int, tensor: torch.Tensor) -> None:
    (FOLDER[0] / f"{i}.swp").write_bytes(tensor.numpy().data)


def read_file(i: int, size: int) -> torch.Tensor:
    tensor = torch.empty(size, dtype=torch.uint8)
    with (FOLDER[0] / f"{i}.swp").open("rb", buffering=0) as file:
        file.readinto(tensor.numpy().data)
    return tensor


# ---- who is measured

SERVED = threading.Event()


def set_served() -> None:
    SERVED.set()


@dataclass(frozen=True)
class ServedStore:
    """A worker that serves its disk, and one that writes to it."""

    name: str = "ours"
    ranks: int = 2
    transports: tuple[str, ...] | None = None

    @contextmanager
    def __call__(self, rank: int, folder: Path) -> Iterator[RemoteStore | None]:
        where = f"file://{folder}/store"
        joined = init_rpc(rank=rank, world_size=2, init_method=where, transports=self.transports)
        with joined, ExitStack() as stack:
            if rank == 1:
                serve_store(folder / "served")
                rpc_sync("worker0", set_served)
                yield None
            else:
                SERVED.wait()
                yield stack.enter_context(RemoteStore(OTHER))


@dataclass(frozen=True)
class Local:
    """A store of this process."""

    name: str = "local"
    ranks: int = 1

    @contextmanager
    def __call__(self, rank: int, folder: Path) -> Iterator[DiskStore]:
        with DiskStore(folder / "local") as store:
            yield store


@dataclass(frozen=True)
class BareRpc:
    """Two workers of torch.distributed.rpc."""

    name: str = "torch"
    ranks: int = 2
    transports: tuple[str, ...] | None = None

    @contextmanager
    def __call__(self, rank: int, folder: Path) -> Iterator[Callable[..., Any]]:
        FOLDER.append(folder)
        if async_io() is not None:  # its first call must come from one thread: several would deadlock
            write_by_deepspeed(0, torch.zeros(PAGE, dtype=torch.uint8))
        with bare_worker(rank, folder, list(self.transports) if self.transports else None) as call:
            yield call


OURS, LOCAL, TORCH, TORCH_AGAIN = ServedStore(), Local(), BareRpc(), BareRpc("torch again")
POLLED = (OURS, TORCH, TORCH_AGAIN)
SOCKETS = (
    ServedStore("ours by sockets", transports=("uv",)),
    BareRpc("torch by sockets", transports=("uv",)),
    BareRpc("torch by sockets again", transports=("uv",)),
)


# ---- rows


@dataclass(frozen=True)
class Turns:
    """Nanoseconds that 1 GiB has taken in pieces in each round: ours, a local store, torch, and torch again."""

    wall: list[list[float]]
    cpu: list[list[float]]


def medians(times: list[list[float]]) -> Iterator[float]:
    """Return milliseconds."""
    return (statistics.median(each) / 1e6 for each in times)


@cache
def pieces(direction: str, rounds: int, who: tuple[ServedStore, BareRpc, BareRpc]) -> Turns:
    """Let all move a gibibyte in pieces."""
    ours, *others = who
    count = GIB // PIECE
    if direction == "write":
        store, bare = partial(write_store, count=count, size=PIECE), partial(send, fn=drop, count=count, size=PIECE)
    else:
        store, bare = (
            partial(read_store, count=count, size=PIECE),
            partial(receive, fn=make_kept, count=count, size=PIECE),
        )
        for variant in (ours, LOCAL):
            groups().of(variant).time(partial(write_store, count=count, size=PIECE))
    measures: dict[Variant, Measure] = {ours: store, LOCAL: store, **dict.fromkeys(others, bare)}
    here = [groups().of(variant) for variant in measures]
    for group in here:
        group.cpu.clear()
    walls = by_turns(rounds, *(partial(group.time, how) for group, how in zip(here, measures.values(), strict=True)))
    return Turns(walls, [group.cpu[1:] for group in here])


def wall(direction: str, rounds: int) -> Row:
    times = pieces(direction, rounds, POLLED).wall
    ours, local, bare, _ = medians(times)
    peer, name = max((local, "local DiskStore"), (bare, "TensorPipe"))
    same = [a / b for a, b in zip(times[3], times[2], strict=True)]
    what = f"{direction} 64 x 16 MiB (local {local:,.0f}, TensorPipe {bare:,.0f})"
    return Row(f"{direction}-1GiB", what, "ms", ours, peer, name, "x", ours / peer, 1 / 0.85, *control("torch", same))


def cpu(name: str, direction: str, who: tuple[ServedStore, BareRpc, BareRpc], rounds: int) -> Row:
    times = pieces(direction, rounds, who).cpu
    ours, local, bare, _ = medians(times)
    same = [a / b for a, b in zip(times[3], times[2], strict=True)]
    way = "polled" if who == POLLED else "by sockets"
    what = f"processor time of {direction} 1 GiB {way} (local {local:,.0f}, TensorPipe {bare:,.0f})"
    peer = local + bare
    return Row(name, what, "ms", ours, peer, "both parts", "x", ours / peer, 1.15, *control("torch", same))


def small(direction: str, rounds: int) -> Row:
    writes = direction == "write"
    if async_io() is None:
        peer, fns = "plain files", (write_file, read_file)
    else:
        peer, fns = "DeepSpeed", (write_by_deepspeed, read_by_deepspeed)
    each = partial(write_store if writes else read_store, count=SMALL_COUNT, size=SMALL)
    at_once = partial(write_store_at_once if writes else read_store_at_once, count=SMALL_COUNT, size=SMALL)
    there = partial(send, fn=fns[0], count=SMALL_COUNT, size=SMALL)
    bare = there if writes else partial(receive, fn=fns[1], count=SMALL_COUNT, size=SMALL)
    if not writes:
        groups().of(OURS).time(partial(write_store, count=SMALL_COUNT, size=SMALL))
        for variant in (TORCH, TORCH_AGAIN):
            groups().of(variant).time(there)
    turns = [partial(groups().of(OURS).time, measure) for measure in (each, at_once)]
    turns += [partial(groups().of(variant).time, bare) for variant in (TORCH, TORCH_AGAIN)]
    took = by_turns(rounds, *turns)
    same = [a / b for a, b in zip(took[3], took[2], strict=True)]
    one_by_one, together, them = (statistics.median(figures) / 1e3 for figures in took[:3])
    us = min(one_by_one, together)
    what = f"{direction} 1,024 x 64 KiB in flight (a call each {one_by_one:,.0f}, one call {together:,.0f})"
    return Row(
        f"{direction}-64KiB",
        what,
        "us",
        us,
        them,
        f"{peer}, a call each",
        "x",
        us / them,
        1 / 13 if writes else 1 / 8,
        *control(peer, same),
    )


def latency(rounds: int) -> Row:
    turns = [partial(groups().of(variant).time, read_page) for variant in (OURS, LOCAL)]
    turns += [partial(groups().of(variant).time, call_empty) for variant in (TORCH, TORCH_AGAIN)]
    remote, local, bare, again = by_turns(rounds, *turns)
    same = [a / b for a, b in zip(again, bare, strict=True)]
    added = statistics.median(remote) - statistics.median(local)
    peer = statistics.median(bare)
    what = f"4 KiB read, added to a local one of {statistics.median(local) / 1e3:,.0f} us"
    return Row("latency", what, "ns", added, peer, "an empty RPC", "x", added / peer, 0.6, *control("torch", same))


LIMITS: dict[str, Callable[[int], Row]] = {
    "write-1GiB": partial(wall, "write"),
    "read-1GiB": partial(wall, "read"),
    "write-cpu": partial(cpu, "write-cpu", "write", POLLED),
    "read-cpu": partial(cpu, "read-cpu", "read", POLLED),
    "write-cpu-sockets": partial(cpu, "write-cpu-sockets", "write", SOCKETS),
    "read-cpu-sockets": partial(cpu, "read-cpu-sockets", "read", SOCKETS),
    "write-64KiB": partial(small, "write"),
    "read-64KiB": partial(small, "read"),
    "latency": latency,
}

SUITE = Suite("remote", "Writing to another worker, two processes on loopback", LIMITS, rounds=7)
