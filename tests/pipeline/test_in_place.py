"""A first stage that works in place gives the results of the undivided model, for a mini-batch of any kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cudafuture.compat.torchgpipe import GPipe
from cudafuture.pipeline import Pipeline

MODES = ["never", "always", "except_last"]
Make = Callable[[nn.Sequential, int, str], nn.Module]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.by)


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


FIRSTS: list[Callable[[], nn.Module]] = [lambda: nn.ReLU(inplace=True), Shift, Scale]


def model_of(first: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(first(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)).double()


def gpipe(model: nn.Sequential, parts: int, checkpoint: str) -> nn.Module:
    return GPipe(model, [2, 2], ["cpu"] * 2, chunks=parts, checkpoint=checkpoint)


def pipeline(model: nn.Sequential, parts: int, checkpoint: Any) -> nn.Module:
    return Pipeline(model, balance=[2, 2], microbatches=parts, checkpoint=checkpoint)


def minibatch() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("make", [gpipe, pipeline])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_call_has_undivided_gradients(
    make: Make, first: Callable[[], nn.Module], checkpoint: str, parts: int, requires_grad: bool
) -> None:
    found: list[list[Tensor | None]] = []
    for model in (model_of(first), model_of(first)):
        source = minibatch().requires_grad_(requires_grad)
        batch = source * 1  # not a leaf: torch refuses in-place operations on those that require a gradient
        output = (make(model, parts, checkpoint) if found else model)(batch)
        changed = batch.detach().clone()
        # The mini-batch has changed, and its history with it; checkpointed parts change a copy.
        (output + batch if checkpoint == "never" else output).square().sum().backward()
        found.append([output, source.grad, *gradients(model), *([changed] if checkpoint == "never" else [])])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("table", ["gpipe", "1f1b", "interleaved_1f1b", "zb1p"])
def test_step_has_undivided_gradients(first: Callable[[], nn.Module], table: str, checkpoint: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output * target.sub_(1)).square().mean()

    plain, model = model_of(first), model_of(first)
    expected = loss(plain(minibatch()), torch.ones(6, 4, dtype=torch.float64).add(2))
    expected.backward()
    stages, devices = (list(model), 2) if table == "interleaved_1f1b" else ([model[:2], model[2:]], 2)
    made = Pipeline(stages, ["cpu"] * devices, microbatches=4, schedule=table, checkpoint=checkpoint, loss=loss)
    batch = minibatch().requires_grad_()  # a step computes no gradient of it
    got = made.step(batch, torch.ones(6, 4, dtype=torch.float64).add(2))
    torch.testing.assert_close([got, *gradients(model)], [expected.detach(), *gradients(plain)])


@pytest.mark.parametrize("make", [gpipe, pipeline])
def test_leaf_requiring_gradient_is_unchanged(make: Make) -> None:
    batch = minibatch().requires_grad_()
    with pytest.raises(RuntimeError, match="modified inplace"):
        make(model_of(Shift), 2, "never")(batch)
    assert torch.equal(batch, minibatch())


@pytest.mark.parametrize("make", [gpipe, pipeline])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_change_of_minibatch_is_error(make: Make, requires_grad: bool) -> None:
    batch = minibatch().requires_grad_(requires_grad) * 1
    output = make(model_of(nn.Identity), 3, "never")(batch)
    with torch.no_grad():
        batch[4:].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("make", [gpipe, pipeline])
def test_base_of_changed_view_keeps_gradient(make: Make) -> None:
    found: list[list[Tensor | None]] = []
    for model in (model_of(Scale), model_of(Scale)):
        source = minibatch().requires_grad_()
        base = source * 1
        view = base[1:]
        output = (make(model, 4, "never") if found else model)(view)
        (output.sum() + base.square().sum() + view.sum()).backward()
        found.append([source.grad, *gradients(model)])
    torch.testing.assert_close(*found)


class ScaleLater(Scale):
    """Stage that works in place, but for the first rows of a mini-batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x[0, 0] == 0 else x.mul_(2)


@pytest.mark.parametrize("run", ["gpipe", "pipeline", "no_grad", "inference_mode", "step"])
@pytest.mark.parametrize(("first", "checkpoint"), [(Scale, "never"), (Scale, "except_last"), (ScaleLater, "never")])
def test_changed_micro_batch_changes_minibatch(run: str, first: Callable[[], nn.Module], checkpoint: Any) -> None:
    weight, batch = torch.ones(4, requires_grad=True), torch.arange(16.0).view(4, 4)
    earlier = (batch * weight).sum()
    model = model_of(first).float()
    if run == "step":
        made = Pipeline(model, balance=[2, 2], microbatches=4, checkpoint=checkpoint, loss=torch.mean)
        made.step(batch)
    else:
        mode = getattr(torch, run, torch.enable_grad)
        with mode():
            (gpipe if run == "gpipe" else pipeline)(model, 4, checkpoint)(batch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        earlier.backward()


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_changed_part_changes_target(checkpoint: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output * target.sub_(1)).mean()

    weight, target = torch.ones(2, requires_grad=True), torch.ones(4, 2)
    earlier = (target * weight).sum()
    Pipeline([nn.Linear(2, 2)], microbatches=4, checkpoint=checkpoint, loss=loss).step(torch.ones(4, 2), target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        earlier.backward()


@pytest.mark.parametrize("changed", ["input", "target"])
def test_error_of_new_change_names_tensor(changed: str) -> None:
    class ShiftLater(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(1) if changed == "input" and x[0, 0] > 1 else x)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output * (target.sub_(1) if changed == "target" and target[0, 0] > 1 else target)).mean()

    made = Pipeline([ShiftLater(2, 2)], microbatches=2, checkpoint="always", loss=loss)
    with pytest.raises(RuntimeError, match=f"stage 0 changes its {changed} in place, but did not before"):
        made.step(torch.arange(4.0).view(2, 2), torch.arange(4.0).view(2, 2))


class ScaleSecond(Scale):
    def forward(self, pair: Any) -> Tensor:
        first, second = pair
        super().forward(second)
        total: Tensor = first + second
        return total


class Pair(nn.Module):
    def __init__(self, second: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.second = second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, self.second(y)


def same(x: Tensor) -> Tensor:
    return x


def view_of(x: Tensor) -> Tensor:
    return x.view(x.shape)


def results(model: nn.Module, divided: nn.Module, value: Any, source: Tensor) -> list[Tensor | None]:
    output = divided(value)
    output.square().sum().backward()
    return [output.detach(), source.grad, *gradients(model)]


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("make", [gpipe, pipeline])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_repeated_tensor_of_minibatch_stays_one(make: Make, checkpoint: str, requires_grad: bool) -> None:
    found: list[list[Tensor | None]] = []
    for _ in range(2):
        model, source = model_of(ScaleSecond), minibatch().requires_grad_(requires_grad)
        x = source * 1
        found.append(results(model, make(model, 4, checkpoint) if found else model, (x, x), source))
    torch.testing.assert_close(*found)


@pytest.mark.sim(devices=2)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("make", [GPipe, Pipeline])
def test_repeated_tensor_between_stages_stays_one(make: Any, device: str, checkpoint: str) -> None:
    devices = ["cpu", "cpu"] if device == "cpu" else ["sim:0", "sim:1"]
    found: list[list[Tensor | None]] = []
    for _ in range(2):
        model, source = nn.Sequential(Pair(same), ScaleSecond()), torch.arange(8.0).view(4, 2).requires_grad_()
        made: nn.Module = model
        if found:
            kind = {"chunks": 4} if make is GPipe else {"microbatches": 4}
            made = make(model, balance=[1, 1], devices=devices, checkpoint=checkpoint, **kind)
        output = made(source).cpu()
        output.square().sum().backward()
        found.append(
            [output.detach(), source.grad, *(each.grad.cpu() for each in model.parameters() if each.grad is not None)]
        )
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("table", ["1f1b", "zb1p"])
def test_step_keeps_repeated_tensor_as_one(table: str, checkpoint: Any) -> None:
    def loss(output: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        targets[0].sub_(1)
        return (output * targets[1]).mean()

    x, target = torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2)
    plain, model = ([nn.Sequential(ScaleSecond(), Pair(same)), ScaleSecond()] for _ in range(2))
    copied, wanted = x.clone(), target.clone()
    expected = loss(plain[1](plain[0]((copied, copied))), (wanted, wanted))
    expected.backward()
    made = Pipeline(model, ["cpu"] * 2, microbatches=4, schedule=table, checkpoint=checkpoint, loss=loss)
    got = made.step((x, x), (target, target))
    torch.testing.assert_close(
        [got, *gradients(nn.ModuleList(model))], [expected.detach(), *gradients(nn.ModuleList(plain))]
    )


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("run", ["gpipe", "pipeline", "step"])
def test_change_of_shared_memory_is_error(run: str, checkpoint: Any) -> None:
    def call(stages: nn.Sequential, value: Any) -> None:
        if run == "gpipe":
            GPipe(stages, [1] * len(stages), ["cpu"] * len(stages), chunks=2, checkpoint=checkpoint)(value)
            return
        made = Pipeline(list(stages), microbatches=2, checkpoint=checkpoint, loss=torch.mean)
        made.step(value) if run == "step" else made(value)

    x = torch.ones(4, 2)
    with pytest.raises(RuntimeError, match="shares memory with another tensor"):
        call(nn.Sequential(ScaleSecond()), (x, x.view(4, 2)))
    with pytest.raises(RuntimeError, match="shares memory with another tensor"):
        call(nn.Sequential(Pair(view_of), ScaleSecond()), x)
    both = torch.ones(4, 4)
    call(nn.Sequential(ScaleSecond()), (both[:, :2], both[:, 2:]))  # of one storage, but of different elements
    call(nn.Sequential(Add(), nn.Linear(2, 2)), (x, x.view(4, 2)))


class Add(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class ShiftBoth(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0].add_(1) * pair[1].add_(1)


def test_micro_batches_sharing_memory_change_once() -> None:
    expanded, scalar = torch.ones(1, 2).expand(4, 2), torch.ones(())
    made = Pipeline([ShiftBoth()], microbatches=4)
    with torch.no_grad():
        assert torch.equal(made((expanded, scalar)), torch.full((4, 2), 4.0))
    model = GPipe(nn.Sequential(Shift()), [1], ["cpu"], chunks=4)
    assert torch.equal(model(torch.ones(1, 2).expand(4, 2)), torch.full((4, 2), 2.0))


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("make", [gpipe, pipeline])
@pytest.mark.parametrize("first", [*FIRSTS, nn.Tanh])
def test_inference_tensors_work_as_undivided(make: Make, checkpoint: str, first: Callable[[], nn.Module]) -> None:
    made, plain = make(model_of(first), 4, checkpoint), model_of(first)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            output = made(minibatch())
            torch.testing.assert_close(output, plain(minibatch()))
            assert output.is_inference() == torch.is_inference_mode_enabled()
    with torch.inference_mode():
        batch = minibatch()
        torch.testing.assert_close(made(batch), plain(minibatch()))
        with torch.enable_grad():  # there is no graph all the same
            torch.testing.assert_close(made(minibatch()), plain(minibatch()))
    if first is nn.Tanh:  # the others change the inference tensor, which torch refuses here
        made(batch).sum().backward()
        plain(batch).sum().backward()
        torch.testing.assert_close(gradients(made), gradients(plain))


@pytest.mark.parametrize("checkpoint", MODES)
def test_step_takes_inference_tensors(checkpoint: Any) -> None:
    with torch.inference_mode():
        batch, target = minibatch(), torch.ones(6, 4, dtype=torch.float64)
    plain, model = model_of(nn.Tanh), model_of(nn.Tanh)
    made = Pipeline(model, balance=[2, 2], microbatches=3, checkpoint=checkpoint, loss=nn.functional.l1_loss)
    loss = made.step(batch, target)
    nn.functional.l1_loss(plain(batch), target).backward()
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert not loss.is_inference()
