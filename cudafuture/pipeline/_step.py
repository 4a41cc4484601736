"""Step of a pipeline: each device runs its row of the table, and messages between stages order the rows.

::

    device 0   F0 ─(1)► F1 ─► F2 ─► ...                ►B0
                  │                                     ▲
                 (2) activation, on streams of copies  (3) gradient, on others
                  ▼                                     │
    device 1      F0 ───► B0 ─(4)► F1 ─► B1 ─► ...  ────┘

1. A row runs its cells one after the other, on the program's current stream of that device. Parameters and gradients
   therefore need no further order with the program's work before and after the step.
2. The copy of an activation waits for the cell that produced it; its memory is kept until the copy has read it.
3. The same holds for a gradient, in the other direction, concurrently with the activations.
4. A cell waits for the copies of its inputs, and memory of a copy is kept until the cell has read it.

Points 2 to 4 are those of ``cudafuture.copy`` and of waiting for its future; see ``LocalLink``.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cudafuture._C import CUDAFuture
from cudafuture.pipeline._ranks import SharedStep
from cudafuture.pipeline._stage import Skip, Stage, StageMessage
from cudafuture.pipeline.link import Link, LinkClosedError
from cudafuture.pipeline.schedule import Cell, Schedule

__all__ = ["Route", "Step"]

_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


@dataclass(frozen=True)
class Route:
    """Routes of skips between stages: the skips that each stage pops, and the stages that stash and pop each skip."""

    popped: Mapping[int, list[Skip]] = field(default_factory=dict)
    """By stage."""
    stashed_by: Mapping[Skip, int] = field(default_factory=dict)
    popped_by: Mapping[Skip, int] = field(default_factory=dict)


class Step:
    """Cells of one mini-batch, in this process.

    Args:
        stages: of this process, by number.
        schedule: the table to run.
        shared: the step, as this process shares it with others; its link is used by this step only.
        route: of the skips.
        weights: of the micro-batches' losses.
        is_checkpointed: returns whether backward recomputes a micro-batch.
        is_inference: run forward cells only, without the loss.
        keeps_outputs: keep the outputs of the last stage.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        shared: SharedStep,
        route: Route,
        weights: Sequence[float],
        is_checkpointed: Callable[[int], bool],
        *,
        is_inference: bool = False,
        keeps_outputs: bool = False,
    ) -> None:
        self._stages, self._schedule, self._shared, self._route = stages, schedule, shared, route
        self._link: Link = shared.link
        self._cells = sum(c is not None and c.stage in stages for row in schedule.rows for c in row)
        self._weights, self._is_checkpointed = weights, is_checkpointed
        self._draws_alone = any(is_checkpointed(m) for m in range(schedule.microbatches))
        self._is_inference, self._keeps_outputs = is_inference, keeps_outputs or is_inference
        self._has_target = False
        self._lock = threading.Lock()  # guards the fields below
        self.errors: list[tuple[Cell | None, BaseException]] = []
        self.outputs: dict[int, StageMessage] = {}
        self.ended: dict[int, CUDAFuture[bool]] = {s: CUDAFuture(name=f"cells of stage {s}") for s in stages}
        """By stage: complete when it runs no more cells; True if all of them have ended."""
        self.peak_activations = [0] * len(schedule.rows)
        self._ended: set[Cell] = set()
        self._running: dict[int, Cell] = {}  # by row
        self._awaited: dict[int, tuple[Any, ...]] = {}  # by stage: the key of a message
        shared.describe, shared.fail = self._describe, self.fail

    def feed(self, inputs: Sequence[StageMessage], targets: Sequence[StageMessage]) -> None:
        """Send the micro-batches to the first stage, and their targets to the last, if they are in this process."""
        last = self._schedule.stages - 1
        self._has_target = bool(targets)
        for m, message in enumerate(inputs):
            self._send(("F", 0, m), message, 0)
        for m, message in enumerate(targets):
            self._send(("target", last, m), message, last)

    def run_row(self, row: int) -> None:
        """Run the cells of a device in their order; stop after an error in any row."""
        try:
            self._run_cells(row)
        finally:
            for s in self._stages:
                if self._schedule.device_of[s] == row and not self.ended[s].done():
                    self.ended[s].set_result(False)

    def _run_cells(self, row: int) -> None:
        live = 0
        left = Counter(cell.stage for cell in self._schedule.rows[row] if cell is not None)
        for cell in self._schedule.rows[row]:
            if cell is None or (self._is_inference and cell.kind != "F"):
                continue
            try:
                with self._lock:
                    if self.errors:
                        return
                    self._running[row] = cell
                live += cell.kind == "F"
                self.peak_activations[row] = max(self.peak_activations[row], live)
                self._run_cell(cell)
                live -= cell.kind in "BW"
                with self._lock:
                    self._ended.add(cell)
                    del self._running[row]
                left[cell.stage] -= 1
                if not left[cell.stage]:
                    self.ended[cell.stage].set_result(True)
            except LinkClosedError:
                return
            except BaseException as error:
                self.fail(error, cell)
                return

    def fail(self, error: BaseException, cell: Cell | None = None) -> None:
        """Record an error, and stop the rows at their next cells."""
        with self._lock:
            self.errors.append((cell, error))
        self._link.close()
        self._shared.stop()

    def error(self) -> BaseException | None:
        """Return the first error, with later ones as notes on it, or None if all cells have ended."""
        with self._lock:
            if not self.errors:
                is_whole = self._is_inference or len(self._ended) == self._cells
                return (
                    None if is_whole else LinkClosedError("the link between the stages closed before all cells ended")
                )
            (cell, first), *others = self.errors
        noted: Any = first  # Python 3.10 has no add_note
        if hasattr(noted, "add_note"):
            if cell is not None:
                noted.add_note(f"in the {self._described(cell)}")
            for other, error in others:
                where = "" if other is None else f" in the {self._described(other)}"
                noted.add_note(f"then{where}: {traceback.format_exception_only(error)[-1].strip()}")
        return first

    def progress(self) -> str:
        """Return a table of stages and micro-batches: the cells that have ended, and in brackets those that run."""
        with self._lock:
            ended, running = set(self._ended), set(self._running.values())
        lines = []
        for s in self._stages:
            marks = []
            for m in range(self._schedule.microbatches):
                cells = [Cell(s, kind, m) for kind in "FBIW"]
                done = "".join(cell.kind for cell in cells if cell in ended)
                marks.append(done + "".join(f"({cell.kind})" for cell in cells if cell in running) or ".")
            lines.append(f"stage {s} on {self._stages[s].device}: " + " ".join(f"{mark:>5}" for mark in marks))
        return "\n".join(lines)

    def _describe(self) -> str:
        """Return what this process does, as the rest of a sentence."""
        with self._lock:
            running, awaited = list(self._running.values()), dict(self._awaited)
        doing = [f"runs the {self._described(cell)}" for cell in running if cell.stage not in awaited]
        doing += [f"waits for {_described(key, self._schedule)}" for key in awaited.values()]
        return ", and ".join(doing) or "runs no cell"

    def _described(self, cell: Cell) -> str:
        stage = self._stages[cell.stage]
        return f"{_NAMES[cell.kind]} of micro-batch {cell.microbatch} in stage {cell.stage} on {stage.device}"

    # ---- cells

    def _run_cell(self, cell: Cell) -> None:
        if cell.kind == "F":
            self._forward(cell.stage, cell.microbatch)
        elif cell.kind == "W":
            self._stages[cell.stage].weight_gradient(cell.microbatch)
        else:
            self._backward(cell.stage, cell.microbatch, cell.kind == "I")

    def _forward(self, s: int, m: int) -> None:
        stage = self._stages[s]
        received = self._receive(s, ("F", s, m))
        popped = {skip: self._receive(s, ("skip", skip, m)) for skip in self._route.popped.get(s, ())}
        has_target = stage.loss is not None and self._has_target
        target = self._receive(s, ("target", s, m)).value() if has_target else None
        if self._is_inference:
            sent = stage.infer(received, popped)
        else:
            weight, is_checkpointed = self._weights[m], self._is_checkpointed(m)
            sent = stage.forward(m, received, popped, target, weight, is_checkpointed, self._draws_alone)
        for skip, message in sent.stashed.items():
            self._send(("skip", skip, m), message, self._route.popped_by[skip])
        if stage.loss is None:
            self._send(("F", s + 1, m), sent.message, s + 1)
        elif self._keeps_outputs:
            with self._lock:
                self.outputs[m] = sent.message

    def _backward(self, s: int, m: int, is_input_only: bool) -> None:
        stage = self._stages[s]
        gradients: dict[Any, torch.Tensor | None] = {}
        if stage.loss is None:
            gradients.update(enumerate(self._receive(s, ("B", s, m)).value()))
        for skip, stash in self._route.stashed_by.items():
            if stash == s:
                gradients[skip] = self._receive(s, ("skip gradient", skip, m)).leaves[0]
        received = stage.input_gradient(m, gradients) if is_input_only else stage.backward(m, gradients)
        for skip in self._route.popped.get(s, ()):
            message = StageMessage.of(received.get(skip), lambda _: False)
            self._send(("skip gradient", skip, m), message, self._route.stashed_by[skip])
        if s > 0:
            count = max((i + 1 for i in received if isinstance(i, int)), default=0)
            leaves = [received.get(i) for i in range(count)]
            self._send(("B", s - 1, m), StageMessage.of(leaves, lambda _: False), s - 1)

    # ---- messages

    def _send(self, key: tuple[Any, ...], message: StageMessage, to: int) -> None:
        if to in self._stages:
            self._link.send(key, message.leaves, self._stages[to].device, tuple(message[1:]))
        else:
            self._shared.send(key, message, self.fail)

    def _receive(self, s: int, key: tuple[Any, ...]) -> StageMessage:
        self._awaited[s] = key
        leaves, header = self._link.receive(key)
        del self._awaited[s]
        return StageMessage(leaves, *header)


def _described(key: tuple[Any, ...], schedule: Schedule) -> str:
    """Return which message it is, and which row sends it."""
    name, subject, microbatch = key
    if name not in "FB":
        return f"the {name} {subject!r} of micro-batch {microbatch}"
    sender = subject + (-1 if name == "F" else 1)
    what = "activation" if name == "F" else "gradient"
    row = f" on rank {schedule.device_of[sender]}" if sender >= 0 else ""
    return f"the {what} of micro-batch {microbatch} from stage {sender}{row}"
