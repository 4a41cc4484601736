"""Traces: what futures and threads did, and where the time of each step went.

::

    with record(folder):        or CUDAFUTURE_TRACE=folder, for each rank
        with step(3): ...       parts of the program
    print(analyse(folder))      where the time went, for each of KINDS;  compare(a, b)
    plot(folder, "step.html")   the same as a picture
    merge(folder, "all.json")   for ui.perfetto.dev;  problems("all.json") checks such a file
"""

from cudafuture.config import config
from cudafuture.graph_breaks import break_graphs
from cudafuture.trace._analysis import (
    KINDS,
    Depth,
    Flight,
    LongWait,
    PathPart,
    StepReport,
    Straggler,
    TraceAnalysis,
    TraceComparison,
    analyse,
    compare,
)
from cudafuture.trace._chrome import merge, problems
from cudafuture.trace._model import DeviceWork, RankTrace, Slice, Trace, TracedFuture, load
from cudafuture.trace._picture import plot
from cudafuture.trace._recording import discard, record, record_process, span, step

__all__ = [
    "KINDS",
    "Depth",
    "DeviceWork",
    "Flight",
    "LongWait",
    "PathPart",
    "RankTrace",
    "Slice",
    "StepReport",
    "Straggler",
    "Trace",
    "TraceAnalysis",
    "TraceComparison",
    "TracedFuture",
    "analyse",
    "compare",
    "discard",
    "load",
    "merge",
    "plot",
    "problems",
    "record",
    "span",
    "step",
]

if config.trace_dir:
    record_process(config.trace_dir)
break_graphs(*map(globals().get, __all__))
