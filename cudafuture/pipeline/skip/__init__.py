"""Tensors that skip stages of a pipeline: a module stashes a tensor, and a later one pops it, by name.

Idea and names: torchgpipe (Kim et al., torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models, 2020).
"""

from cudafuture.pipeline.skip._layout import SkipLayout, inspect_skip_layout, verify_skippables
from cudafuture.pipeline.skip._skippable import Skippable, pop, skippable, stash
from cudafuture.pipeline.skip._tracker import SkipNamespace, SkipTracker, current_skip_tracker, use_skip_tracker

__all__ = [
    "SkipLayout",
    "SkipNamespace",
    "SkipTracker",
    "Skippable",
    "current_skip_tracker",
    "inspect_skip_layout",
    "pop",
    "skippable",
    "stash",
    "use_skip_tracker",
    "verify_skippables",
]
