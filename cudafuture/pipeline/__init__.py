"""Pipeline parallelism in one process: stages on devices, micro-batches between them, schedules as tables."""

from cudafuture.graph_breaks import break_graphs
from cudafuture.pipeline import balance, checkpoint, stream
from cudafuture.pipeline.analysis import Analysis, Costs
from cudafuture.pipeline.link import Link, LocalLink
from cudafuture.pipeline.pipeline import Pipeline
from cudafuture.pipeline.schedule import Cell, Schedule
from cudafuture.pipeline.skip import pop, skippable, stash
from cudafuture.pipeline.workers import Workers

__all__ = [
    "Analysis",
    "Cell",
    "Costs",
    "Link",
    "LocalLink",
    "Pipeline",
    "Schedule",
    "Workers",
    "balance",
    "pop",
    "skippable",
    "stash",
]

# Not stash, pop and skippable: they are in modules that a program may compile.
break_graphs(Analysis, Costs, LocalLink, Pipeline, Schedule, Workers)
break_graphs(*(vars(module)[name] for module in (balance, checkpoint, stream) for name in module.__all__))
