"""Rows of the benchmarks with their limits, measurement by turns, the table, the JSON.

The JSON is written after each row, so that a run that is cut leaves those that it has measured. A row that raises is
reported as failed, and the next one follows. A row raises Skipped where the machine lacks what it needs.

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
import re
import statistics
import sys
import traceback
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
        """The comparison with the limit: "ok", "noise" or "over"."""
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
    """Return twice the standard error of the median, from the median absolute deviation; noise is normal."""
    middle = statistics.median(figures)
    deviation = 1.4826 * statistics.median(abs(f - middle) for f in figures)
    return 2 * 1.2533 * deviation / math.sqrt(len(figures))


def control(what: str, same: Sequence[float]) -> tuple[float, str]:
    """Return the error of a control, and the words for it."""
    error = two_errors(same)
    return error, f"{what}: {statistics.median(same):.3g} ± {error:.2g}"


class Skipped(Exception):
    """Reason why a row cannot be measured on this machine."""


@dataclass(frozen=True)
class Unmeasured:
    """Row without figures: it failed, it was skipped, or its logic ran where figures mean nothing."""

    name: str
    verdict: str  # "failed", "skipped" or "rehearsed"
    why: str = ""
    trace: str = ""


Outcome = Row | Unmeasured


def machine() -> str:
    """Return a label for the kind of machine and the versions, without its name."""
    python, torch_version = platform.python_version(), torch.__version__.replace("+", "-")
    label = f"{platform.machine()}-{os.cpu_count()}cpu-python{python}-torch{torch_version}"
    if not torch.cuda.is_available():
        return label
    return f"{label}-{re.sub(r'[^a-z0-9]+', '-', torch.cuda.get_device_name(0).lower()).strip('-')}"


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the rows as a table, and the controls below."""
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


def outcome(name: str, measure: Callable[[int], Row], rounds: int, takes_figures: bool) -> Outcome:
    """Measure a row; without figures, run it and note only that its data were right."""
    try:
        row = measure(rounds)
    except Skipped as e:
        return Unmeasured(name, "skipped", str(e))
    except Exception as e:
        sys.stderr.write(traceback.format_exc())
        return Unmeasured(name, "failed", f"{type(e).__name__}: {e}"[:600], traceback.format_exc()[-2000:])
    return row if takes_figures else Unmeasured(name, "rehearsed")


def write(path: Path, rounds: int, outcomes: Sequence[Outcome]) -> None:
    """Replace the report, so that it is readable at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [asdict(row) | {"verdict": row.verdict} for row in outcomes]
    report = {"machine": machine(), "rounds": rounds, "rows": written}
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(report, indent=2) + "\n")
    beside.replace(path)


def chosen(words: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    """Return the names that were asked for: each word is a name, or the beginning of names up to a hyphen."""
    if not words:
        return list(names)
    found = {word: [n for n in names if n == word or n.startswith(f"{word}-")] for word in words}
    if unknown := [word for word, of_word in found.items() if not of_word]:
        raise ValueError(f"no row is named {', '.join(unknown)}; there are {', '.join(names)}")
    return list(dict.fromkeys(name for of_word in found.values() for name in of_word))


def run(
    name: str, title: str, limits: Mapping[str, Callable[[int], Row]], rounds: int, *, takes_figures: bool = True
) -> int:
    """Measure, print and write; return the number of failed rows, and of broken limits if these are checked."""
    parser = argparse.ArgumentParser(description=f"Measure {name} beside its peers.")
    known = f"a row, or the beginning of several up to a hyphen: {', '.join(limits)}"
    parser.add_argument("--only", nargs="+", metavar="NAME", help=known.replace("%", "%%"))
    parser.add_argument("--rounds", type=int, default=rounds, help=f"a row shows medians over so many ({rounds})")
    default = Path(__file__).parent / "results" / f"{name}-{machine()}.json"
    parser.add_argument("--json", type=Path, nargs="?", const=default, metavar="PATH", help="write the rows there")
    parser.add_argument("--check", action="store_true", help="exit with an error when a limit is broken")
    args = parser.parse_args()
    try:
        names = chosen(args.only, list(limits))
    except ValueError as e:
        parser.error(str(e))
    outcomes: list[Outcome] = []
    for which in names:
        sys.stderr.write(f"measuring {which}\n")  # and no progress bar: its thread would ask for the GIL meanwhile
        outcomes.append(outcome(which, limits[which], args.rounds, takes_figures))
        if args.json:
            write(args.json, args.rounds, outcomes)
    if rows := [row for row in outcomes if isinstance(row, Row)]:
        show(title, rows)
    for row in outcomes:
        if isinstance(row, Unmeasured):
            print(f"{row.name} {row.verdict}{row.why and ': '}{row.why}")
    broken = sum(row.verdict == "over" for row in outcomes) if args.check else 0
    return broken + sum(row.verdict == "failed" for row in outcomes)
