"""Monitored barriers that some rank does not enter, on groups whose own timeout is far longer than the test."""

from __future__ import annotations

import datetime as dt
import time

import pytest
import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture
from cudafuture.distributed import CollectiveError
from support.ranks import run_ranks

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

LONG = 40.0  # seconds; far less than the timeout of the group
SHORT = 0.5  # seconds, of the barriers that fail


def failure(seconds: float = SHORT, wait_all_ranks: bool = False) -> str:
    """Enter a barrier that fails, and return the error text."""
    began = time.monotonic()
    error = cfd.monitored_barrier(None, dt.timedelta(seconds=seconds), wait_all_ranks).exception(timeout=LONG)
    assert isinstance(error, CollectiveError)
    assert error.operation == "monitored_barrier"
    assert isinstance(error.__cause__, RuntimeError)
    assert time.monotonic() - began < LONG / 2
    return str(error)


def pass_together() -> None:
    assert cfd.monitored_barrier(timeout=LONG).wait(timeout=LONG) is None


def miss_one(rank: int) -> list[str]:
    errors = [] if rank == 1 else [failure()]
    dist.barrier()
    if rank == 1:
        errors.append(failure(LONG))  # at once: the others have failed already
    for _ in range(3):
        pass_together()
    return errors


def test_first_barrier_times_out_naming_rank() -> None:
    (first,), (late,), (last,) = run_ranks(3, miss_one)
    assert "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 500 ms" in first
    reached = (
        "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0"
    )
    assert reached in last
    assert "Rank 1 failed" in last or "missing ranks: 1" in last
    assert "Rank 1 successfully reached monitoredBarrier, but received errors" in late


def miss_all_but_rank_0(rank: int) -> list[str]:
    errors = [failure(wait_all_ranks=True), failure()] if rank == 0 else []
    dist.barrier()
    if rank != 0:
        assert "Ranks 1, 2 failed to pass" in failure(LONG, wait_all_ranks=True)
        assert "Rank 1 failed to pass" in failure(LONG)
    pass_together()
    return errors


def test_wait_all_ranks_names_all_missing() -> None:
    every, first = run_ranks(3, miss_all_but_rank_0)[0]
    assert "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 500 ms" in every
    assert "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 500 ms" in first


def leave_no_time(rank: int) -> list[str]:
    errors = [failure(0.0)] if rank == 0 else []
    dist.barrier()
    return errors


def test_zero_timeout_fails_rank_0() -> None:
    (error,) = run_ranks(2, leave_no_time)[0]
    assert "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms" in error


def miss_rank_0(rank: int) -> list[str]:
    errors = [failure()] if rank == 1 else []
    dist.barrier()
    if rank == 0:
        errors.append(failure(LONG))
    pass_together()
    return errors


def test_rank_giving_up_fails_rank_0() -> None:
    (led,), (followed,) = run_ranks(2, miss_rank_0)
    assert "rank 0 had not released it; missing ranks: 0" in followed
    assert "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 500 ms" in led


def hang_in_an_object_collective(rank: int) -> list[str]:
    gathered = None if rank == 1 else cfd.all_gather_object([None, None], rank)
    errors = [] if rank == 1 else [failure()]
    dist.barrier()
    if rank == 1:
        gathered = cfd.all_gather_object([None, None], rank)
        failure(LONG)
    assert gathered is not None
    assert gathered.wait(timeout=LONG) == [0, 1]
    return errors


def test_hanging_object_collective_spares_barrier() -> None:
    (error,) = run_ranks(2, hang_in_an_object_collective)[0]
    assert "Rank 1 failed to pass monitoredBarrier in 500 ms" in error


def leave_keys(rank: int) -> int:
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for _ in range(20):
        pass_together()
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts[-1] - counts[1]


def test_barriers_leave_no_keys_behind() -> None:
    assert run_ranks(2, leave_keys) == [0, 0]


def enter_in_callbacks(rank: int) -> None:
    def barrier(_: object) -> CUDAFuture[None]:
        return cfd.monitored_barrier(timeout=LONG)

    chains = [cfd.all_reduce(torch.ones(1)).then_async(barrier).then_async(barrier) for _ in range(3)]
    for chain in chains:
        assert chain.wait(timeout=LONG) is None


def test_callbacks_may_enter_barriers() -> None:
    run_ranks(2, enter_in_callbacks)
