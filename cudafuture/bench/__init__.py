"""Benchmarks of the library beside its peers, which are measured in the same run: ``cudafuture bench``.

::

    ENTRY_POINTS ──► Suite, its rows ──► Row: ours, the peer, the ratio, its limit

Ours and the peer run by turns in a shuffled order, and a row shows medians over the rounds. Where two figures that
ought to be equal are compared, a control measures the same thing twice, and the row says "noise" when it is over its
limit by no more than the control's error. A row whose peer is not installed is skipped, with the reason. The limits are
those that the library is held to on a machine with two cores.

A package adds a suite by an entry point of the group ENTRY_POINTS: an object `Suite`. Its rows give `by_turns` a
function for each contender, `Timed`, which does something many times and returns the nanoseconds that one took.
"""

from cudafuture.bench._rows import Row, Skipped, Suite, Timed, Unmeasured, by_turns, control, disk_folder
from cudafuture.bench._suites import ENTRY_POINTS, load, names, run
from cudafuture.graph_breaks import break_graphs

__all__ = [
    "ENTRY_POINTS",
    "Row",
    "Skipped",
    "Suite",
    "Timed",
    "Unmeasured",
    "by_turns",
    "control",
    "disk_folder",
    "load",
    "names",
    "run",
]

break_graphs(*map(globals().get, __all__))
