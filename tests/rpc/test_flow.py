"""Limits on the calls and bytes in flight to one worker, calls that wait for room, and the counts."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc_ext
from cudafuture import InvalidStateError, wait_all
from cudafuture.errors import CallsFailedError
from rpc_ext import batch, broadcast_call, init_rpc, remote, rpc_async, rpc_sync
from support.patience import PATIENCE
from support.rpc_callees import ME, Gate, add, alone, forward, pending, raises, same, sees, wait_for, waits
from support.soak import soak_count

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("rpc-flow")]


def own_statistics() -> rpc_ext.DestinationStatistics:
    return rpc_ext.statistics().destinations[ME]


def in_thread(target: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread


# ---- how many


def test_surplus_call_waits_for_room(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous", max_in_flight=3):
        held = [rpc_async(ME, pending, (gate,)) for _ in range(3)]
        later: list[Any] = []
        thread = in_thread(lambda: later.append(rpc_async(ME, add, (1, 2))))
        wait_for(lambda: own_statistics().waiting == 1)
        assert (own_statistics().in_flight, own_statistics().calls, later) == (3, 3, [])
        wait_for(lambda: len(gate.futures) == 3)
        gate.futures[1].set_result("one")
        thread.join(PATIENCE)
        assert later[0].wait(timeout=PATIENCE) == 3
        assert (own_statistics().waiting, own_statistics().calls) == (0, 4)
        for i in (0, 2):
            gate.futures[i].set_result("others")
        assert wait_all(held, timeout=PATIENCE) == ["others", "one", "others"] or held[1].done()


def test_non_blocking_raises_instead(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous", max_in_flight=2):
        held = [rpc_async(ME, waits, (gate, i), non_blocking=True) for i in range(2)]
        with pytest.raises(BlockingIOError, match=r"2 calls and \d+ bytes are in flight to worker 'me' \(at most 2"):
            rpc_async(ME, add, (1, 2), non_blocking=True)
        assert (own_statistics().calls, own_statistics().waiting, own_statistics().failed) == (2, 0, 0)
        gate.open()
        wait_all(held, timeout=PATIENCE)
        assert rpc_async(ME, add, (1, 2), non_blocking=True).wait(timeout=PATIENCE) == 3


def test_non_blocking_call_does_not_overtake(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous", max_bytes_in_flight=10_000):
        held = rpc_async(ME, waits, (gate, torch.zeros(1000)))
        later: list[Any] = []
        thread = in_thread(lambda: later.append(rpc_async(ME, same, (torch.zeros(2000),))))
        wait_for(lambda: own_statistics().waiting == 1)
        with pytest.raises(BlockingIOError):
            rpc_async(ME, add, (1, 2), non_blocking=True)  # there would be room for it
        gate.open()
        held.wait(timeout=PATIENCE)
        thread.join(PATIENCE)
        assert later[0].wait(timeout=PATIENCE).shape == (2000,)


def test_waiting_callers_are_admitted_in_order(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous", max_in_flight=1, num_worker_threads=2):
        held = rpc_async(ME, waits, (gate,))
        threads = []
        for i in range(10):
            threads.append(in_thread(lambda i=i: rpc_async(ME, sees, (gate, i))))  # type: ignore[misc]
            wait_for(lambda i=i: own_statistics().waiting == i + 1)  # type: ignore[misc]
        gate.open()
        held.wait(timeout=PATIENCE)
        for thread in threads:
            thread.join(PATIENCE)
        wait_for(lambda: own_statistics().in_flight == 0)
        assert gate.seen == list(range(10))


def test_call_limit_is_never_exceeded(tmp_path: Path) -> None:
    most = 0
    lock = threading.Lock()

    def watch(_: object) -> None:
        nonlocal most
        with lock:
            most = max(most, own_statistics().in_flight)

    def use() -> None:
        for i in range(100):
            rpc_async(ME, add, (i, 1)).add_done_callback(watch)
            watch(None)

    with alone(tmp_path / "rendezvous", max_in_flight=5):
        threads = [in_thread(use) for _ in range(4)]
        for thread in threads:
            thread.join(PATIENCE)
    assert 1 <= most <= 5


# ---- how many bytes


def test_bytes_are_limited_except_oversized_calls(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous", max_bytes_in_flight=100_000):
        small = rpc_async(ME, waits, (gate, torch.zeros(1000)))
        assert 4000 < own_statistics().bytes_in_flight < 5000
        with pytest.raises(BlockingIOError, match="100000"):
            rpc_async(ME, same, (torch.zeros(25_000),), non_blocking=True)
        later: list[Any] = []
        thread = in_thread(lambda: later.append(rpc_async(ME, same, (torch.zeros(1_000_000),))))
        wait_for(lambda: own_statistics().waiting == 1)
        gate.open()
        small.wait(timeout=PATIENCE)
        thread.join(PATIENCE)
        assert later[0].wait(timeout=PATIENCE).shape == (1_000_000,)
        assert own_statistics().bytes_in_flight == 0
        assert rpc_sync(ME, same, (torch.zeros(1_000_000),)).shape == (1_000_000,)


# ---- waiting that ends otherwise


def test_wait_for_room_has_call_timeout(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous", max_in_flight=1):
        held = rpc_async(ME, waits, (gate, 1))
        for timeout in (0.05, 0.0001):
            with pytest.raises(TimeoutError, match=r"no room for another call to worker 'me' within"):
                rpc_async(ME, add, (1, 2), timeout=timeout)
        with pytest.raises(TimeoutError, match="no room"):
            rpc_sync(ME, add, (1, 2), timeout=0.05)
        assert (own_statistics().calls, own_statistics().waiting) == (1, 0)
        gate.open()
        assert held.wait(timeout=PATIENCE) == 1
        assert rpc_sync(ME, add, (1, 2)) == 3


class Recorder:
    """An agent that remembers the timeouts that calls were sent with."""

    def __init__(self, agent: Any) -> None:
        self.agent, self.timeouts = agent, list[float]()

    def call(self, to: int, payload: bytes, tensors: Any, timeout: float, listener: Any) -> None:
        self.timeouts.append(timeout)
        self.agent.call(to, payload, tensors, timeout, listener)


def test_waiting_time_counts_towards_timeout(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    with alone(tmp_path / "rendezvous", max_in_flight=1) as session, monkeypatch.context() as patch:
        recorder = Recorder(session.agent)
        patch.setattr(session, "agent", recorder)
        patch.setattr(type(session), "has_agent", lambda _: True)
        held = rpc_async(ME, pending, (gate,), timeout=0.2)
        second = rpc_async(ME, same, (1,), timeout=PATIENCE)  # waits until the first one's time is over
        assert isinstance(held.exception(), TimeoutError)
        assert second.wait(timeout=PATIENCE) == 1
        assert 0 < recorder.timeouts[0] <= 0.2
        assert 0 < recorder.timeouts[1] < PATIENCE


def test_ending_session_releases_waiting_callers(tmp_path: Path, gate: Gate) -> None:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            rpc_async(ME, add, (1, 2), timeout=math.inf)
        except BaseException as e:
            raised.append(e)

    with alone(tmp_path / "rendezvous", max_in_flight=1):
        held = rpc_async(ME, pending, (gate,))
        thread = in_thread(call)
        wait_for(lambda: own_statistics().waiting == 1)
        rpc_ext.shutdown(graceful=False)
        thread.join(PATIENCE)
    assert isinstance(raised[0], InvalidStateError)
    assert held.exception(timeout=PATIENCE) is not None


@pytest.mark.parametrize("option", ["max_in_flight", "max_bytes_in_flight", "num_worker_threads"])
def test_limits_are_at_least_one(option: str, tmp_path: Path) -> None:
    limits: Any = {option: 0}
    with pytest.raises(ValueError, match=option):
        init_rpc(ME, rank=0, world_size=1, init_method=f"file://{tmp_path / 'rendezvous'}", **limits)


# ---- what is counted


def test_calls_bytes_failures_are_counted_exactly(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous"):
        nothing = own_statistics()
        assert nothing == rpc_ext.DestinationStatistics(
            calls=0,
            failed=0,
            in_flight=0,
            bytes_in_flight=0,
            waiting=0,
            bytes_sent=0,
            bytes_received=0,
            latency_p50=nothing.latency_p50,
            latency_p99=nothing.latency_p99,
            latencies=(),
        )
        assert math.isnan(nothing.latency_p50)
        for i in range(10):
            rpc_sync(ME, same, (torch.zeros(1000 * i),))
        sent = own_statistics()
        assert (sent.calls, sent.failed, sent.in_flight) == (10, 0, 0)
        assert 45 * 4000 < sent.bytes_sent < 45 * 4000 + 10 * 500
        assert 45 * 4000 < sent.bytes_received < 45 * 4000 + 10 * 500
        for error in (LookupError("a"), SystemExit("b")):
            with pytest.raises(Exception, match=r"[ab]"):
                rpc_sync(ME, raises, (error,))
        with pytest.raises(CallsFailedError):
            broadcast_call([ME], raises, (LookupError("c"),)).wait(timeout=PATIENCE)
        with pytest.raises(TimeoutError):
            rpc_sync(ME, waits, (gate,), timeout=0.05)
        cancelled = rpc_async(ME, same, (1,))
        cancelled.cancel()
        wait_for(lambda: own_statistics().in_flight == 0)
        assert (own_statistics().calls, own_statistics().failed) == (15, 4)
        gate.open()


def test_running_calls_are_counted(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous") as session:
        statistics = rpc_ext.statistics()
        assert (statistics.worker, statistics.served, statistics.serving) == (ME, 0, 0)
        assert dict(statistics.refused) == {}
        held = [rpc_async(ME, waits, (gate, 1)), rpc_async(ME, pending, (gate,))]
        wait_for(lambda: rpc_ext.statistics().serving == 2)
        assert rpc_sync(ME, forward, (ME, add, 1, 2)) == 3
        assert session.statistics().served == 4
        wait_for(lambda: len(gate.futures) == 1)
        gate.open()
        gate.futures[0].set_result(1)
        wait_all(held, timeout=PATIENCE)
        assert rpc_ext.statistics().serving == 0
    with pytest.raises(InvalidStateError):
        rpc_ext.statistics()


def test_latencies_span_call_to_future(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous"):
        slow = rpc_async(ME, waits, (gate,))
        for i in range(99):
            rpc_sync(ME, add, (i, 1))
        with pytest.raises(TimeoutError):
            slow.wait(timeout=0.5)
        gate.open()
        slow.wait(timeout=PATIENCE)
        found = own_statistics()
    assert sum(count for _, count in found.latencies) == 100
    assert [upper for upper, _ in found.latencies] == sorted(upper for upper, _ in found.latencies)
    assert found.latencies[-1][0] >= 0.5
    assert 0 < found.latency_p50 <= found.latency_p99 <= found.latencies[-1][0]


def test_batched_calls_are_counted_singly(tmp_path: Path) -> None:
    with alone(tmp_path / "rendezvous", max_in_flight=50):
        with batch(ME):
            futures = [rpc_async(ME, add, (i, 1)) for i in range(500)]
        wait_all(futures, timeout=PATIENCE)
        assert (own_statistics().calls, own_statistics().in_flight, rpc_ext.statistics().served) == (500, 0, 500)


def test_references_are_made_beside_limits(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous", max_in_flight=1):
        held = rpc_async(ME, waits, (gate, 1))
        assert remote(ME, add, (1, 2)).to_here() == 3
        gate.open()
        assert held.wait(timeout=PATIENCE) == 1


@pytest.mark.soak
def test_room_is_always_returned(tmp_path: Path) -> None:
    calls = soak_count(1000)

    def use(thread: int) -> None:
        for i in range(calls):
            kind = (i + thread) % 4
            if kind == 0:
                rpc_async(ME, add, (i, 1)).cancel()
            elif kind == 1:
                rpc_async(ME, raises, (LookupError(),)).exception(timeout=PATIENCE)
            elif kind == 2:
                rpc_async(ME, same, (torch.zeros(i),))
            else:
                with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
                    rpc_async(ME, same, (lambda: 1,))

    with alone(tmp_path / "rendezvous", max_in_flight=3, max_bytes_in_flight=2000):
        threads = [in_thread(lambda i=i: use(i)) for i in range(4)]  # type: ignore[misc]
        for thread in threads:
            thread.join(2 * PATIENCE)
        wait_for(lambda: own_statistics().in_flight == 0)
        assert (own_statistics().bytes_in_flight, own_statistics().waiting, own_statistics().calls) == (0, 0, 3 * calls)
