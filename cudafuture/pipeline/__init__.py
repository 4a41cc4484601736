"""Pipeline parallelism in one process: stages on devices, micro-batches between them, schedules as tables."""

from cudafuture.pipeline import balance
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
