"""The order of callbacks and of what they issue: the same on every rank, whatever the timing."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture
import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, InvalidStateError, executors
from cudafuture.testing import World
from support.soak import SOAK, soak_count

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

LONG = 60.0  # seconds; much more than anything takes


def step(rank: int, rounds: int, buckets: int, delays: tuple[float, float], group: Any = None) -> None:
    """Run chains of all_reduce and broadcast, of which rank 1 issues each part and runs each callback late.

    `delays`: the longest wait in the program and the wait in a callback, in seconds.
    """
    late = random.Random(rank)
    beside, inside = delays if rank == 1 else (0.0, 0.0)

    def pause(seconds: float) -> None:
        if seconds:
            time.sleep(seconds)

    def second(future: CUDAFuture[torch.Tensor]) -> CUDAFuture[torch.Tensor]:
        pause(inside)
        tensor = future.value().clone() if rank == 0 else torch.full((5,), -1.0)
        return cfd.broadcast(tensor, group=group, group_src=0)

    for turn in range(rounds):
        chains = []
        for bucket in range(buckets):
            pause(late.random() * beside)
            tensor = torch.full((5,), float(100 * turn + bucket + rank))
            chains.append(cfd.all_reduce(tensor, group=group).then_async(second).then(lambda f: f.value() + 1))
        values = cudafuture.gather(*chains).wait(timeout=LONG)
        assert [v.tolist() for v in values] == [[2.0 * (100 * turn + b) + 2] * 5 for b in range(buckets)]


@pytest.mark.soak
@pytest.mark.parametrize("buckets", [2, 8])
@pytest.mark.world(2, timeout=100)
@pytest.mark.timeout(1200)
def test_two_step_chains_have_right_data(world: World, buckets: int) -> None:
    world.run(lambda: step(dist.get_rank(), soak_count(300), buckets, (0.002, 0.0)))


@pytest.mark.soak
@pytest.mark.parametrize("buckets", [2, 8])
@pytest.mark.world(2, timeout=400)
@pytest.mark.timeout(1200)
def test_slow_callbacks_change_nothing(world: World, buckets: int) -> None:
    world.run(lambda: step(dist.get_rank(), soak_count(300), buckets, (0.0, 0.05 if SOAK else 0.01)))


@pytest.mark.soak
@pytest.mark.world(2, timeout=100)
@pytest.mark.timeout(1200)
def test_threads_on_own_groups_stay_separate(world: World) -> None:
    def run() -> None:
        groups = [cfd.new_group() for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(step, dist.get_rank(), soak_count(300), 2, (0.002, 0.0), g) for g in groups]
            for job in jobs:
                job.result()

    world.run(run)


# ---- one process: what runs after what


@pytest.mark.world(1)
def test_callbacks_run_in_attachment_order(world: World) -> None:
    def run() -> list[str]:
        queue = cfd.ProcessGroup().queue
        ran: list[str] = []
        first: CUDAFuture[int] = CUDAFuture()
        second: CUDAFuture[int] = CUDAFuture()
        children = [
            first.then(lambda f: ran.append("first"), executor=queue),
            second.then(lambda f: ran.append("second"), executor=queue),
            cfd.all_reduce(torch.ones(1)).then(lambda f: ran.append("collective")),
            CUDAFuture.completed(0).then(lambda f: ran.append("completed"), executor=queue),
            first.then(lambda f: ran.append("first again"), executor=queue),
        ]
        second.set_result(0)
        assert ran == []
        first.set_result(0)
        cudafuture.wait_all(children, timeout=LONG)
        return ran

    assert world.run(run) == [["first", "second", "collective", "completed", "first again"]]


@pytest.mark.world(1)
def test_callback_never_runs_inline(world: World) -> None:
    def run() -> bool:
        future = cfd.all_reduce(torch.ones(1))
        future.wait(timeout=LONG)
        here = threading.get_ident()
        told: CUDAFuture[int] = CUDAFuture()
        future.add_done_callback(lambda f: told.set_result(threading.get_ident()))
        return here not in (future.then(lambda f: threading.get_ident()).wait(timeout=LONG), told.wait(timeout=LONG))

    assert world.run(run) == [True]


@pytest.mark.world(1)
def test_second_steps_overlap_next_chains(world: World) -> None:
    def run() -> list[str]:
        ran: list[str] = []
        inner: CUDAFuture[int] = CUDAFuture()
        one = cfd.all_reduce(torch.ones(1)).then_async(lambda f: inner).then(lambda f: ran.append("second of one"))
        two = cfd.all_reduce(torch.ones(1)).then_async(lambda f: ran.append("first of two") or CUDAFuture.completed(0))  # type: ignore[func-returns-value]
        two.wait(timeout=LONG)
        inner.set_result(0)
        one.wait(timeout=LONG)
        return ran

    assert world.run(run) == [["first of two", "second of one"]]


@pytest.mark.world(1)
def test_combined_futures_keep_part_order(world: World) -> None:
    def run() -> list[int]:
        ran: list[int] = []
        late: CUDAFuture[int] = CUDAFuture()
        reduced = [cfd.all_reduce(torch.ones(1)) for _ in range(3)]
        children = [
            cudafuture.gather(reduced[0], late).then(lambda f: ran.append(0)),
            cudafuture.collect_all(reduced).then(lambda f: ran.append(1)),
            cudafuture.collect_any(reduced).then(lambda f: ran.append(2)),
        ]
        cudafuture.wait(reduced, timeout=LONG)
        late.set_result(0)
        cudafuture.wait_all(children, timeout=LONG)
        return ran

    assert world.run(run) == [[0, 1, 2]]


@pytest.mark.world(1)
def test_impossible_callback_gives_up_place(world: World) -> None:
    def run() -> bool:
        queue = cfd.ProcessGroup().queue
        never: CUDAFuture[int] = CUDAFuture()
        never.then(lambda f: None, executor=queue)
        del never  # it can never complete now
        return cfd.all_reduce(torch.ones(1)).then(lambda f: True).wait(timeout=LONG)

    assert world.run(run) == [True]


# ---- what callbacks may issue


@pytest.mark.world(2)
def test_callback_may_wait_for_own_collective(world: World) -> None:
    def run() -> float:
        def add_up(future: CUDAFuture[torch.Tensor]) -> torch.Tensor:
            return cfd.all_reduce(future.value()).then(lambda f: f.value() * 10).wait(timeout=LONG)

        return cfd.all_reduce(torch.ones(1)).then(add_up).wait(timeout=LONG).item()

    assert world.run(run) == [40.0, 40.0]


@pytest.mark.world(2)
def test_callbacks_issue_every_collective(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()

        def objects(future: CUDAFuture[Any]) -> CUDAFuture[list[Any]]:
            return cfd.all_gather_object([None, None], ("callback", rank))

        chains: list[CUDAFuture[Any]] = []
        for _ in range(10):
            chains.append(cfd.all_reduce(torch.ones(3)).then_async(objects))
            chains.append(cfd.all_gather_object([None, None], ("program", rank)))
            chains.append(cfd.barrier().then_async(lambda f: cfd.monitored_barrier()))
        values = cudafuture.gather(*chains).wait(timeout=LONG)
        assert values == [[("callback", 0), ("callback", 1)], [("program", 0), ("program", 1)], None] * 10

    world.run(run)


@pytest.mark.world(2)
def test_three_level_chains_work_both_ways(world: World) -> None:
    def run() -> list[float]:
        def reduce(future: CUDAFuture[torch.Tensor]) -> CUDAFuture[torch.Tensor]:
            return cfd.all_reduce(future.value())

        flat = [
            cfd.all_reduce(torch.ones(1)).then_async(reduce).then_async(reduce).then_async(reduce) for _ in range(4)
        ]
        nested = [
            cfd.all_reduce(torch.ones(1)).then_async(
                lambda f: reduce(f).then_async(lambda g: reduce(g).then_async(reduce))
            )
            for _ in range(4)
        ]
        return [t.item() for t in cudafuture.gather(*flat, *nested).wait(timeout=LONG)]

    assert world.run(run) == [[16.0] * 8] * 2


@pytest.mark.world(1)
def test_callback_on_other_executor_may_not_issue(world: World) -> None:
    def run() -> None:
        other = cfd.new_group()
        with ThreadPoolExecutor(1) as pool:
            for executor in (pool, executors.inline, executors.callback_thread):
                future = cfd.all_reduce(torch.ones(1))
                child = future.then_async(lambda f: cfd.all_reduce(f.value()), executor=executor)
                with pytest.raises(InvalidStateError, match=r"executor of its own.*another group"):
                    child.wait(timeout=LONG)
                child = future.then_async(lambda f: other.all_reduce(f.value()), executor=executor)
                assert child.wait(timeout=LONG).item() == 1
                objects = future.then_async(lambda f: cfd.all_gather_object([None], 1), executor=executor)
                with pytest.raises(InvalidStateError, match="executor of its own"):
                    objects.wait(timeout=LONG)

    world.run(run)


@pytest.mark.world(1)
def test_callback_in_completion_order_may_not_issue(world: World) -> None:
    def run() -> None:
        read = cudafuture.submit(lambda: torch.ones(1))  # or a read from disk, or an RPC
        for future in (read, CUDAFuture.completed(torch.ones(1))):
            with pytest.raises(InvalidStateError, match=r"executor=ProcessGroup\(group\)\.queue"):
                future.then_async(lambda f: cfd.all_reduce(f.value())).wait(timeout=LONG)
            ordered = future.then_async(lambda f: cfd.all_reduce(f.value()), executor=cfd.ProcessGroup().queue)
            assert ordered.wait(timeout=LONG).item() == 1
            sent = future.then_async(lambda f: cudafuture.gather(cfd.recv(torch.ones(1), 0), cfd.send(f.value(), 0)))
            assert sent is not None

    world.run(run)
