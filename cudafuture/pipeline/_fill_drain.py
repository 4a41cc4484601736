"""Engine of GPipe's order: micro-batches through stages, as one autograd graph whose backward pass is the reverse.

In clock cycle k the worker of each stage j enqueues micro-batch k - j. These are the points where it orders streams, or
the backward pass, shown for a micro-batch i between two stages on two devices. ``S`` is the stream that was current
when the forward pass began; the others belong to the two ends of the edge::

    forward: downwards      stream          backward: upwards
    ------------------      ------          -----------------
      stage j                 S       [2]   its functions, or one that runs the result of [4]
      depart                  gate    [3]   S records an event;  backward: S waits for the event of [5]
      recompute               S       [4]   backward only: beside the copy of the gradient, as S has not waited yet
      order                   gate    [6]   backward: only after [6] of i + 1, or [2] if that is one function
      copy                out -> in   [5]   out waits for the event of [3];  backward: in -> out, and records an event
      wait                    S'      [1]   S' waits for in;  backward: in waits for S'
      stage j + 1             S'      [2]

Each autograd function is applied while the stream in its row is current (for the copy: `in`). Autograd runs its
backward pass in that stream, and makes the stream wait for those of the functions that produced the gradients. A
gradient in flight therefore delays `gate`, on which nothing else is enqueued, and not S before [3].

Two stages on one device need neither [1], [3] nor [5]. A skip tensor takes the same path as the micro-batch, from the
stage that stashes it directly to the one that pops it.

The order of the backward passes of one stage: those of i + 1 become ready first, all at once, by [6]. One thread of
autograd runs all functions of the device, and runs those first that were applied last in their thread. All functions in
the table are applied by the worker of their stage, so the functions of i + 1 end before those of i begin. Hence
parameters get the gradients of the micro-batches in the reverse order, and [1] and [5] do not wait for other
micro-batches. A checkpointed stage is one function and can take part in [6] itself. Then i is recomputed only after
the backward pass of i + 1.

Idea: torchgpipe (Kim et al., 2020).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import ne
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from cudafuture._modes import ThreadContext
from cudafuture.pipeline._copy import Handover, copy, depart, wait
from cudafuture.pipeline._dependency import fork, join, phony
from cudafuture.pipeline._minibatch import TensorOrTensors, concatenate, expect_tensors, passing_changes
from cudafuture.pipeline._sharing import distinct, refuse_overlap, versions_of
from cudafuture.pipeline.checkpoint import RandomState, checkpointing, is_checkpointing, is_recomputing, recomputing
from cudafuture.pipeline.skip import SkipNamespace, SkipTracker, inspect_skip_layout, use_skip_tracker
from cudafuture.pipeline.stream import AbstractStream, current_stream, new_stream, use_stream
from cudafuture.pipeline.workers import Workers

__all__ = ["FillDrain"]

_Key = tuple[SkipNamespace | None, str]


class FillDrain:
    """Forward passes of micro-batches through stages. ``backward()`` of a loss of the output drains them.

    Args:
        stages: modules, each on its device.
        devices: of the stages.

    Attributes:
        stages: as given. They may be replaced between two calls of ``run``.
    """

    def __init__(self, stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self.stages = stages
        self._partitions: list[_FillDrainStage] = []
        layout = inspect_skip_layout(stages)
        routes = layout.by_ns_name
        for j, (stage, device) in enumerate(zip(stages, devices, strict=True)):
            pops = [(source, (ns, name)) for source, ns, name in layout.copy_policy(j)]
            stashes = [key for key, (source, _) in routes.items() if source == j and layout.requires_copy(*key)]
            targets = [devices[routes[key][1]] for key in stashes] + list(devices[j + 1 : j + 2])
            sends = any(target != device for target in targets)
            self._partitions.append(_FillDrainStage(stage, device, pops, stashes, sends))

    def run(
        self, minibatch: TensorOrTensors, microbatches: Sequence[TensorOrTensors], checkpointed: int = 0
    ) -> TensorOrTensors:
        """Return the output of a mini-batch, on the device of the last stage.

        Args:
            minibatch: on the device of the first stage.
            microbatches: its parts, as ``minibatch.split`` returns them.
            checkpointed: the number of micro-batches, from the first, that backward recomputes. Default 0.

        Raises:
            TypeError: a stage returned another value than a tensor or a tuple of tensors.
        """
        for partition, stage in zip(self._partitions, self.stages, strict=True):
            partition.module = stage
        with passing_changes(minibatch, microbatches):
            return concatenate(_ForwardPass(microbatches, self._partitions, checkpointed).run())


@dataclass
class _FillDrainStage:
    """Stage of a model, with the streams of its ends of the edges."""

    module: nn.Module
    device: torch.device
    pops: list[tuple[int, _Key]]
    """Skips that another stage stashes, with the number of that stage."""
    stashes: list[_Key]
    """Skips that another stage pops."""
    sends: bool
    """True if an output goes to another device."""
    in_stream: AbstractStream = field(init=False)
    out_stream: AbstractStream = field(init=False)
    gate: AbstractStream = field(init=False)
    changes_input: bool | None = None
    """True if the module has changed its input in place; None: not known yet."""

    def __post_init__(self) -> None:
        self.in_stream, self.out_stream, self.gate = (new_stream(self.device) for _ in range(3))


def _clock_cycles(batches: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the cells (micro-batch, stage) of each clock cycle."""
    for clock in range(batches + stages - 1):
        yield [(clock - j, j) for j in range(stages) if 0 <= clock - j < batches]


class _ParcelStructure(NamedTuple):
    """Structure of a parcel without its tensors."""

    is_tuple: bool
    size: int  # tensors of the micro-batch, each counted once
    indices: list[int]  # of the items of the micro-batch, among these tensors
    skips: dict[_Key, bool]

    def parcel(self, tensors: Sequence[Tensor]) -> _Parcel:
        value = tuple(tensors[i] for i in self.indices) if self.is_tuple else tensors[0]
        rest = iter(tensors[self.size :])
        return _Parcel(value, {key: next(rest) if is_there else None for key, is_there in self.skips.items()})


@dataclass
class _Parcel:
    """Micro-batch between two stages, with the skip tensors that one of them pops or stashes."""

    value: TensorOrTensors
    skips: dict[_Key, Tensor | None]

    def tensors(self) -> tuple[Tensor, ...]:
        return (*distinct(self._items())[0], *(tensor for tensor in self.skips.values() if tensor is not None))

    def shape(self) -> _ParcelStructure:
        skips = {key: tensor is not None for key, tensor in self.skips.items()}
        found, indices = distinct(self._items())
        return _ParcelStructure(isinstance(self.value, tuple), len(found), indices, skips)

    def _items(self) -> tuple[Tensor, ...]:
        return self.value if isinstance(self.value, tuple) else (self.value,)


class _Errors:
    """Errors of one step. The step raises the first one, with notes about the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self.first: BaseException | None = None

    def add(self, error: BaseException, where: str) -> None:
        with self._lock:
            if self.first is None:
                self.first = error
            elif error is not self.first and hasattr(self.first, "add_note"):  # Python 3.11
                self.first.add_note(f"also in {where}: {type(error).__name__}: {error}")

    @contextmanager
    def kept(self, where: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.add(error, where)
            raise


class _CellRun:
    """Stage j for micro-batch i: its computation, and its state until backward."""

    def __init__(
        self, stage: _FillDrainStage, stream: AbstractStream, name: str, shape: _ParcelStructure, errors: _Errors
    ) -> None:
        self.stage = stage
        self.stream = stream
        self.name = name
        self.shape = shape  # of the input
        self.errors = errors
        self.has_changed: list[bool] = []  # for each tensor of the input, whether the last run changed it in place
        # Of a checkpointed cell:
        self.sent_shape: _ParcelStructure | None = None
        self.context: ThreadContext | None = None  # of the forward pass
        self.random: RandomState | None = None  # the states of the generators
        self.recomputed: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None  # outputs and leaves

    def run_with_checkpoint(self, tensors: Sequence[Tensor], after: Tensor) -> _Parcel:
        """Run the stage, and keep only its input; backward passes through `after` behind its own functions."""
        self.context = ThreadContext()
        outputs = _Checkpoint.apply(after, self, *tensors)  # type: ignore[no-untyped-call]
        assert self.sent_shape is not None
        return self.sent_shape.parcel(outputs)

    def run(self, given: Sequence[Tensor]) -> _Parcel:
        received, before = self.shape.parcel(given), versions_of(given)
        tracker = SkipTracker()
        tracker.tensors.update(received.skips)
        with use_skip_tracker(tracker):
            value = self.stage.module(received.value)
        self.has_changed = list(map(ne, before, versions_of(given)))
        if torch.is_grad_enabled():
            refuse_overlap(given, self.has_changed, self.name)
        expect_tensors(value)
        if isinstance(value, tuple) and not value:
            raise ValueError(f"{self.name} returned no tensor: an empty tuple")
        return _Parcel(value, {key: tracker.tensors[key] for key in self.stage.stashes})

    def run_checkpointed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the stage without a graph, and keep its input as it was before."""
        stage = self.stage
        protects = stage.changes_input is not False
        given = [tensor.clone() if protects else tensor for tensor in tensors]
        with checkpointing():
            self.random = RandomState.capture(stage.device)
            sent = self.run(given)
        refuse_overlap(tensors, self.has_changed, self.name)
        if any(self.has_changed):
            stage.changes_input = True
            if not protects:
                raise RuntimeError(
                    f"{self.name} changes its input in place, but did not before: do so always, or never"
                )
        elif stage.changes_input is None:
            stage.changes_input = False
        self.sent_shape = sent.shape()
        return sent.tensors()

    def recompute(self, saved: tuple[Tensor, ...]) -> None:
        """Run the stage again, with a graph; autograd calls this in the context of the forward pass."""
        assert self.random is not None
        leaves = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in saved)
        with use_stream(self.stream), torch.enable_grad(), recomputing(self.random):
            given = [leaf.clone() if self.stage.changes_input else leaf for leaf in leaves]
            self.recomputed = self.run(given).tensors(), leaves

    def backward(self, gradients: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
        """Run the backward pass of the recomputed stage, and return the gradients of the inputs."""
        assert self.recomputed is not None, "recompute runs before, see [4]"
        (outputs, leaves), self.recomputed = self.recomputed, None
        pairs = [(y, grad) for y, grad in zip(outputs, gradients, strict=True) if y.requires_grad and grad is not None]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [grad for _, grad in pairs])
        return (leaf.grad for leaf in leaves)


class _Checkpoint(torch.autograd.Function):
    """Stage whose forward pass keeps nothing. Its backward pass is that of the result of ``_Recompute``."""

    @staticmethod
    def forward(ctx: Any, after: Tensor, cell: _CellRun, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.cell = cell
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in cell.run_checkpointed(inputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with ctx.cell.errors.kept(f"the backward pass of {ctx.cell.name}"):
            return None, None, *ctx.cell.backward(gradients)


class _Recompute(torch.autograd.Function):
    """Phony whose backward pass runs a stage again."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, cell: _CellRun, *inputs: Tensor) -> Tensor:
        ctx.cell = cell
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return carrier.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        with ctx.cell.errors.kept(f"the recomputation of {ctx.cell.name}"):
            saved = ctx.saved_tensors
            ctx.cell.context.run(ctx.cell.recompute, saved)
        return (None,) * (2 + len(saved))


class _StageWorkers(Workers):
    """Workers whose tasks are ordered by the copies between their streams alone."""

    _records = False


class _ForwardPass:
    """Forward pass of one mini-batch."""

    def __init__(
        self, batches: Sequence[TensorOrTensors], stages: Sequence[_FillDrainStage], checkpointed: int
    ) -> None:
        self.batches = list(batches)
        self.stages = stages
        self.checkpointed = checkpointed  # micro-batches
        self.skips: list[dict[_Key, Tensor | None]] = [{} for _ in batches]  # stashed, not yet popped
        self.streams = [current_stream(stage.device) for stage in stages]
        self.handovers: list[dict[int, Handover]] = [{} for _ in batches]  # of the stages, between [3] and [5]
        self.carriers: list[Tensor | None] = [None] * len(stages)  # phonies of the forks [6] of the last micro-batch
        self.errors = _Errors()

    def run(self) -> list[TensorOrTensors]:
        cycles = _clock_cycles(len(self.batches), len(self.stages))
        if is_checkpointing() or is_recomputing():
            # The generators and flags of an outer checkpoint belong to this thread: no other thread may run its parts.
            for i, j in itertools.chain.from_iterable(cycles):
                with use_stream(self.streams[j]):
                    ThreadContext().run(self._run_cell, i, j)
            return self.batches
        with _StageWorkers([stage.device for stage in self.stages], name="cudafuture-stage") as workers:
            for cycle in cycles:
                self._run_cycle(cycle, workers)
        return self.batches

    def _run_cycle(self, cycle: list[tuple[int, int]], workers: Workers) -> None:
        failed: dict[int, BaseException] = {}  # by stage
        cells = [
            workers.submit(
                self.stages[j].device, partial(self._try_cell, i, j, failed), stream=self.streams[j], name=_name(i, j)
            )
            for i, j in cycle
        ]
        workers.wait()
        for cell in cells:
            cell.value()  # raises the error of a thread that died
        for i, j in cycle:
            if j in failed:
                self.errors.add(failed.pop(j), _name(i, j))
        self._raise_first()

    def _try_cell(self, i: int, j: int, failed: dict[int, BaseException]) -> None:
        try:
            self._run_cell(i, j)
        except BaseException as error:  # in the future it would get a note with the name of this method
            failed[j] = error

    def _raise_first(self) -> None:
        error, self.errors.first = self.errors.first, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback has this frame

    def _run_cell(self, i: int, j: int) -> None:
        """Run stage j for micro-batch i, while the stage's stream is current."""
        stage = self.stages[j]
        sources = {key: source for source, key in stage.pops}
        parcel = _Parcel(self.batches[i], {key: self.skips[i].pop(key) for key in sources})
        shape, tensors = parcel.shape(), list(parcel.tensors())
        if j > 0:
            origins = [j - 1] * shape.size + [sources[key] for key, is_there in shape.skips.items() if is_there]
            tensors = self._copied(tensors, origins, i, j)
        cell = _CellRun(stage, self.streams[j], _name(i, j), shape, self.errors)
        carrier = self.carriers[j]
        if is_checkpointed := self._is_checkpointed(i, stage, tensors):
            tensors = [tensor.clone() if tensor.is_inference() else tensor for tensor in tensors]  # backward saves them
            is_tracked = carrier is not None and carrier.requires_grad
            after = carrier if is_tracked else phony(stage.device, requires_grad=True)
            sent, carrier = cell.run_with_checkpoint(tensors, cast(Tensor, after)), None  # [2] and [6]
            if j == 0 and self.checkpointed < len(self.batches):  # the others will change the mini-batch
                increment_version(compress(tensors, cell.has_changed))  # before [4] saves parts of it
        else:
            sent = cell.run(tensors)  # [2]
        outputs = self._finished(i, j, sent.tensors(), (cell, tensors) if is_checkpointed else None, carrier)
        parcel = sent.shape().parcel(outputs)
        self.skips[i].update(parcel.skips)
        self.batches[i] = parcel.value

    def _copied(self, tensors: list[Tensor], origins: list[int], i: int, j: int) -> list[Tensor]:
        """Return tensors of micro-batch i on the device of stage j; `origins` are the stages that produced them."""
        stage = self.stages[j]
        far = [n for n, origin in enumerate(origins) if self.stages[origin].device != stage.device]
        for origin in sorted({origins[n] for n in far}):
            group = [n for n in far if origins[n] == origin]
            out, handover = self.stages[origin].out_stream, self.handovers[i][origin]
            copies = copy(out, stage.in_stream, *(tensors[n] for n in group), handover=handover)  # [5]
            for n, tensor in zip(group, copies, strict=True):
                tensors[n] = tensor
        if far:
            waited = wait(stage.in_stream, self.streams[j], *(tensors[n] for n in far))  # [1]
            for n, tensor in zip(far, waited, strict=True):
                tensors[n] = tensor
        return tensors

    def _is_checkpointed(self, i: int, stage: _FillDrainStage, inputs: Sequence[Tensor]) -> bool:
        has_graph = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if i >= self.checkpointed or not has_graph or is_checkpointing() or is_recomputing():
            return False
        return any(tensor.requires_grad for tensor in (*inputs, *stage.module.parameters()))

    def _finished(
        self,
        i: int,
        j: int,
        outputs: tuple[Tensor, ...],
        checkpointed: tuple[_CellRun, Sequence[Tensor]] | None,
        carrier: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return the outputs of a stage for the next stages; `checkpointed` is its cell and input if it is."""
        stage, stream = self.stages[j], self.streams[j]
        with use_stream(stage.gate if stage.sends else stream):
            if stage.sends:
                handover = self.handovers[i][j] = Handover()
                outputs = depart(stream, handover, *outputs)  # [3]
            if checkpointed is not None:
                cell, inputs = checkpointed
                outputs, trigger = fork(outputs)
                with use_stream(stream):
                    trigger = _Recompute.apply(trigger, cell, *inputs)  # type: ignore[no-untyped-call] # [4]
                outputs = join(outputs, trigger)
            if carrier is not None:
                outputs = join(outputs, carrier)  # [6]
            outputs, self.carriers[j] = fork(outputs)  # [6]
        return outputs


def _name(i: int, j: int) -> str:
    return f"partition {j}, micro-batch {i}"
