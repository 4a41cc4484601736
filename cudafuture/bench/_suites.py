"""Suites of this environment, which packages name by entry points."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from cudafuture.bench._rows import Row, Skipped, Suite, Unmeasured, interrupted, machine

ENTRY_POINTS = "cudafuture.bench"


def names() -> list[str]:
    """Return the names of all suites.

    >>> "core" in names()
    True
    """
    return sorted({entry.name for entry in metadata.entry_points(group=ENTRY_POINTS)})


def load(name: str) -> Suite:
    """Import a suite.

    Raises:
        ValueError: there is no suite of this name, or its entry point leads to none.
        Skipped: this machine, or this environment, lacks what the suite needs.

    >>> load("core").rounds
    21
    """
    found = metadata.entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        raise ValueError(f"there is no benchmark {name}; there are {', '.join(names())}")
    entry = next(iter(found))
    try:
        suite = entry.load()
    except ModuleNotFoundError as e:
        raise Skipped(f"{name} needs the package {e.name}, which is not installed") from e
    except (AttributeError, ImportError) as e:
        raise ValueError(f"the benchmark {name} cannot be loaded: {e}") from e
    if not isinstance(suite, Suite):
        raise ValueError(f"the benchmark {name} cannot be loaded: {entry.value} is not a Suite")
    return suite


def run(
    name: str,
    only: Sequence[str] = (),
    *,
    rounds: int | None = None,
    json: Path | None = None,
    plot: Path | None = None,
) -> list[Row | Unmeasured]:
    """Measure rows of a suite, with progress on stderr; print the table, and return the outcomes.

    Args:
        name: the suite.
        only: its rows, or the beginning of several up to a hyphen; by default all.
        rounds: a row shows medians over so many; by default the suite's.
        json: a file for the figures, which is written after each row; or a folder for a file with the names of the
            suite and of the kind of machine.
        plot: a .png, .svg or .pdf file for a picture of the rows.

    Raises:
        ImportError: rich, or matplotlib for the picture, is missing: ``pip install cudafuture[cli]``.
        Skipped: this machine, or this environment, lacks what the suite needs.
        ValueError: there is no such suite or row; `rounds` is less than 1; no row has figures for the picture.

    >>> outcomes = run("core", ["await"], rounds=1)
    The core beside its peers, medians
    ...
    >>> [outcome.name for outcome in outcomes]
    ['await']
    """
    try:
        from cudafuture.bench import _report
    except ModuleNotFoundError as e:
        raise ImportError(f"benchmarks need the package {e.name}: pip install 'cudafuture[cli]'") from e
    suite = load(name)
    rows = suite.choose(only)
    rounds = suite.rounds if rounds is None else rounds
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    if json is not None and json.is_dir():
        json /= f"{suite.name}-{machine()}.json"
    figure = None if plot is None else _report.make_figure(plot)
    outcomes: list[Row | Unmeasured] = []
    try:
        with _until_interrupted():
            _report.measure(suite, rows, rounds, json, outcomes)
    finally:  # also after Ctrl-C
        _report.show(suite.title, outcomes)
    if plot is not None:
        _report.plot(figure, suite.title, outcomes, plot)
    return outcomes


@contextmanager
def _until_interrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end a run, even where the code that is measured keeps exceptions for itself."""
    interrupted.clear()
    if threading.current_thread() is not threading.main_thread():  # signals are another's
        yield
        return

    def interrupt(number: int, _: object) -> None:
        interrupted.set()
        raise SystemExit(128 + number) if number == signal.SIGTERM else KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        interrupted.clear()  # another suite of this process may be measured later
