"""Search for the quickest table for given seconds of cells, under a limit of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudafuture.pipeline._cells import Cell
from cudafuture.pipeline._list_schedule import (
    early_microbatch_first,
    forward_first,
    list_schedule,
    longest_path_first,
)
from cudafuture.pipeline.analysis import Costs

__all__ = ["found_tables"]


def found_tables(
    stages: int, microbatches: int, devices: int, costs: Costs, most_open: int, splits: bool
) -> Iterator[list[list[Cell]]]:
    """Yield tables by list scheduling: for each placement of the stages, limit of memory and order of preference."""
    kinds = (False, True) if splits else (False,)
    for device_of in _placements(stages, devices):
        for limit in _limits(stages, microbatches, devices, most_open):
            for kind in kinds:
                preferences = (early_microbatch_first, forward_first, longest_path_first(stages, costs, kind))
                for preference in preferences:
                    table = list_schedule(device_of, microbatches, costs, limit, preference, splits=kind)
                    if table is not None:
                        yield table[1]


def _placements(stages: int, devices: int) -> list[Sequence[int]]:
    """Return the device of each stage: in turn, to and fro, and in blocks."""
    turns = [s % devices for s in range(stages)]
    to_and_fro = [d if s // devices % 2 == 0 else devices - 1 - d for s, d in enumerate(turns)]
    blocks = [s * devices // stages for s in range(stages)]
    return [list(each) for each in dict.fromkeys(map(tuple, (turns, to_and_fro, blocks)))]


def _limits(stages: int, microbatches: int, devices: int, most_open: int) -> list[int]:
    """Return limits of open (stage, micro-batch) pairs: fewer can be quicker, as the gradients come sooner."""
    per_device = -(-stages // devices)
    usual = (stages, stages + devices, 2 * stages, per_device * microbatches)
    return sorted({min(limit, most_open) for limit in (*usual, most_open)})
