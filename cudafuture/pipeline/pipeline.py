"""Model whose stages lie on several devices, trained by tables of cells."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from cudafuture import _C
from cudafuture._arguments import expect_callable
from cudafuture._C import CUDAFuture
from cudafuture.errors import InvalidStateError
from cudafuture.pipeline._clipping import clip_gradients
from cudafuture.pipeline._division import (
    divide,
    layers_of,
    move_stages,
    place_of_rank,
    places_of,
    receivers_of,
    refuse_shared,
    route_of,
    table_of,
)
from cudafuture.pipeline._fill_drain import FillDrain
from cudafuture.pipeline._minibatch import (
    expect_tensors,
    join,
    map_tensors,
    passing_changes,
    rows_of,
    shares_of,
    sizes_of,
    split,
    split_target,
)
from cudafuture.pipeline._ranks import Alone, Ranks, SharedStep
from cudafuture.pipeline._replicas import GradientReduction, OneReplica, Replicas
from cudafuture.pipeline._stage import Stage, StageMessage
from cudafuture.pipeline._step import Step
from cudafuture.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from cudafuture.pipeline.checkpoint import is_checkpointing, is_recomputing
from cudafuture.pipeline.link import Link, LocalLink
from cudafuture.pipeline.schedule import Schedule
from cudafuture.pipeline.workers import Workers

__all__ = ["Pipeline"]

Checkpoint = Literal["never", "always", "except_last"]


class Pipeline(nn.Module):
    """Model in stages on devices. ``step`` trains it on a mini-batch, by a table of forward and backward cells.

    Args:
        stages: an nn.Sequential with a `balance`, or a list of modules, one for each stage. A stage is called with one
            value of any nesting, and its result goes to the next. The modules are moved to their devices.
        devices: one for each row of the table; None (default): all accelerators, or the host once for each stage. A
            device may appear several times; each row has its own thread.
        balance: the number of layers in each stage, for an nn.Sequential; see ``pipeline.balance``.
        microbatches: parts of a mini-batch, along the first dimension of its tensors. A mini-batch with fewer rows has
            fewer parts; with your own table it is refused.
        schedule: "gpipe", "1f1b" (default), "zb1p"; with a multiple of as many stages as devices "interleaved_1f1b",
            "looped_bfs", "interleaved_zero_bubble"; with twice as many "zbv"; or a Schedule. Stage `s` lies on the
            device of its row.
        checkpoint: "never" (default); "always": backward recomputes the forward cells, so that only their inputs are
            kept; "except_last": not for the last micro-batch.
        loss: ``loss(output, target)``, or ``loss(output)`` without a target, with one element; None (default): the
            output is the loss.
        loss_reduction: of `loss` over the rows; "mean" (default): losses of micro-batches are weighted by their rows,
            so that the gradients are those of the whole mini-batch; "sum".
        deferred_batch_norm: let BatchNorm layers collect statistics of whole mini-batches. New layers replace them in
            the containers inside the stages, so the given model changes, as with torchgpipe. Default False.
        link: creates the link between the stages of this process for each step. Default: LocalLink.
        group: a torch process group, a ProcessGroup, or the group of one dimension of a device mesh: rank `r` runs row
            `r` of the table, and has only the stages of that row. None (default): this process runs all rows.
        replicas: such a group of the processes that run the same rows for other samples. They begin with the parameters
            and buffers of its first rank, and each step averages the gradients (adds them, with
            ``loss_reduction="sum"``). None (default): no other process does.
        initialize: fills the tensors of a stage that was made on the meta device, ``initialize(stage)``, where this
            process has the stage, with the names of the undivided model. None (default): ``reset_parameters()`` of each
            module that has such tensors.

    Parameters keep the names that they have in the nn.Sequential (for a list of modules: in ``nn.Sequential(*list)``),
    so ``state_dict()`` is that of the undivided model. Create the optimizer after the pipeline.

    Cells run on the streams that are current for the program on each device. ``model(x)`` runs all forward cells
    before any backward cell, as GPipe does, and ``loss.backward()`` then drains them; ``step`` runs any table.

    Raises:
        ValueError, TypeError: stages, devices, balance and table do not fit, two stages share a parameter or a buffer,
            or the nn.Sequential has its own forward or hooks, which no stage would run.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> pipeline = Pipeline(model, ["cpu", "cpu"], balance=[2, 1], microbatches=2, loss=nn.functional.mse_loss)
    >>> loss = pipeline.step(torch.ones(6, 4), torch.zeros(6, 1))
    >>> all(parameter.grad is not None for parameter in model.parameters())
    True
    """

    def __init__(
        self,
        stages: nn.Sequential | Sequence[nn.Module],
        devices: Sequence[torch.device | str | int] | None = None,
        *,
        balance: Sequence[int] | None = None,
        microbatches: int,
        schedule: str | Schedule = "1f1b",
        checkpoint: Checkpoint = "never",
        loss: Callable[..., torch.Tensor] | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        deferred_batch_norm: bool = False,
        link: Callable[[], Link] = LocalLink,
        group: Any = None,
        replicas: Any = None,
        initialize: Callable[[nn.Module], object] | None = None,
    ) -> None:
        super().__init__()
        self._ranks = Alone() if group is None else Ranks(group)
        weakref.finalize(self, self._ranks.leave).atexit = False
        self._replicas = OneReplica() if replicas is None else Replicas(replicas)
        weakref.finalize(self, self._replicas.leave).atexit = False
        with self._ranks.making() as making, self._replicas.making() as making_replica:
            _expect_choices(checkpoint, loss_reduction, microbatches)
            if loss is not None:
                expect_callable("loss", loss, "loss(output, target)")
            expect_callable("link", link, "link()")
            if initialize is not None:
                expect_callable("initialize", initialize, "initialize(stage)")
            layers, parts = divide(stages, balance, _RESERVED)
            self.devices = tuple(places_of(devices, len(parts)) if group is None else [place_of_rank(devices)])
            count = len(self.devices) if group is None else self._ranks.size
            self._rows_here = range(self._ranks.rank, self._ranks.rank + len(self.devices))
            self._named = schedule if isinstance(schedule, str) else None
            self.schedule = table_of(schedule, len(parts), microbatches, count)
            here = [s for s, row in enumerate(self.schedule.device_of) if row in self._rows_here]
            if deferred_batch_norm:
                for s in here:
                    parts[s] = convert_deferred_batch_norm(parts[s], microbatches)
            refuse_shared(parts)
            for name, layer in [named for s in here for named in layers_of(parts[s])]:
                self.add_module(name, layer)
            self.stages = tuple(parts[s] for s in here)
            """The parts of the model that this process has, each on its device."""
            self.stage_devices = tuple(self._device_of(s) for s in here)
            move_stages(self.stages, self.stage_devices, initialize)
            self._route = route_of(parts)
            devices_here = dict(zip(here, self.stage_devices, strict=True))
            settings = f"{checkpoint=}, {loss_reduction=}, layers {dict(layers).keys()}"
            making.settings = f"a pipeline of\n{self.schedule}\nwith {settings}"
            making.receivers = receivers_of(self._route, self.schedule.device_of, devices_here)
            making.settings += f" and messages {[each.key for each in making.receivers]}" if self._route.popped else ""
            if making_replica is not None:
                named = [(name, p.shape, p.dtype, p.requires_grad) for name, p in self.named_parameters()]
                buffers = [(name, buffer.shape, buffer.dtype) for name, buffer in self.named_buffers()]
                making_replica.settings = f"{making.settings}, parameters {named} and buffers {buffers}"
        self._replicas.copy_first(self.stages)
        self.microbatches = microbatches
        self._checkpoint, self._mean, self._link = checkpoint, loss_reduction == "mean", link
        loss = loss if loss is not None else _output_is_loss
        self._last = len(parts) - 1
        self._stages = {
            s: Stage(s, parts[s], device, loss if s == self._last else None) for s, device in devices_here.items()
        }
        self._fill_drain: FillDrain | None = None  # made by the first call, since it takes streams
        self._batch_norms = [layer for layer in self.modules() if isinstance(layer, DeferredBatchNorm)]
        self._workers = [Workers([device], name="cudafuture-pipeline") for device in self.devices]
        # Held for the length of a step. A thread that Ctrl-C kept from releasing it can take it again; the cells, which
        # must not take it, run in other threads.
        self._stepping = threading.RLock()
        self._rows: list[CUDAFuture[None]] = []  # of the last step
        self._numbers = itertools.count(1)  # of the steps
        self.peak_activations: tuple[int, ...] = ()
        """For each device, the most micro-batches whose activations the last step kept at a time."""

    def _device_of(self, stage: int) -> torch.device:
        return self.devices[self.schedule.device_of[stage] - self._rows_here.start]

    # ---- training

    def step(
        self,
        batch: Any,
        target: Any = None,
        *,
        weights: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        return_outputs: bool = False,
        average: bool = True,
        timeout: float | None = None,
    ) -> Any:
        """Run forward and backward of a mini-batch; return its loss, without a graph, on the device of the last stage.

        Gradients are accumulated in ``parameter.grad``, for each stage in the order of its cells in the table. The
        mini-batch itself gets no gradient.

        Args:
            batch: the input of the first stage, of any nesting; tensors have one row for each sample.
            target: for the loss; None (default): the loss takes none. Its tensors have as many rows as the mini-batch,
                or a multiple, and are split at the same places.
            weights: tensor whose rows are those of the target, such as ``labels != ignore_index``: the loss of a
                micro-batch is weighted by its share of their sum. None (default): by its rows.
            scaler: multiplies the gradients, but not the returned loss, by its scale; then call its ``unscale_``,
                ``step`` and ``update`` as always. With a `group`, on all ranks, one that knows of infinite gradients on
                the others: ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler(process_group=group)``.
            return_outputs: return ``(loss, outputs)``. Default False.
            average: average the gradients over the `replicas`. Default True. False, on all of them: only accumulate; a
                later step averages what has been accumulated. With ``loss_reduction="sum"`` gradients are larger until
                then, by the number of replicas. The replicas do not tell each other of errors in such a step.
            timeout: seconds after which the step is abandoned. None (default): no limit; with a `group` or `replicas`,
                their timeouts. The collectives of replicas take at most the timeout of their group.

        With a `group` all ranks call this. The rank of the first stage uses its `batch`, that of the last stage its
        `target`; the other ranks ignore theirs, and get None as loss and outputs. The step ends well on all ranks or
        raises on all: another rank's error is a ``RemoteError`` here. So do `replicas`, whose losses are their own; the
        gradients of a stage are on their way while cells of other stages run. A parameter that no replica has used gets
        a gradient of zeros.

        Raises:
            Exception: the first error of any cell, with its traceback; later ones are notes on it. Gradients of cells
                that have run are accumulated. The pipeline can be used again.
            TimeoutError: with a table of the cells that have ended and that run. Running cells continue; ``wait``,
                ``zero_grad`` of the pipeline (not that of an optimizer) and the next step wait for them. With a `group`
                the message has what each rank does, and which ranks do not answer; make another group and pipeline.
            RemoteError: a cell of another rank failed. ``WorkerLostError``: that rank is dead.
            RuntimeError: another thread is inside a step of this pipeline, or gradients are disabled.

        >>> pipeline = Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, loss=nn.functional.l1_loss)
        >>> loss, outputs = pipeline.step(torch.ones(4, 2), torch.ones(4, 1), return_outputs=True)
        >>> outputs.shape
        torch.Size([4, 1])
        """
        replicas = self._replicas if average else OneReplica()
        with (
            self._alone(),
            self._breaking_both(),
            self._ranks.step("step", self._link()) as shared,
            replicas.step(self._stages.values(), next(self._numbers)) as reduction,
        ):
            shared.limit(timeout)
            reduction.limit(timeout)
            if is_checkpointing() or is_recomputing():
                raise RuntimeError("a pipeline cannot run inside a stage that is recomputed")
            if not torch.is_grad_enabled():
                raise RuntimeError("step() computes gradients: call it outside of no_grad() and inference_mode()")
            rows = shared.share(rows_of(batch) if 0 in self._stages else None)
            schedule = self._schedule_for(rows)
            count = schedule.microbatches
            with torch.no_grad():
                parts = self._split(batch, count)
                targets = split_target(target, rows, count) if self._last in self._stages else []
            shares = self._shares(weights, rows, count) if self._last in self._stages else [1.0] * count
            scale = None
            if scaler is not None:
                scale = scaler.scale(torch.ones((), dtype=torch.float32, device=self.stage_devices[-1]))
                shares = [share * scale for share in shares]
            recomputes = self._recomputes(count)
            step = Step(self._stages, schedule, shared, self._route, shares, recomputes, keeps_outputs=return_outputs)
            given = (batch if parts else None, target if targets else None)
            with passing_changes(given, list(zip(parts or [None] * count, targets or [None] * count, strict=True))):
                self._run(step, parts, targets, shared, reduction)
            reduction.finish()
            self.peak_activations = tuple(step.peak_activations[row] for row in self._rows_here)
            loss = self._loss(count)
            if scale is not None and loss is not None:
                loss = loss / scale
        return (loss, _joined(step)) if return_outputs else loss

    def _shares(self, weights: Any, rows: int, count: int) -> list[Any]:
        """Return the factors of the micro-batches' losses."""
        if weights is None:
            # The sum of the replicas' gradients is the average of gradients that are larger.
            return [size / rows if self._mean else float(self._replicas.size) for size in sizes_of(rows, count)]
        if not self._mean:
            raise ValueError('weights are for loss_reduction="mean": a sum has none')
        return shares_of(weights, rows, count, self.stage_devices[-1])

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Any:
        """Scale the gradients of all stages in place so that their norm is at most `max_norm`; return their norm.

        The norm is that of the gradients of the undivided model, as by ``torch.nn.utils.clip_grad_norm_``, whose
        arguments these are. With a `group`, all ranks call this, with the same arguments.

        Raises:
            RuntimeError: `error_if_nonfinite`, and the norm is not finite; on all ranks.

        >>> pipeline = Pipeline([nn.Linear(1, 1, bias=False)], microbatches=1, loss=nn.functional.l1_loss)
        >>> _ = pipeline.step(torch.full((1, 1), 3.0), torch.full((1, 1), 9.0))
        >>> pipeline.clip_grad_norm_(1.0)
        tensor(3.)
        >>> round(pipeline.get_parameter("0.weight").grad.item(), 3)
        -1.0
        """
        self.wait()
        return clip_gradients(
            list(self.parameters()), max_norm, norm_type, error_if_nonfinite, self._ranks.group, self.devices[0]
        )

    def _loss(self, count: int) -> torch.Tensor | None:
        """Return the loss of the mini-batch; None: another process has the last stage."""
        if self._last not in self._stages:
            return None
        losses = self._stages[self._last].losses
        loss = losses[0]
        for m in range(1, count):
            loss = loss + losses[m]
        return loss if self._mean else loss / self._replicas.size

    def _infer(self, batch: Any) -> Any:
        with self._alone(), self._breaking_both(), self._ranks.step("call", self._link()) as shared:
            schedule = self._schedule_for(shared.share(rows_of(batch) if 0 in self._stages else None))
            count = schedule.microbatches
            weights = [1.0] * count
            step = Step(self._stages, schedule, shared, self._route, weights, lambda m: False, is_inference=True)
            parts = self._split(batch, count)
            with passing_changes(batch if parts else None, parts):
                self._run(step, parts, [], shared, GradientReduction())
        return _joined(step)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("this pipeline is inside a step already; use one pipeline for each thread")
        try:
            self.wait()
            self._reset()
            yield
        finally:
            self._reset()
            self._stepping.release()

    @contextmanager
    def _breaking_both(self) -> Iterator[None]:
        """Stop both ranks and replicas where one of the two cannot go on: the others would wait for this one."""
        try:
            yield
        except BaseException:
            for one, other in ((self._ranks, self._replicas), (self._replicas, self._ranks)):
                if one.broken is not None:
                    other.abandon(one.broken)
            raise

    def _reset(self) -> None:
        for stage in self._stages.values():
            stage.reset()

    def wait(self, timeout: float | None = None) -> None:
        """Block until no cell runs any more: cells of an abandoned step run to their end.

        Raise TimeoutError after `timeout` seconds.

        >>> Pipeline([nn.Linear(1, 1)], microbatches=1).wait()
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for row in self._rows:
            try:
                if not row.done():
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    row.wait(non_blocking=True, timeout=left)
            except TimeoutError:
                if not row.done():
                    raise TimeoutError(f"a cell of an abandoned step still runs after {timeout} s") from None
            except Exception:  # the step has raised the error of the row
                continue
        self._rows = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, once no cell runs any more; see ``nn.Module.zero_grad``.

        >>> Pipeline([nn.Linear(1, 1)], microbatches=1).zero_grad()
        """
        self.wait()
        super().zero_grad(set_to_none)

    def _split(self, batch: Any, count: int) -> list[Any]:
        for layer in self._batch_norms:
            layer.set_chunks(count)
        return split(batch, count) if 0 in self._stages else []

    def _run(
        self, step: Step, parts: list[Any], targets: list[Any], shared: SharedStep, reduction: GradientReduction
    ) -> None:
        """Run the rows of this process on their devices' threads, and begin to reduce the gradients of their stages."""
        inputs, wanted = ([StageMessage.of(part, lambda _: False) for part in each] for each in (parts, targets))
        step.feed(inputs, wanted)
        futures = self._rows = []
        try:
            for row, device, workers in zip(self._rows_here, self.devices, self._workers, strict=True):
                streams = _C.current_streams([device])
                run = functools.partial(step.run_row, row)
                stream = streams[0] if streams else None
                futures.append(workers.submit(device, run, stream=stream, name=f"row {row} of the step"))
            for s in sorted(self._stages, reverse=True) if reduction.is_needed else ():
                if not shared.wait(step.ended[s]):
                    break
                reduction.begin(self._stages[s])
            for future in futures:
                shared.wait(future)
        except TimeoutError:
            what = f"a step did not end in {shared.timeout} s; cells that have ended, and (those that run or wait)"
            error = TimeoutError(f"{what}:\n{step.progress()}")
            step.fail(error)
            reduction.abandon(error)
            for future in futures:
                future.add_done_callback(_retrieve_error, executor=_C.inline_executor)
            raise error from None
        except BaseException as error:  # Ctrl-C
            step.fail(error)
            for future in futures:
                future.exception()
        first = step.error()
        if first is not None:
            raise first

    def _schedule_for(self, rows: int) -> Schedule:
        if rows >= self.schedule.microbatches:
            return self.schedule
        if self._named is None or rows == 0:
            raise ValueError(f"the mini-batch has {rows} rows for {self.schedule.microbatches} micro-batches")
        return Schedule.build(self._named, self.schedule.stages, rows, len(self.schedule.rows))

    def _recomputes(self, count: int) -> Callable[[int], bool]:
        if self._checkpoint == "never":
            return lambda m: False
        return lambda m: self._checkpoint == "always" or m < count - 1

    # ---- use as a module

    def forward(self, batch: Any) -> Any:
        """Run the forward pass of all micro-batches, on all devices; return the output of the mini-batch.

        ``loss.backward()`` then drains them in the reverse order: that is GPipe's table, for any table of the pipeline,
        and the activations of all micro-batches are kept until then. ``step`` runs the pipeline's table.

        Args:
            batch: a tensor or a tuple of tensors; stages pass the same kinds here. Under ``torch.no_grad()`` it may be
                of any nesting, as in ``step``.

        Raises:
            TypeError: another value.

        >>> pipeline = Pipeline([nn.Linear(2, 4), nn.Linear(4, 1)], microbatches=2)
        >>> pipeline(torch.ones(3, 2)).shape
        torch.Size([3, 1])
        """
        if not torch.is_grad_enabled():
            return self._infer(batch)
        if self._ranks.group is not None or self._replicas.size > 1:
            raise RuntimeError("a pipeline over several processes is trained by step()")
        if self._fill_drain is None:
            self._fill_drain = FillDrain(self.stages, self.stage_devices)
        expect_tensors(batch)
        count = min(self.microbatches, rows_of(batch))
        for layer in self._batch_norms:
            layer.set_chunks(count)
        moved = map_tensors(batch, lambda tensor: tensor.to(self.stage_devices[0]))
        checkpointed = {"never": 0, "always": count, "except_last": count - 1}[self._checkpoint]
        return self._fill_drain.run(moved, split(moved, count), checkpointed)

    def __iter__(self) -> Iterator[nn.Module]:
        """Return an iterator over the layers."""
        return iter(module for _, module in layers_of(self))

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._modules)

    def to(self, *args: Any, **kwargs: Any) -> Pipeline:
        """Convert the dtype, as ``nn.Module.to`` does; raise TypeError for a device, because stages have their own.

        >>> Pipeline([nn.Linear(1, 1)], microbatches=1).to(torch.float64).get_parameter("0.bias").dtype
        torch.float64
        """
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None:
            raise TypeError("the stages of a pipeline lie on the devices that it was created with")
        return super().to(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Pipeline:
        for parameter in self.parameters():
            if fn(parameter.new_empty(0)).device != parameter.device:  # cuda(), cpu() and similar methods
                raise TypeError("the stages of a pipeline lie on the devices that it was created with")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError: threads cannot be copied or pickled."""
        raise TypeError("a pipeline cannot be copied or pickled: copy the model before, or its state_dict()")

    def train(self, mode: bool = True) -> Pipeline:
        """Set the mode of all layers; see ``nn.Module.train``.

        >>> Pipeline([nn.Dropout()], microbatches=1).eval().training
        False
        """
        super().train(mode)
        for stage in self.stages:
            stage.train(mode)
        return self

    def close(self) -> None:
        """End the threads. A later step raises.

        >>> with_one_stage = Pipeline([nn.Linear(1, 1)], microbatches=1)
        >>> with_one_stage.close()

        Raises:
            InvalidStateError: called by a cell.
        """
        if any(workers.is_inside() for workers in self._workers):
            raise InvalidStateError("a cell cannot close its pipeline, because close() waits for the cell")
        for workers in self._workers:
            workers.close()
        self._replicas.close()
        self._ranks.close()


_RESERVED = frozenset(
    (*dir(Pipeline), "devices", "microbatches", "peak_activations", "schedule", "stage_devices", "stages")
)
"""Names that a layer cannot have."""


def _joined(step: Step) -> Any:
    """Return the outputs; None: another process has the last stage."""
    if not step.outputs:
        return None
    return join([step.outputs[m].value() for m in range(len(step.outputs))])


def _retrieve_error(future: CUDAFuture[Any]) -> None:
    """Retrieve an error that is raised too late, so that it is not logged."""
    with contextlib.suppress(BaseException):
        future.value()


def _output_is_loss(output: torch.Tensor) -> torch.Tensor:
    return output


def _expect_choices(checkpoint: object, loss_reduction: object, microbatches: object) -> None:
    if checkpoint not in ("never", "always", "except_last"):
        raise ValueError(f'checkpoint={checkpoint!r}: pass "never", "always" or "except_last"')
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f'loss_reduction={loss_reduction!r}: pass "mean" or "sum"')
    if type(microbatches) is not int or microbatches < 1:
        raise ValueError(f"microbatches={microbatches!r}: pass an int of at least 1")
