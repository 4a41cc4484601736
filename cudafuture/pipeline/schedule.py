"""Schedules as data: tables of forward and backward cells, one row per device, from generators, CSV files or users."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from cudafuture.errors import ScheduleError
from cudafuture.pipeline import _builtin_schedules as builtin
from cudafuture.pipeline._cells import Cell, parse_field, validate_rows
from cudafuture.pipeline._search import found_tables
from cudafuture.pipeline.analysis import Analysis, Costs, analyse, draw

__all__ = ["Cell", "Schedule"]

_NAMES = ("gpipe", "1f1b", "zb1p", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv")
_SPLIT = ("zb1p", "interleaved_zero_bubble", "zbv")


@dataclass(frozen=True, init=False, repr=False)
class Schedule:
    r"""Table of cells: for each device, the micro-batches and stages that it runs, in order.

    A device runs its row from left to right, each cell as soon as the cells it needs have ended. Idle slots take no
    time: they only move cells to the right in a printed table. Two schedules are equal if their rows are.

    Args:
        rows: one row per device, of cells, texts such as "2F0", or None for an idle slot.
        name: name of the schedule in messages and pictures.

    Raises:
        ValueError: a cell is malformed, a stage number is skipped, or there is no cell. The message has the device
            and the position. ``check`` finds out whether the table can run.

    >>> schedule = Schedule([["0F0", "0F1", None, "0B0", "0B1"], [None, "1F0", "1B0", "1F1", "1B1"]])
    >>> print(schedule)
    device 0  0F0 0F1  .  0B0 0B1
    device 1   .  1F0 1B0 1F1 1B1
    >>> schedule.check().seconds
    9.0

    Built-in schedules, by the name of their function or by the name for ``build``:

    >>> print(Schedule.gpipe(2, 2))
    device 0  0F0 0F1  .   .  0B0 0B1
    device 1   .  1F0 1F1 1B0 1B1  .
    >>> print(Schedule.one_f_one_b(2, 3))
    device 0  0F0 0F1  .  0B0 0F2 0B1  .  0B2
    device 1   .  1F0 1B0 1F1 1B1 1F2 1B2  .
    >>> Schedule.interleaved_1f1b(2, 2, 4).device_of
    (0, 1, 0, 1)
    >>> schedules = Schedule.one_f_one_b(4, 8), Schedule.zb1p(4, 8, delay_weights=False), Schedule.zb1p(4, 8)
    >>> [schedule.check().seconds for schedule in schedules]
    [33.0, 30.0, 27.0]
    >>> Schedule.build("interleaved_1f1b", stages=4, microbatches=2, devices=2)
    Schedule(name='interleaved_1f1b', devices=2, stages=4, microbatches=2)

    >>> Schedule.zbv(4, 8).check(Costs(forward=1, backward=2)).seconds, Schedule.zbv(2, 2).device_of
    (51.0, (0, 1, 1, 0))

    The quickest table that is found for measured seconds:

    >>> costs = Costs(forward=[1, 2, 1, 2], backward=[2, 4, 2, 4])
    >>> found = Schedule.search(4, 8, 2, costs, most_activations=8)
    >>> found.device_of, found.check(costs).seconds < Schedule.interleaved_1f1b(2, 2, 8).check(costs).seconds
    ((0, 1, 1, 0), True)

    A schedule from a file, without its fields of communication:

    >>> print(Schedule.from_csv(io.StringIO("0F0,0SEND_F0,0RECV_B0,0B0\n,1F0,1B0\n")))
    device 0  0F0 0B0  .
    device 1   .  1F0 1B0
    """

    rows: tuple[tuple[Cell | None, ...], ...]
    """Cells of each device in order of execution. None is an idle slot. The row of a device without cells is empty."""
    name: str = field(compare=False)
    stages: int = field(compare=False)
    """Number of stages."""
    microbatches: int = field(compare=False)
    """Number of micro-batches."""
    device_of: tuple[int, ...] = field(compare=False)
    """Device of each stage, as the number of its row."""

    def __init__(self, rows: Iterable[Iterable[Cell | str | None]], name: str = "table") -> None:
        table = validate_rows(rows)
        device_of: dict[int, int] = {}
        microbatches = 0
        for device, row in enumerate(table):
            for cell in row:
                if cell is not None:
                    device_of.setdefault(cell.stage, device)
                    microbatches = max(microbatches, cell.microbatch + 1)
        values: dict[str, object] = {
            "rows": table,
            "name": name,
            "stages": len(device_of),
            "microbatches": microbatches,
        }
        values["device_of"] = tuple(device_of[stage] for stage in range(len(device_of)))
        for key, value in values.items():
            object.__setattr__(self, key, value)

    @classmethod
    def gpipe(cls, stages: int, microbatches: int) -> Schedule:
        """Return GPipe's fill and drain: all forward passes, then all backward passes. One stage per device."""
        return cls._align(builtin.gpipe(stages, microbatches), "gpipe")

    @classmethod
    def one_f_one_b(cls, stages: int, microbatches: int) -> Schedule:
        """Return 1F1B: as fast as GPipe, but device d has at most ``stages - d`` micro-batches open."""
        return cls._align(builtin.one_f_one_b(stages, microbatches), "1f1b")

    @classmethod
    def interleaved_1f1b(cls, devices: int, stages_per_device: int, microbatches: int) -> Schedule:
        """Return interleaved 1F1B: each device has several stages, which shortens its idle time.

        Stage s is on device ``s % devices``. Any number of micro-batches is possible; a multiple of `devices` is best.
        """
        return cls._align(builtin.interleaved_1f1b(devices, stages_per_device, microbatches), "interleaved_1f1b")

    @classmethod
    def zb1p(cls, stages: int, microbatches: int, *, delay_weights: bool = True) -> Schedule:
        """Return 1F1B with its backward cells split in I and W, so that gradients reach earlier stages sooner.

        Device d holds back d weight gradients to fill its idle time, so that up to `stages` micro-batches are open on
        every device: as many as on the first one under 1F1B. With ``delay_weights=False`` device d has at most
        ``stages - d`` micro-batches open, as under 1F1B, and more idle time.

        Source: ZB-H1 of Qi et al., Zero Bubble Pipeline Parallelism (2023).
        """
        return cls._align(builtin.zb1p(stages, microbatches, delay_weights), "zb1p")

    @classmethod
    def looped_bfs(cls, devices: int, stages_per_device: int, microbatches: int) -> Schedule:
        """Return looped BFS: a device runs all micro-batches of a stage before those of its next stage.

        Stage s is on device ``s % devices``. It keeps all activations, as GPipe does, with less idle time.

        Source: Lamy-Poirier, Breadth-First Pipeline Parallelism (2022).
        """
        return cls._align(builtin.looped_bfs(devices, stages_per_device, microbatches), "looped_bfs")

    @classmethod
    def interleaved_zero_bubble(cls, devices: int, stages_per_device: int, microbatches: int) -> Schedule:
        """Return interleaved stages with I and W cells, whose W cells fill the idle time.

        Stage s is on device ``s % devices``. No device keeps more activations than device 0 under interleaved 1F1B.

        Source: the placement of Narayanan et al. (2021), and the split of Qi et al. (2023), by list scheduling.
        """
        rows = builtin.interleaved_zero_bubble(devices, stages_per_device, microbatches)
        return cls._align(rows, "interleaved_zero_bubble")

    @classmethod
    def zbv(cls, devices: int, microbatches: int) -> Schedule:
        """Return ZB-V: two stages per device, to and fro, so that the first and the last one are on device 0.

        The I and W cells leave next to no idle time if cells take equally long, with at most ``2 * devices`` open
        pairs of a stage and a micro-batch on each device: the activations of device 0 under 1F1B.

        Source: the placement and the limit of Qi et al., Pipeline Parallelism with Controllable Memory (2024); the
        order is found by list scheduling.
        """
        return cls._align(builtin.zbv(devices, microbatches), "zbv")

    @classmethod
    def search(
        cls,
        stages: int,
        microbatches: int,
        devices: int,
        costs: Costs,
        *,
        most_activations: int | None = None,
        splits: bool = True,
    ) -> Schedule:
        """Return the quickest table that is found for the seconds of cells: never slower than a named one.

        Args:
            stages: number of stages.
            microbatches: number of micro-batches.
            devices: number of devices.
            costs: seconds of the cells of each stage, and of copies, as measured.
            most_activations: most (stage, micro-batch) pairs that a device keeps for backward; None: any number.
            splits: backward may be I and W. Default True.

        Raises:
            ScheduleError: no table keeps so few activations.
            ValueError: the numbers do not fit together.
        """
        builtin.require_counts(stages=stages, microbatches=microbatches, devices=devices)
        costs.require_stages(stages)
        limit = stages * microbatches if most_activations is None else most_activations
        builtin.require_counts(most_activations=limit)
        if stages < devices:
            raise ValueError(f"{stages} stages cannot lie on {devices} devices: each needs one")
        best: tuple[float, Schedule] | None = None
        for table in cls._candidates(stages, microbatches, devices, costs, limit, splits):
            analysis = table.check(costs)
            if max(analysis.peak_activations) <= limit and (best is None or analysis.seconds < best[0]):
                best = analysis.seconds, table
        if best is None:
            raise ScheduleError(f"no table of {stages} stages on {devices} devices keeps at most {limit} activations")
        return best[1]

    @classmethod
    def _candidates(
        cls, stages: int, microbatches: int, devices: int, costs: Costs, limit: int, splits: bool
    ) -> Iterator[Schedule]:
        for name in _NAMES:
            if splits or name not in _SPLIT:
                with contextlib.suppress(ValueError):  # it has another number of stages
                    yield cls.build(name, stages, microbatches, devices)
        for rows in found_tables(stages, microbatches, devices, costs, limit, splits):
            yield cls(rows, "search")

    @classmethod
    def build(cls, name: str, stages: int, microbatches: int, devices: int | None = None) -> Schedule:
        """Return the built-in schedule `name`.

        Args:
            name: "gpipe", "1f1b", "zb1p" with one stage on each device; "interleaved_1f1b", "looped_bfs",
                "interleaved_zero_bubble" with a multiple of `devices` stages; "zbv" with two on each device.
            stages: number of stages.
            microbatches: number of micro-batches.
            devices: number of devices. Default: one per stage.

        Raises:
            ValueError: the name is unknown, or the numbers do not fit together.
        """
        devices = stages if devices is None else devices
        builtin.require_counts(stages=stages, microbatches=microbatches, devices=devices)
        alone = {"gpipe": cls.gpipe, "1f1b": cls.one_f_one_b, "zb1p": cls.zb1p}
        looped = {
            "interleaved_1f1b": cls.interleaved_1f1b,
            "looped_bfs": cls.looped_bfs,
            "interleaved_zero_bubble": cls.interleaved_zero_bubble,
        }
        if name in looped:
            if stages % devices:
                raise ValueError(f"{name} needs a multiple of {devices} stages for {devices} devices, but has {stages}")
            return looped[name](devices, stages // devices, microbatches)
        if name == "zbv":
            if stages != 2 * devices:
                raise ValueError(f"zbv needs two stages per device, but has {stages} stages and {devices} devices")
            return cls.zbv(devices, microbatches)
        if name not in alone:
            raise ValueError(f"unknown schedule {name!r}: pass one of {', '.join(_NAMES)}")
        if devices != stages:
            raise ValueError(f"{name} needs one device per stage, but has {stages} stages and {devices} devices")
        return alone[name](stages, microbatches)

    @classmethod
    def _align(cls, rows: list[list[Cell]], name: str) -> Schedule:
        """Return the schedule of `rows` with idle slots, so that each cell is right of the cells that it needs."""
        slots = analyse(cls(rows, name), Costs(1, 1, 1, 1)).start
        aligned: list[list[Cell | None]] = []
        for row in rows:
            line: list[Cell | None] = []
            for cell in row:
                line += [None] * (int(slots[cell]) - len(line))
                line.append(cell)
            aligned.append(line)
        return cls(aligned, name)

    @classmethod
    def from_csv(cls, path_or_file: str | os.PathLike[str] | TextIO) -> Schedule:
        """Return the schedule of a file in torch's format. Its name is that of the file.

        Each line is one device, each field one cell; an empty field is an idle slot. ``(0F1;1B0)OVERLAP_F_B`` becomes
        its parts, one after the other. Fields of communication (SEND_F, UNSHARD, REDUCE_GRAD and others) are skipped.
        A blank line is a device without cells, except at the end of the file. A byte order mark is skipped.

        Raises:
            ValueError: a field is malformed. The message has its line and column, both counted from 1.
        """
        if isinstance(path_or_file, (str, os.PathLike)):
            path = Path(path_or_file)
            with path.open(newline="", encoding="utf-8") as file:
                return cls._read(file, path.stem)
        return cls._read(path_or_file, "table")

    @classmethod
    def _read(cls, file: TextIO, name: str) -> Schedule:
        rows: list[list[Cell | None]] = []
        devices = 0  # without blank lines at the end
        reader = csv.reader(_without_mark(file))
        for fields in reader:
            rows.append([])
            if fields and not (len(fields) == 1 and fields[0].isspace()):
                devices = len(rows)
            for column, text in enumerate(fields, 1):
                try:
                    rows[-1] += parse_field(text)
                except ValueError as error:
                    raise ValueError(f"line {reader.line_num}, column {column}: {error}") from None
        return cls(rows[:devices], name)

    def to_csv(self, path_or_file: str | os.PathLike[str] | TextIO | None = None) -> str:
        """Return the table in torch's format, and write it to a path or an open file if one is given.

        >>> print(Schedule.gpipe(2, 1).to_csv(), end="")
        0F0,,,0B0
        ,1F0,1B0
        """
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(
            # An idle slot for a device without cells: a blank line at the end would not be read as a device.
            [["" if cell is None else str(cell) for cell in row or (None,)] for row in self.rows]
        )
        text = buffer.getvalue()
        if isinstance(path_or_file, (str, os.PathLike)):
            Path(path_or_file).write_bytes(text.encode())
        elif path_or_file is not None:
            path_or_file.write(text)
        return text

    def check(self, costs: Costs | None = None) -> Analysis:
        """Return times, bubble and peak of activations of one step, or raise if the table cannot run.

        Args:
            costs: seconds of each kind of cell. Default: ``Costs()``, a backward pass twice as long as a forward pass.

        Raises:
            ScheduleError: a stage has two devices, a cell is missing or appears twice, or cells wait for each other.
            ValueError: `costs` are for another number of stages.

        >>> analysis = Schedule.one_f_one_b(4, 8).check()
        >>> analysis.seconds, round(analysis.bubble, 3), analysis.peak_activations
        (33.0, 0.273, (4, 3, 2, 1))
        >>> Schedule([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]).check()
        Traceback (most recent call last):
        ...
        cudafuture.errors.ScheduleError: deadlock: 0B0 (device 0, position 1) waits for 1B0, which is behind 1F1;
        1F1 (device 1, position 1) waits for 0F1, which is behind 0B0. Change the order.
        """
        return analyse(self, Costs() if costs is None else costs)

    def picture(self, path: str | os.PathLike[str], costs: Costs | None = None) -> None:
        """Draw the table over time to an image file; the end of `path` (.svg, .png) is its format.

        Time is on x and devices are on y. The colour is the kind; the label is stage/micro-batch.

        Raises:
            ImportError: matplotlib is not installed.
            ScheduleError: as ``check``.

        >>> Schedule.one_f_one_b(4, 8).picture("1f1b.svg")
        """
        draw(self, path, costs)

    def __str__(self) -> str:
        texts = [["." if cell is None else str(cell) for cell in row] for row in self.rows]
        slots = max(len(row) for row in texts)
        width = max(len(text) for row in texts for text in row)
        digits = len(str(len(texts) - 1))
        lines = []
        for device, row in enumerate(texts):
            padded = row + ["."] * (slots - len(row))
            cells = " ".join(f"{text:^{width}}" if text == "." else f"{text:<{width}}" for text in padded)
            lines.append(f"device {device:>{digits}}  {cells}".rstrip())
        return "\n".join(lines)

    def __repr__(self) -> str:
        numbers = f"devices={len(self.rows)}, stages={self.stages}, microbatches={self.microbatches}"
        return f"Schedule(name={self.name!r}, {numbers})"


def _without_mark(file: TextIO) -> Iterator[str]:
    """Yield the lines, without a byte order mark, which spreadsheet programs write at the beginning."""
    for i, line in enumerate(file):
        yield line.removeprefix("\ufeff") if i == 0 else line
