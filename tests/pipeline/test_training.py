"""Training loops around pipelines: losses that count tokens, evaluation, and DistributedDataParallel."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from cudafuture.compat.torchgpipe import GPipe
from cudafuture.pipeline import Pipeline, Schedule
from cudafuture.testing import World


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()


def rows(count: int) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("table", ["gpipe", "1f1b", "zb1p"])
def test_label_sum_is_minibatch_loss(table: str, checkpoint: Any) -> None:
    def loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(output, target[0], ignore_index=-100, reduction="sum") / target[1]

    plain, model = model_of().eval(), model_of().eval()
    labels = torch.arange(11) % 3
    labels[:4] = -100  # the whole first micro-batch
    made = Pipeline(
        model,
        ["cpu"] * 2,
        balance=[2, 2],
        microbatches=3,
        schedule=table,
        checkpoint=checkpoint,
        loss=loss,
        loss_reduction="sum",
    )
    got = made.step(rows(11), (labels, (labels != -100).sum()))
    expected = cross_entropy(plain(rows(11)), labels)
    expected.backward()
    torch.testing.assert_close([got, *gradients(model)], [expected.detach(), *gradients(plain)])


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("table", ["1f1b", "zb1p"])
@pytest.mark.parametrize("tokens", [None, 5])
def test_weights_make_minibatch_mean(tokens: int | None, table: str, checkpoint: Any) -> None:
    """Rows count differently, also several labels for each row, and a whole micro-batch counts nothing."""
    plain, model = model_of().eval(), model_of().eval()
    labels = torch.arange(11 * (tokens or 1)) % 3
    labels[: 4 * (tokens or 1)] = -100  # the whole first micro-batch
    labels[-2:] = -100

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.repeat_interleave(tokens or 1, 0), target, ignore_index=-100)

    made = Pipeline(
        model, ["cpu"] * 2, balance=[2, 2], microbatches=3, schedule=table, checkpoint=checkpoint, loss=loss
    )
    got = made.step(rows(11), labels, weights=labels != -100)
    expected = loss(plain(rows(11)), labels)
    expected.backward()
    torch.testing.assert_close([got, *gradients(model)], [expected.detach(), *gradients(plain)])
    with pytest.raises(ValueError, match="sum of the weights is 0"):
        made.step(rows(11), labels, weights=labels == 7)
    with pytest.raises(TypeError, match="weights are a tensor"):
        made.step(rows(11), labels, weights=[1.0] * 11)
    with pytest.raises(ValueError, match="6 rows for a mini-batch of 11"):
        made.step(rows(11), labels, weights=torch.ones(6))


@pytest.mark.sim(devices=2)
def test_weights_on_device_make_minibatch_mean() -> None:
    plain, model = model_of().eval(), model_of().eval()
    labels = torch.arange(11) % 3
    labels[:3] = -100
    made = Pipeline(model, ["sim:0", "sim:1"], balance=[2, 2], microbatches=3, loss=lambda y, t: cross_entropy(y, t))
    got = made.step(rows(11).to("sim:0"), labels.to("sim:1"), weights=(labels != -100).to("sim:1"))
    expected = cross_entropy(plain(rows(11)), labels)
    expected.backward()
    torch.testing.assert_close(got.cpu(), expected.detach(), check_dtype=False)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_clipping_takes_norm_of_all_stages(limit: float, norm_type: float) -> None:
    plain, model = model_of().eval(), model_of().eval()
    made = Pipeline(model, ["cpu"] * 2, balance=[2, 2], microbatches=3, loss=mse_loss)
    made.step(rows(9), torch.zeros(9, 3, dtype=torch.float64))
    mse_loss(plain(rows(9)), torch.zeros(9, 3, dtype=torch.float64)).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type)
    torch.testing.assert_close(made.clip_grad_norm_(limit, norm_type), expected)
    torch.testing.assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("count", [1, 7])
def test_evaluation_returns_minibatch_output(mode: Callable[[], Any], count: int) -> None:
    model = model_of()
    made = Pipeline(model, ["cpu"] * 2, balance=[2, 2], microbatches=3, checkpoint="always", loss=cross_entropy)
    made.eval()
    with mode():
        torch.testing.assert_close(made(rows(count)), model(rows(count)))
    assert gradients(made) == [None] * 4
    assert not any(layer.training for layer in made)


class AddBias(nn.Module):
    """With one row, the gradients of the bias and of the input are views of one tensor."""

    def __init__(self, after: Callable[[], None]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.bias[None]
        y.register_hook(lambda _: self.after())
        return y


class Late(nn.Module):
    """Its first backward cell begins when the next stage has ended its last one."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.event = event

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.scale
        y.register_hook(lambda gradient: (self.event.wait(60), gradient)[1])
        return y


@pytest.mark.parametrize("kind", ["B", "I"])
def test_gradients_that_were_sent_do_not_change(kind: str) -> None:
    event, calls = threading.Event(), iter(range(10))
    last = [f"1{k}{m}" for m in range(2) for k in ("IW" if kind == "I" else "B")]
    table = Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", *last]])
    model = nn.Sequential(Late(event), AddBias(lambda: event.set() if next(calls) else None))
    plain = nn.Sequential(Late(event), AddBias(lambda: None))
    made = Pipeline(model, ["cpu"] * 2, balance=[1, 1], microbatches=2, schedule=table, loss=mse_loss)
    x, y = rows(2), torch.zeros(2, 4, dtype=torch.float64)
    made.step(x, y)
    mse_loss(plain(x), y).backward()
    torch.testing.assert_close(gradients(made), gradients(plain))


@pytest.mark.world(2)
def test_ranks_average_pipeline_gradients(world: World) -> None:
    def train() -> None:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        plain = model_of().eval()
        mse_loss(plain(rows(8)), torch.zeros(8, 3, dtype=torch.float64)).backward()
        own, target = rows(8)[rank::size], torch.zeros(8 // size, 3, dtype=torch.float64)
        for checkpoint in ("never", "always"):
            makes: list[Callable[[nn.Sequential], nn.Module]] = [
                lambda model, mode=checkpoint: GPipe(model, [2, 2], ["cpu"] * 2, chunks=2, checkpoint=mode),  # type: ignore[misc]
                lambda model, mode=checkpoint: Pipeline(model, balance=[2, 2], microbatches=2, checkpoint=mode),  # type: ignore[misc]
            ]
            for make in makes:
                made = make(model_of().eval())
                replica = DistributedDataParallel(made, static_graph=checkpoint == "always")
                for _ in range(2):
                    made.zero_grad()
                    mse_loss(replica(own), target).backward()
                    torch.testing.assert_close(gradients(made), gradients(plain))
        stepped = Pipeline(model_of().eval(), balance=[2, 2], microbatches=2, loss=mse_loss)
        stepped.step(own, target)
        for gradient in gradients(stepped):
            assert gradient is not None
            torch.distributed.all_reduce(gradient.div_(size))
        torch.testing.assert_close(gradients(stepped), gradients(plain))

    world.run(train)
