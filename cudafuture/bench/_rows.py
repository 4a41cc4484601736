"""Rows of a benchmark with their limits, measurement by turns, and suites of rows."""

from __future__ import annotations

import math
import os
import platform
import random
import re
import statistics
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

Timed = Callable[[], float]  # does something many times, returns the nanoseconds that one took


interrupted = threading.Event()
"""Set by Ctrl-C while `cudafuture bench` measures."""


@dataclass(frozen=True)
class Row:
    """One limit: what ours and the peer took, what is compared with the limit, and how sure that is.

    What is compared is a cost: less is better. A suite replaces the name by the one under which it has the row.
    """

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
    """Run each once in every round, in a shuffled order that every process shares; the first round is a warm-up.

    Returns:
        for each of them, what it returned in each round but the first.

    >>> by_turns(3, lambda: 1.0, lambda: 2.0)
    [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    """
    shuffle = random.Random(0).sample
    took: list[list[float]] = [[] for _ in timed]
    for _ in range(rounds + 1):
        for which in shuffle(range(len(timed)), len(timed)):
            took[which].append(timed[which]())
            if interrupted.is_set():  # the code in the row may have caught the exception
                raise KeyboardInterrupt
    return [figures[1:] for figures in took]


def two_errors(figures: Sequence[float]) -> float:
    """Return twice the standard error of the median, from the median absolute deviation; noise is normal."""
    middle = statistics.median(figures)
    deviation = 1.4826 * statistics.median(abs(f - middle) for f in figures)
    return 2 * 1.2533 * deviation / math.sqrt(len(figures))


def control(what: str, same: Sequence[float]) -> tuple[float, str]:
    """Return the error of a control, two standard errors of its median, and the words for it.

    >>> control("ours / ours", [1.0, 1.01, 0.99, 1.02, 0.98])
    (0.01661..., 'ours / ours: 1 ± 0.017')
    """
    error = two_errors(same)
    return error, f"{what}: {statistics.median(same):.3g} ± {error:.2g}"


@contextmanager
def disk_folder() -> Iterator[Path]:
    """Make a folder on the disk that is measured, below CUDAFUTURE_BENCH_DIR (default: the current folder).

    >>> from cudafuture.bench import disk_folder
    >>> with disk_folder() as folder:
    ...     folder.is_dir()
    True
    """
    with tempfile.TemporaryDirectory(dir=os.environ.get("CUDAFUTURE_BENCH_DIR", "."), prefix="bench-") as name:
        yield Path(name).absolute()
    os.sync()  # no later row pays for the dirty pages of this one


class Skipped(Exception):
    """Reason why a row, or a suite, cannot be measured on this machine."""


@dataclass(frozen=True)
class Unmeasured:
    """Row without figures: it failed, it was skipped, or its logic ran where figures mean nothing."""

    name: str
    verdict: Literal["failed", "skipped", "rehearsed"]
    why: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Suite:
    """Rows of one part of the library, by name; each is called with the number of rounds of its medians.

    >>> def adding(rounds):
    ...     ours, peer = by_turns(rounds, lambda: 2.0, lambda: 4.0)
    ...     return Row("adding", "an addition", "ns", ours[0], peer[0], "a peer", "x", ours[0] / peer[0], limit=1.0)
    >>> suite = Suite("sums", "Sums", {"adding": adding}, rounds=3)
    >>> [row.verdict for row in suite.measure(["adding"], 3)]
    ['ok']
    """

    name: str
    title: str
    rows: Mapping[str, Callable[[int], Row]]
    rounds: int
    """Rounds of a row by default."""
    takes_figures: bool = True
    """False on fake devices: each row runs its logic once, and the figures are dropped."""
    prepare: Callable[[], None] | None = None
    """Called once, before the first row; raises Skipped where the machine lacks what all rows need."""

    def choose(self, words: Sequence[str]) -> list[str]:
        """Return the names of rows that `words` ask for: each is a name, or the beginning of names up to a hyphen.

        No words ask for all rows.

        Raises:
            ValueError: a word fits no row.

        >>> Suite("s", "S", {"copy-small": None, "copy-large": None, "wait": None}, rounds=1).choose(["copy"])
        ['copy-small', 'copy-large']
        """
        if not words:
            return list(self.rows)
        found = {word: [n for n in self.rows if n == word or n.startswith(f"{word}-")] for word in words}
        if unknown := [word for word, of_word in found.items() if not of_word]:
            raise ValueError(f"{self.name}: no row is named {', '.join(unknown)}; there are {', '.join(self.rows)}")
        return list(dict.fromkeys(name for of_word in found.values() for name in of_word))

    def measure(self, names: Sequence[str], rounds: int) -> Iterator[Row | Unmeasured]:
        """Measure rows one after the other, and yield each; a row that fails does not end the others.

        >>> def breaks(rounds):
        ...     raise OSError("no disk")
        >>> [row.why for row in Suite("s", "S", {"breaks": breaks}, rounds=1).measure(["breaks"], 1)]
        ['OSError: no disk']
        """
        if self.prepare is not None:
            self.prepare()
        for name in names:
            if interrupted.is_set():
                raise KeyboardInterrupt
            yield self._measure_row(name, rounds)

    def _measure_row(self, name: str, rounds: int) -> Row | Unmeasured:
        try:
            row = self.rows[name](rounds)
        except Skipped as e:
            return Unmeasured(name, "skipped", str(e))
        except Exception as e:
            return Unmeasured(name, "failed", f"{type(e).__name__}: {e}"[:600], traceback.format_exc()[-2000:])
        return replace(row, name=name) if self.takes_figures else Unmeasured(name, "rehearsed")


def machine() -> str:
    """Return a label for the kind of machine and the versions, without its name."""
    python, torch_version = platform.python_version(), torch.__version__.replace("+", "-")
    label = f"{platform.machine()}-{os.cpu_count()}cpu-python{python}-torch{torch_version}"
    if not torch.cuda.is_available():
        return label
    return f"{label}-{re.sub(r'[^a-z0-9]+', '-', torch.cuda.get_device_name(0).lower()).strip('-')}"
