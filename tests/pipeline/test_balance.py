"""Balance: the best partition into blocks, and the measures of time and size that go into it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cudafuture.pipeline import balance as module_of_balance
from cudafuture.pipeline.balance import balance_by_size, balance_by_time, balance_cost
from cudafuture.pipeline.skip import pop, skippable, stash


def blocks(cost: list[int], balance: list[int]) -> list[int]:
    rest = iter(cost)
    return [sum(itertools.islice(rest, n)) for n in balance]


@pytest.mark.parametrize("seed", range(40))
def test_largest_partition_is_minimal(seed: int) -> None:
    choose = random.Random(seed)
    cost = [choose.choice((0, 1, 1, 2, 5, choose.randrange(50))) for _ in range(choose.randint(1, 8))]
    partitions = choose.randint(1, len(cost))
    balance = balance_cost(cost, partitions)
    assert len(balance) == partitions
    assert sum(balance) == len(cost)
    assert min(balance) >= 1
    every = []
    for cuts in itertools.combinations(range(1, len(cost)), partitions - 1):
        edges = [0, *cuts, len(cost)]
        every.append(blocks(cost, [b - a for a, b in itertools.pairwise(edges)]))
    best = min((max(sums), sum(s * s for s in sums)) for sums in every)
    sums = blocks(cost, balance)
    assert (max(sums), sum(s * s for s in sums)) == best


@pytest.mark.parametrize("partitions", [0, 3, -1])
def test_impossible_partition_count_is_refused(partitions: int) -> None:
    with pytest.raises(ValueError, match="2 layers cannot be split"):
        balance_cost([1, 1], partitions)


def test_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        balance_cost([1, float("nan")], 1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Takes(nn.Module):
    def __init__(self, seconds: float, clock: Clock) -> None:
        super().__init__()
        self.seconds = seconds
        self.clock = [clock]  # a list of its own in a copy, with the same clock

    def __deepcopy__(self, memo: Any) -> Takes:
        return Takes(self.seconds, self.clock[0])

    def forward(self, x: Tensor) -> Tensor:
        self.clock[0].now += self.seconds
        return x * 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module_of_balance.time, "perf_counter", clock)  # type: ignore[attr-defined]
    return clock


def test_layers_are_balanced_by_their_time(clock: Clock) -> None:
    model = nn.Sequential(*(Takes(seconds, clock) for seconds in (1, 1, 1, 3)))
    assert balance_by_time(2, model, torch.ones(1), timeout=0, device="cpu") == [3, 1]


def test_median_of_repeated_measurements_counts(clock: Clock) -> None:
    first = iter([100.0, 1.0, 1.0])

    class SlowFirst(Takes):
        def __deepcopy__(self, memo: Any) -> Takes:
            return Takes(next(first), self.clock[0])

    model = nn.Sequential(SlowFirst(0, clock), *(Takes(seconds, clock) for seconds in (1, 1, 3)))
    assert balance_by_time(2, model, torch.ones(1), timeout=112, device="cpu") == [3, 1]


def test_measuring_leaves_model_unchanged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout()).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.ones(3, 4, requires_grad=True)
    balance_by_time(2, model, x, timeout=0, device="cpu")
    balance_by_size(2, model, x, device="cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in (x, *model.parameters()))
    assert not model[0].training


def test_parameter_with_gradient_is_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(ValueError, match="has a gradient"):
        balance_by_time(1, model, torch.ones(1, 1), device="cpu")


@pytest.mark.parametrize("balance", [balance_by_time, balance_by_size])
def test_too_many_partitions_are_refused_early(balance: Any) -> None:
    with pytest.raises(ValueError, match="1 layers cannot be split into 2"):
        balance(2, nn.Sequential(nn.Module()), torch.ones(1), device="cpu")


def test_param_scale_multiplies_parameters() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Tanh(), nn.Tanh())
    x = torch.ones(64, 32)
    assert balance_by_size(2, model, x, param_scale=10, device="cpu") == [1, 3]
    assert balance_by_size(2, model, x, param_scale=0, device="cpu") == [2, 2]


def test_micro_batches_have_smaller_activations() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Tanh(), nn.Tanh())
    x = torch.ones(64, 32)
    assert balance_by_size(2, model, x, chunks=1, param_scale=1, device="cpu") == [2, 2]
    assert balance_by_size(2, model, x, chunks=8, param_scale=1, device="cpu") == [1, 3]


def test_layer_saving_more_is_larger() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().exp().exp().exp()

    assert balance_by_size(2, nn.Sequential(nn.ReLU(), nn.ReLU(), Chain()), torch.zeros(4, 4), device="cpu") == [2, 1]


def test_integers_tuples_and_skips_are_measured() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, 2 * x

    @skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Any:
            yield stash("skip", pair[0])
            return pair[1]

    @skippable(pop=["skip"])
    class Pop(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + (yield pop("skip"))

    model = nn.Sequential(nn.Embedding(9, 4), Pair(), Stash(), Pop())
    ids = torch.arange(8)
    assert sum(balance_by_time(2, model, ids, timeout=0, device="cpu")) == 4
    assert balance_by_size(2, model, ids, device="cpu", param_scale=100) == [1, 3]


@pytest.mark.sim
def test_layers_are_measured_on_current_accelerator() -> None:
    devices = set()

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            devices.add(x.device.type)
            return x

    model = nn.Sequential(nn.Linear(2, 2), Look())
    assert balance_by_time(2, model, torch.ones(2, 2), timeout=0) == [1, 1]
    assert balance_by_size(2, model, torch.ones(2, 2)) == [1, 1]
    assert devices == {"sim"}
    assert model[0].weight.device.type == "cpu"
