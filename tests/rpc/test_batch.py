"""Calls that travel together: each has its own future, they start in order, and none holds up another."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc as torch_rpc

import rpc_ext
from cudafuture import CancelledError, CUDAFuture, InvalidStateError, collect_all, timer, wait_all
from cudafuture.testing import World
from rpc_ext import _batching, async_execution, batch, remote, rpc_async, rpc_sync
from support.patience import PATIENCE
from support.rpc_callees import (
    ME,
    SHARED_MEMORY,
    Adder,
    Gate,
    add,
    alone,
    pending,
    raises,
    same,
    sees,
    wait_for,
    waits,
    working,
)
from support.soak import soak_count

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("rpc-batch")]

ONES = torch.ones(2, 2)


def calls_in_a_batch(calls: int) -> None:
    with batch(ME):
        futures = [rpc_async(ME, add, (i, 1)) for i in range(calls)]
    assert wait_all(futures, timeout=PATIENCE) == list(range(1, calls + 1))


# ---- each call is a call


def test_each_call_has_own_outcome(worker: rpc_ext.Session) -> None:
    with batch(ME):
        futures = [
            rpc_async(ME, add, (1, 2)),
            rpc_async(ME, raises, (LookupError("expected"),)),
            rpc_async(ME, same, (ONES,)),
            rpc_async(ME, same, ([ONES * 2, {"a": ONES * 3}],)),
            rpc_async(ME, raises, (SystemExit(3),)),
            rpc_async(ME, lambda_maker),
            rpc_async(ME, same, (Unreadable(),)),
            rpc_async(ME, same, (ONES.to_sparse(),)),
            rpc_async(ME, add, (3, 4), {"c": 5}),
        ]
    done = collect_all(futures).wait(timeout=PATIENCE)
    assert done[0].value() == 3
    assert torch.equal(done[2].value(), ONES)
    assert torch.equal(done[3].value()[0], ONES * 2)
    assert torch.equal(done[3].value()[1]["a"], ONES * 3)
    assert torch.equal(done[7].value().to_dense(), ONES)
    assert done[8].value() == 12
    assert [type(done[i].exception()).__name__ for i in (1, 4, 6)] == ["LookupError", "RemoteError", "KeyError"]
    assert "pickle" in str(done[5].exception())
    assert "raised on worker 'me'" in "".join(done[1].exception().__notes__)  # type: ignore[union-attr]
    statistics = rpc_ext.statistics()
    assert (statistics.destinations[ME].calls, statistics.destinations[ME].failed) == (9, 4)
    assert statistics.destinations[ME].in_flight == 0
    assert statistics.served == 9


def lambda_maker() -> Any:
    return lambda: 1


class Unreadable:
    def __reduce__(self) -> Any:
        return raises, (KeyError("not here"),)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 255, 256, 257, 1000])
def test_any_number_of_calls(worker: rpc_ext.Session, count: int) -> None:
    calls_in_a_batch(count)
    calls_in_a_batch(count)


def test_calls_start_in_order(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous", num_worker_threads=16):  # which could mix them up
        with batch(ME):
            futures = [rpc_async(ME, sees, (gate, i)) for i in range(2000)]
        wait_all(futures, timeout=PATIENCE)
    assert gate.seen == list(range(2000))


def test_large_payloads_travel_separately_in_order(worker: rpc_ext.Session, gate: Gate) -> None:
    large = [bytes([i]) * (1 << 19) for i in range(8)]
    with batch(ME):
        futures: list[Any] = [rpc_async(ME, sees, (gate, value)) for value in large]
        futures += [rpc_async(ME, same, (torch.full((1 << 18,), float(i)),)) for i in range(8)]
    for i, future in enumerate(futures):
        value = future.wait(timeout=PATIENCE)
        assert value == large[i] if i < 8 else value.eq(i - 8).all()
    assert gate.seen == large


@pytest.mark.parametrize("calls", [1, 5, 100])
def test_wait_inside_body_is_answered(worker: rpc_ext.Session, calls: int) -> None:
    with batch(ME):
        for _ in range(3):
            futures = [rpc_async(ME, add, (i, 1)) for i in range(calls)]
            assert [future.wait(timeout=PATIENCE) for future in futures] == list(range(1, calls + 1))


def test_await_inside_body_is_answered(worker: rpc_ext.Session) -> None:
    async def body(i: int) -> int:
        with batch(ME):
            first = await rpc_async(ME, add, (i, 1))
            return await rpc_async(ME, add, (first, 1))

    async def bodies() -> list[int]:
        return await asyncio.gather(*[body(i) for i in range(5)])  # in turns, on one thread

    assert asyncio.run(bodies()) == [i + 2 for i in range(5)]
    assert rpc_async(ME, add, (1, 1)).wait(timeout=PATIENCE) == 2


def test_calls_travel_together(worker: rpc_ext.Session, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = _batching._BatchMessage.send
    monkeypatch.setattr(
        _batching._BatchMessage,
        "send",
        lambda self, *args: (sent.append(len(self.calls)), send(self, *args)),  # type: ignore[func-returns-value]
    )
    with batch(ME):
        futures = [rpc_async(ME, pending, (gate,))]
        futures += [rpc_async(ME, same, (i,)) for i in range(999)]
    assert gate.reached.wait(PATIENCE)
    gate.futures[0].set_result(0)
    wait_all(futures, timeout=PATIENCE)
    assert sum(sent) == 999  # the first call goes in a message of its own
    assert len(sent) < 32


# ---- nothing holds up anything


@async_execution
def completes_the_first(gate: Gate, value: Any) -> CUDAFuture[Any]:
    gate.futures[0].set_result(value)
    return CUDAFuture.completed("second")


def test_call_may_depend_on_later_one(worker: rpc_ext.Session, gate: Gate) -> None:
    with batch(ME):
        first = rpc_async(ME, pending, (gate,))
        assert gate.reached.wait(PATIENCE)
        second = rpc_async(ME, completes_the_first, (gate, ONES))
    assert torch.equal(first.wait(timeout=PATIENCE), ONES)
    assert second.wait(timeout=PATIENCE) == "second"


def test_late_future_delays_no_other(worker: rpc_ext.Session, gate: Gate) -> None:
    with batch(ME):
        late = [rpc_async(ME, pending, (gate,)) for _ in range(5)]
        prompt = [rpc_async(ME, same, (i,)) for i in range(500)]
    assert wait_all(prompt, timeout=PATIENCE) == list(range(500))
    assert not any(future.done() for future in late)
    gate.futures[3].set_exception(LookupError("late"))
    for i in (4, 2, 1, 0):
        gate.futures[i].set_result([i, ONES])
    assert isinstance(late[3].exception(timeout=PATIENCE), LookupError)
    assert [late[i].wait(timeout=PATIENCE)[0] for i in (0, 1, 2, 4)] == [0, 1, 2, 4]
    statistics = rpc_ext.statistics().destinations[ME]
    assert (statistics.calls, statistics.failed, statistics.in_flight) == (505, 1, 0)


def test_calls_inside_batch_may_be_awaited(worker: rpc_ext.Session) -> None:
    with batch(ME):
        first = rpc_async(ME, add, (1, 2))
        assert rpc_sync(ME, add, (3, 4)) == 7
        assert first.wait(timeout=PATIENCE) == 3  # it went first
        rref: Any = remote(ME, Adder, (1,))
        assert rref.to_here().value == 1
        assert rref.rpc_sync().add(1) == 2


def test_full_destination_flushes_batch(tmp_path: Path) -> None:
    with alone(tmp_path / "rendezvous", max_in_flight=10):
        calls_in_a_batch(100)


# ---- timeouts, cancelling


def test_each_call_has_its_own_timeout(worker: rpc_ext.Session, gate: Gate) -> None:
    with batch(ME):
        futures = [
            rpc_async(ME, pending, (gate,), timeout=0.1),
            rpc_async(ME, same, (1,), timeout=PATIENCE),
            rpc_async(ME, pending, (gate,), timeout=PATIENCE),
            rpc_async(ME, pending, (gate,), timeout=math.inf),
            rpc_async(ME, same, (2,), timeout=0.2),
        ]
    with pytest.raises(TimeoutError, match=r"pending on worker 'me' has not answered within 0.1 s"):
        futures[0].wait(timeout=PATIENCE)
    assert futures[1].wait(timeout=PATIENCE) == 1

    def have_answers() -> bool:
        for future in gate.futures:  # of the calls that have begun
            if not future.done():
                future.set_result(3)
        return all(future.done() for future in futures[2:4])

    wait_for(have_answers)
    assert [f.wait(timeout=PATIENCE) for f in futures[2:4]] == [3, 3]


@pytest.mark.parametrize("behind", [PATIENCE, math.inf], ids=["a long timeout", "no timeout"])
def test_waiting_call_keeps_its_timeout(worker: rpc_ext.Session, gate: Gate, behind: float) -> None:
    with batch(ME):
        first = rpc_async(ME, waits, (gate, 1), timeout=behind)
        assert gate.reached.wait(PATIENCE)  # it is in flight, and holds the only thread
        late = [rpc_async(ME, same, (i,), timeout=0.1) for i in range(3)]
        after = rpc_async(ME, same, (2,), timeout=PATIENCE)
    for future in late:
        with pytest.raises(TimeoutError, match=r"same on worker 'me' has not answered within 0.1 s"):
            future.wait(timeout=PATIENCE)
    assert not first.done()
    gate.open()
    assert (first.wait(timeout=PATIENCE), after.wait(timeout=PATIENCE)) == (1, 2)
    assert rpc_ext.statistics().destinations[ME].in_flight == 0


@pytest.mark.parametrize("value", ["small", b"large" * (_batching.MOST_BYTES // 4)], ids=["small", "large"])
def test_short_timeout_survives_long_one(worker: rpc_ext.Session, gate: Gate, value: object) -> None:
    with batch(ME):
        first = rpc_async(ME, waits, (gate, 1), timeout=math.inf)
        assert gate.reached.wait(PATIENCE)  # it is in flight, and holds the only thread
        before = rpc_async(ME, same, (2,), timeout=PATIENCE)
        rpc_async(ME, same, (3,), timeout=0.001).exception(timeout=PATIENCE)  # by now the timer thread has looked
        late = rpc_async(ME, same, (value,), timeout=0.1)
    with pytest.raises(TimeoutError, match=r"same on worker 'me' has not answered within 0.1 s"):
        late.wait(timeout=PATIENCE)
    assert not first.done()
    gate.open()
    assert (first.wait(timeout=PATIENCE), before.wait(timeout=PATIENCE)) == (1, 2)


def test_unconfirmed_references_delay_no_call(
    worker: rpc_ext.Session, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed: CUDAFuture[None] = CUDAFuture()
    monkeypatch.setattr(worker.server, "_confirmed", lambda owners: confirmed)
    with batch(ME):
        first = rpc_async(ME, sees, (gate, rpc_ext.RRef(1)))
        second = rpc_async(ME, sees, (gate, 2))
    assert second.wait(timeout=PATIENCE) == 2
    assert gate.seen == [2]
    assert not first.done()
    confirmed.set_result(None)
    assert first.wait(timeout=PATIENCE).to_here() == 1


def test_single_call_follows_earlier_calls(worker: rpc_ext.Session, gate: Gate) -> None:
    with batch(ME):
        before = [rpc_async(ME, sees, (gate, i)) for i in range(300)]
        alone_in_its_message = [rpc_async(ME, sees_later, (gate, 300)), rpc_async(ME, torch_sees_later, (gate, 301))]
    wait_all([*before, *alone_in_its_message], timeout=PATIENCE)
    assert gate.seen[:300] == list(range(300))
    assert sorted(gate.seen[300:]) == [300, 301]


@async_execution
def sees_later(gate: Gate, value: Any) -> CUDAFuture[Any]:
    return CUDAFuture.completed(sees(gate, value))


@torch_rpc.functions.async_execution  # type: ignore[untyped-decorator]
def torch_sees_later(gate: Gate, value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(sees(gate, value))
    return future


def test_waiting_single_call_expires_or_cancels(worker: rpc_ext.Session, gate: Gate) -> None:
    with batch(ME):
        first = rpc_async(ME, waits, (gate, 1))
        assert gate.reached.wait(PATIENCE)
        late = rpc_async(ME, sees_later, (gate, "late"), timeout=0.1)
        cancelled = rpc_async(ME, sees_later, (gate, "cancelled"))
        kept = rpc_async(ME, sees_later, (gate, "kept"))
        assert cancelled.cancel()
    with pytest.raises(TimeoutError, match=r"sees_later on worker 'me' has not answered within 0.1 s"):
        late.wait(timeout=PATIENCE)
    gate.open()
    assert (first.wait(timeout=PATIENCE), kept.wait(timeout=PATIENCE)) == (1, "kept")
    assert gate.seen == ["kept"]
    assert rpc_ext.statistics().destinations[ME].in_flight == 0


def test_callee_only_decorated_function_is_answered(worker: rpc_ext.Session, gate: Gate) -> None:
    """The caller cannot know that it returns a future: the answers of its message wait for that."""
    with batch(ME):
        before = rpc_async(ME, same, (1,))
        hidden = rpc_async(ME, Hidden(gate))
        after = rpc_async(ME, same, (ONES,))
    assert gate.reached.wait(PATIENCE)
    assert not before.done()
    gate.futures[0].set_result(ONES * 2)
    assert (before.wait(timeout=PATIENCE), hidden.wait(timeout=PATIENCE).sum().item()) == (1, 8)
    assert torch.equal(after.wait(timeout=PATIENCE), ONES)


class Hidden:
    """A callable that arrives as ``pending`` of its gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __call__(self) -> Any:
        raise AssertionError("it is called on the callee only")

    def __reduce__(self) -> Any:
        return Decorated, (self._gate,)


class Decorated(Hidden):
    _rpc_ext_async_execution = True

    def __call__(self) -> Any:
        return pending(self._gate)


def test_lazy_arguments_are_consumed_once(worker: rpc_ext.Session) -> None:
    with batch(ME):
        sums = [rpc_async(ME, add, (part for part in (i, torch.ones(1) if i % 2 else 1))) for i in range(4)]  # type: ignore[call-overload]
    assert [int(future.wait(timeout=PATIENCE)) for future in sums] == [1, 2, 3, 4]


def test_replies_to_cancelled_calls_are_dropped(worker: rpc_ext.Session, gate: Gate) -> None:
    with batch(ME):
        before = rpc_async(ME, same, (1,))
        assert before.cancel()
        late, after = rpc_async(ME, pending, (gate,)), rpc_async(ME, same, (2,))
    assert after.wait(timeout=PATIENCE) == 2
    assert late.cancel()
    gate.futures[0].set_result(1)
    with pytest.raises(CancelledError):
        before.wait()
    assert rpc_sync(ME, same, (3,)) == 3
    assert rpc_ext.statistics().destinations[ME].failed == 0


# ---- bodies


def test_error_in_body_keeps_calls(worker: rpc_ext.Session) -> None:
    futures = []

    def body() -> None:
        with batch(ME):
            futures.append(rpc_async(ME, same, (1,)))
            raise LookupError("body")

    with pytest.raises(LookupError, match="body"):
        body()
    assert futures[0].wait(timeout=PATIENCE) == 1
    assert rpc_async(ME, same, (2,)).wait(timeout=PATIENCE) == 2


def test_batches_are_nested(worker: rpc_ext.Session, gate: Gate) -> None:
    with batch(ME):
        first = rpc_async(ME, sees, (gate, "outer"))
        with batch(0):
            inner = [rpc_async(ME, sees, (gate, i)) for i in range(3)]
        assert wait_all(inner, timeout=PATIENCE) == [0, 1, 2]
        last = rpc_async(ME, sees, (gate, "outer again"))
    assert wait_all([first, last], timeout=PATIENCE) == ["outer", "outer again"]


def test_batch_in_use_refuses_entry(worker: rpc_ext.Session) -> None:
    with batch(ME) as one:
        with pytest.raises(InvalidStateError, match="in use"), one:
            pass
        future = rpc_async(ME, same, (1,))
    assert future.wait(timeout=PATIENCE) == 1


def test_batch_is_used_again(worker: rpc_ext.Session) -> None:
    again = batch(ME)
    for i in range(3):
        with again:
            future = rpc_async(ME, same, (i,))
        assert future.wait(timeout=PATIENCE) == i


def test_batch_without_worker_is_refused(worker: rpc_ext.Session) -> None:
    with pytest.raises(ValueError, match="nobody"):
        batch("nobody")


def test_batch_before_rpc_is_refused() -> None:
    with pytest.raises(InvalidStateError):
        batch(ME)


def test_batch_belongs_to_its_thread(worker: rpc_ext.Session) -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        found.append(rpc_async(ME, same, (1,)).wait(timeout=PATIENCE))

    with batch(ME):
        kept = rpc_async(ME, same, (2,))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(PATIENCE)
        assert found == [1]
    assert kept.wait(timeout=PATIENCE) == 2


def test_callbacks_make_calls_of_their_own(worker: rpc_ext.Session) -> None:
    with batch(ME):
        chains = [
            rpc_async(ME, add, (i, 1)).then_async(lambda f: rpc_async(ME, add, (f.value(), 1))) for i in range(50)
        ]
        direct = [rpc_async(ME, add, (i, 1)).then(lambda f: rpc_sync(ME, add, (f.value(), 2))) for i in range(50)]
    assert wait_all(chains, timeout=PATIENCE) == list(range(2, 52))
    assert wait_all(direct, timeout=PATIENCE) == list(range(3, 53))


@async_execution
def batch_in_callee(count: int) -> CUDAFuture[Any]:
    with batch(ME):
        futures = [rpc_async(ME, add, (i, 1)) for i in range(count)]
    return collect_all(futures).then(lambda f: sum(part.value() for part in f.value()))


def test_callee_makes_own_batch(worker: rpc_ext.Session) -> None:
    with batch(ME):
        futures = [rpc_async(ME, batch_in_callee, (n,)) for n in range(20)]
    assert wait_all(futures, timeout=PATIENCE) == [n * (n + 1) // 2 for n in range(20)]


@pytest.mark.soak
def test_from_several_threads_at_once(worker: rpc_ext.Session) -> None:
    rounds = soak_count(100)
    failures: list[BaseException] = []

    def use(thread: int) -> None:
        try:
            for _ in range(rounds):
                with batch(ME):
                    futures = [rpc_async(ME, add, (thread, i)) for i in range(100)]
                assert wait_all(futures, timeout=PATIENCE) == [thread + i for i in range(100)]
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_batch_is_dropped_after_last_reply(worker: rpc_ext.Session, gate: Gate) -> None:
    """Else the timer would keep it, and the session's agent with its threads, until the timeout of the calls."""
    with batch(ME) as calls:
        future = rpc_async(ME, waits, (gate, 3), timeout=100 * PATIENCE)
    later: CUDAFuture[None] = CUDAFuture()
    timer.expire(later, 0.1, "the timer has looked at the batch, whose call has no reply yet")
    assert isinstance(later.exception(timeout=PATIENCE), TimeoutError)
    gate.open()
    assert future.wait(timeout=PATIENCE) == 3
    dropped = weakref.ref(calls)
    del calls
    wait_for(lambda: gc.collect() >= 0 and dropped() is None)


# ---- between workers


def to_each_other(file: str, secret: str | None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with working(f"w{rank}", rank, size, file, num_worker_threads=1, secret=secret, transports=SHARED_MEMORY):
        others = [i for i in range(size) if i != rank]
        for _ in range(5):
            with batch(others[0]), batch(others[1]):
                futures = [(i, to, rpc_async(to, add, (torch.full((3,), i), to))) for i in range(300) for to in others]
            for i, to, future in futures:
                assert future.wait(timeout=PATIENCE).eq(i + to).all()
        counted = rpc_ext.statistics()
        assert [counted.destinations[f"w{to}"].calls for to in others] == [1500, 1500]
        dist.barrier()
        assert rpc_ext.statistics().served == 1500 * len(others)


@pytest.mark.slow
@pytest.mark.world(3)
@pytest.mark.parametrize("secret", [None, "sixteen bytes and more"], ids=["open", "signed"])
def test_batches_to_several_workers_at_once(world: World, tmp_path: Path, secret: str | None) -> None:
    world.run(to_each_other, str(tmp_path / "rendezvous"), secret)
