"""What files that are futures cost beside fio, the disk's own limit: on one folder, every limit a row.

    python benchmarks/storage.py [--only NAME ...] [--rounds N] [--json [PATH]] [--check]

The folder is CUDAFUTURE_BENCH_DIR, or the current one; it needs 3 GiB and a file system with O_DIRECT. fio (3.30 or
newer) runs with io_uring at the queue depth and block size that are best there, which is tried out first, on a file
that was written before, as ours is. Rounds alternate; fio's second run in each is the control.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from _rows import Row, by_turns, control, run
from cudafuture import wait_all
from cudafuture.storage import File

now = time.perf_counter_ns
MIB = 1 << 20
SHAPES = {"8x128MiB": (8, 128 * MIB), "512x1MiB": (512, MIB)}
PAGE = 4096
LATENCIES = 500  # reads of one page, one after the other


@cache
def folder() -> Path:
    """Return a folder for the files, which is gone at the end."""
    made = tempfile.TemporaryDirectory(dir=os.environ.get("CUDAFUTURE_BENCH_DIR", "."))
    atexit.register(made.cleanup)
    return Path(made.name)


# ---- fio


def fio(direction: str, size: int, block: int, depth: int, engine: str = "io_uring") -> float:
    """Return the nanoseconds that fio takes to read or write so many bytes."""
    command = [
        "fio", "--name=peer", f"--filename={folder() / 'fio'}", f"--rw={direction}", f"--size={size}", f"--bs={block}",
        f"--iodepth={depth}", f"--ioengine={engine}", "--direct=1", "--output-format=json", "--overwrite=1",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout)["jobs"][0]["read" if "read" in direction else "write"]
    return float(job["io_bytes"] / job["bw_bytes"] * 1e9)


@cache
def best(direction: str, size: int) -> tuple[int, int]:
    """Return the block size and queue depth with which fio is fastest here."""
    fio("write", size, MIB, 8)  # the file has its blocks
    choices = [(block, depth) for block in (MIB // 4, MIB // 2, MIB) for depth in (4, 16, 64)]
    took = {choice: min(fio(direction, size, *choice) for _ in range(2)) for choice in choices}
    return min(took, key=lambda choice: took[choice])


def fio_latency() -> float:
    """Return the nanoseconds of one read of a page, one at a time."""
    command = [
        "fio", "--name=peer", f"--filename={folder() / 'fio'}", "--rw=randread", f"--size={64 * MIB}", "--bs=4k",
        f"--number_ios={LATENCIES}", "--ioengine=psync", "--direct=1", "--output-format=json", "--overwrite=1",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["lat_ns"]["mean"])


# ---- ours


@cache
def tensors(count: int, size: int) -> list[torch.Tensor]:
    return [torch.full((size,), i % 251, dtype=torch.uint8) for i in range(count)]


@cache
def file() -> File:
    made = File(folder() / "ours", "w+", direct=True)
    made.allocate(1024 * MIB)
    made.write(torch.zeros(1024 * MIB, dtype=torch.uint8)).wait()
    return made


def transfer(direction: str, count: int, size: int) -> float:
    """Return the nanoseconds that all tensors take."""
    use = file().read if direction == "read" else file().write
    given = tensors(count, size)
    start = now()
    wait_all([use(tensor, i * size) for i, tensor in enumerate(given)])
    return now() - start


def latency() -> float:
    """Return the nanoseconds of one read of a page, one at a time."""
    page = torch.zeros(PAGE, dtype=torch.uint8)
    took = []
    for i in range(LATENCIES):
        start = now()
        file().read(page, (i * 7919 % (64 * MIB // PAGE)) * PAGE).wait()
        took.append(now() - start)
    return statistics.mean(took)


# ---- rows


def throughput(direction: str, name: str, rounds: int) -> Row:
    count, size = SHAPES[name]
    block, depth = best(direction, count * size)
    peer = partial(fio, direction, count * size, block, depth)
    ours, theirs, again = by_turns(rounds, partial(transfer, direction, count, size), peer, peer)
    us, them = statistics.median(ours) / 1e6, statistics.median(theirs) / 1e6
    same = [a / b for a, b in zip(again, theirs, strict=True)]
    what = f"{direction} {name}"
    with_best = f"fio {block >> 10}K x{depth}"
    controlled = control("fio / fio", same)
    return Row(f"{direction}-{name}", what, "ms", us, them, with_best, "x", us / them, 1 / 0.97, *controlled)


def read_latency(rounds: int) -> Row:
    best("read", 1024 * MIB)  # there is a file
    ours, theirs, again = by_turns(rounds, latency, fio_latency, fio_latency)
    us, them = statistics.median(ours), statistics.median(theirs)
    same = [a - b for a, b in zip(again, theirs, strict=True)]
    controlled = control("fio - fio", same)
    limit = 1.15 * them + 10_000
    return Row("latency", "read of one page", "ns", us, them, "fio psync", "ns", us, limit, *controlled)


LIMITS: dict[str, Callable[[int], Row]] = {
    **{
        f"{direction}-{name}": partial(throughput, direction, name)
        for name in SHAPES
        for direction in ("write", "read")
    },
    "latency": read_latency,
}


if __name__ == "__main__":
    if shutil.which("fio") is None:
        sys.exit("the peer is fio, which is not installed: apt-get install fio")
    sys.exit(run("storage", "files that are futures beside fio, O_DIRECT", LIMITS, rounds=9))
