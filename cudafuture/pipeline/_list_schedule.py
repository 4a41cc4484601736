"""Tables by list scheduling: each idle device takes the first of its cells that can run, in an order of preference.

Source: list scheduling, Graham (1966).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from cudafuture.pipeline._cells import Cell
from cudafuture.pipeline.analysis import Costs

__all__ = ["Preference", "early_microbatch_first", "forward_first", "list_schedule", "longest_path_first"]

Preference = Callable[[Cell], tuple[float, ...]]
"""Returns the rank of a cell among those that can run: the lowest is taken."""


def early_microbatch_first(cell: Cell) -> tuple[float, ...]:
    """Return the rank of a cell by its micro-batch, weights last."""
    return cell.kind == "W", cell.microbatch, cell.kind == "F"


def forward_first(cell: Cell) -> tuple[float, ...]:
    """Return the rank of a cell: forward cells first, those of late stages before others, weights last."""
    if cell.kind == "F":
        return 0, -cell.stage, cell.microbatch
    return 1 + (cell.kind == "W"), cell.stage, cell.microbatch


def longest_path_first(stages: int, costs: Costs, splits: bool) -> Preference:
    """Return the preference for the cells behind which the longest chain of others waits."""
    kind = "I" if splits else "B"
    backward = [0.0]  # seconds of the chain of a backward cell of each stage, itself included
    for s in range(stages):
        backward.append(backward[-1] + costs.seconds(Cell(s, kind, 0)))
    forward = [backward[-1]]
    for s in reversed(range(stages)):
        forward.append(forward[-1] + costs.seconds(Cell(s, "F", 0)))

    def rank(cell: Cell) -> tuple[float, ...]:
        stage, kind, microbatch = cell
        if kind == "W":
            return 0.0, 0, microbatch
        path = forward[stages - stage] if kind == "F" else backward[stage + 1]
        return -path, kind == "F", microbatch

    return rank


def list_schedule(
    device_of: Sequence[int], microbatches: int, costs: Costs, most_open: int, preference: Preference, *, splits: bool
) -> tuple[float, list[list[Cell]]] | None:
    """Return the seconds of a step, and the cells of every device; None: each waits for memory, or for another.

    Args:
        device_of: device of each stage.
        microbatches: number of micro-batches.
        costs: seconds of cells and copies.
        most_open: the most (stage, micro-batch) pairs of a device whose forward cell has run and whose B or W has not.
        preference: among cells that can run.
        splits: backward as I and W; False: as B.
    """
    return _ListSchedule(device_of, microbatches, costs, most_open, splits).run(preference)


class _ListSchedule:
    def __init__(self, device_of: Sequence[int], microbatches: int, costs: Costs, most_open: int, splits: bool) -> None:
        self.device_of, self.microbatches, self.costs = device_of, microbatches, costs
        self.most_open, self.backward = most_open, "I" if splits else "B"
        devices = max(device_of) + 1
        self.rows: list[list[Cell]] = [[] for _ in range(devices)]
        self.stages_of = [[s for s, own in enumerate(device_of) if own == d] for d in range(devices)]
        self.free = [0.0] * devices  # second from which each device is idle
        self.open = [0] * devices
        self.weights: list[deque[Cell]] = [deque() for _ in range(devices)]  # cells whose I has begun
        self.next = {(s, kind): 0 for s in range(len(device_of)) for kind in ("F", self.backward)}  # micro-batch
        self.arrival: dict[tuple[Cell, int], float] = {}  # of the result of a cell, on a device

    def run(self, preference: Preference) -> tuple[float, list[list[Cell]]] | None:
        left = len(self.device_of) * self.microbatches * (3 if self.backward == "I" else 2)
        times = [0.0]  # at which a device becomes idle, or a result arrives
        while left:
            if not times:
                return None
            now = heapq.heappop(times)
            for device, free in enumerate(self.free):
                if free > now:
                    continue
                cell = min(self.ready(device, now), key=preference, default=None)
                if cell is None:
                    continue
                left -= 1
                for time in self.begin(cell, device, now):
                    heapq.heappush(times, time)
        return max(self.free), self.rows

    def ready(self, device: int, now: float) -> Iterator[Cell]:
        """Yield the next cell of each kind and stage that can run on a device."""
        if self.weights[device] and self.has_arrived(self.weights[device][0]._replace(kind="I"), device, now):
            yield self.weights[device][0]
        last = len(self.device_of) - 1
        for stage in self.stages_of[device]:
            m = self.next[stage, "F"]
            has_room = m < self.microbatches and self.open[device] < self.most_open
            if has_room and (stage == 0 or self.has_arrived(Cell(stage - 1, "F", m), device, now)):
                yield Cell(stage, "F", m)
            m = self.next[stage, self.backward]
            has_run = m < self.microbatches and self.has_arrived(Cell(stage, "F", m), device, now)
            if has_run and (stage == last or self.has_arrived(Cell(stage + 1, self.backward, m), device, now)):
                yield Cell(stage, self.backward, m)

    def has_arrived(self, cell: Cell, device: int, now: float) -> bool:
        return self.arrival.get((cell, device), now + 1) <= now

    def begin(self, cell: Cell, device: int, now: float) -> Iterator[float]:
        """Put a cell at the end of its row; yield the times at which something can begin because of it."""
        stage, kind, microbatch = cell
        self.rows[device].append(cell)
        end = self.free[device] = now + self.costs.seconds(cell)
        yield end
        if kind == "W":
            self.weights[device].popleft()
        else:
            self.next[stage, kind] = microbatch + 1
        self.open[device] += (kind == "F") - (kind in "BW")
        if kind == "I":
            self.weights[device].append(Cell(stage, "W", microbatch))
        self.arrival[cell, device] = end
        to = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= to < len(self.device_of) and self.device_of[to] != device:
            self.arrival[cell, self.device_of[to]] = end + self.costs.copy
            yield end + self.costs.copy
