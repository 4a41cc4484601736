"""Delay of Ctrl-C in a main thread that waits: at most 100 ms, in every kind of wait.

    python benchmarks/interrupt.py [--count N] [--json [PATH]] [--check]

A child process waits for a future that is never completed. Once its main thread has released the GIL, which it does
only in the wait, this process sends SIGINT after a pause of 0 to 100 ms and notes the time; the child notes when it
catches KeyboardInterrupt. Both read CLOCK_MONOTONIC, which is one clock for all processes. The peers wait in the same
way; torch's own future ignores Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import rich.box
from rich.console import Console
from rich.progress import track
from rich.table import Table

LIMIT_MS = 100.0
DEAF_S = 1.0  # a wait that has not noticed after so long never will

WAITS = {
    "wait": "CUDAFuture().wait()",
    "wait, timeout": "CUDAFuture().wait(timeout=1000)",
    "gather": "gather(CUDAFuture(), CUDAFuture()).wait()",
    "wait_all": "wait_all([CUDAFuture(), CUDAFuture()])",
    "wait(set)": "wait([CUDAFuture(), CUDAFuture()])",
    "as_completed": "next(as_completed([CUDAFuture()]))",
    "await": "asyncio.run(awaited(CUDAFuture()))",
}
PEERS = {
    "concurrent.futures": "concurrent.futures.Future().result()",
    "asyncio": "asyncio.run(awaited_loop_future())",
    "torch.futures": "torch.futures.Future().wait()",
}

CHILD = """
import asyncio, concurrent.futures, sys, threading, time
import torch
from cudafuture import CUDAFuture, as_completed, gather, wait, wait_all

async def awaited(future): return await future
async def awaited_loop_future(): return await asyncio.get_running_loop().create_future()

def announce(begun):
    begun.wait()
    print("waiting", flush=True)

sys.setswitchinterval(1000)
for _ in range(int(sys.argv[1])):
    begun = threading.Event()
    thread = threading.Thread(target=announce, args=(begun,))
    thread.start()
    try:
        begun.set()
        {wait}
    except KeyboardInterrupt:
        print(time.monotonic(), flush=True)
    thread.join()
    sys.stdin.readline()
"""


@dataclass(frozen=True)
class Row:
    """Delays of Ctrl-C in one kind of wait, in milliseconds; None where it had no effect."""

    wait: str
    count: int
    median_ms: float | None
    worst_ms: float | None

    @property
    def verdict(self) -> str:
        if self.wait in PEERS:
            return ""
        return "ok" if self.worst_ms is not None and self.worst_ms <= LIMIT_MS else "over"


def measure(name: str, count: int) -> Row:
    """Interrupt one kind of wait `count` times."""
    code = CHILD.replace("{wait}", (WAITS | PEERS)[name])
    with subprocess.Popen(
        [sys.executable, "-c", code, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        took = [interrupt(child) for _ in range(count)]
        if None in took:
            child.kill()
    latencies = [ms for ms in took if ms is not None]
    if not latencies:
        return Row(name, count, None, None)
    return Row(name, count, statistics.median(latencies), max(latencies))


def interrupt(child: subprocess.Popen[str]) -> float | None:
    """Send SIGINT to a child that waits; return after how many milliseconds it noticed, None where it did not."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(random.uniform(0, 0.1))  # anywhere in the interval at which a wait looks for signals
    sent = time.monotonic()
    child.send_signal(signal.SIGINT)
    noticed, _, _ = select.select([child.stdout], [], [], DEAF_S)
    if not noticed:
        return None
    took = float(child.stdout.readline()) - sent
    child.stdin.write("\n")
    child.stdin.flush()
    return took * 1e3


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(title=f"Ctrl-C during a wait, limit {LIMIT_MS:.0f} ms", box=rich.box.SIMPLE_HEAD)
    for column in ("wait", "times", "median ms", "worst ms", ""):
        table.add_column(column, justify="left" if column in ("wait", "") else "right")
    for row in rows:
        figures = [f"{ms:.1f}" if ms is not None else "never" for ms in (row.median_ms, row.worst_ms)]
        table.add_row(row.wait, str(row.count), *figures, row.verdict)
    Console().print(table)


def main() -> int:
    """Run what the command line asks for; return how many limits were broken, if that was asked."""
    parser = argparse.ArgumentParser(description="Measure how soon Ctrl-C gets through to a wait.")
    parser.add_argument("--count", type=int, default=50, help="interrupts for each kind of wait (default 50)")
    default = Path(__file__).parent / "results" / "interrupt.json"
    parser.add_argument("--json", type=Path, nargs="?", const=default, metavar="PATH", help="write the rows there")
    parser.add_argument("--check", action="store_true", help="exit with an error when the limit is broken")
    args = parser.parse_args()
    names = track([*WAITS, *PEERS], "interrupting", console=Console(stderr=True))
    rows = [measure(name, 1 if name == "torch.futures" else args.count) for name in names]
    show(rows)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"python": platform.python_version(), "rows": [asdict(r) | {"verdict": r.verdict} for r in rows]}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return sum(row.verdict == "over" for row in rows) if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
