"""Calls to a worker that dies or stops: every one ends, says whose fault it is, and the caller goes on."""

from __future__ import annotations

import math
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rpc_ext
from cudafuture.errors import CallsFailedError
from rpc_ext import rpc_async, rpc_sync
from support.ranks import run_ranks
from support.rpc_callees import SHARED_MEMORY
from support.rpc_workers import (
    LONG,
    SHORT,
    be_lost,
    begin,
    blame,
    go_on,
    hold,
    hold_half,
    outcome,
    outcomes,
    release,
    same,
    wait_for_release,
)

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("rpc-survival")]

CALLS = 1000
LOSSES = pytest.mark.parametrize(
    ("sent", "error"), [(signal.SIGKILL, "WorkerLostError"), (signal.SIGSTOP, "TimeoutError")]
)


def timeout_of(sent: int) -> float:
    """Return what calls get as a timeout: none where the break of the connection is all that has to end them."""
    return math.inf if sent == signal.SIGKILL else SHORT


def expect_all_ended(session: rpc_ext.Session) -> None:
    """Check that the lost worker has no calls in flight; then leave without it."""
    there = session.statistics().destinations["callee"]
    assert (there.in_flight, there.bytes_in_flight, there.waiting) == (0, 0, 0)
    rpc_ext.shutdown(graceful=False)


def call_the_lost(rank: int, store: str, sent: int) -> Counter[str]:
    session = begin(rank, 2, store, rpc_timeout=timeout_of(sent), transports=SHARED_MEMORY)
    if rank == 1:
        be_lost()
    ended = outcomes([rpc_async("callee", hold_half, (CALLS // 2, sent)) for _ in range(CALLS)])
    expect_all_ended(session)
    return ended


@LOSSES
def test_callee_dies_during_thousand_calls(tmp_path: Path, sent: int, error: str) -> None:
    ended = run_ranks(2, call_the_lost, str(tmp_path / "store"), sent, lost=[1])[0]
    assert set(ended) <= {"answered", error}
    assert ended.total() == CALLS
    assert ended[error] >= CALLS // 4  # the held calls, and those not begun


def batch_to_the_lost(rank: int, store: str, sent: int) -> Counter[str]:
    session = begin(rank, 2, store, rpc_timeout=timeout_of(sent))
    if rank == 1:
        be_lost()
    with rpc_ext.batch("callee"):
        futures = [rpc_async("callee", hold_half, (CALLS // 2, sent)) for _ in range(CALLS)]
    ended = outcomes(futures)
    expect_all_ended(session)
    return ended


@LOSSES
def test_callee_dies_during_batches(tmp_path: Path, sent: int, error: str) -> None:
    ended = run_ranks(2, batch_to_the_lost, str(tmp_path / "store"), sent, lost=[1])[0]
    assert set(ended) <= {"answered", error}
    assert ended.total() == CALLS
    assert ended[error] >= CALLS // 4


def wait_for_room_at_the_lost(rank: int, store: str, sent: int) -> Counter[str]:
    """Make calls in eight threads; most of them wait until others have been answered."""
    session = begin(rank, 2, store, rpc_timeout=SHORT, max_in_flight=4)
    if rank == 1:
        be_lost()
    ended: list[str] = []

    def call() -> None:
        for _ in range(8):
            try:
                future = rpc_async("callee", hold_half, (10, sent), timeout=0.5)
            except TimeoutError as e:
                ended.append(blame(e))
            else:
                ended.append(outcome(future))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    expect_all_ended(session)
    return Counter(ended)


@LOSSES
def test_waiting_calls_end_with_callee(tmp_path: Path, sent: int, error: str) -> None:
    ended = run_ranks(2, wait_for_room_at_the_lost, str(tmp_path / "store"), sent, lost=[1])[0]
    assert ended.total() == 8 * 8
    assert ended[error] > 0


def call_in_every_way(rank: int, store: str, sent: int) -> dict[str, str]:
    session = begin(rank, 2, store)
    if rank == 1:
        be_lost()
    there = rpc_ext.remote("callee", same, (1,))
    assert there.to_here() == 1
    last = rpc_async("callee", hold_half, (1, sent), timeout=SHORT)
    blame(last.exception(timeout=LONG))
    ways: dict[str, Callable[[], Any]] = {
        "rpc_sync": lambda: rpc_sync("callee", same, (1,), timeout=0.5),
        "to_here": lambda: there.to_here(timeout=0.5),
        "method": lambda: there.rpc_sync(timeout=0.5).bit_length(),
        "method that makes another": lambda: there.remote(timeout=0.5).bit_length().to_here(timeout=0.5),
        "remote": lambda: rpc_ext.remote("callee", same, (1,), timeout=0.5).to_here(timeout=0.5),
        "then": lambda: rpc_async("callee", same, (1,), timeout=0.5).then(lambda f: f.value()).wait(timeout=LONG),
        "then_async": lambda: (
            rpc_async("caller", same, (1,))
            .then_async(lambda f: rpc_async("callee", same, (f.value(),), timeout=0.5))
            .wait(timeout=LONG)
        ),
        "in a batch": lambda: call_in_batch(0.5),
    }
    results = {}
    for name, way in ways.items():
        try:
            way()
        except Exception as e:
            results[name] = blame(e)
    expect_all_ended(session)
    return results


def call_in_batch(timeout: float) -> Any:
    with rpc_ext.batch("callee"):
        future = rpc_async("callee", same, (1,), timeout=timeout)
    return future.wait(timeout=LONG)


@LOSSES
def test_requests_to_lost_worker_fail(tmp_path: Path, sent: int, error: str) -> None:
    results = run_ranks(2, call_in_every_way, str(tmp_path / "store"), sent, lost=[1])[0]
    assert len(results) == 8
    assert set(results.values()) == {error}


def go_on_without_it(rank: int, store: str) -> None:
    begin(rank, 3, store)
    if rank == 1:
        be_lost()
    if rank == 0:
        assert outcome(rpc_async("callee", hold_half, (1, signal.SIGKILL))) == "WorkerLostError"
        both = rpc_ext.broadcast_call(["callee", "third"], same, (7,)).exception(timeout=LONG)
        assert isinstance(both, CallsFailedError)
        assert both.results == {"third": 7}
        assert [rpc_sync("third", same, (i,)) for i in range(100)] == list(range(100))
    with pytest.raises(TimeoutError, match="worker 1 \\('callee'\\) of 3 has not arrived within"):
        rpc_ext.shutdown(timeout=SHORT)
    with pytest.raises(RuntimeError, match="has ended"):
        rpc_async("third", same, (1,))


def test_graceful_shutdown_names_lost_worker(tmp_path: Path) -> None:
    run_ranks(3, go_on_without_it, str(tmp_path / "store"), lost=[1])


def pass_on_what_a_lost_worker_has(rank: int, store: str) -> None:
    begin(rank, 3, store, rpc_timeout=SHORT if rank == 2 else LONG)
    if rank == 1:
        be_lost()
    if rank == 0:
        there = rpc_ext.remote("callee", same, (1,))
        assert there.to_here() == 1
        assert outcome(rpc_async("callee", hold_half, (1, signal.SIGKILL))) == "WorkerLostError"
        error = rpc_async("third", same, (there,)).exception(timeout=LONG)
        assert isinstance(error, TimeoutError)
        assert "worker 'callee' has not confirmed" in str(error)
        assert error.worker == "third"  # type: ignore[attr-defined]
        assert rpc_sync("third", count_serving) == 1  # this one
        rpc_async("third", go_on).exception(timeout=LONG)  # it may leave before it has answered
    else:
        assert release.wait(LONG)
    rpc_ext.shutdown(graceful=False)


def count_serving() -> int:
    return rpc_ext.statistics().serving


def test_reference_into_lost_worker_names_it(tmp_path: Path) -> None:
    run_ranks(3, pass_on_what_a_lost_worker_has, str(tmp_path / "store"), lost=[1])


def use_what_is_late(rank: int, store: str) -> None:
    with begin(rank, 2, store):
        if rank == 0:
            late = rpc_ext.remote("callee", wait_for_release, timeout=0.05)
            rpc_async("callee", hold, timeout=0.2).exception(timeout=LONG)  # the reference's time was over sooner
            assert not late._rref._get_future().done()  # torch would mark another reference as late, one that is gone
            uses: list[Callable[[], object]] = [
                late.to_here,
                lambda: late.get_future().wait(),
                lambda: late.rpc_sync().bit_length(),
                lambda: rpc_sync("callee", same, (late,)),
            ]
            for use in uses:
                with pytest.raises(TimeoutError, match="worker 'callee' has not made the value of an RRef in time"):
                    use()
            rpc_sync("callee", go_on)
            late._rref._get_future().wait()  # it is made, after all
            assert late.to_here() is None


def test_late_value_times_out_everywhere(tmp_path: Path) -> None:
    run_ranks(2, use_what_is_late, str(tmp_path / "store"))


def leave_the_stopped(rank: int, store: str) -> None:
    """Leave while calls without any timeout are in flight to a stopped worker."""
    begin(rank, 2, store, rpc_timeout=math.inf)
    if rank == 1:
        be_lost()
    futures = [rpc_async("callee", hold_half, (5, signal.SIGSTOP)) for _ in range(10)]
    held_here = rpc_async("caller", hold)
    with pytest.raises(TimeoutError, match="has not answered"):
        rpc_ext.shutdown(timeout=0.5)
    for future in (*futures[5:], held_here):
        error = future.exception(timeout=LONG)
        assert error is None or "RPC was shut down before worker" in str(error)
    assert held_here.exception() is not None


def meet_the_stopped(rank: int, store: str) -> None:
    """Stop the first worker, which counts the arrivals, before a barrier."""
    begin(rank, 2, store)
    if rank == 0:
        be_lost()
    stopped = rpc_async("caller", hold_half, (1, signal.SIGSTOP), timeout=math.inf)
    error = rpc_ext.barrier(timeout=SHORT).exception(timeout=LONG)
    assert isinstance(error, TimeoutError)
    assert "barrier of caller, callee: worker 'caller', which counts the arrivals, has not answered" in str(error)
    rpc_ext.shutdown(graceful=False)
    assert stopped.exception(timeout=LONG) is not None


def test_barrier_names_stopped_first_worker(tmp_path: Path) -> None:
    run_ranks(2, meet_the_stopped, str(tmp_path / "store"), lost=[0])


def test_graceful_shutdown_does_not_hang(tmp_path: Path) -> None:
    run_ranks(2, leave_the_stopped, str(tmp_path / "store"), lost=[1])
