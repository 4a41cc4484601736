"""Times at which device work runs: early, late, and in between by a seed."""

from __future__ import annotations

import pytest
import torch

from cudafuture.testing import sim

pytestmark = pytest.mark.sim(devices=2)

SCHEDULES: list[sim.Schedule] = ["free", "jitter", "lazy"]


def count_executed() -> int:
    return sim.statistics().executed


def test_free_runs_at_once() -> None:
    sim.enable(schedule="free")
    pinned = torch.zeros(4).pin_memory()
    pinned.copy_(torch.ones(4, device="sim"), non_blocking=True)
    assert pinned.data_ptr()
    event = torch.Event("sim")
    event.record()
    assert event.query()


def test_lazy_runs_nothing_before_wait() -> None:
    sim.enable(schedule="lazy")
    before = count_executed()
    x = torch.ones(4, device="sim").add_(1)
    assert count_executed() == before
    assert x.tolist() == [2, 2, 2, 2]
    assert count_executed() > before


def test_lazy_runs_only_awaited_work() -> None:
    sim.enable(schedule="lazy")
    first, second = torch.Stream("sim"), torch.Stream("sim")
    sim.sleep(1, first)
    sim.sleep(1, second)
    sim.sleep(1, second)
    before = count_executed()
    first.synchronize()
    assert count_executed() == before + 1
    sim.synchronize()
    assert count_executed() == before + 3


def test_lazy_runs_dependencies_of_awaited_work() -> None:
    sim.enable(schedule="lazy")
    first, second = torch.Stream("sim"), torch.Stream("sim")
    sim.sleep(1, first)
    second.wait_stream(first)
    sim.sleep(1, first)
    sim.sleep(1, second)
    before = count_executed()
    second.synchronize()
    assert count_executed() == before + 2


def test_lazy_reader_without_wait_sees_nan() -> None:
    sim.enable(schedule="lazy", detect=False)
    side = torch.Stream("sim")
    with side:
        x = torch.ones(4, device="sim")
    total = x.sum()
    torch.accelerator.current_stream().synchronize()
    assert total.isnan().item()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_polling_ends(schedule: sim.Schedule) -> None:
    sim.enable(schedule=schedule, seed=11)
    side = torch.Stream("sim")
    for _ in range(20):
        sim.sleep(1, side)
    event = torch.Event("sim")
    event.record(side)
    for _ in range(1000):
        if event.query():
            return
    pytest.fail("it was asked a thousand times")


def racy_program(seed: int) -> list[float]:
    """Return the values that a program without waits happens to read, with every choice made by the seed."""
    sim.enable(schedule="jitter", seed=seed, detect=False)
    streams = [torch.Stream("sim") for _ in range(4)]
    x = torch.zeros(1, device="sim")
    sim.synchronize()
    pinned = torch.zeros(24).pin_memory()
    for i in range(24):
        with streams[i % 4]:
            x.mul_(1.5).add_(i)
            pinned[i : i + 1].copy_(x, non_blocking=True)
    sim.synchronize()
    return pinned.tolist()


def test_seed_repeats_run() -> None:
    for seed in range(5):
        assert racy_program(seed) == racy_program(seed)


def test_other_seeds_give_other_runs() -> None:
    assert len({tuple(racy_program(seed)) for seed in range(10)}) > 1


def ordered_program() -> list[float]:
    streams = [torch.Stream("sim") for _ in range(4)]
    x = torch.zeros(1, device="sim")
    for i in range(24):
        stream = streams[i % 4]
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            x.mul_(1.5).add_(i).remainder_(7)
        x.record_stream(stream)
        torch.accelerator.current_stream().wait_stream(stream)
    return x.tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_raceless_program_ignores_schedule_and_seed(schedule: sim.Schedule) -> None:
    sim.enable(schedule="free")
    expected = ordered_program()
    for seed in range(10):
        sim.enable(schedule=schedule, seed=seed)
        assert ordered_program() == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_numbers_depend_on_program_alone(schedule: sim.Schedule) -> None:
    def numbers() -> list[float]:
        torch.manual_seed(5)
        first = torch.rand(4, device="sim")
        second = torch.randn(4, device="sim")
        return [*second.tolist(), *first.tolist()]

    sim.enable(schedule="free")
    expected = numbers()
    sim.enable(schedule=schedule, seed=9)
    assert numbers() == expected
    assert numbers() == expected
    assert torch.rand(4, device="sim").tolist() != torch.rand(4, device="sim").tolist()
