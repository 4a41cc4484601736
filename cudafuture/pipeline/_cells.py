"""Cells of schedules: parsing, the cells that a cell needs, the checks of one table, and its error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

__all__ = ["Cell", "CellTable", "needed_groups", "parse_field", "validate_rows"]

_PATTERN = re.compile(r"([0-9]+)([FBIW])([0-9]+)")
_COMMUNICATION = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Cell(NamedTuple):
    """Unit of work of a device: a pass of one micro-batch through one stage.

    `kind` is "F" (forward), "B" (whole backward), "I" (backward, gradient of the input only) or "W" (backward,
    gradients of the weights only).

    >>> cell = Cell(stage=2, kind="F", microbatch=0)
    >>> str(cell)
    '2F0'
    >>> Cell.parse("12W3")
    Cell(stage=12, kind='W', microbatch=3)
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Return the cell that `text` names; raise ValueError if it names none."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no cell: write stage, kind (F, B, I or W) and micro-batch, such as 2F0")
        return cls(int(match[1]), match[2], int(match[3]))


class CellTable(Protocol):
    """Cells of a schedule, one row per device, as far as an analysis needs them."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> tuple[tuple[Cell | None, ...], ...]: ...
    @property
    def stages(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def device_of(self) -> tuple[int, ...]: ...


def parse_field(text: str) -> list[Cell | None]:
    """Return the cells of one field of torch's format: none if it is communication, [None] if it is empty."""
    text = text.strip()
    if not text:
        return [None]
    if _COMMUNICATION.fullmatch(text):
        return []
    overlap = _OVERLAP.fullmatch(text)
    if overlap is None:
        return [Cell.parse(text)]
    return [cell for part in overlap[1].split(";") for cell in parse_field(part)]


def needed_groups(cell: Cell, stages: int) -> list[tuple[Cell, ...]]:
    """Return the cells that must end before `cell` starts: of each group, the one cell that the table contains."""
    stage, kind, microbatch = cell
    if kind == "F":
        return [(Cell(stage - 1, "F", microbatch),)] if stage > 0 else []
    if kind == "W":
        return [(Cell(stage, "I", microbatch),)]
    groups: list[tuple[Cell, ...]] = [(Cell(stage, "F", microbatch),)]
    if stage + 1 < stages:
        groups.append((Cell(stage + 1, "B", microbatch), Cell(stage + 1, "I", microbatch)))
    return groups


def validate_rows(rows: Iterable[Iterable[Cell | str | None]]) -> tuple[tuple[Cell | None, ...], ...]:
    """Return the rows with every text parsed; a row without cells is empty.

    Raises:
        ValueError: a cell is malformed, with its device and position.
    """
    if isinstance(rows, str):
        raise ValueError(f"rows={rows!r}: pass one sequence of cells per device")
    valid: list[tuple[Cell | None, ...]] = []
    for device, row in enumerate(rows):
        if isinstance(row, (str, Cell)):
            raise ValueError(f"device {device}: {row!r} is one cell or text: pass a sequence of cells")
        cells: list[Cell | None] = []
        for position, cell in enumerate(row):
            try:
                cells.append(_validate(cell))
            except ValueError as error:
                raise ValueError(f"device {device}, position {position}: {error}") from None
        valid.append(tuple(cells) if any(cell is not None for cell in cells) else ())
    _require_all_stages(valid)
    return tuple(valid)


def _validate(cell: object) -> Cell | None:
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return None
    if isinstance(cell, str):
        return Cell.parse(cell)
    if not isinstance(cell, Cell):
        raise ValueError(f"{cell!r} is no cell: pass a Cell, a text such as '2F0', or None for an idle slot")
    if type(cell.stage) is not int or type(cell.microbatch) is not int or cell.stage < 0 or cell.microbatch < 0:
        raise ValueError(f"{cell!r}: stage and micro-batch are ints from 0 up")
    if cell.kind not in ("F", "B", "I", "W"):
        raise ValueError(f"{cell!r}: the kind is F, B, I or W")
    return cell


def _require_all_stages(rows: list[tuple[Cell | None, ...]]) -> None:
    """Raise ValueError unless the stages are 0, 1, 2, ... without a gap."""
    places = {cell.stage: (device, position, cell) for device, position, cell in _locate(rows)}
    if not places:
        raise ValueError("the table has no cell: pass at least one device with one cell")
    last = max(places)
    missing = next((stage for stage in range(last) if stage not in places), None)
    if missing is not None:
        device, position, cell = places[last]
        raise ValueError(
            f"device {device}, position {position}: {cell} is of stage {last}, but stage {missing} has no cell"
        )


def _locate(rows: list[tuple[Cell | None, ...]]) -> list[tuple[int, int, Cell]]:
    return [(d, p, cell) for d, row in enumerate(rows) for p, cell in enumerate(row) if cell is not None]
