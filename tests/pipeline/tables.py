"""Tables for tests: random ones that can run, those of torch's classes, and a simulation by events."""

from __future__ import annotations

import heapq
import io
import random
from collections import deque
from itertools import count
from types import SimpleNamespace
from typing import Any

from cudafuture.pipeline.analysis import Costs
from cudafuture.pipeline.schedule import Cell, Schedule


def random_table(seed: int, stages: int, microbatches: int, devices: int) -> Schedule:
    """Return a random table without deadlock: stages lie anywhere, and some micro-batches have I and W in place of B.

    A list scheduler takes any cell whose needs have been placed, and puts it at the end of its device's row.
    """
    rng = random.Random(f"{seed} {stages} {microbatches} {devices}")
    device_of = [rng.randrange(devices) for _ in range(stages)]
    splits = {(s, m): rng.random() < 0.5 for s in range(stages) for m in range(microbatches)}
    rows: list[list[Cell | None]] = [[] for _ in range(devices)]
    ready = [Cell(0, "F", m) for m in range(microbatches)]
    while ready:
        cell = ready.pop(rng.randrange(len(ready)))
        row = rows[device_of[cell.stage]]
        row += [None] * (rng.random() < 0.2) + [cell]
        stage, kind, m = cell
        if kind == "I":
            ready.append(Cell(stage, "W", m))
        if kind == "F" and stage + 1 < stages:
            ready.append(Cell(stage + 1, "F", m))
        elif kind == "F":
            ready.append(Cell(stage, "I" if splits[stage, m] else "B", m))
        elif kind in "BI" and stage > 0:
            ready.append(Cell(stage - 1, "I" if splits[stage - 1, m] else "B", m))
    return Schedule(rows, f"random {seed}")


def random_costs(seed: int, stages: int) -> Costs:
    """Return seconds that floats hold exactly, some of them zero."""
    rng = random.Random(seed)

    def draw() -> tuple[float, ...]:
        return tuple(rng.randrange(12) / 4 for _ in range(stages))

    split = rng.random() < 0.5
    choices: list[float | tuple[float, ...]] = [draw(), 1.5]
    return Costs(
        rng.choice(choices), draw(), draw() if split else None, draw() if split else None, rng.randrange(4) / 4
    )


def torch_schedule(name: str, devices: int, stages_per_device: int, microbatches: int) -> Any:
    """Return torch's schedule `name` as device 0 makes it, on stages that nothing can run on."""
    from torch.distributed.pipelining import schedules

    stages = [
        SimpleNamespace(
            group_size=devices,
            group_rank=0,
            num_stages=devices * stages_per_device,
            stage_index=i,
            is_first=False,
            is_last=False,
            submod=None,
        )
        for i in range(stages_per_device)
    ]
    if name == "Runtime":
        return schedules._PipelineScheduleRuntime(stages, microbatches)
    cls = schedules.get_schedule_class(name)
    return cls(stages[0] if issubclass(cls, schedules.PipelineScheduleSingle) else stages, microbatches)


def torch_table(name: str, devices: int, stages_per_device: int, microbatches: int) -> Schedule:
    """Return torch's schedule `name`, read from the CSV text that torch writes for it."""
    order = torch_schedule(name, devices, stages_per_device, microbatches).pipeline_order
    lines = [",".join("" if action is None else str(action) for action in order[rank]) for rank in range(devices)]
    return Schedule.from_csv(io.StringIO("\r\n".join(lines) + "\r\n"))


class EventSimulation:
    """A run of a table event by event: ends of cells and ends of copies, from a heap."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.costs = costs
        self.last = schedule.stages - 1
        self.device_of = schedule.device_of
        self.rows = [deque(cell for cell in row if cell is not None) for row in schedule.rows]
        self.working: set[int] = set()
        self.ended: set[Cell] = set()
        self.activations: set[tuple[int, int]] = {(0, m) for m in range(schedule.microbatches)}
        self.gradients: set[tuple[int, int]] = {(self.last, m) for m in range(schedule.microbatches)}
        self.links: dict[tuple[int, int], deque[Cell]] = {}
        self.start: dict[Cell, float] = {}
        self.end: dict[Cell, float] = {}
        self.open = [0] * len(self.rows)
        self.peak = [0] * len(self.rows)
        self.events: list[tuple[float, int, str, Cell]] = []
        self.numbers = count()
        self.start_cells(0.0)
        while self.events:
            now, _, what, cell = heapq.heappop(self.events)
            (self.end_cell if what == "cell" else self.end_copy)(now, cell)
            self.start_cells(now)
        self.is_stuck = any(self.rows)

    def is_ready(self, cell: Cell) -> bool:
        stage, kind, m = cell
        if kind == "F":
            return (stage, m) in self.activations
        if kind == "W":
            return Cell(stage, "I", m) in self.ended
        return Cell(stage, "F", m) in self.ended and (stage, m) in self.gradients

    def start_cells(self, now: float) -> None:
        for device, row in enumerate(self.rows):
            if row and device not in self.working and self.is_ready(row[0]):
                self.working.add(device)
                cell = row.popleft()
                self.start[cell] = now
                self.push(now + self.costs.seconds(cell), "cell", cell)

    def end_cell(self, now: float, cell: Cell) -> None:
        device = self.device_of[cell.stage]
        self.working.remove(device)
        self.ended.add(cell)
        self.end[cell] = now
        self.open[device] += {"F": 1, "B": -1, "I": 0, "W": -1}[cell.kind]
        self.peak[device] = max(self.peak[device], self.open[device])
        to = cell.stage + 1 if cell.kind == "F" else cell.stage - 1
        if cell.kind == "W" or not 0 <= to <= self.last:
            return
        if self.device_of[to] == device:
            self.deliver(cell, to)
            return
        link = self.links.setdefault((cell.stage, to), deque())
        link.append(cell)
        if len(link) == 1:
            self.push(now + self.costs.copy, "copy", cell)

    def end_copy(self, now: float, cell: Cell) -> None:
        to = cell.stage + 1 if cell.kind == "F" else cell.stage - 1
        self.deliver(cell, to)
        link = self.links[cell.stage, to]
        link.popleft()
        if link:
            self.push(now + self.costs.copy, "copy", link[0])

    def deliver(self, cell: Cell, to: int) -> None:
        (self.activations if cell.kind == "F" else self.gradients).add((to, cell.microbatch))

    def push(self, time: float, what: str, cell: Cell) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), what, cell))
