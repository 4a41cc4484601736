"""The report of a run: a progress bar, a table, a JSON file and a picture.

The JSON is written after each row, so that a run that is cut leaves those that it has measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cudafuture.bench._rows import Row, Suite, Unmeasured, machine
from cudafuture.statistics import text_of_seconds

COLOURS = {"ok": "green", "noise": "yellow", "over": "red"}
PIPE_WIDTH = 200  # characters of a line, where the table goes to no terminal
MARKS = {"ok": "tab:green", "noise": "tab:olive", "over": "tab:red"}


def measure(
    suite: Suite, rows: Sequence[str], rounds: int, file: Path | None, outcomes: list[Row | Unmeasured]
) -> None:
    """Measure rows of a suite, with progress on stderr; add the outcomes, and write the file after each of them."""
    is_regular = file is not None and (file.is_file() or not file.exists())
    if file is not None and is_regular:
        file = file.resolve()  # a link stays one
        replace(file, rounds, outcomes)  # an error of the file comes before the measurement
    for outcome in _with_progress(suite.name, rows, suite.measure(rows, rounds)):
        outcomes.append(outcome)
        if file is not None and is_regular:
            replace(file, rounds, outcomes)
    if file is not None and not is_regular:  # a pipe or a device
        file.write_text(as_json(rounds, outcomes))


def _with_progress(suite: str, rows: Sequence[str], outcomes: Iterable[Row | Unmeasured]) -> Iterator[Row | Unmeasured]:
    """Yield the outcomes; show the row that is measured: a bar on a terminal, else a line for each row.

    The bar is drawn between rows only: a thread that draws it would ask for the GIL while a row is measured.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=len(rows))
        left = iter(outcomes)
        for done, name in enumerate(rows):
            bar.update(task, description=escape(f"{suite}: {name}"), completed=done, refresh=True)
            if not console.is_terminal:
                console.print(f"measuring {name}", highlight=False, markup=False)
            outcome = next(left)
            if isinstance(outcome, Unmeasured) and outcome.trace:
                console.print(outcome.trace, markup=False, highlight=False)
            yield outcome


def as_json(rounds: int, outcomes: Sequence[Row | Unmeasured]) -> str:
    """Return the report as text."""
    rows = [asdict(row) | {"verdict": row.verdict} for row in outcomes]
    return json.dumps({"machine": machine(), "rounds": rounds, "rows": rows}, indent=2) + "\n"


def replace(file: Path, rounds: int, outcomes: Sequence[Row | Unmeasured]) -> None:
    """Replace the report, so that it is readable at any time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".new")
    beside.write_text(as_json(rounds, outcomes))
    beside.replace(file)


def show(title: str, outcomes: Sequence[Row | Unmeasured]) -> None:
    """Print the rows as a table, and the controls and the rows without figures below."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    rows = [row for row in outcomes if isinstance(row, Row)]
    if rows:
        console.print(_table(title, rows))
    for row in rows:
        if row.control:
            console.print(f"control of {row.name}: {row.control}", markup=False)
    for outcome in outcomes:
        if isinstance(outcome, Unmeasured):
            why = f": {outcome.why}" if outcome.why else ""
            console.print(f"{outcome.name} {outcome.verdict}{why}", markup=False, soft_wrap=True)
    console.print(machine(), highlight=False)


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=escape(f"{title}, medians"), box=rich.box.SIMPLE_HEAD, collapse_padding=True)
    for heading in ("row", "what", "ours", "peer", "measured", "at most", ""):
        table.add_column(
            heading, justify="right" if heading in ("ours", "measured", "at most") else "left", overflow="fold"
        )
    for row in rows:
        measured = f"{row.measured:,.0f}" if row.measured > 100 else f"{row.measured:.3f}"
        ours, peer = _text(row.ours, row.unit), f"{_text(row.peer, row.unit)}, {row.peer_name}"
        verdict = f"[{COLOURS[row.verdict]}]{row.verdict}[/]"
        cells = (row.name, row.what, ours, peer, measured, f"{row.limit:,g} {row.measure}")
        table.add_row(*map(escape, cells), verdict)
    return table


def make_figure(file: Path) -> Any:
    """Return a figure of matplotlib for a picture in this file.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the format of a file with this suffix is unknown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("a picture needs matplotlib: pip install 'cudafuture[cli]'") from e
    if file.suffix not in {".pdf", ".png", ".svg"}:
        raise ValueError(f"{file}: a picture is a .png, .svg or .pdf file")
    return Figure(layout="constrained")


def plot(figure: Any, title: str, outcomes: Sequence[Row | Unmeasured], file: Path) -> None:
    """Draw a mark for each row: what ours takes as a part of what the peer takes, on a logarithmic axis.

    Raises:
        ValueError: no row has figures.
    """
    rows = [row for row in outcomes if isinstance(row, Row) and row.ours > 0 and row.peer > 0][::-1]
    if not rows:
        raise ValueError("no row has figures to draw")
    figure.set_size_inches(11, 1.4 + 0.42 * len(rows))
    axes = figure.add_subplot()
    parts = [row.measured if row.measure == "x" else row.ours / row.peer for row in rows]
    axes.axvline(1, color="0.4", linewidth=1)
    axes.hlines(range(len(rows)), parts, 1, color="0.8", linewidth=3)
    axes.scatter(parts, range(len(rows)), color=[MARKS[row.verdict] for row in rows], s=50, zorder=3)
    limited = [i for i, row in enumerate(rows) if row.measure == "x"]
    axes.scatter([rows[i].limit for i in limited], limited, marker="|", color="black", s=120, zorder=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    words = [f"{_text(row.ours, row.unit)}; {row.peer_name} {_text(row.peer, row.unit)}" for row in rows]
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(range(len(rows)), words)
    axes.set_xlabel("ours / peer: to the left of 1, ours takes less; a stroke is the limit")
    axes.set_title(f"{title}\n{machine()}", fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _text(value: float, unit: str) -> str:
    seconds = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}
    return text_of_seconds(value * seconds[unit]) if unit in seconds else f"{value:,.0f} {unit}"
