"""Pipeline parallelism in one process: stages on devices, micro-batches between them, schedules as tables."""

from cudafuture.graph_breaks import break_graphs
from cudafuture.pipeline import balance, checkpoint, minibatch, stream
from cudafuture.pipeline.analysis import Analysis, Costs
from cudafuture.pipeline.fill_drain import FillDrain, move_stages
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
break_graphs(Analysis, Costs, FillDrain, LocalLink, Pipeline, Schedule, Workers, move_stages)
for module in (balance, checkpoint, minibatch, stream):
    break_graphs(*map(vars(module).get, module.__all__))
