"""Benchmark of stores on disk beside the disk's own limit and beside their peers; every limit a row.

    cudafuture bench storage [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

The folder is CUDAFUTURE_BENCH_DIR, or the current one; it needs 12 GiB and a file system with O_DIRECT. Peers that are
not installed are skipped; docs/benchmarks.md says how to install them.

All contenders of a shape move the same tensors, by turns, and overwrite their own files. Ours does it with a call for
each tensor ("each") and with one for all of them ("all"); the better one counts. fio (3.30 or newer) runs with io_uring
at the block size and queue depth that are best here, which is tried out first; its second run in each round is the
control; "huge" is fio with huge pages. DeepSpeed, too, runs with what is best of a few (queue depth / threads).

Tensors are where torch puts them, which is not where a disk can fetch them: past the page cache ours has to copy, but
not those of io.empty(). The memory of DeepSpeed and NIXL is aligned to pages, as they want it; "aligned" is ours with
DeepSpeed's. Processor time is compared for that memory, which needs no copy; "copied" and "summed" are ours for
torch's, without and with checksums. How fast a disk is depends on how its memory lies: scattered pages are slower than
huge ones. Reads through the page cache find pages that it still has; where TensorNVMe is not installed, the peer is a
plain pool of threads.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from cudafuture.bench._rows import Row, Suite, Timed, by_turns, control, disk_folder
from cudafuture.bench._storage_peers import (
    MIB,
    PAGE,
    SHAPES,
    Contender,
    DeepSpeed,
    FileThreads,
    Fio,
    Nixl,
    TensorNVMe,
    TensorSet,
    Turn,
    fio_job,
    missing,
    need,
    need_fio,
    now,
)
from cudafuture.combine import wait_all
from cudafuture.io import default_engine, empty
from cudafuture.store import DiskStore

__all__ = ["SUITE"]

DIRECTIONS = ("write", "read")
FIO = {"8x128MiB": 0.97, "512x1MiB": 0.97, "4096x64KiB": 0.95, "65536x4KiB": 0.5}  # so much of fio's speed at least
EMPTY = {"8x128MiB": 0.97}  # the same for tensors from io.empty()
FIO_CHECKSUM = {"8x128MiB": 0.93, "512x1MiB": 0.93}
DEEPSPEED = {"4096x64KiB": 8.0, "65536x4KiB": 8.0}
LATENCIES = 2000  # reads of one page, one after the other
SPARE = 64 * MIB  # that the library may take beside the blocks that are with the kernel


class OfStore(Contender):
    """A store, with one call for all tensors or one for each."""

    def __init__(self, store: DiskStore, shape: TensorSet, tensors: Sequence[torch.Tensor], *, at_once: bool) -> None:
        super().__init__(shape, tensors)
        self.store, self.at_once = store, at_once
        self.label = "ours, all at once" if at_once else "ours, one by one"
        self.named_tensors = {f"tensor {i}": tensor for i, tensor in enumerate(tensors)}
        keys = list(self.named_tensors)
        self.keys = [keys[i] for i in self.order]
        self.outs = [tensors[i] for i in self.order]

    def write(self) -> None:
        if self.at_once:
            self.store.writev(self.named_tensors).wait()
        else:
            wait_all([self.store.write(key, tensor) for key, tensor in self.named_tensors.items()])

    def read(self) -> None:
        if self.at_once:
            self.store.readv(self.keys, self.outs).wait()
        else:
            wait_all([self.store.read(key, out) for key, out in zip(self.keys, self.outs, strict=True)])


def pair(where: Path, shape: TensorSet, stack: ExitStack, tensors: Sequence[torch.Tensor], **how: Any) -> list[OfStore]:
    """Return both ways of using one store."""
    store = stack.enter_context(DiskStore(where, **how))
    return [OfStore(store, shape, tensors, at_once=at_once) for at_once in (False, True)]


# ---- measuring


@dataclass(frozen=True)
class Took:
    """Medians of a contender in one direction, in milliseconds for all tensors, and every round's."""

    wall: float
    cpu: float
    rounds: list[float]
    label: str


def race(contenders: Mapping[str, Contender], shape: TensorSet, rounds: int, where: Path | None) -> dict[str, Took]:
    """Let everybody write by turns, then read by turns; fio, twice, where there is a file for it."""
    for contender in contenders.values():
        contender.prove()
    took = {}
    for direction in DIRECTIONS:
        turns = [Turn(contender, direction) for contender in contenders.values()]
        fio = None if where is None else fio_for(where, direction, shape)
        jobs: dict[str, Timed] = {} if fio is None else {"fio": fio, "fio again": fio, "fio huge": fio.with_huge_pages}
        figures = by_turns(rounds, *turns, *jobs.values())
        for name, turn, walls in zip(contenders, turns, figures[: len(turns)], strict=True):
            label, cpu = turn.contender.label_for(direction), statistics.median(turn.cpu[1:])
            took[f"{direction} {name}"] = Took(statistics.median(walls) / 1e6, cpu / 1e6, walls, label)
        for name, walls in zip(jobs, figures[len(turns) :], strict=True):
            took[f"{direction} {name}"] = Took(statistics.median(walls) / 1e6, 0.0, walls, fio.label if fio else "")
    return took


def fio_for(where: Path, direction: str, shape: TensorSet) -> Fio:
    """Return fio's job for a shape.

    Small tensors are packed, so fio writes large blocks; they are read wherever they lie. Tensors of a page are
    compared with the disk's rate at 1 MiB.
    """
    if shape.size >= MIB:
        return Fio(where, direction, shape)
    if shape.size == PAGE:
        return Fio(where, direction, shape, blocks=(MIB,))
    if direction == "write":
        return Fio(where, direction, shape, blocks=(MIB,), depths=(4, 8, 16, 32, 64))
    return Fio(where, "randread", shape, blocks=(shape.size,), depths=(8, 16, 32, 64, 128))


@cache
def past_the_cache(name: str, rounds: int) -> dict[str, Took]:
    """Let all meet that bypass the page cache."""
    need_fio()
    shape = SHAPES[name]
    with disk_folder() as place, ExitStack() as stack:
        peers: dict[str, Contender] = {}
        for peer in (DeepSpeed, Nixl):
            if not missing(peer):
                peers[peer.label] = peer(place / peer.label, shape)
                stack.callback(peers[peer.label].close)
        tensors = shape.tensors()
        aligned = peers[DeepSpeed.label].tensors if DeepSpeed.label in peers else shape.tensors(align=PAGE)
        plain = pair(place / "plain", shape, stack, tensors, direct=True, checksum=False)
        summed = pair(place / "summed", shape, stack, tensors, direct=True)
        fetched = pair(place / "aligned", shape, stack, aligned, direct=True, checksum=False)
        names = [f"{kind} {how}" for kind in ("plain", "summed", "aligned") for how in ("each", "all")]
        contenders: dict[str, Contender] = dict(zip(names, [*plain, *summed, *fetched], strict=True))
        if name in EMPTY:
            made = [empty(tensor.shape, tensor.dtype).copy_(tensor) for tensor in tensors]
            both = pair(place / "empty", shape, stack, made, direct=True, checksum=False)
            contenders |= zip(("empty each", "empty all"), both, strict=True)
        return race(contenders | peers, shape, rounds, place / "fio" if name in FIO else None)


@cache
def through_the_cache(name: str, rounds: int) -> dict[str, Took]:
    """Let all meet that use the page cache."""
    shape = SHAPES[name]
    with disk_folder() as place, ExitStack() as stack:
        how = {"direct": False, "checksum": False}
        contenders: dict[str, Contender] = {}
        contenders |= zip(("each", "all"), pair(place / "ours", shape, stack, shape.tensors(), **how), strict=True)
        for peer in (TensorNVMe, FileThreads):
            if not missing(peer):
                contenders[peer.label] = peer(place / peer.label, shape)
                stack.callback(contenders[peer.label].close)
        return race(contenders, shape, rounds, None)


# ---- rows


def better(took: Mapping[str, Took], *names: str) -> Took:
    return min((took[name] for name in names), key=lambda one: one.wall)


def other_figures(took: Mapping[str, Took], **names: str) -> str:
    """Return the other figures, for the words of a row."""
    return ", ".join(f"{word} {took[name].wall:,.0f}" for word, name in names.items() if name in took)


def beside_fio(kind: str, least: float, direction: str, name: str, rounds: int) -> Row:
    took = past_the_cache(name, rounds)
    each, all_, fio = (f"{direction} {kind} each", f"{direction} {kind} all", took[f"{direction} fio"])
    us = better(took, each, all_)
    same = [a / b for a, b in zip(took[f"{direction} fio again"].rounds, fio.rounds, strict=True)]
    names = {"each": each, "all": all_, "aligned": f"{direction} aligned all", "NIXL": f"{direction} NIXL"}
    others = other_figures(took, **names, huge=f"{direction} fio huge")
    words = {"plain": ("", ""), "summed": ("-checksum", ", checksums"), "empty": ("-empty", ", io.empty()")}
    row, how = words[kind]
    what = f"{direction} {name}{how} ({others})"
    compared = (us.wall, fio.wall, fio.label, "x", us.wall / fio.wall, 1 / least)
    return Row(f"{direction}-{name}{row}", what, "ms", *compared, *control("fio / fio", same))


def beside_deepspeed(least: float, direction: str, name: str, rounds: int) -> Row:
    need(DeepSpeed)
    took = past_the_cache(name, rounds)
    each, all_, them = f"{direction} plain each", f"{direction} plain all", took[f"{direction} DeepSpeed"]
    us = better(took, each, all_)
    what = f"{direction} {name} ({other_figures(took, each=each, all=all_, NIXL=f'{direction} NIXL')})"
    compared = (us.wall, them.wall, them.label, "x", us.wall / them.wall, 1 / least)
    return Row(f"{direction}-{name}-deepspeed", what, "ms", *compared)


def processor(direction: str, name: str, rounds: int) -> Row:
    """Measure the processor time of all threads, in and out of the kernel, for a gibibyte."""
    need(DeepSpeed)
    took = past_the_cache(name, rounds)
    gibibytes = SHAPES[name].total / (1 << 30)
    us = {who: took[f"{direction} {who} all"].cpu / gibibytes for who in ("plain", "summed", "aligned")}
    them = took[f"{direction} DeepSpeed"]
    what = f"{direction} {name}, processor (copied {us['plain']:,.0f}, summed {us['summed']:,.0f})"
    ratio = us["aligned"] * gibibytes / them.cpu
    compared = (us["aligned"], them.cpu / gibibytes, them.label, "x", ratio, 1.0)
    return Row(f"cpu-{direction}-{name}", what, "ms/GiB", *compared)


def beside_threads(direction: str, name: str, rounds: int) -> Row:
    took = through_the_cache(name, rounds)
    each, all_ = f"{direction} each", f"{direction} all"
    threads = f"{direction} {FileThreads.label}"
    us, them = better(took, each, all_), took.get(f"{direction} {TensorNVMe.label}", took[threads])
    others = other_figures(took, each=each, all=all_, threads=threads)
    what = f"{direction} {name}, cached ({others})"
    return Row(f"cached-{direction}-{name}", what, "ms", us.wall, them.wall, them.label, "x", us.wall / them.wall, 1.0)


def read_latency(rounds: int) -> Row:
    """Measure from the call until the tensor is there, without other work; fio reads pages of an equal file."""
    need_fio()
    shape = TensorSet(16384, PAGE, 1)
    with disk_folder() as place, DiskStore(place / "ours", direct=True) as store:
        Fio(place / "fio", "write", shape, blocks=(MIB,), depths=(8,))
        ours = OfStore(store, shape, shape.tensors(), at_once=True)
        ours.prove()

        def each() -> float:
            took = []
            for key, out in zip(ours.keys[:LATENCIES], ours.outs, strict=False):
                start = now()
                store.read(key, out).wait()
                took.append(now() - start)
            return statistics.mean(took)

        def fio() -> float:
            options = (f"--size={shape.total}", f"--number_ios={LATENCIES}", "--bs=4k", "--ioengine=psync")
            return float(fio_job(place / "fio", "randread", *options)["lat_ns"]["mean"])

        figures, theirs, again = by_turns(rounds, each, fio, fio)
    us, them = statistics.median(figures), statistics.median(theirs)
    same = control("fio - fio", [a - b for a, b in zip(again, theirs, strict=True)])
    what = "read one tensor of 4 KiB, alone, and wait"
    return Row("latency", what, "ns", us, them, "fio psync", "ns", us, 1.2 * them, *same)


def urgent(rounds: int) -> Row:
    """Measure from the call until a tensor of 1 MiB is there, behind 1 GiB of queued writes, by priority."""
    shape = TensorSet(128, 8 * MIB, 1)
    out = torch.empty(MIB, dtype=torch.uint8)
    with disk_folder() as place, DiskStore(place / "ours", direct=True) as store:
        ours = OfStore(store, shape, shape.tensors(), at_once=False)
        ours.prove()
        store.write("wanted", torch.ones(MIB, dtype=torch.uint8)).wait()

        def read(priority: int) -> float:
            writes = [store.write(key, tensor) for key, tensor in ours.named_tensors.items()]
            start = now()
            store.read("wanted", out, priority=priority).wait()
            took = now() - start
            wait_all(writes)
            return took

        first, queued, again = by_turns(rounds, partial(read, -1), partial(read, 0), partial(read, 0))
    ns, others = statistics.median(first), statistics.median(queued)
    same = control("queued / queued", [a / b for a, b in zip(again, queued, strict=True)])
    what = "read 1 MiB behind 1 GiB of queued writes"
    return Row("urgent", what, "ms", ns / 1e6, others / 1e6, "priority 0", "x", ns / others, 0.1, *same)


def links(rounds: int) -> Row:
    """Compare 10,000 links with writing 10,000 tensors of 64 KiB, all in one call."""
    names = [f"step {i}" for i in range(10_000)]
    tensors = dict.fromkeys(names, torch.ones(64 * 1024, dtype=torch.uint8))
    best = {f"best {name}": name for name in names}
    with disk_folder() as place, DiskStore(place / "ours", direct=True) as store:
        store.writev(tensors).wait()

        def write() -> float:
            start = now()
            store.writev(tensors).wait()
            return now() - start

        def link() -> float:
            start = now()
            store.link(best).wait()
            return now() - start

        linked, written, again = by_turns(rounds, link, write, write)
    ns, others = statistics.median(linked), statistics.median(written)
    same = control("write / write", [a / b for a, b in zip(again, written, strict=True)])
    what = "link 10,000 keys to tensors of 64 KiB"
    return Row("link", what, "ms", ns / 1e6, others / 1e6, "writing them", "x", ns / others, 0.01, *same)


def atomic(rounds: int) -> Row:
    """Compare a durable write of 256 tensors of 64 KiB, all or none, with one of each by itself."""
    tensors = {str(i): torch.ones(64 * 1024, dtype=torch.uint8) for i in range(256)}
    with disk_folder() as place, DiskStore(place / "ours", direct=True, durable=True) as store:

        def write(is_atomic: bool) -> float:
            start = now()
            for _ in range(8):
                store.writev(tensors, atomic=is_atomic).wait()
            return now() - start

        write(True)
        together, each, again = by_turns(rounds, partial(write, True), partial(write, False), partial(write, False))
    ns, others = statistics.median(together), statistics.median(each)
    same = control("each / each", [a / b for a, b in zip(again, each, strict=True)])
    what = "8 durable calls of 256 x 64 KiB, atomic"
    return Row("atomic", what, "ms", ns / 1e6, others / 1e6, "not atomic", "x", ns / others, 1.1, *same)


def memory(name: str, _rounds: int) -> Row:
    """Measure the peak of the resident set over the tensors, in a process of its own."""
    with disk_folder() as place:
        command = [sys.executable, "-m", "cudafuture.bench._storage_memory", str(place / "ours"), name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    engine = default_engine()
    peak, allowed = int(done.stdout) / MIB, (engine.queue_depth * engine.block_size + SPARE) / MIB
    what = f"memory beside the tensors, {name}"
    return Row(f"memory-{name}", what, "MiB", peak, allowed, "allowed", "MiB", peak, allowed)


def limits() -> dict[str, Callable[[int], Row]]:
    rows: dict[str, Callable[[int], Row]] = {}
    for direction in DIRECTIONS:
        rows |= {f"{direction}-{name}": partial(beside_fio, "plain", at, direction, name) for name, at in FIO.items()}
        rows |= {f"{direction}-{n}-empty": partial(beside_fio, "empty", at, direction, n) for n, at in EMPTY.items()}
        for name, at in FIO_CHECKSUM.items():
            rows[f"{direction}-{name}-checksum"] = partial(beside_fio, "summed", at, direction, name)
        for name, at in DEEPSPEED.items():
            rows[f"{direction}-{name}-deepspeed"] = partial(beside_deepspeed, at, direction, name)
        rows |= {f"cpu-{direction}-{name}": partial(processor, direction, name) for name in SHAPES}
        rows |= {f"cached-{direction}-{name}": partial(beside_threads, direction, name) for name in SHAPES}
    return (
        rows
        | {"latency": read_latency, "urgent": urgent, "link": links, "atomic": atomic}
        | {f"memory-{name}": partial(memory, name) for name in SHAPES}
    )


SUITE = Suite("storage", "Writing tensors to a store and reading them, and the peers", limits(), rounds=5)
