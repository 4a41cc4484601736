"""Pipeline parallelism in one process: stages on devices, micro-batches between them, schedules as tables."""

from cudafuture.graph_breaks import break_graphs
from cudafuture.pipeline import balance, checkpoint, copy, dependency, microbatch, stream, worker
from cudafuture.pipeline.analysis import Analysis, Costs
from cudafuture.pipeline.gpipe import GPipe
from cudafuture.pipeline.link import Link, LocalLink
from cudafuture.pipeline.pipeline import Pipeline
from cudafuture.pipeline.schedule import Cell, Schedule
from cudafuture.pipeline.skip import pop, skippable, stash
from cudafuture.pipeline.workers import Workers

__all__ = [
    "Analysis",
    "Cell",
    "Costs",
    "GPipe",
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
break_graphs(Analysis, Costs, GPipe, LocalLink, Pipeline, Schedule, Workers)
for module in (balance, checkpoint, copy, dependency, microbatch, stream, worker):
    break_graphs(*map(vars(module).get, module.__all__))
