"""Pipelines on accelerators: stages on two devices give what the plain model gives, and nothing is used too early."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cudafuture.pipeline import Pipeline, Workers
from support.harness import SIZE, Device

Tensor = torch.Tensor


class Scale(nn.Module):
    """A layer whose results are exact in any order of additions."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def layers() -> list[nn.Module]:
    return [Scale(by) for by in (2.0, 0.5, 4.0, 0.25)]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(("table", "stages"), [("gpipe", 2), ("1f1b", 2), ("zb1p", 2), ("interleaved_1f1b", 4)])
def test_two_devices_train_like_plain_model(pair: Device, table: str, stages: int, checkpoint: Any) -> None:
    plain = nn.Sequential(*layers())
    balance = [4 // stages] * stages
    pipeline = Pipeline(
        copy.deepcopy(plain),
        [pair.at(0), pair.at(1)],
        balance=balance,
        microbatches=4,
        schedule=table,
        checkpoint=checkpoint,
        loss=torch.sum,
        loss_reduction="sum",
    )
    batch = torch.ones(4, SIZE)
    plain(batch).sum().backward()
    for _step in range(2):
        pipeline.zero_grad()
        with pair.on(pair.stream(index=0)), pair.on(pair.stream(index=1)):
            x = pair.produce(1.0, index=0)
            loss = pipeline.step(x.expand(4, -1))
            gradients = [parameter.grad for parameter in pipeline.parameters()]
            assert loss.item() == 4 * SIZE
            for gradient, expected in zip(gradients, plain.parameters(), strict=True):
                assert gradient is not None
                assert expected.grad is not None
                assert gradient.item() == expected.grad.item()
        pair.finish()
    pipeline.close()


def make_pipeline(pair: Device) -> Pipeline:
    return Pipeline(nn.Sequential(*layers()), [pair.at(0), pair.at(1)], balance=[2, 2], microbatches=4)


def test_call_orders_devices(pair: Device) -> None:
    pipeline = make_pipeline(pair)
    for value in (1.0, 2.0, 3.0):
        batch = torch.stack([pair.produce(value, index=0)] * 4)
        output = pipeline(batch)
        del batch
        assert pair.read(output) == value
        del output
        pair.produce(-1.0, index=0)
    pipeline.close()


@pytest.mark.torch_makes_contexts("autograd destroys its events with another device current")
def test_backward_of_call_orders_devices(pair: Device) -> None:
    if pair.at().type == "sim":
        pytest.skip("strict devices report autograd's own events; tests/pipeline has this without them")
    pipeline = make_pipeline(pair)
    for _step in range(2):
        pipeline.zero_grad()
        pipeline(pair.produce(1.0, index=0).expand(4, -1)).sum().backward()
        gradients = [parameter.grad.item() for parameter in pipeline.parameters() if parameter.grad is not None]
        assert gradients == [4 * SIZE / by for by in (2.0, 0.5, 4.0, 0.25)]
    pipeline.close()


def test_worker_task_precedes_its_consumer(accelerator: Device) -> None:
    with Workers([accelerator.at()]) as workers:
        made = workers.submit(accelerator.at(), lambda: accelerator.produce(3.0), stream=accelerator.stream())
        assert accelerator.read(made.wait(non_blocking=True)) == 3
