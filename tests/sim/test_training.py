"""A model trains on the simulated accelerator as it does on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cudafuture.testing import sim


class Model(nn.Module):
    """A little of everything: convolution, batch norm, dropout, embedding, attention, layer norm, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer_norm = nn.LayerNorm(8)
        self.embedding = nn.Embedding(10, 8)
        self.out = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.convolution(images))).mean(dim=1)
        x = x + self.embedding(words)
        x = self.layer_norm(x + self.attention(x, x, x, need_weights=False)[0])
        out: torch.Tensor = self.out(x.mean(dim=1))
        return out


def losses(device: str, optimizer: type[torch.optim.Optimizer], steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    model = Model().to(device)
    optim = optimizer(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        images = torch.randn(6, 1, 8, 8, generator=generator).to(device)
        words = torch.randint(10, (6, 8), generator=generator).to(device)
        labels = torch.randint(10, (6,), generator=generator).to(device)
        optim.zero_grad()
        loss = nn.functional.cross_entropy(model(images, words), labels)
        loss.backward()
        optim.step()
        found.append(loss.detach())
    return [loss.item() for loss in found]


@pytest.mark.sim
@pytest.mark.parametrize("schedule", ["free", "jitter", "lazy"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_losses_match_cpu(schedule: sim.Schedule, optimizer: type[torch.optim.Optimizer]) -> None:
    sim.enable(schedule=schedule, seed=2)
    assert losses("sim", optimizer) == pytest.approx(losses("cpu", optimizer), rel=1e-4)


@pytest.mark.sim(devices=2, schedule="lazy")
def test_model_trains_over_two_devices() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 1)
    x = torch.randn(4, 8)
    second(torch.relu(first(x))).sum().backward()
    expected = [p.grad.clone() for p in (*first.parameters(), *second.parameters()) if p.grad is not None]
    for layer in (first, second):
        layer.zero_grad()
    first.to("sim:0")
    second.to("sim:1")
    second(torch.relu(first(x.to("sim:0"))).to("sim:1")).sum().backward()
    for parameter, grad in zip((*first.parameters(), *second.parameters()), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), grad)


@pytest.mark.sim(schedule="lazy")
def test_lstm_and_dropout() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 8, batch_first=True).to("sim")
    out, _ = lstm(torch.randn(2, 5, 4, device="sim"))
    dropped = nn.functional.dropout(out, 0.5)
    dropped.sum().backward()
    zeros = (dropped == 0).float().mean().item()
    assert 0.2 < zeros < 0.8
    assert all(p.grad is not None and p.grad.isfinite().all().item() for p in lstm.parameters())
