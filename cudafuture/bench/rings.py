"""Arrangements of rings and threads in an engine, compared by fio: one ring and one thread that submits win.

    cudafuture bench rings [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

fio (3.30 or newer) stands for what could be built: it does nothing but ask the kernel. "One ring" is a thread with 32
blocks in flight; "four rings" are four threads with eight each. The limits say when one is enough: when it moves at
least 0.95 times as much, and takes no more processor time; and when files that are registered with the ring are hardly
faster than files that are not. The folder is CUDAFUTURE_BENCH_DIR, or the current one, and has to have O_DIRECT.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cudafuture.bench._rows import Row, Suite, by_turns, control, disk_folder
from cudafuture.bench._storage_peers import MIB, fio_job

__all__ = ["SUITE"]

SIZE = 1024 * MIB
SECONDS = 2
ONE = ("--numjobs=1", "--iodepth=32")
FOUR = ("--numjobs=4", "--iodepth=8", "--group_reporting", "--thread")
REGISTERED = (*ONE, "--registerfiles=1", "--fixedbufs=1")
BLOCKS = {"512KiB": "512k", "4KiB": "4k"}


def job(file: Path, direction: str, block: str, *options: str) -> dict[str, Any]:
    """Run fio at random places of the file, which is laid out."""
    timed = (f"--runtime={SECONDS}", "--time_based", f"--size={SIZE}", f"--bs={block}", "--ioengine=io_uring")
    return fio_job(file, direction, *timed, *options)


def nanoseconds_per_byte(file: Path, direction: str, block: str, options: tuple[str, ...]) -> float:
    return 1e9 / float(job(file, direction, block, *options)["bw_bytes"])


def compare(
    name: str,
    direction: str,
    block: str,
    ours: tuple[str, ...],
    peer: tuple[str, ...],
    words: str,
    limit: float,
    n: int,
) -> Row:
    """Compare two arrangements by the time that they take for a byte; ours runs twice, which is the control."""
    with disk_folder() as folder:
        file = folder / "file"
        fio_job(file, "write", f"--size={SIZE}", "--bs=1m", "--ioengine=io_uring", "--iodepth=8")
        timed = [partial(nanoseconds_per_byte, file, direction, block, o) for o in (ours, peer, ours)]
        first, other, again = by_turns(n, *timed)
    ratios = [a / b for a, b in zip(first, other, strict=True)]
    error, words_of_control = control("the same again", [a / b for a, b in zip(first, again, strict=True)])
    return Row(
        name=name,
        what=f"{words}, {direction} of {block}",
        unit="MB/s",
        ours=1e3 / statistics.median(first),
        peer=1e3 / statistics.median(other),
        peer_name=" ".join(peer[:2]),
        measure="x",
        measured=statistics.median(ratios),
        limit=limit,
        error=error,
        control=words_of_control,
    )


def rings(direction: str, size: str) -> Callable[[int], Row]:
    name = f"rings-{direction}-{size}"
    return lambda n: compare(name, direction, BLOCKS[size], ONE, FOUR, "one ring", 1 / 0.95, n)


def beside_unregistered(n: int) -> Row:
    return compare(
        "registered", "randread", "4k", ONE, REGISTERED, "files and buffers that are not registered", 1.05, n
    )


LIMITS = {
    **{f"{d}-{size}": rings(d, size) for d in ("randread", "randwrite") for size in BLOCKS},
    "registered": beside_unregistered,
}
SUITE = Suite("rings", "One ring, one thread", LIMITS, rounds=5)
