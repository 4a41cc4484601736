"""Check and simulation of schedules: completeness, deadlocks, times, idle share, open activations, and a picture."""

from __future__ import annotations

import importlib
import math
import numbers
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import SupportsFloat

from cudafuture.errors import ScheduleError
from cudafuture.pipeline._cells import Cell, CellTable, needed_groups

__all__ = ["Analysis", "Costs"]


@dataclass(frozen=True)
class Costs:
    """Seconds of cells and copies. A number applies to all stages; a sequence has one number per stage.

    Raises:
        ValueError: a number is negative or not finite.

    >>> Costs(forward=[1, 2]).seconds(Cell(1, "F", 0))
    2.0
    """

    forward: float | Sequence[float] = 1.0
    """Seconds of an F cell."""
    backward: float | Sequence[float] = 2.0
    """Seconds of a B cell."""
    input: float | Sequence[float] | None = None
    """Seconds of an I cell. None: half of `backward`."""
    weight: float | Sequence[float] | None = None
    """Seconds of a W cell. None: half of `backward`."""
    copy: float = 0.0
    """Seconds of a copy of an activation or a gradient from one device to another.

    Copies overlap with cells. Those between the same two stages and in the same direction run one after another."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None:
                if each.name not in ("input", "weight"):
                    raise ValueError(f"{each.name}=None: pass seconds")
                continue
            if isinstance(value, numbers.Real):
                checked: float | tuple[float, ...] = _seconds(each.name, value)
            elif each.name == "copy":
                raise ValueError(f"copy={value!r}: pass one number of seconds")
            else:
                checked = tuple(_seconds(each.name, number) for number in value)
            object.__setattr__(self, each.name, checked)

    def seconds(self, cell: Cell) -> float:
        """Return the seconds of a cell.

        >>> Costs(backward=3).seconds(Cell(0, "W", 0))
        1.5
        """
        kinds = {"F": self.forward, "B": self.backward, "I": self.input, "W": self.weight}
        value = kinds[cell.kind]
        share = 1.0
        if value is None:
            value, share = self.backward, 0.5
        return share * (value[cell.stage] if isinstance(value, Sequence) else value)

    def require_stages(self, stages: int) -> None:
        """Raise ValueError if a sequence does not have one number for each of `stages` stages.

        >>> Costs(forward=[1, 2]).require_stages(3)
        Traceback (most recent call last):
        ...
        ValueError: forward has seconds for 2 stages, but the schedule has 3
        """
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Sequence) and len(value) != stages:
                raise ValueError(f"{each.name} has seconds for {len(value)} stages, but the schedule has {stages}")


def _seconds(name: str, value: SupportsFloat) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} has {value!r}: seconds are finite and not negative")
    return number


@dataclass(frozen=True)
class Analysis:
    """Times and memory of one step of a schedule. ``Schedule.check`` creates it."""

    seconds: float
    """Seconds of the step, from the start of the first cell to the end of the last."""
    bubble: float
    """Idle share of devices x seconds, 0 to 1."""
    busy: tuple[float, ...]
    """Seconds that each device works."""
    peak_activations: tuple[int, ...]
    """For each device: most (stage, micro-batch) pairs with a forward pass whose B or W cell has not ended."""
    start: Mapping[Cell, float]
    """Second in which each cell starts."""
    end: Mapping[Cell, float]
    """Second in which each cell ends."""
    order: tuple[Cell, ...]
    """All cells by start. A cell comes after all cells that it needs, even if cells take no time."""


class _Table:
    """Cells of a schedule, each with its device, its position, and the cells that it needs."""

    def __init__(self, schedule: CellTable) -> None:
        self.schedule = schedule
        self.rows = [[cell for cell in row if cell is not None] for row in schedule.rows]
        self.places: dict[Cell, tuple[int, int]] = {}
        for device, row in enumerate(schedule.rows):
            for position, cell in enumerate(row):
                if cell is None:
                    continue
                if cell in self.places:
                    message = (
                        f"{cell} appears twice: {self.name(cell)} and device {device}, position {position}. Keep one."
                    )
                    raise ScheduleError(message)
                self.places[cell] = (device, position)

    def name(self, cell: Cell) -> str:
        """Return the position of a cell for messages."""
        device, position = self.places[cell]
        return f"device {device}, position {position}"

    def require_one_device_per_stage(self) -> None:
        """Raise ScheduleError if two devices have cells of the same stage."""
        first: dict[int, Cell] = {}
        for cell, (device, _) in self.places.items():
            other = first.setdefault(cell.stage, cell)
            if self.places[other][0] != device:
                raise ScheduleError(
                    f"stage {cell.stage} lies on two devices: {other} ({self.name(other)}) and {cell} "
                    f"({self.name(cell)}). Move its cells to one device."
                )

    def require_complete(self) -> None:
        """Raise ScheduleError unless each stage has one F per micro-batch, and one B, or one I and one W."""
        for stage in range(self.schedule.stages):
            for microbatch in range(self.schedule.microbatches):
                held = [k for k in "FBIW" if Cell(stage, k, microbatch) in self.places]
                if held not in (["F", "B"], ["F", "I", "W"]):
                    self._raise_incomplete(stage, microbatch, held)

    def _raise_incomplete(self, stage: int, microbatch: int, held: list[str]) -> None:
        cells = [Cell(stage, kind, microbatch) for kind in held]
        found = ", ".join(f"{cell} ({self.name(cell)})" for cell in cells) or "no cell"
        if "B" in held and ("I" in held or "W" in held):
            advice = "Keep either B, or I and W"
        else:
            splits = "I" in held or "W" in held
            needed = ["F", "I", "W"] if splits else ["F", "B"]
            lacking = " and ".join(str(Cell(stage, kind, microbatch)) for kind in needed if kind not in held)
            advice = f"Add {lacking}"
        device = self.schedule.device_of[stage]
        raise ScheduleError(
            f"stage {stage}, micro-batch {microbatch} is not complete: device {device} has {found}. {advice}."
        )

    def needs(self, cell: Cell) -> Iterator[Cell]:
        """Yield the cells of the table that must end before `cell` starts."""
        for group in needed_groups(cell, self.schedule.stages):
            yield next(needed for needed in group if needed in self.places)


def analyse(schedule: CellTable, costs: Costs) -> Analysis:
    """Return the analysis of a schedule; raise ScheduleError if it cannot run, ValueError if `costs` do not fit."""
    table = _Table(schedule)
    table.require_one_device_per_stage()
    table.require_complete()
    costs.require_stages(schedule.stages)
    start, end = _simulate(table, costs)
    rank = {cell: i for i, cell in enumerate(start)}
    busy = tuple(sum(costs.seconds(cell) for cell in row) for row in table.rows)
    seconds = max(end.values())
    bubble = 1 - sum(busy) / (len(busy) * seconds) if seconds > 0 else 0.0
    return Analysis(
        seconds=seconds,
        bubble=max(0.0, bubble),  # float sums may exceed the time of the step
        busy=busy,
        peak_activations=tuple(_peak(row) for row in table.rows),
        start=start,
        end=end,
        order=tuple(sorted(start, key=lambda cell: (start[cell], rank[cell]))),
    )


def _peak(row: list[Cell]) -> int:
    """Return the most open micro-batches of a row. Only this device opens and closes them, so its order suffices."""
    now = peak = 0
    for cell in row:
        now += {"F": 1, "I": 0}.get(cell.kind, -1)
        peak = max(peak, now)
    return peak


class _Links:
    """Copies between devices. Those of one stage in one direction run one after another."""

    def __init__(self, device_of: tuple[int, ...], seconds: float) -> None:
        self._device_of = device_of
        self._seconds = seconds
        self._free: dict[tuple[int, str], float] = {}

    def arrive(self, cell: Cell, end: float) -> float:
        """Return the time at which the result of `cell`, which ended at `end`, arrives at the neighbouring stage."""
        target = cell.stage + (1 if cell.kind == "F" else -1)
        here = self._device_of[cell.stage]
        if cell.kind == "W" or not 0 <= target < len(self._device_of) or self._device_of[target] == here:
            return end
        link = (cell.stage, "forward" if cell.kind == "F" else "backward")
        self._free[link] = max(end, self._free.get(link, 0.0)) + self._seconds
        return self._free[link]


def _simulate(table: _Table, costs: Costs) -> tuple[dict[Cell, float], dict[Cell, float]]:
    """Return start and end of each cell, ordered so that a cell comes after all cells that it needs."""
    links = _Links(table.schedule.device_of, costs.copy)
    start: dict[Cell, float] = {}
    end: dict[Cell, float] = {}
    arrived: dict[Cell, float] = {}
    heads = [0] * len(table.rows)
    free = [0.0] * len(table.rows)
    waiting: dict[Cell, int] = {}  # needed cell -> device whose head waits for it
    runnable = deque(range(len(table.rows)))
    while runnable:
        device = runnable.popleft()
        for cell in table.rows[device][heads[device] :]:
            needs = list(table.needs(cell))
            missing = next((needed for needed in needs if needed not in end), None)
            if missing is not None:
                waiting[missing] = device
                break
            ready = [(end if needed.stage == cell.stage else arrived)[needed] for needed in needs]
            start[cell] = max([free[device], *ready])
            end[cell] = free[device] = start[cell] + costs.seconds(cell)
            arrived[cell] = links.arrive(cell, end[cell])
            heads[device] += 1
            if cell in waiting:
                runnable.append(waiting.pop(cell))
    if len(end) < len(table.places):
        raise ScheduleError(_describe_deadlock(table, heads, end))
    return start, end


def _describe_deadlock(table: _Table, heads: list[int], ended: Mapping[Cell, float]) -> str:
    """Return a message that names the first cells that wait for each other in a cycle."""
    waits: dict[Cell, tuple[Cell, Cell]] = {}  # first cell that cannot run -> cell that it needs, cell ahead of that
    device = next(d for d, row in enumerate(table.rows) if heads[d] < len(row))
    cell = table.rows[device][heads[device]]
    while cell not in waits:
        needed = next(each for each in table.needs(cell) if each not in ended)
        blocker = table.places[needed][0]
        waits[cell] = needed, table.rows[blocker][heads[blocker]]
        cell = waits[cell][1]
    circle = list(waits)[list(waits).index(cell) :]
    parts = [
        f"{each} ({table.name(each)}) waits for {waits[each][0]}, which is behind {waits[each][1]}" for each in circle
    ]
    return f"deadlock: {'; '.join(parts)}. Change the order."


def draw(schedule: CellTable, path: str | os.PathLike[str], costs: Costs | None = None) -> None:
    """Write a picture of a schedule over time with matplotlib."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("a picture of a schedule needs matplotlib: pip install matplotlib") from error
    costs = Costs() if costs is None else costs
    analysis = analyse(schedule, costs)
    colours = {"F": "#8ecae6", "B": "#ffb703", "I": "#fb8500", "W": "#a7c957"}
    names = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weight"}
    # A label must fit in a cell: about a third of an inch per average cell.
    width = max(6.0, min(60.0, max(len(row) for row in schedule.rows) / 3))
    figure = figures.Figure(figsize=(width, 1.2 + 0.4 * len(schedule.rows)), layout="constrained")
    axes = figure.subplots()
    for kind in "FBIW":
        cells = [cell for cell in analysis.order if cell.kind == kind]
        if not cells:
            continue
        devices = [schedule.device_of[cell.stage] for cell in cells]
        starts = [analysis.start[cell] for cell in cells]
        bars = axes.barh(
            devices,
            [costs.seconds(cell) for cell in cells],
            left=starts,
            height=0.9,
            color=colours[kind],
            edgecolor="white",
            label=names[kind],
        )
        axes.bar_label(bars, [f"{cell.stage}/{cell.microbatch}" for cell in cells], label_type="center", fontsize=7)
    axes.set_yticks(range(len(schedule.rows)), [f"device {device}" for device in range(len(schedule.rows))])
    axes.invert_yaxis()
    axes.set_xlim(0, analysis.seconds or 1)
    axes.set_xlabel(f"seconds ({schedule.name}: {analysis.seconds:g} s, bubble {analysis.bubble:.1%})")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(os.fspath(path))
