"""Pipeline: gradients are those of the plain model, under every table, and errors leave it usable."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import io
import os
import pathlib
import signal
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from cudafuture.errors import InvalidStateError
from cudafuture.pipeline import LocalLink, Pipeline, Schedule, Workers, pop, skippable, stash
from cudafuture.pipeline.link import LinkClosedError
from cudafuture.testing import sim
from pipeline.reference import gradients_in_order, model_of
from pipeline.tables import random_table, torch_table
from support.child import run_script
from support.interrupts import interrupt_at
from support.soak import SOAK, soak_count

sim.prepare()  # before the first backward

Tensor = torch.Tensor
FOLDER = str(pathlib.Path(sys.modules[Pipeline.__module__].__file__ or "").parent)
WIDTH = 6


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.fixture(params=["lazy", "jitter", "free"])
def schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    sim.enable(devices=4, seed=1, schedule=request.param)
    yield request.param
    races = sim.races()
    sim.disable()
    assert not races, races[0]


def batch_of(rows: int, device: str = "cpu", seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    return x.to(device), y.to(device)


def parts_of(batch: Tensor, target: Tensor, count: int) -> tuple[list[tuple[Tensor, Tensor]], list[float]]:
    parts = list(zip(batch.tensor_split(count), target.tensor_split(count), strict=True))
    return parts, [len(x) / len(batch) for x, _ in parts]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}


def expect_plain(pipeline: Pipeline, model: nn.Sequential, balance: list[int], rows: int, device: str = "cpu") -> None:
    """Compare a step with the plain model, bit for bit."""
    batch, target = batch_of(rows)
    parts, weights = parts_of(batch, target, pipeline.schedule.microbatches)
    loss, expected = gradients_in_order(model, balance, pipeline.schedule, parts, loss_of, weights)
    got = pipeline.step(batch.to(device), target.to(device))
    assert torch.equal(got.cpu(), loss)
    assert gradients(pipeline).keys() == expected.keys()
    for name, gradient in gradients(pipeline).items():
        assert torch.equal(gradient, expected[name]), name


LOOPED = ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv"]  # two stages on each device
TABLES = ["gpipe", "1f1b", "zb1p", *LOOPED]


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_gradients_equal_plain_model(devices: int, table: str, checkpoint: Any) -> None:
    stages = 2 * devices if table in LOOPED else devices
    balance = [1] * stages
    balance[-1] += 1
    for microbatches in range(1, 9):
        model = model_of(stages + 1)
        pipeline = Pipeline(
            copy.deepcopy(model),
            ["cpu"] * devices,
            balance=balance,
            microbatches=microbatches,
            schedule=table,
            checkpoint=checkpoint,
            loss=loss_of,
        )
        expect_plain(pipeline, model, balance, rows=2 * microbatches + 1)
        pipeline.close()


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("table", TABLES)
def test_devices_are_ordered_after_each_other(schedule: str, table: str, checkpoint: Any) -> None:
    stages = 4
    devices = [f"sim:{i}" for i in range(2 if table in LOOPED else stages)]
    model = model_of(stages)
    pipeline = Pipeline(
        copy.deepcopy(model),
        devices,
        balance=[1] * stages,
        microbatches=4,
        schedule=table,
        checkpoint=checkpoint,
        loss=loss_of,
    )
    for _step in range(2):
        pipeline.zero_grad()
        expect_plain(pipeline, model, [1] * stages, rows=9, device="sim:0")
    pipeline.close()


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble"])
def test_tables_of_torch_run(name: str) -> None:
    schedule = torch_table(name, devices=2, stages_per_device=2, microbatches=4)
    model = model_of(4)
    pipeline = Pipeline(
        copy.deepcopy(model), ["cpu"] * 2, balance=[1] * 4, microbatches=4, schedule=schedule, loss=loss_of
    )
    expect_plain(pipeline, model, [1] * 4, rows=9)
    assert pipeline.peak_activations == schedule.check().peak_activations


@pytest.mark.parametrize("seed", range(soak_count(500)))
def test_random_tables_have_plain_gradients(seed: int) -> None:
    stages, microbatches, devices = 1 + seed % 4, 1 + seed // 4 % 5, 1 + seed // 20 % 3
    devices = min(devices, stages)
    schedule = random_table(seed, stages, microbatches, devices)
    model = model_of(stages, seed=seed)
    sim.enable(devices=3, seed=seed, schedule="jitter")
    try:
        pipeline = Pipeline(
            copy.deepcopy(model),
            [f"sim:{i}" for i in range(devices)],
            balance=[1] * stages,
            microbatches=microbatches,
            schedule=schedule,
            checkpoint=("never", "except_last", "always")[seed % 3],
            loss=loss_of,
        )
        expect_plain(pipeline, model, [1] * stages, rows=microbatches + seed % 3, device="sim:0")
        assert pipeline.peak_activations == schedule.check().peak_activations
        pipeline.close()
        assert not sim.races(), sim.races()[0]
    finally:
        sim.disable()


# ---- fill and drain


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_call_fills_and_backward_drains(schedule: str, checkpoint: Any) -> None:
    model = model_of(4)
    pipeline = Pipeline(
        copy.deepcopy(model), [f"sim:{i}" for i in range(4)], balance=[1] * 4, microbatches=4, checkpoint=checkpoint
    )
    batch, target = batch_of(8)
    loss_of(pipeline(batch.to("sim:0")), target.to("sim:3")).backward()
    loss_of(model(batch), target).backward()
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradients(pipeline)[name], gradient, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(pipeline(batch.to("sim:0")).cpu(), model(batch), atol=1e-6)
    pipeline.close()


# ---- values


class Split(nn.Module):
    """Module with a nested output: tensors with and without a gradient, and a value that is no tensor."""

    def forward(self, x: Tensor) -> Any:
        return {"halves": (x[:, :3] * 2, x[:, 3:]), "rows": torch.arange(len(x)), "note": "text", "none": None}


class Merge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value: Any) -> Tensor:
        assert value["note"] == "text"
        assert value["none"] is None
        assert value["rows"].tolist() == list(range(len(value["rows"])))
        merged: Tensor = torch.cat(value["halves"], dim=1) * self.scale
        return merged


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_values_between_stages_may_nest(checkpoint: Any) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Split(), Merge(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers)
    pipeline = Pipeline(
        copy.deepcopy(model), balance=[1] * 4, microbatches=3, schedule="zb1p", checkpoint=checkpoint, loss=loss_of
    )
    for rows in (3, 7, 12):
        pipeline.zero_grad()
        expect_plain(pipeline, model, [1] * 4, rows)


def test_batches_and_outputs_may_nest() -> None:
    class First(nn.Module):
        def forward(self, batch: Any) -> Any:
            return batch["x"] * batch["factor"] + batch["more"][0]

    pipeline = Pipeline([First(), nn.Identity()], microbatches=3, loss=lambda y, target: (y - target["y"]).sum())
    batch = {"x": torch.arange(7.0), "factor": 2, "more": [torch.ones(7)]}
    loss, outputs = pipeline.step(batch, {"y": torch.zeros(7)}, return_outputs=True)
    assert outputs.tolist() == [1, 3, 5, 7, 9, 11, 13]
    assert loss.item() == pytest.approx(sum(part * len(r) / 7 for part, r in ((9, "012"), (16, "34"), (24, "56"))))


def test_call_without_gradients_may_nest() -> None:
    pipeline = Pipeline([nn.Linear(WIDTH, WIDTH), Split(), Merge()], microbatches=2, loss=loss_of)
    batch, _ = batch_of(5)
    with torch.no_grad():
        expected = pipeline.stages[0](batch)
        expected = torch.cat([expected[:, :3] * 2, expected[:, 3:]], dim=1)
        assert torch.allclose(pipeline(batch), expected)
    with pytest.raises(TypeError):
        pipeline({"x": batch})


def test_pipeline_stays_on_its_devices() -> None:
    pipeline = Pipeline([nn.Linear(1, 1)], microbatches=1)
    move: Callable[[], object]
    for move in (lambda: pipeline.to("meta"), lambda: pipeline.to_empty(device="meta")):
        with pytest.raises(TypeError, match="lie on the devices"):
            move()
    assert pipeline.double().get_parameter("0.bias").dtype is torch.float64


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_fewer_rows_make_fewer_micro_batches(rows: int) -> None:
    model = model_of(2)
    pipeline = Pipeline(copy.deepcopy(model), balance=[1, 1], microbatches=4, loss=loss_of)
    batch, target = batch_of(rows)
    loss = pipeline.step(batch, target)
    expected = loss_of(model(batch), target)
    assert loss.item() == pytest.approx(expected.item())
    expected.backward()
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradients(pipeline)[name], gradient, atol=1e-6)


def test_sum_is_not_weighted() -> None:
    pipeline = Pipeline(
        [nn.Linear(1, 1)], microbatches=2, loss=lambda y, t: (y - t).sum(), loss_reduction="sum", schedule="gpipe"
    )
    pipeline.step(torch.ones(3, 1), torch.zeros(3, 1))
    assert pipeline.get_parameter("0.bias").grad.tolist() == [3]  # type: ignore[union-attr]


def test_autocast_reaches_cells() -> None:
    seen = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x @ torch.ones(WIDTH, WIDTH, requires_grad=True)
            seen.append(y.dtype)
            return y.float()

    pipeline = Pipeline([Look(), Look()], microbatches=2, loss=lambda y: y.sum())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline.step(torch.ones(4, WIDTH))
    assert seen == [torch.bfloat16] * 4


class Hooked(nn.Module):
    """Doubles the gradient on its way through a hook of a tensor inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return y.tanh()


class Tied(nn.Module):
    """Module that uses one parameter twice, and a custom function with an attribute named like that of leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = Keeping.apply(self.linear(x))  # type: ignore[no-untyped-call]
        again: Tensor = self.linear(kept.relu())
        return again


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = 3
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


class Stop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        stopped: Tensor = Undefined.apply(x)  # type: ignore[no-untyped-call]
        return stopped


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("table", ["1f1b", "zb1p"])
@pytest.mark.parametrize("kind", [Hooked, Tied])
def test_hooks_and_tied_layers_count_once(kind: type[nn.Module], table: str, checkpoint: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(3)))
    pipeline = Pipeline(
        copy.deepcopy(model), balance=[1] * 3, microbatches=3, schedule=table, checkpoint=checkpoint, loss=loss_of
    )
    expect_plain(pipeline, model, [1] * 3, rows=7)


def test_undefined_gradient_stays_undefined() -> None:
    pipeline = Pipeline([nn.Linear(1, 1), Stop(), nn.Linear(1, 1)], microbatches=2, loss=torch.sum)
    pipeline.step(torch.ones(2, 1))
    assert pipeline.get_parameter("0.weight").grad is None
    assert pipeline.get_parameter("2.weight").grad is not None


def test_backward_has_autocast_dtypes_of_forward() -> None:
    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return x.float() @ self.weight

    torch.manual_seed(0)
    model = nn.Sequential(Island(), Island())
    pipeline = Pipeline(copy.deepcopy(model), balance=[1, 1], microbatches=1, loss=loss_of)
    batch, target = batch_of(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline.step(batch, target)
        loss = loss_of(model(batch), target)
    loss.backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradients(pipeline)[name], gradient)


def test_step_without_gradients_is_refused() -> None:
    pipeline = Pipeline([nn.Linear(1, 1)], microbatches=1, loss=torch.sum)
    for disabled in (torch.no_grad(), torch.inference_mode()):
        with disabled, pytest.raises(RuntimeError, match="outside of no_grad"):
            pipeline.step(torch.ones(1, 1))


def test_opaque_object_with_tensors_is_refused() -> None:
    @dataclasses.dataclass
    class Output:
        x: Tensor

    class Make(nn.Module):
        def forward(self, x: Tensor) -> Output:
            return Output(x)

    pipeline = Pipeline([Make(), nn.Identity()], microbatches=1, loss=torch.sum)
    with pytest.raises(TypeError, match="a Output with tensors cannot go from stage to stage"):
        pipeline.step(torch.ones(1, 1))


# ---- skips, random numbers, statistics


@skippable(stash=["x"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("x", x * 2)
        return x + 1


@skippable(pop=["x"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        stashed = yield pop("x")
        return x * stashed


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("table", TABLES)
def test_skips_cross_stages_under_every_table(table: str, checkpoint: Any) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Stash(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Pop(), nn.Linear(WIDTH, WIDTH)]
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    pipeline = Pipeline(
        copy.deepcopy(model),
        ["cpu"] * (2 if table in LOOPED else 4),
        balance=[2, 1, 1, 2],
        microbatches=4,
        schedule=table,
        checkpoint=checkpoint,
        loss=loss_of,
    )
    expect_plain(pipeline, model, [2, 1, 1, 2], rows=9)


@skippable(stash=["s"])
class StashOf(nn.Module):
    def __init__(self, made: Callable[[Tensor], Any], gives: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.made, self.gives = nn.Linear(WIDTH, WIDTH), made, gives

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        yield stash("s", self.made(y))
        return self.gives(y)


@skippable(pop=["s"])
class PopInto(nn.Module):
    def __init__(self, used: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.used = used

    def forward(self, x: Tensor) -> Any:
        stashed = yield pop("s")
        return self.used(x, stashed)


SKIPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Any], Tensor]]] = {
    "complex": (lambda y: torch.complex(y, y * 2), lambda x, s: x + s.abs()),
    "without a gradient": (lambda y: torch.ones(WIDTH), lambda x, s: x * torch.from_numpy(s.numpy())),
    "integers": (lambda y: torch.arange(WIDTH), lambda x, s: x * s),
    "none": (lambda y: None, lambda x, s: x if s is None else x * 0),
    "changed in place by the next stage": (lambda y: y, lambda x, s: x + s),
}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", SKIPS)
def test_skips_are_of_any_kind(kind: str, checkpoint: Any) -> None:
    if kind == "without a gradient" and checkpoint == "always":
        pytest.skip("whether a tensor needs a gradient is not known before its stage is computed again")
    made, used = SKIPS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(StashOf(made, lambda y: y), nn.ReLU(inplace="place" in kind), PopInto(used))
    plain = nn.Sequential(StashOf(made, lambda y: y.clone()), nn.ReLU(), PopInto(used))
    plain.load_state_dict(model.state_dict())
    pipeline = Pipeline(model, balance=[1] * 3, microbatches=2, checkpoint=checkpoint, loss=loss_of)
    batch, target = batch_of(6)
    loss = pipeline.step(batch, target)
    expected = loss_of(plain(batch), target)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item())
    for name, gradient in gradients(plain).items():
        assert torch.allclose(gradients(pipeline)[name], gradient, atol=1e-6), name


@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
@pytest.mark.parametrize("table", ["1f1b", "zb1p"])
def test_dropout_draws_same_numbers_again(table: str, checkpoint: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x * self.scale, 0.5)

    pipeline = Pipeline(
        [Scaled() for _ in range(3)], microbatches=6, schedule=table, checkpoint=checkpoint, loss=torch.sum,
        loss_reduction="sum",
    )  # fmt: skip
    for _step in range(8):
        pipeline.zero_grad()
        loss = pipeline.step(torch.ones(60, 50))
        assert 0 < loss.item() < 60 * 50 * 8 * 8
        for parameter in pipeline.parameters():  # the loss is linear in each of them
            assert parameter.grad is not None
            assert (parameter.grad * 2).item() == pytest.approx(loss.item())


def test_deferred_batch_norm_covers_mini_batch() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    pipeline = Pipeline(
        model, balance=[2, 1], microbatches=4, loss=loss_of, deferred_batch_norm=True, checkpoint="always"
    )
    for rows in (8, 13, 11):
        batch, target = batch_of(rows)
        pipeline.step(batch, target)
        plain(batch)
    assert pipeline.state_dict().keys() == plain.state_dict().keys()
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.allclose(pipeline.state_dict()[name], plain.state_dict()[name], atol=1e-6)


# ---- a module


def test_state_equals_undivided_model() -> None:
    model = model_of(4)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    pipeline = Pipeline(copy.deepcopy(model), balance=[1, 2, 1], microbatches=1, loss=loss_of)
    assert list(pipeline.state_dict()) == list(expected)
    assert [name for name, _ in pipeline.named_parameters()] == [name for name, _ in model.named_parameters()]
    pipeline.load_state_dict({name: torch.zeros_like(value) for name, value in expected.items()})
    assert all(not parameter.any() for stage in pipeline.stages for parameter in stage.parameters())
    pipeline.eval()
    assert not any(module.training for stage in pipeline.stages for module in stage.modules())


class Scale(nn.Module):
    """Has a parameter and no way to fill it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_pipelines_that_only_step_take_no_streams(schedule: str) -> None:
    pipelines = []
    for _ in range(20):  # more than a device has streams for
        pipelines.append(Pipeline(model_of(4), ["sim:0"] * 4, balance=[1] * 4, microbatches=2, loss=loss_of))
        pipelines[-1].step(*batch_of(4))
    pipelines[0](batch_of(4, "sim:0")[0]).sum().backward()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_stages_of_meta_device_get_memory(device: str) -> None:
    if device == "sim":
        sim.enable(devices=2)
    places = ["cpu"] * 2 if device == "cpu" else ["sim:0", "sim:1"]
    with torch.device("meta"):
        model, other = nn.Sequential(*model_of(3), nn.BatchNorm1d(WIDTH)), model_of(2)
        first: Any = other[0]
        first.append(first[0])  # twice in one stage
        own = nn.Sequential(*model_of(1), Scale())
    pipeline = Pipeline(model, places, balance=[2, 2], microbatches=2, loss=loss_of)
    pipeline.step(*batch_of(4))
    for name, tensor in [*pipeline.named_parameters(), *pipeline.named_buffers()]:
        assert tensor.device.type == device, name
        assert tensor.isfinite().all(), name
    assert all(parameter.grad is not None for parameter in pipeline.parameters())
    assert pipeline.get_buffer("3.running_var").ne(1).all()  # was 1, and has seen the batch

    tied = Pipeline(other, places, balance=[1, 1], microbatches=2, loss=loss_of)
    assert tied.get_parameter("0.0.weight") is tied.get_parameter("0.3.weight")

    with pytest.raises(ValueError, match="a Scale has tensors on the meta device, and no reset_parameters"):
        Pipeline(copy.deepcopy(own), places, balance=[1, 1], microbatches=2, loss=loss_of)
    state = nn.Sequential(*model_of(1, seed=3), Scale()).state_dict()
    filled: list[list[str]] = []

    def fill(stage: nn.Module) -> None:
        filled.append(list(stage.state_dict()))
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})

    loaded = Pipeline(own, places, balance=[1, 1], microbatches=2, loss=loss_of, initialize=fill)
    assert [name for names in filled for name in names] == list(state)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor.cpu(), state[name])
    Pipeline(model_of(2), places, balance=[1, 1], microbatches=2, loss=loss_of, initialize=fill)
    assert len(filled) == 2  # those that have memory keep their values
    if device == "sim":
        sim.disable()


def test_mismatched_arguments_are_refused() -> None:
    two = [nn.Linear(2, 2), nn.Linear(2, 2)]
    shared = nn.Linear(2, 2)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "share a parameter", {"stages": [nn.Sequential(shared), nn.Sequential(shared)]}),
        (ValueError, "needs a balance", {"stages": nn.Sequential(*two)}),
        (ValueError, "does not divide 2 layers", {"stages": nn.Sequential(*two), "balance": [1, 2]}),
        (TypeError, "list of modules", {"stages": []}),
        (ValueError, "microbatches=0", {"stages": two, "microbatches": 0}),
        (ValueError, "checkpoint='sometimes'", {"stages": two, "checkpoint": "sometimes"}),
        (ValueError, "loss_reduction='max'", {"stages": two, "loss_reduction": "max"}),
        (
            ValueError,
            "the table has 3 stages, but the pipeline has 2",
            {"stages": two, "schedule": Schedule.gpipe(3, 1)},
        ),
        (ValueError, "2 micro-batches, but the pipeline has 1", {"stages": two, "schedule": Schedule.gpipe(2, 2)}),
    ]
    for error, message, arguments in cases:
        with pytest.raises(error, match=message):
            Pipeline(**{"microbatches": 1, "devices": None, **arguments})
    with pytest.raises(ValueError, match="a layer is named 'devices'"):
        Pipeline(nn.Sequential(OrderedDict(devices=nn.ReLU())), balance=[1], microbatches=1)
    with pytest.raises(ValueError, match="a target has 7 rows for a mini-batch of 4"):
        Pipeline(two, microbatches=1, loss=loss_of).step(torch.ones(4, 2), torch.ones(7, 2))
    with pytest.raises(TypeError, match="copy the model before"):
        copy.deepcopy(Pipeline(two, microbatches=1, loss=loss_of))
    pipeline = Pipeline(two, microbatches=2, schedule=Schedule.gpipe(2, 2), loss=loss_of)
    with pytest.raises(ValueError, match="1 rows for 2 micro-batches"):
        pipeline.step(torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="they have 2, 3 rows"):
        pipeline.step((torch.ones(2, 2), torch.ones(3, 2)), torch.ones(1, 2))
    with pytest.raises(TypeError, match="a loss returns a tensor with one element"):
        Pipeline(two, microbatches=2).step(torch.ones(2, 2))


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("table", ["1f1b", "zb1p"])
def test_stage_may_change_input_in_place(table: str, checkpoint: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    pipeline = Pipeline(
        copy.deepcopy(model), balance=[1] * 3, microbatches=3, schedule=table, checkpoint=checkpoint, loss=loss_of
    )
    for _step in range(2):
        pipeline.zero_grad()
        expect_plain(pipeline, model, [1] * 3, rows=7)


def test_custom_link_carries_values() -> None:
    class Written(LocalLink):
        """Tensors cross as bytes, as they would between processes."""

        keys: ClassVar[list[Any]] = []

        def send(self, key: Any, leaves: Any, device: torch.device, header: Any) -> None:
            self.keys.append(key)
            file = io.BytesIO()
            torch.save(list(leaves), file)
            super().send(key, torch.load(io.BytesIO(file.getvalue())), device, header)

    model = model_of(3)
    pipeline = Pipeline(copy.deepcopy(model), balance=[1] * 3, microbatches=2, loss=loss_of, link=Written)
    expect_plain(pipeline, model, [1] * 3, rows=4)
    assert {("F", 1, 0), ("F", 2, 1), ("B", 0, 1), ("target", 2, 0)} <= set(Written.keys)


# ---- errors


class BrokenError(Exception):
    pass


class Breaking(nn.Module):
    """Raises in forward, or in backward, at a micro-batch whose rows are 7."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward" and (x == 7).any():
            raise BrokenError("broken forward")
        broken: Tensor = BreakingBackward.apply(x, self.where)  # type: ignore[no-untyped-call]
        return broken


class BreakingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.breaks = where == "backward" and bool((x == 7).any())
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.breaks:
            raise BrokenError("broken backward")
        return gradients[0], None


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


@pytest.mark.parametrize("table", ["gpipe", "1f1b", "zb1p"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_first_error_is_raised_and_pipeline_recovers(table: str, where: str, stage: int, checkpoint: Any) -> None:
    stages: list[nn.Module] = [Shift() for _ in range(3)]
    stages[stage] = nn.Sequential(Shift(), Breaking(where))
    pipeline = Pipeline(stages, microbatches=4, schedule=table, checkpoint=checkpoint, loss=torch.sum)
    batch = torch.zeros(4, 2)
    batch[2] = 7
    with pytest.raises(BrokenError, match=f"broken {where}") as raised:
        pipeline.step(batch)
    assert where in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    notes = getattr(raised.value, "__notes__", [f"micro-batch 2 in stage {stage} on cpu"])
    assert any(f"micro-batch 2 in stage {stage} on cpu" in note for note in notes)
    del raised
    pipeline.zero_grad()
    pipeline.step(torch.zeros(4, 2))
    assert all(parameter.grad is not None for parameter in pipeline.parameters())


def test_later_errors_are_notes() -> None:
    together = threading.Barrier(2)

    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x == 7).any():
                together.wait(60)
                raise BrokenError(f"in {threading.current_thread().name}")
            return x

    table = Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    pipeline = Pipeline([Both(), nn.Sequential(Raise7(), Both())], microbatches=2, schedule=table, loss=torch.sum)
    batch = torch.zeros(2, 2, requires_grad=False)
    batch[1] = 7
    with pytest.raises(BrokenError) as raised:
        pipeline.step(batch)
    notes = getattr(raised.value, "__notes__", None)
    if notes is not None:
        assert any("then in the forward" in note and "BrokenError" in note for note in notes)


class Raise7(nn.Module):
    """Turns zeros into sevens, so that the next module fails while the stage before is busy with its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 7


def test_no_cell_begins_after_error(monkeypatch: pytest.MonkeyPatch) -> None:
    may_fail = threading.Event()
    ended: list[str] = []

    class Weight(torch.autograd.Function):
        """Counter of weight gradients."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *given: Tensor) -> Tensor:
            ended.append("W")
            may_fail.set()
            assert failed.wait(60)
            return given[0]

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            weight: Tensor = Weight.apply(self.by)  # type: ignore[no-untyped-call]
            return x + weight

    failed = threading.Event()

    class FailsLate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x == 7).any():
                assert may_fail.wait(60)
                raise BrokenError("late")
            return x + 0

    table = Schedule(
        [["0F0", "0F1", "0F2", "0I0", "0I1", "0W0", "0W1", "0I2", "0W2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]
    )
    pipeline = Pipeline([Counted(), FailsLate()], microbatches=3, schedule=table, loss=torch.sum)
    original = LocalLink.close

    def close(link: LocalLink) -> None:
        original(link)
        failed.set()

    batch = torch.zeros(3, 2)
    batch[2] = 7
    monkeypatch.setattr(LocalLink, "close", close)
    with pytest.raises(BrokenError):
        pipeline.step(batch)
    assert ended == ["W"]


def test_unprintable_error_keeps_first() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    together = threading.Barrier(2)

    class Fails(nn.Module):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

        def forward(self, x: Tensor) -> Tensor:
            if (x == 7).any():
                together.wait(60)
                raise self.error
            return x + 7

    table = Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    pipeline = Pipeline([Fails(Unprintable()), Fails(Unprintable())], microbatches=2, schedule=table, loss=torch.sum)
    batch = torch.zeros(2, 2)
    batch[1] = 7
    with pytest.raises(Unprintable):
        pipeline.step(batch)


def test_cell_cannot_close_its_pipeline() -> None:
    pipelines: list[Pipeline] = []

    class Closing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pipelines[0].close()
            return x

    pipelines.append(Pipeline([Shift(), Closing()], microbatches=1, loss=torch.sum))
    with pytest.raises(InvalidStateError, match="a cell cannot close its pipeline"):
        pipelines[0].step(torch.zeros(1, 2))


def test_self_closing_link_is_error() -> None:
    class Half(LocalLink):
        def receive(self, key: Any) -> Any:
            if key == ("F", 1, 1):
                self.close()
            return super().receive(key)

    pipeline = Pipeline([Shift(), Shift()], microbatches=2, loss=torch.sum, link=Half)
    with pytest.raises(LinkClosedError, match="closed before all cells ended"):
        pipeline.step(torch.zeros(2, 2))


def test_checkpointed_stage_refuses_pipeline() -> None:
    inner = Pipeline([Shift()], microbatches=1, loss=torch.sum)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inner.step(x.detach())
            return x + 0

    pipeline = Pipeline([Shift(), Outer()], microbatches=1, checkpoint="always", loss=torch.sum)
    with pytest.raises(RuntimeError, match="inside a stage that is recomputed"):
        pipeline.step(torch.zeros(1, 2))


def test_threads_end_with_pipeline() -> None:
    before = set(threading.enumerate())
    pipeline = Pipeline(model_of(3), balance=[1] * 3, microbatches=2, loss=loss_of)
    pipeline.step(*batch_of(4))
    assert set(threading.enumerate()) - before
    pipeline.close()
    assert not set(threading.enumerate()) - before
    dropped = Pipeline(model_of(3), balance=[1] * 3, microbatches=2, loss=loss_of)
    dropped.step(*batch_of(4))
    threads = set(threading.enumerate()) - before
    assert threads
    del dropped
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_ctrl_c_ends_step_and_pipeline_recovers() -> None:
    waiting, go_on = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x == 7).any():
                waiting.set()
                assert go_on.wait(60)
            return x + 0

    def interrupt() -> None:
        assert waiting.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        go_on.set()

    pipeline = Pipeline([Shift(), Slow()], microbatches=2, loss=torch.sum)
    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        pipeline.step(torch.full((2, 2), 7.0))
    helper.join()
    pipeline.zero_grad()
    pipeline.step(torch.zeros(2, 2))
    assert pipeline.get_parameter("0.by").grad is not None


def test_slow_step_shows_its_cells() -> None:
    go_on = threading.Event()

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert go_on.wait(60)
            return x + 0

    pipeline = Pipeline([Shift(), Slow()], microbatches=2, schedule="gpipe", loss=torch.sum)
    pipeline.wait()
    with pytest.raises(TimeoutError, match=r"stage 0 on cpu: +F\(B\) +F\nstage 1 on cpu: +\(F\) +\."):
        pipeline.step(torch.zeros(2, 2), timeout=0.5)
    with pytest.raises(TimeoutError, match="still runs"):
        pipeline.wait(timeout=0.1)
    go_on.set()
    pipeline.zero_grad()
    assert pipeline.get_parameter("0.by").grad is None
    pipeline.step(torch.zeros(2, 2), timeout=60)
    assert pipeline.get_parameter("0.by").grad is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("table", ["1f1b", "zb1p"])
def test_ctrl_c_anywhere_leaves_pipeline_usable(table: str) -> None:
    model = model_of(2)
    line = 1
    while True:
        pipeline = Pipeline(copy.deepcopy(model), balance=[1, 1], microbatches=2, schedule=table, loss=loss_of)
        batch, target = batch_of(4)
        if not interrupt_at(line, FOLDER, functools.partial(pipeline.step, batch, target)):
            break
        pipeline.zero_grad()
        expect_plain(pipeline, model, [1, 1], rows=4)
        pipeline.close()
        line += 1 if line < 40 or SOAK else 7
    assert line > 100


def test_two_pipelines_run_beside_and_inside() -> None:
    models = [model_of(3, seed=seed) for seed in range(2)]
    pipelines = [Pipeline(copy.deepcopy(m), balance=[1] * 3, microbatches=3, loss=loss_of) for m in models]
    with Workers(["cpu"]) as workers:
        inside = workers.submit("cpu", lambda: expect_plain(pipelines[0], models[0], [1] * 3, rows=7))
        expect_plain(pipelines[1], models[1], [1] * 3, rows=7)
        inside.wait()


def test_nested_step_is_refused() -> None:
    pipelines: list[Pipeline] = []

    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pipelines[0].step(x)
            return x

    pipelines.append(Pipeline([Nested()], microbatches=1, loss=torch.sum))
    with pytest.raises(RuntimeError, match="inside a step already"):
        pipelines[0].step(torch.ones(1, 1))


def test_process_may_end_during_step() -> None:
    script = """
import threading, torch
from cudafuture.pipeline import Pipeline

waiting = threading.Event()

class Stuck(torch.nn.Module):
    def forward(self, x):
        waiting.set()
        threading.Event().wait()

pipeline = Pipeline([torch.nn.Linear(1, 1), Stuck()], microbatches=2, loss=torch.sum)
threading.Thread(target=pipeline.step, args=(torch.ones(2, 1),), daemon=True).start()
waiting.wait()
print("ends")
"""
    ended = run_script(script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")
