"""Generators of the built-in schedules. Each returns the cells of every device in order, without idle slots.

Papers: GPipe: Huang et al. (2019). 1F1B: Narayanan et al., PipeDream (2019). Interleaved 1F1B: Narayanan et al.,
Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (2021). Looped BFS: Lamy-Poirier,
Breadth-First Pipeline Parallelism (2022). Split backward: Qi et al., Zero Bubble Pipeline Parallelism (2023), and
Pipeline Parallelism with Controllable Memory (2024).
"""

from __future__ import annotations

import itertools
import operator

from cudafuture.pipeline._cells import Cell
from cudafuture.pipeline._list_schedule import early_microbatch_first, forward_first, list_schedule
from cudafuture.pipeline.analysis import Costs

__all__ = [
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "require_counts",
    "zb1p",
    "zbv",
]


def require_counts(**counts: int) -> None:
    """Raise ValueError unless each of the named numbers is an int of at least 1."""
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"{name}={count!r}: pass an int of at least 1")


def gpipe(stages: int, microbatches: int) -> list[list[Cell]]:
    """Return the cells of fill and drain: each device runs all forward passes, then all backward passes."""
    require_counts(stages=stages, microbatches=microbatches)
    return [[Cell(stage, kind, m) for kind in "FB" for m in range(microbatches)] for stage in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> list[list[Cell]]:
    """Return the cells of 1F1B: a device has at most as many micro-batches open as there are stages from it on."""
    require_counts(stages=stages, microbatches=microbatches)
    rows = []
    for stage in range(stages):
        forwards = [Cell(stage, "F", m) for m in range(microbatches)]
        backwards = [Cell(stage, "B", m) for m in range(microbatches)]
        rows.append(_alternate(forwards, backwards, warm_up=stages - 1 - stage))
    return rows


def zb1p(stages: int, microbatches: int, delay_weights: bool) -> list[list[Cell]]:
    """Return the cells of 1F1B with the backward pass split in I and W.

    Without `delay_weights` each W follows its I at once: the gradient reaches the previous stage earlier by the time of
    a W, and no device has more micro-batches open than under 1F1B. With it device d holds back d weight gradients,
    as the schedule ZB-H1 of the paper does: less idle time, but as many open micro-batches everywhere as on device 0.
    """
    rows = []
    for stage, row in enumerate(one_f_one_b(stages, microbatches)):
        cells: list[Cell] = []
        for cell in row:
            if cell.kind == "F":
                cells.append(cell)
                continue
            cells.append(Cell(stage, "I", cell.microbatch))
            due = cell.microbatch - (stage if delay_weights else 0)
            if due >= 0:
                cells.append(Cell(stage, "W", due))
        done = sum(cell.kind == "W" for cell in cells)
        rows.append(cells + [Cell(stage, "W", m) for m in range(done, microbatches)])
    return rows


def interleaved_1f1b(devices: int, stages_per_device: int, microbatches: int) -> list[list[Cell]]:
    """Return the cells of interleaved 1F1B, with stage s on device ``s % devices``.

    Micro-batches go through the stages of a device in rounds of at least `devices` micro-batches, if there are as
    many. Earlier rounds are not smaller than later ones: the number of forward passes that a device runs before its
    first backward pass is computed from the first round, and must suffice for all.
    """
    require_counts(devices=devices, stages_per_device=stages_per_device, microbatches=microbatches)
    count = max(1, microbatches // devices)
    sizes = [microbatches // count + (i < microbatches % count) for i in range(count)]
    rounds = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(count)]
    chunks = range(stages_per_device)
    rows = []
    for device in range(devices):
        forwards = [Cell(c * devices + device, "F", m) for batch in rounds for c in chunks for m in batch]
        backwards = [Cell(c * devices + device, "B", m) for batch in rounds for c in reversed(chunks) for m in batch]
        warm_up = (stages_per_device - 1) * sizes[0] + 2 * (devices - 1 - device)
        rows.append(_alternate(forwards, backwards, warm_up))
    return rows


def looped_bfs(devices: int, stages_per_device: int, microbatches: int) -> list[list[Cell]]:
    """Return the cells of looped BFS: each device runs all micro-batches of a stage before the next stage."""
    require_counts(devices=devices, stages_per_device=stages_per_device, microbatches=microbatches)
    chunks, batch = range(stages_per_device), range(microbatches)
    return [
        [Cell(c * devices + device, "F", m) for c in chunks for m in batch]
        + [Cell(c * devices + device, "B", m) for c in reversed(chunks) for m in batch]
        for device in range(devices)
    ]


def interleaved_zero_bubble(devices: int, stages_per_device: int, microbatches: int) -> list[list[Cell]]:
    """Return the cells of interleaved stages whose weight gradients fill the idle time.

    No device has more (stage, micro-batch) pairs open than device 0 under interleaved 1F1B.
    """
    require_counts(devices=devices, stages_per_device=stages_per_device, microbatches=microbatches)
    first, *_ = interleaved_1f1b(devices, stages_per_device, microbatches)
    most_open = max(itertools.accumulate(1 if cell.kind == "F" else -1 for cell in first))
    return _zero_bubble([s % devices for s in range(devices * stages_per_device)], microbatches, most_open)


def zbv(devices: int, microbatches: int) -> list[list[Cell]]:
    """Return the cells of ZB-V: device d has the stages d and ``2 * devices - 1 - d``, so that the loss is on device 0.

    No device has more than ``2 * devices`` (stage, micro-batch) pairs open: as much memory as device 0 under 1F1B.
    """
    require_counts(devices=devices, microbatches=microbatches)
    return _zero_bubble([*range(devices), *reversed(range(devices))], microbatches, 2 * devices)


def _zero_bubble(device_of: list[int], microbatches: int, most_open: int) -> list[list[Cell]]:
    """Return the quicker one of the tables of two preferences, for equal cells."""
    equal = Costs(forward=1, backward=2)
    tables = [
        list_schedule(device_of, microbatches, equal, most_open, preference, splits=True)
        for preference in (early_microbatch_first, forward_first)
    ]
    return min((table for table in tables if table is not None), key=operator.itemgetter(0))[1]


def _alternate(forwards: list[Cell], backwards: list[Cell], warm_up: int) -> list[Cell]:
    """Return `warm_up` forward cells, then alternating forward and backward cells, then the other backward cells."""
    warm_up = min(warm_up, len(forwards))
    cells = forwards[:warm_up]
    steady = len(forwards) - warm_up
    for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):
        cells += (forward, backward)
    return cells + backwards[steady:]
