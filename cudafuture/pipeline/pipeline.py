"""A model whose stages lie on several devices, trained by tables of cells."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from cudafuture import _C
from cudafuture.pipeline._fill_drain import fill_drain, stages_of
from cudafuture.pipeline._minibatch import join, rows_of, split
from cudafuture.pipeline._stage import Message, Stage
from cudafuture.pipeline._step import Route, Step
from cudafuture.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from cudafuture.pipeline.link import Link, LocalLink
from cudafuture.pipeline.microbatch import Batch, TensorOrTensors, check, gather
from cudafuture.pipeline.schedule import Schedule
from cudafuture.pipeline.skip import inspect_skip_layout, verify_skippables
from cudafuture.pipeline.workers import Workers

__all__ = ["Pipeline"]

Checkpoint = Literal["never", "always", "except_last"]


class Pipeline(nn.Module):
    """A model in stages on devices. ``step`` trains it on a mini-batch, by a table of forward and backward cells.

    Args:
        stages: an nn.Sequential with a `balance`, or a list of modules, one for each stage. A stage is called with one
            value of any nesting, and what it returns goes to the next. The modules are moved to their devices.
        devices: one for each row of the table; None (default): all accelerators, or the host once for each stage. A
            device may be named several times; each row has a thread of its own.
        balance: the number of layers in each stage, for an nn.Sequential; see ``pipeline.balance``.
        microbatches: parts of a mini-batch, along the first dimension of its tensors. A mini-batch with fewer rows has
            fewer parts; with a table of one's own it is refused.
        schedule: "gpipe", "1f1b" (default), "interleaved_1f1b" (with a multiple of as many stages as devices), "zb1p",
            or a Schedule. Stage `s` lies on the device of its row.
        checkpoint: "never" (default); "always": backward computes the forward cells again, so that only their inputs
            are kept; "except_last": not for the last micro-batch.
        loss: ``loss(output, target)``, or ``loss(output)`` without a target, with one element; None (default): the
            output is the loss.
        loss_reduction: of `loss` over the rows; "mean" (default): losses of micro-batches are weighted by their rows,
            so that the gradients are those of the whole mini-batch; "sum".
        deferred_batch_norm: have BatchNorm layers collect statistics of whole mini-batches. Default False.
        link: makes the way between the stages for each step. Default: LocalLink.

    Parameters keep the names that they have in the nn.Sequential (of a list of modules: in ``nn.Sequential(*list)``),
    so ``state_dict()`` is that of the model which is not divided. Make the optimizer after the pipeline.

    Cells run on the streams that are current for the program on each device. ``model(x)`` runs all forward cells
    before any backward cell, as GPipe does, and ``loss.backward()`` then drains them; ``step`` runs any table.

    Raises:
        ValueError, TypeError: stages, devices, balance and table do not fit, or two stages share a parameter.

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
    ) -> None:
        super().__init__()
        _expect_choices(checkpoint, loss_reduction, microbatches)
        layers, parts = _divide(stages, balance)
        if deferred_batch_norm:
            parts = [convert_deferred_batch_norm(part, microbatches) for part in parts]
            layers = [named for part in parts for named in part.named_children()]
        for name, layer in layers:
            self.add_module(name, layer)
        _refuse_shared(parts)
        places = _places(devices, len(parts))
        self._named = schedule if isinstance(schedule, str) else None
        self.schedule = _table(schedule, len(parts), microbatches, len(places))
        self.devices = tuple(places)
        self.microbatches = microbatches
        self._checkpoint, self._mean, self._link = checkpoint, loss_reduction == "mean", link
        loss = loss if loss is not None else _output_is_loss
        last = len(parts) - 1
        self.stages = tuple(part.to(self._device_of(s)) for s, part in enumerate(parts))
        """The parts of the model, each on its device."""
        self.stage_devices = tuple(self._device_of(s) for s in range(len(parts)))
        self._stages = [
            Stage(s, part, self.stage_devices[s], loss if s == last else None) for s, part in enumerate(self.stages)
        ]
        self._route = _route(parts)
        self._drained = stages_of(self.stages, self.stage_devices, inspect_skip_layout(parts))
        self._batch_norms = [layer for layer in self.modules() if isinstance(layer, DeferredBatchNorm)]
        self._workers = [Workers([device], name="cudafuture-pipeline") for device in self.devices]
        self._stepping = threading.Lock()  # held for the length of a step
        self.peak_activations: tuple[int, ...] = ()
        """For each device, the most micro-batches of which the last step kept activations at a time."""

    def _device_of(self, stage: int) -> torch.device:
        return self.devices[self.schedule.device_of[stage]]

    # ---- training

    def step(self, batch: Any, target: Any = None, *, return_outputs: bool = False) -> Any:
        """Run forward and backward of a mini-batch; return its loss, without a graph, on the device of the last stage.

        Gradients are accumulated in ``parameter.grad``, for each stage in the order of its cells in the table.

        Args:
            batch: the input of the first stage, of any nesting; tensors have one row for each sample.
            target: for the loss; None (default): the loss takes none.
            return_outputs: return ``(loss, outputs)``. Default False.

        Raises:
            Exception: the first error of any cell, with its traceback; others that followed are notes on it. Gradients
                of cells that have run are accumulated then. The pipeline can be used again.
            RuntimeError: another thread is inside a step of this pipeline.

        >>> pipeline = Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], microbatches=2, loss=nn.functional.l1_loss)
        >>> loss, outputs = pipeline.step(torch.ones(4, 2), torch.ones(4, 1), return_outputs=True)
        >>> outputs.shape
        torch.Size([4, 1])
        """
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("this pipeline is inside a step already; use one pipeline for each thread")
        try:
            return self._step(batch, target, return_outputs)
        finally:
            for stage in self._stages:
                stage.reset()
            self._stepping.release()

    def _step(self, batch: Any, target: Any, return_outputs: bool) -> Any:
        rows = rows_of(batch)
        schedule = self._schedule_for(rows)
        count = schedule.microbatches
        for layer in self._batch_norms:
            layer.set_chunks(count)
        parts = split(batch, count)
        weights = [rows_of(part) / rows if self._mean else 1.0 for part in parts]
        step = Step(self._stages, schedule, self._link(), self._route, weights, self._recomputes(count))
        inputs = [Message.of(part, lambda _: False) for part in parts]
        targets = [] if target is None else [Message.of(part, lambda _: False) for part in split(target, count)]
        step.feed(inputs, targets)
        self._run_rows(step)
        self.peak_activations = tuple(step.peak_activations)
        losses = self._stages[-1].losses
        loss = losses[0]
        for m in range(1, count):
            loss = loss + losses[m]
        return (loss, join([step.outputs[m].value() for m in range(count)])) if return_outputs else loss

    def _run_rows(self, step: Step) -> None:
        futures = []
        try:
            for row, (device, workers) in enumerate(zip(self.devices, self._workers, strict=True)):
                streams = _C.current_streams([device])
                run = _row(step, row)
                futures.append(workers.submit(device, run, stream=streams[0] if streams else None))
            for future in futures:
                future.wait(non_blocking=True)
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
        return Schedule.build(self._named, len(self._stages), rows, len(self.devices))

    def _recomputes(self, count: int) -> Callable[[int], bool]:
        if self._checkpoint == "never":
            return lambda m: False
        return lambda m: self._checkpoint == "always" or m < count - 1

    # ---- a module

    def forward(self, batch: TensorOrTensors) -> TensorOrTensors:
        """Run the forward pass of all micro-batches, on all devices; return the output of the mini-batch.

        ``loss.backward()`` then drains them in the reverse order: that is GPipe's table, whatever the pipeline has, and
        the activations of all micro-batches are kept until then. ``step`` runs the pipeline's table.

        Args:
            batch: a tensor or a tuple of tensors, as stages give them to each other here; for other values there is
                ``step``.

        Raises:
            TypeError: another value.

        >>> pipeline = Pipeline([nn.Linear(2, 4), nn.Linear(4, 1)], microbatches=2)
        >>> pipeline(torch.ones(3, 2)).shape
        torch.Size([3, 1])
        """
        check(batch)
        count = min(self.microbatches, rows_of(batch))
        for layer in self._batch_norms:
            layer.set_chunks(count)
        first = self.stage_devices[0]
        moved = batch.to(first) if isinstance(batch, torch.Tensor) else tuple(x.to(first) for x in batch)
        batches = [Batch(part, m) for m, part in enumerate(split(moved, count))]
        checkpointed = {"never": 0, "always": count, "except_last": count - 1}[self._checkpoint]
        return gather(fill_drain(batches, self._drained, checkpointed))

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the layers."""
        return iter(self.children())

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._modules)

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
        """End the threads. A step after it raises.

        >>> with_one_stage = Pipeline([nn.Linear(1, 1)], microbatches=1)
        >>> with_one_stage.close()
        """
        for workers in self._workers:
            workers.close()


def _row(step: Step, row: int) -> Callable[[], None]:
    return lambda: step.run_row(row)


def _output_is_loss(output: torch.Tensor) -> torch.Tensor:
    return output


def _expect_choices(checkpoint: object, loss_reduction: object, microbatches: object) -> None:
    if checkpoint not in ("never", "always", "except_last"):
        raise ValueError(f'checkpoint={checkpoint!r}: pass "never", "always" or "except_last"')
    if loss_reduction not in ("mean", "sum"):
        raise ValueError(f'loss_reduction={loss_reduction!r}: pass "mean" or "sum"')
    if type(microbatches) is not int or microbatches < 1:
        raise ValueError(f"microbatches={microbatches!r}: pass an int of at least 1")


def _divide(
    stages: nn.Sequential | Sequence[nn.Module], balance: Sequence[int] | None
) -> tuple[list[tuple[str, nn.Module]], list[nn.Sequential]]:
    """Return the layers by their names, and the stages."""
    if isinstance(stages, nn.Sequential):
        if balance is None:
            raise ValueError("an nn.Sequential needs a balance: the number of layers in each stage")
        layers = list(stages.named_children())
    else:
        layers = [(str(i), layer) for i, layer in enumerate(stages)]
        balance = [1] * len(layers) if balance is None else balance
    if not layers or not all(isinstance(layer, nn.Module) for _, layer in layers):
        raise TypeError("stages are an nn.Sequential with layers, or a list of modules")
    if len({name for name, _ in layers} & set(dir(nn.Module))) > 0:
        raise ValueError("a layer has the name of an attribute of nn.Module")
    if sum(balance) != len(layers) or min(balance) < 1:
        raise ValueError(f"balance={list(balance)} does not divide {len(layers)} layers, at least one for each stage")
    parts, at = [], 0
    for count in balance:
        part = nn.Sequential()
        for name, layer in layers[at : at + count]:
            part.add_module(name, layer)
        parts.append(part)
        at += count
    return layers, parts


def _refuse_shared(parts: Sequence[nn.Module]) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for s, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            at, other = owner.setdefault(id(parameter), (s, name))
            if at != s:
                raise ValueError(
                    f"stage {at} and stage {s} share a parameter, {other} and {name}, which cannot lie on two devices; "
                    "put its layers into one stage"
                )


def _places(devices: Sequence[torch.device | str | int] | None, stages: int) -> list[torch.device]:
    if devices is not None:
        places = [torch.device(device) for device in devices]
        return [at if at.type == "cpu" else _C.pool_stream(at, 0).device for at in places]  # with its index
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [torch.device("cpu")] * stages
    return [torch.device(accelerator.type, i) for i in range(min(torch.accelerator.device_count(), stages))]


def _table(schedule: str | Schedule, stages: int, microbatches: int, devices: int) -> Schedule:
    table = Schedule.build(schedule, stages, microbatches, devices) if isinstance(schedule, str) else schedule
    table.check()
    for what, has, wanted in (
        ("stages", table.stages, stages),
        ("micro-batches", table.microbatches, microbatches),
        ("rows", len(table.rows), devices),
    ):
        if has != wanted:
            raise ValueError(f"the table has {has} {what}, and the pipeline {wanted}")
    return table


def _route(parts: Sequence[nn.Sequential]) -> Route:
    """Return the ways of skips between stages; those inside a stage are its own affair."""
    verify_skippables(nn.Sequential(*(layer for part in parts for layer in part)))
    between = {
        skip: (stash, pop) for skip, (stash, pop) in inspect_skip_layout(parts).by_ns_name.items() if stash != pop
    }
    popped: dict[int, list[Any]] = {}
    for skip, (_, pop) in between.items():
        popped.setdefault(pop, []).append(skip)
    return Route(
        popped, {skip: stash for skip, (stash, _) in between.items()}, {skip: pop for skip, (_, pop) in between.items()}
    )
