"""Optimizer state that is moved in inference mode stays usable for training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cudafuture.swap import OffloadedOptimizer, offload

STEPS = 4


def load_state(optimizer: OffloadedOptimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def load_checkpoint(optimizer: OffloadedOptimizer) -> None:
    optimizer.save("checkpoint")
    optimizer.load("checkpoint")


@pytest.mark.parametrize("memory", [0, 1 << 30], ids=["in the store", "in memory"])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"swap_gradients": True}], ids=str)
@pytest.mark.parametrize("between", [None, load_state, load_checkpoint], ids=["step", "load_state_dict", "load"])
def test_training_continues_after_call_in_inference_mode(
    tmp_path: Path, memory: int, options: dict[str, bool], between: Callable[[OffloadedOptimizer], None] | None
) -> None:
    parameters = [torch.nn.Parameter(torch.full((4096,), float(i))) for i in (1, 2)]
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    reference = torch.optim.Adam(copies)
    optimizer = offload(torch.optim.Adam(parameters), tmp_path, min_bytes=0, memory=memory, **options)  # type: ignore[arg-type]
    with optimizer:
        for step in range(STEPS):
            for each, of in ((optimizer, parameters), (reference, copies)):
                each.zero_grad()
                (of[0] * of[1]).sum().backward()
            with torch.inference_mode(between is None and step == 0):
                optimizer.step()
            reference.step()
            if between is not None and step == 1:
                with torch.inference_mode():
                    between(optimizer)
    for parameter, copied in zip(parameters, copies, strict=True):
        assert not parameter.is_inference()
        torch.testing.assert_close(parameter, copied)


def test_inference_mode_gradients_update_chunked_parameter(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(40_000))
    copied = torch.nn.Parameter(torch.ones(40_000))
    optimizer = offload(torch.optim.Adam([parameter]), tmp_path, min_bytes=0, chunk_bytes=65536)
    reference = torch.optim.Adam([copied])
    with optimizer:
        for _ in range(STEPS):
            with torch.inference_mode():
                parameter.grad, copied.grad = torch.ones(40_000), torch.ones(40_000)
            optimizer.step()
            reference.step()
    torch.testing.assert_close(parameter, copied)
