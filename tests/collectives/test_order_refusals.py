"""Refusals of collectives in callbacks that have no order shared by all ranks, and the remedies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture
import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, InvalidStateError, executors
from cudafuture.testing import World

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

LONG = 60.0  # seconds; much more than anything takes
Chain = Callable[[CUDAFuture[torch.Tensor]], CUDAFuture[Any]]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


@pytest.mark.world(4)
def test_mesh_chains_need_second_queue(world: World) -> None:
    def run() -> list[float]:
        rank = dist.get_rank()
        rows = [cfd.new_group([0, 1]), cfd.new_group([2, 3])]
        columns = [cfd.new_group([0, 2]), cfd.new_group([1, 3])]
        row, column = rows[rank // 2], columns[rank % 2]
        refused = row.all_reduce(ones(1)).then_async(lambda f: column.all_reduce(f.value()))
        with pytest.raises(InvalidStateError, match=r"executor=ProcessGroup\(group\)\.queue of the group"):
            refused.wait(timeout=LONG)
        chains = []
        for turn in range(5):
            part = row.all_reduce(ones(1) * (turn + rank))
            chains.append(part.then_async(lambda f: column.all_reduce(f.value()), executor=column.queue))
        return [t.item() for t in cudafuture.gather(*chains).wait(timeout=LONG)]

    assert world.run(run) == [[4.0 * turn + 6 for turn in range(5)]] * 4


@pytest.mark.world(3)
def test_subgroup_callback_may_not_issue_outside(world: World) -> None:
    def run() -> None:
        part = cfd.new_group([0, 1])
        if dist.get_rank() < 2:
            chain = part.all_reduce(ones(1)).then_async(lambda f: cfd.all_reduce(f.value()))
            with pytest.raises(InvalidStateError, match="has ranks that have no such callback"):
                chain.wait(timeout=LONG)
        whole = cfd.all_reduce(ones(1)).then_async(lambda f: part.all_reduce(ones(1)))  # the other way round is fine
        assert whole.wait(timeout=LONG) in (None, ones(1) * 2)

    world.run(run)


def attach_in(kind: str, wake: CUDAFuture[int], chain: Chain, pool: ThreadPoolExecutor) -> CUDAFuture[Any]:
    """Attach a chain that issues to a collective, in a callback that runs in no order."""
    reduced = cfd.all_reduce(ones(1))
    if kind == "of another future":
        return wake.then_async(lambda _: reduced.then_async(chain))
    if kind == "on a pool":
        return reduced.then_async(lambda f: f.then_async(chain), executor=pool)
    if kind == "inline":
        return wake.then_async(lambda _: chain(reduced), executor=executors.inline)
    if kind == "on the callback thread":
        return wake.then_async(lambda _: chain(reduced), executor=executors.callback_thread)
    return wake.then_async(lambda _: cudafuture.submit(lambda: chain(reduced), executor=cfd.ProcessGroup().queue))


@pytest.mark.parametrize(
    "kind", ["of another future", "on a pool", "inline", "on the callback thread", "a job in the queue"]
)
@pytest.mark.world(1)
def test_unordered_attachment_may_not_issue(world: World, kind: str) -> None:
    def run() -> None:
        wake: CUDAFuture[int] = CUDAFuture()
        with ThreadPoolExecutor(1) as pool:
            future = attach_in(kind, wake, lambda f: cfd.broadcast(ones(1), 0), pool)
            wake.set_result(0)
            with pytest.raises(InvalidStateError, match="cannot be issued in a callback"):
                future.wait(timeout=LONG)

    world.run(run)


@pytest.mark.world(1)
def test_torch_future_callbacks_may_not_issue(world: World) -> None:
    def run() -> None:
        plain: CUDAFuture[int] = CUDAFuture()
        child = plain.to_torch().then(lambda f: cfd.all_reduce(ones(1)))
        plain.set_result(0)
        with pytest.raises(RuntimeError, match="cannot be issued in a callback"):
            child.wait()

    world.run(run)


@pytest.mark.world(2)
def test_groups_are_not_made_in_callbacks(world: World) -> None:
    def run() -> None:
        pg = cfd.ProcessGroup()
        for make in (lambda: cfd.new_group([0, 1]), lambda: pg.new_group([0, 1]), lambda: pg.split([[0], [1]])):
            with pytest.raises(InvalidStateError, match="not in a callback"):
                cfd.all_reduce(ones(1)).then(lambda f, make=make: make()).wait(timeout=LONG)  # type: ignore[misc]

    world.run(run)


@pytest.mark.world(1)
def test_endless_issuing_chain_is_stopped(world: World) -> None:
    def run() -> int:
        future = cfd.all_reduce(ones(1))
        steps = []
        for _ in range(40):
            future = future.then_async(lambda f: cfd.all_reduce(f.value()))
            steps.append(future)
        with pytest.raises(InvalidStateError, match="more than 32 steps"):
            future.wait(timeout=LONG)
        return sum(step.exception(timeout=LONG) is None for step in steps)

    assert world.run(run) == [32]


@pytest.mark.world(2)
def test_profiler_works_beside_side_groups(world: World) -> None:
    def run() -> int:
        cfd.all_reduce(ones(1)).then_async(lambda f: cfd.all_reduce(f.value())).wait(timeout=LONG)
        cfd.all_gather_object([None, None], 1).wait(timeout=LONG)
        with torch.profiler.profile() as profile:
            cfd.all_reduce(ones(1)).wait(timeout=LONG)
        return len(profile.events() or [])

    assert all(count > 0 for count in world.run(run))
