"""Virtual time of host threads: each has its own clock, and joins another's where that thread hands work over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from cudafuture import _C, CUDAFuture, as_completed, collect_all, collect_any, executors, gather, submit, wait, wait_all
from cudafuture.testing import sim

pytestmark = pytest.mark.sim(speeds=sim.Speeds(compute=1e12, copy=1e9, launch=0))

T = TypeVar("T")


def now() -> float:
    """Return the calling thread's virtual time in milliseconds."""
    return sim.clock() * 1e3


def in_thread(body: Callable[[], T]) -> T:
    """Run `body` in a new thread and return its result."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(body()))
    thread.start()
    thread.join()
    return results[0]


def complete_at(ms: float, future: CUDAFuture[Any] | None = None) -> CUDAFuture[Any]:
    """Return a future (default: a new one) that a thread of its own has completed at a virtual time."""
    done: CUDAFuture[Any] = CUDAFuture() if future is None else future

    def complete() -> None:
        sim.spend(ms)
        done.set_result(None)

    in_thread(complete)
    return done


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_threads_spend_time_side_by_side() -> None:
    def spend_twice() -> float:
        sim.spend(ms=3)
        sim.spend(ms=2)
        return now()

    sim.spend(ms=1)
    assert in_thread(spend_twice) == pytest.approx(5)
    assert in_thread(spend_twice) == pytest.approx(5)
    assert now() == pytest.approx(1)


def test_new_thread_starts_at_zero() -> None:
    sim.spend(ms=7)
    assert in_thread(now) == 0


async def _await(future: CUDAFuture[Any]) -> Any:
    return await future


WAYS_TO_WAIT: dict[str, Callable[[CUDAFuture[Any]], object]] = {
    "wait": lambda future: future.wait(),
    "wait_non_blocking": lambda future: future.wait(non_blocking=True),
    "result": lambda future: future.result(),
    "value": lambda future: future.value(),
    "exception": lambda future: future.exception(),
    "await": lambda future: asyncio.run(_await(future)),
    "wait_function": lambda future: wait([future]),
    "first_completed": lambda future: next(as_completed([future, CUDAFuture()])),
    "as_completed": lambda future: list(as_completed([future])),
    "wait_all": lambda future: wait_all([future]),
    "gather": lambda future: gather(future).wait(),
    "collect_all": lambda future: collect_all([future]).wait(),
    "collect_any": lambda future: collect_any([CUDAFuture(), future]).wait(),
    "then": lambda future: future.then(lambda done: None).wait(),
    "then_async": lambda future: CUDAFuture.completed(None).then_async(lambda done: future).wait(),
}


@pytest.mark.parametrize("way", WAYS_TO_WAIT.values(), ids=WAYS_TO_WAIT.keys())
def test_waiting_thread_joins_completion_time(
    way: Callable[[CUDAFuture[Any]], object],
) -> None:
    future = complete_at(3)
    sim.spend(ms=1)
    way(future)
    assert now() == pytest.approx(3)


def test_blocked_thread_joins_completion_time() -> None:
    future: CUDAFuture[None] = CUDAFuture()
    times: list[float] = []
    thread = threading.Thread(target=lambda: (future.wait(), times.append(now())))  # type: ignore[func-returns-value]
    thread.start()
    sim.spend(ms=4)
    future.set_result(None)
    thread.join()
    assert times == [pytest.approx(4)]


def test_waiting_coroutine_joins_completion_time() -> None:
    future: CUDAFuture[None] = CUDAFuture()

    async def wait_for_thread() -> float:
        thread = threading.Thread(target=lambda: complete_at(5, future))
        thread.start()
        await future
        thread.join()
        return now()

    assert asyncio.run(wait_for_thread()) == pytest.approx(5)


def test_failure_hands_time_over() -> None:
    future: CUDAFuture[None] = CUDAFuture()

    def fail() -> None:
        sim.spend(ms=3)
        future.set_exception(ValueError("no"))

    in_thread(fail)
    with pytest.raises(ValueError, match="no"):
        future.wait()
    assert now() == pytest.approx(3)


def test_thread_ahead_keeps_its_time() -> None:
    future = complete_at(3)
    sim.spend(ms=8)
    future.wait()
    assert now() == pytest.approx(8)


def test_done_and_timed_out_wait_keep_clock() -> None:
    future = complete_at(3)
    assert future.done()
    with pytest.raises(TimeoutError):
        gather(future, CUDAFuture()).wait(timeout=0)
    assert now() == 0


def test_gather_of_done_futures_keeps_clock() -> None:
    parts = [complete_at(3), complete_at(5)]
    for whole in (gather(*parts), collect_all(parts), collect_any(parts)):
        assert whole.done()
    assert now() == 0


def test_gather_takes_latest_part_time() -> None:
    late, early = CUDAFuture[None](), CUDAFuture[None]()
    whole = gather(late, early)
    complete_at(5, late)
    complete_at(2, early)
    whole.wait()
    assert now() == pytest.approx(5)


def test_completion_never_precedes_creation() -> None:
    sim.spend(ms=6)
    made_here: CUDAFuture[None] = CUDAFuture()
    in_thread(lambda: made_here.set_result(None))
    assert in_thread(lambda: (made_here.wait(), now())[1]) == pytest.approx(6)


def test_submit_hands_time_both_ways(worker: ThreadPoolExecutor) -> None:
    def work() -> float:
        began = now()
        sim.spend(ms=3)
        return began

    sim.spend(ms=2)
    future = submit(work, executor=worker)
    sim.spend(ms=1)
    assert future.wait() == pytest.approx(2)
    assert now() == pytest.approx(5)


def test_worker_ahead_begins_later(worker: ThreadPoolExecutor) -> None:
    submit(sim.spend, ms=4, executor=worker)
    assert submit(now, executor=worker).wait() == pytest.approx(4)


@pytest.mark.parametrize("kind", ["callback_thread", "serial", "pool"])
def test_callback_follows_parent_and_attachment(kind: str, worker: ThreadPoolExecutor) -> None:
    ways: dict[str, Any]
    ways = {"callback_thread": executors.callback_thread, "serial": executors.serial("clock"), "pool": worker}
    executor = ways[kind]
    parent: CUDAFuture[None] = CUDAFuture()
    ran_at = parent.then(lambda done: now(), executor=executor)
    complete_at(3, parent)
    assert in_thread(ran_at.wait) == pytest.approx(3)
    sim.spend(ms=6)
    assert parent.then(lambda done: now(), executor=executor).wait() == pytest.approx(6)


def test_callback_moves_clock_of_its_thread() -> None:
    parent = complete_at(3)
    parent.then(lambda done: sim.spend(ms=2), executor=executors.inline)
    assert now() == pytest.approx(5)


def test_each_waiter_joins_device_time() -> None:
    def copy() -> CUDAFuture[torch.Tensor]:
        future: CUDAFuture[torch.Tensor] = CUDAFuture()
        sim.sleep(ms=4)
        future.set_result(torch.ones(2, device="sim"))
        return future

    future = in_thread(copy)
    future.wait(non_blocking=True)
    assert now() == 0
    for _ in range(2):
        assert in_thread(lambda: (future.wait(), now())[1]) == pytest.approx(4)
    assert future.then(lambda done: now(), executor=executors.callback_thread).wait(timeout=60) == pytest.approx(0)


def test_blocking_callback_follows_device_time() -> None:
    future: CUDAFuture[torch.Tensor] = CUDAFuture()
    held = sim.hold()
    sim.sleep(ms=4)
    future.set_result(torch.ones(2, device="sim"))
    ran_at = future.then(lambda done: now(), non_blocking=False, executor=executors.serial("after devices"))
    held.open()
    assert ran_at.wait() == pytest.approx(4)


def test_threads_enqueue_work_side_by_side() -> None:
    def work(stream: torch.Stream, ms: float) -> float:
        sim.spend(ms)
        sim.sleep(ms, stream)
        stream.synchronize()
        return now()

    first, second = torch.Stream("sim"), torch.Stream("sim")
    assert in_thread(lambda: work(first, 3)) == pytest.approx(6)
    assert in_thread(lambda: work(second, 1)) == pytest.approx(2)
    assert now() == 0


def test_synchronization_spares_streams_of_others() -> None:
    stream = torch.Stream("sim")

    def synchronize_late() -> None:
        sim.spend(ms=9)
        sim.synchronize()

    in_thread(synchronize_late)
    sim.sleep(ms=1, stream=stream)
    stream.synchronize()
    assert now() == pytest.approx(1)


def test_autograd_threads_use_backward_clock() -> None:
    def train() -> float:
        leaf = torch.ones(2, device="sim", requires_grad=True)
        leaf.register_hook(lambda gradient: sim.spend(ms=2))
        sim.spend(ms=1)
        (3 * leaf).sum().backward()
        return now()

    assert in_thread(train) == pytest.approx(3)
    assert in_thread(train) == pytest.approx(3)
    assert now() == 0


def test_backward_work_never_precedes_call() -> None:
    leaf = torch.ones(2, device="sim", requires_grad=True)
    loss = (3 * leaf).sum()
    sim.spend(ms=5)
    leaf.register_hook(lambda gradient: sim.sleep(ms=1))
    loss.backward()
    sim.synchronize()
    assert now() == pytest.approx(6)


def test_enable_resets_all_clocks(worker: ThreadPoolExecutor) -> None:
    sim.spend(ms=2)
    submit(sim.spend, ms=4, executor=worker).wait()
    assert now() == pytest.approx(6)
    sim.enable()
    assert now() == 0
    assert worker.submit(now).result() == 0


def test_future_before_enable_has_no_time() -> None:
    old = complete_at(5)
    pending: CUDAFuture[None] = CUDAFuture()
    sim.enable()
    old.wait()
    assert now() == 0
    complete_at(1, pending)
    gather(old, pending).wait()
    assert now() == pytest.approx(1)


def test_custom_queue_hands_time_over_itself() -> None:
    sim.spend(ms=2)
    put = _C.host_time()
    assert put == sim.clock()

    def take() -> float:
        _C.join_host_time(put)
        _C.join_host_time(0.001)
        return now()

    assert in_thread(take) == pytest.approx(2)


def test_unknown_device_function_is_refused() -> None:
    with pytest.raises(TypeError, match="does not know"):
        _C.set_device_functions(torch.device("sim", 0), is_iddle=None)


def test_host_time_needs_accelerator() -> None:
    sim.spend(ms=2)
    future = CUDAFuture.completed(None)
    sim.disable()
    assert _C.host_time() == 0
    _C.join_host_time(5)
    future.wait()
    assert _C.host_time() == 0
    sim.enable()  # for the end of the test, which looks for races


BATCHES = 10
DEPTH = 2


@pytest.mark.parametrize(("load", "compute"), [(3, 1), (1, 3), (2, 2)])
def test_loader_and_trainer_take_slower_time(load: float, compute: float) -> None:
    loaded = [CUDAFuture[int]() for _ in range(BATCHES)]
    used = [CUDAFuture[None]() for _ in range(BATCHES)]

    def load_batches() -> None:
        for i, batch in enumerate(loaded):
            if i >= DEPTH:
                used[i - DEPTH].wait()
            sim.spend(ms=load)
            batch.set_result(i)

    loader = threading.Thread(target=load_batches)
    loader.start()
    for batch, after in zip(loaded, used, strict=True):
        batch.wait()
        sim.sleep(ms=compute)
        torch.accelerator.current_stream().synchronize()
        after.set_result(None)
    loader.join()
    assert now() == pytest.approx(BATCHES * max(load, compute) + min(load, compute))
