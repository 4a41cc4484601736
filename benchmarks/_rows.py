"""What every benchmark here shares: rows with limits, measuring by turns, the table, the JSON.

A row shows medians over the rounds. Where two figures that ought to be equal are compared, a control measures the same
thing twice, and the row says "noise" when it is over its limit by no more than the control's error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import rich.box
import torch
from rich.console import Console
from rich.table import Table

Timed = Callable[[], float]  # does something many times, returns the nanoseconds that one took


@dataclass(frozen=True)
class Row:
    """One limit: what ours and the peer took, what is compared with the limit, and how sure that is."""

    name: str
    what: str
    unit: str
    ours: float
    peer: float
    peer_name: str
    measure: str  # the unit of what is compared
    measured: float
    limit: float
    error: float = 0.0  # two standard errors of the control's median, in the unit of `measured`
    control: str = ""

    @property
    def verdict(self) -> str:
        """Whether the limit is kept."""
        if self.measured <= self.limit:
            return "ok"
        return "noise" if self.measured - self.error <= self.limit else "over"


def by_turns(rounds: int, *timed: Timed) -> list[list[float]]:
    """Run each once in every round, in a shuffled order that every process shares; the first round is a warm-up."""
    shuffle = random.Random(0).sample
    took: list[list[float]] = [[] for _ in timed]
    for _ in range(rounds + 1):
        for which in shuffle(range(len(timed)), len(timed)):
            took[which].append(timed[which]())
    return [figures[1:] for figures in took]


def two_errors(figures: Sequence[float]) -> float:
    """Twice the standard error of the median, from the median absolute deviation (normal noise taken for granted)."""
    middle = statistics.median(figures)
    deviation = 1.4826 * statistics.median(abs(f - middle) for f in figures)
    return 2 * 1.2533 * deviation / math.sqrt(len(figures))


def control(what: str, same: Sequence[float]) -> tuple[float, str]:
    """The error of a control, and the words for it."""
    error = two_errors(same)
    return error, f"{what}: {statistics.median(same):.3g} ± {error:.2g}"


def machine() -> str:
    """A label for the kind of machine and the versions, without its name."""
    python, torch_version = platform.python_version(), torch.__version__.replace("+", "-")
    return f"{platform.machine()}-{os.cpu_count()}cpu-python{python}-torch{torch_version}"


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the rows as people read them, and the controls below."""
    colours = {"ok": "green", "noise": "yellow", "over": "red"}
    table = Table(title=f"{title}, medians", box=rich.box.SIMPLE_HEAD, collapse_padding=True)
    for heading in ("what", "ours", "peer", "", "measured", "at most", ""):
        table.add_column(heading, justify="left" if heading in ("what", "") else "right")
    for row in rows:
        what, ours, peer = f"{row.what}, {row.unit}", f"{row.ours:,.0f}", f"{row.peer:,.0f}"
        measured = f"{row.measured:,.0f}" if row.measured > 100 else f"{row.measured:.3f}"
        verdict = f"[{colours[row.verdict]}]{row.verdict}[/]"
        table.add_row(what, ours, peer, row.peer_name, measured, f"{row.limit:,g} {row.measure}", verdict)
    console = Console()
    console.print(table)
    for row in rows:
        if row.control:
            console.print(f"control of {row.name}: {row.control}")
    console.print(machine())


def run(name: str, title: str, limits: Mapping[str, Callable[[int], Row]], rounds: int) -> int:
    """Measure, print, write; the number of limits that are broken, if that was to be checked."""
    parser = argparse.ArgumentParser(description=f"Measure {name} beside its peers.")
    parser.add_argument("--only", choices=limits, nargs="+", metavar="NAME", help=f"of {', '.join(limits)}")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"a row shows medians over so many ({rounds})")
    default = Path(__file__).parent / "results" / f"{name}-{machine()}.json"
    parser.add_argument("--json", type=Path, nargs="?", const=default, metavar="PATH", help="write the rows there")
    parser.add_argument("--check", action="store_true", help="exit with an error when a limit is broken")
    args = parser.parse_args()
    rows = []
    for which in args.only or limits:
        sys.stderr.write(f"measuring {which}\n")  # and no progress bar: its thread would ask for the GIL meanwhile
        rows.append(limits[which](args.rounds))
    show(title, rows)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        written = [asdict(row) | {"verdict": row.verdict} for row in rows]
        report = {"machine": machine(), "rounds": args.rounds, "rows": written}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return sum(row.verdict == "over" for row in rows) if args.check else 0
