"""prefetch() on the simulated accelerator: random programs under seeded schedules, memory, and errors of a device."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cudafuture import prefetch
from cudafuture.testing import sim
from support.soak import soak_count


class Batches:
    """Batches of random sizes; the first number of each tensor is the batch's."""

    def __init__(self, seed: int, batches: int) -> None:
        self.seed, self.batches = seed, batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        choose = random.Random(self.seed)
        for i in range(self.batches):
            batch: dict[str, Any] = {"id": i, "x": torch.full((choose.choice((16, 256, 4096)),), float(i))}
            if choose.random() < 0.3:
                batch["pinned"] = torch.full((20_000,), float(i)).pin_memory()
            if choose.random() < 0.3:
                batch["there"] = torch.full((64,), float(i), device="sim")
            if choose.random() < 0.5:
                batch["small"] = [torch.full((3,), float(i)) for _ in range(choose.randrange(6))]
            yield batch


def halve(batch: dict[str, Any]) -> dict[str, Any]:
    sim.sleep(ms=1)
    return {**batch, "half": batch["x"] / 2}


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("size", [10, 1 << 20])
@pytest.mark.sim(schedule="lazy")
def test_iterable_may_refill_pageable_tensors(size: int, pack: bool) -> None:
    def fill_again() -> Iterator[list[torch.Tensor]]:
        tensors = [torch.empty(size), torch.empty(size)]
        for i in range(6):
            yield [tensor.fill_(i) for tensor in tensors]

    assert [[x[0].item() for x in batch] for batch in prefetch(fill_again(), "sim", pack=pack)] == [
        [i, i] for i in range(6)
    ]


def test_host_target_gets_original_tensors() -> None:
    tensor = torch.ones(2)
    assert all(batch[0] is tensor for batch in prefetch([[tensor], (tensor,)], "cpu"))


@pytest.mark.parametrize("seed", range(soak_count(1000)))
@pytest.mark.sim(schedule="jitter")
def test_random_program_has_no_race(seed: int) -> None:
    choose = random.Random(seed)
    sim.enable(devices=2, schedule=choose.choice(("jitter", "jitter", "lazy", "free")), seed=seed)
    total = choose.randrange(1, 14)
    transform = choose.choice((None, halve))
    futures = choose.random() < 0.2
    prefetched = prefetch(
        Batches(seed, total),
        "sim",
        depth=choose.randint(1, 8),
        bytes=choose.choice((None, None, 30_000)),
        pack=choose.random() < 0.8,
        transform=transform,
        futures=futures,
        across_epochs=choose.random() < 0.3,
    )
    streams = [torch.accelerator.current_stream(), torch.Stream(device="sim"), torch.Stream(device="sim")]
    kept: list[tuple[int, torch.Tensor]] = []
    checks: list[tuple[float, torch.Tensor]] = []
    for _epoch in range(choose.randint(1, 3)):
        leaves_at = choose.choice((None, None, choose.randrange(total)))
        moves = choose.random() < 0.3
        for i, taken in enumerate(prefetched):
            with streams[choose.randrange(3) if moves else 0]:
                batch = taken.wait(non_blocking=True) if futures else taken
                assert batch["id"] == i
                sim.sleep(ms=choose.choice((0, 1, 5)))
                tensors = [batch["x"], *batch.get("small", ()), *(batch[k] for k in ("pinned", "there") if k in batch)]
                if moves and not futures:  # taken on another stream than the one that uses it
                    for tensor in tensors:
                        tensor.record_stream(torch.accelerator.current_stream())
                    torch.accelerator.current_stream().wait_stream(streams[0])
                checks += [(float(i), tensor.mean()) for tensor in tensors]
                if transform is not None and not moves:
                    checks.append((i / 2, batch["half"].mean()))
                if choose.random() < 0.2 and not moves:
                    kept.append((i, batch["x"]))
            del batch, taken, tensors
            if i == leaves_at:
                break
    prefetched.close()
    sim.synchronize()
    assert [mean.item() for _, mean in checks] == [value for value, _ in checks]
    assert [x.mean().item() for _, x in kept] == [float(i) for i, _ in kept]


@pytest.mark.sim
def test_reserved_memory_is_flat_over_epochs() -> None:
    prefetched = prefetch([torch.rand(50_000) for _ in range(10)], "sim", depth=2)
    reserved = []
    for _epoch in range(20):
        for batch in prefetched:
            sim.sleep(ms=1)
            batch.mean()
            del batch
        reserved.append(sim.statistics().reserved_bytes)
    assert len(set(reserved[2:])) == 1


@pytest.mark.sim
def test_batch_of_many_tensors_copies_once() -> None:
    batch = [torch.rand(8) for _ in range(100)]
    sim.synchronize()
    before = sim.statistics().submitted
    assert len(list(prefetch([batch], "sim"))) == 1
    assert sim.statistics().submitted - before == 1


@pytest.mark.sim
def test_device_without_memory_fails_only_batch() -> None:
    sim.enable(memory=8 << 20)
    batches = [torch.ones(1000), torch.ones(4 << 20), torch.ones(1000)]
    prefetched = prefetch(batches, "sim")
    for _epoch in range(2):
        epoch = iter(prefetched)
        assert next(epoch).sum().item() == 1000
        with pytest.raises(torch.OutOfMemoryError):
            next(epoch)
        del epoch
    batches[1] = torch.ones(1000)
    assert [x.sum().item() for x in prefetched] == [1000] * 3


@pytest.mark.sim(schedule="lazy")
def test_transform_without_memory_fails_batch() -> None:
    sim.enable(memory=8 << 20)
    prefetched = prefetch([torch.ones(1000)], "sim", transform=lambda x: torch.cat([x] * 10_000))
    with pytest.raises(torch.OutOfMemoryError):
        list(prefetched)
    torch.full((1000,), 9.0, device="sim")  # in memory that the copy may still write, if that is not kept


@pytest.mark.sim
def test_loader_and_trainer_take_longer_time() -> None:
    sim.enable(speeds=sim.Speeds(copy=4e6, launch=0))  # a millisecond for 1,000 floats

    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(50):
                sim.spend(ms=3)
                yield torch.ones(1000)

    for batch in prefetch(Loader(), "sim"):
        sim.sleep(ms=2)
        batch[0].item()
    assert 0.150 <= sim.clock() <= 0.157


async def wait_behind_held_copies(turns: int) -> float:
    """Open the device after so many turns of the event loop; return the seconds that were counted as its."""
    held = contextlib.ExitStack()
    calls = itertools.count()

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 0:
            held.enter_context(sim.hold())  # before the event of the first batch
        return batch

    prefetched = prefetch([torch.ones(10)] * 4, "sim", depth=1, transform=transform)
    epoch = aiter(prefetched)
    await anext(epoch)
    await anext(epoch)
    waiting = asyncio.ensure_future(anext(epoch))  # two copies are in flight already
    for _ in range(turns):
        await asyncio.sleep(0)
    assert not waiting.done()
    held.close()
    await waiting
    return prefetched.statistics().waited_for_device


@pytest.mark.sim(schedule="lazy")
def test_wait_for_device_is_counted() -> None:
    turns = 1
    while asyncio.run(wait_behind_held_copies(turns)) == 0:  # the reader had not come to wait for the device
        turns *= 2
