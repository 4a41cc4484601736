"""The reference of a pipeline: gradients of the plain model, accumulated in the order of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cudafuture.pipeline.schedule import Schedule
from cudafuture.testing import sim


def model_of(layers: int, *, width: int = 6, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model of that many layers, with a parameter in each."""
    torch.manual_seed(seed)
    made: list[nn.Module] = []
    for i in range(layers):
        last = nn.Tanh() if i % 2 == 0 else nn.ReLU(inplace=True)
        made.append(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), last))
    return nn.Sequential(*made).to(dtype)


@contextmanager
def without_races(**settings: Any) -> Iterator[None]:
    """Run on a simulated accelerator with these settings; a race is a failure."""
    sim.enable(**settings)
    try:
        yield
        races = sim.races()
    finally:
        sim.disable()
    assert not races, races[0]


def gradients_in_order(
    model: nn.Sequential,
    balance: list[int],
    schedule: Schedule,
    parts: list[tuple[Any, Any]],
    loss: Callable[..., torch.Tensor],
    weights: list[float],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a mini-batch, and the gradients by name."""
    losses: list[torch.Tensor] = []
    by_part: list[dict[str, torch.Tensor]] = []
    for (batch, target), weight in zip(parts, weights, strict=True):
        model.zero_grad()
        value = loss(model(batch), target) * weight
        value.backward()
        losses.append(value.detach())
        by_part.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    total = losses[0]
    for each in losses[1:]:
        total = total + each
    found: dict[str, torch.Tensor] = {}
    for stage, names in enumerate(names_of_stages(model, balance)):
        order = [c.microbatch for row in schedule.rows for c in row if c and c.stage == stage and c.kind in "BW"]
        for name in names:
            for m in order:
                found[name] = by_part[m][name] if name not in found else found[name] + by_part[m][name]
    return total, found


def names_of_stages(model: nn.Sequential, balance: list[int]) -> list[list[str]]:
    """Return the names of the parameters of each stage."""
    ends = [sum(balance[: s + 1]) for s in range(len(balance))]
    names: list[list[str]] = [[] for _ in balance]
    for name, _ in model.named_parameters():
        layer = int(name.split(".")[0])
        names[next(s for s, end in enumerate(ends) if layer < end)].append(name)
    return names
