"""Ranks that die or stop during collectives over NCCL: every future of the others ends with a CollectiveError."""

from __future__ import annotations

import random
import signal

import pytest

from support import nccl_ranks
from support.nccl_ranks import GOES_ON, run_nccl
from support.soak import soak_count

pytestmark = [pytest.mark.cuda, pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("nccl-failures")]

SIZE = 3


def test_stopped_rank_fails_every_future() -> None:
    results = run_nccl(SIZE, nccl_ranks.lose_one, 1, signal.SIGSTOP, lost=[1])
    for rank in (0, 2):
        assert set(results[rank].values()) == {"CollectiveError"}, results[rank]


def test_aborted_futures_never_succeed() -> None:
    busy = GOES_ON | {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "200"}  # for each operation, four times as long
    results = run_nccl(SIZE, nccl_ranks.lose_one, 1, signal.SIGKILL, lost=[1], environment=busy)
    for rank in (0, 2):
        assert set(results[rank].values()) == {"CollectiveError"}, results[rank]


def test_errors_are_reported_without_cleanup() -> None:
    as_it_is = GOES_ON | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    results = run_nccl(SIZE, nccl_ranks.lose_one, 1, signal.SIGKILL, lost=[1], environment=as_it_is)
    for rank in (0, 2):
        assert set(results[rank].values()) == {"CollectiveError"}, results[rank]


def test_lost_rank_error_names_operation() -> None:
    run_nccl(SIZE, nccl_ranks.describe_a_loss, 2, lost=[2])


def test_others_continue_without_lost_rank() -> None:
    assert run_nccl(SIZE, nccl_ranks.go_on_without, SIZE, 0, lost=[0]) == [None, 128.0, 128.0]


def test_finished_work_stays_successful() -> None:
    results = run_nccl(SIZE, nccl_ranks.finish_before, 1, lost=[1])
    for rank in (0, 2):
        assert results[rank] == ["success"] * 8


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "10"}, id="by the watchdog"),
        pytest.param(
            {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1"}, id="by the monitor"
        ),
    ],
)
def test_torch_ends_process_by_default(environment: dict[str, str]) -> None:
    """Show that the variables of docs/collectives.md are needed: they are not set here."""
    with pytest.raises(AssertionError, match=r"ended with exit code -6"):
        run_nccl(SIZE, nccl_ranks.stay_alive, 1, lost=[1], environment=environment)


@pytest.mark.soak
def test_killed_ranks_fail_every_future() -> None:
    rng = random.Random(16)
    killed = 0
    while killed < soak_count(100):
        order = rng.sample(range(SIZE + 1), SIZE)
        results = run_nccl(SIZE + 1, nccl_ranks.lose_one_after_another, SIZE + 1, order, lost=order)
        (survivor,) = [outcomes for outcomes in results if outcomes is not None]
        for outcomes in survivor:
            assert set(outcomes.values()) == {"CollectiveError"}, outcomes
            killed += 1
