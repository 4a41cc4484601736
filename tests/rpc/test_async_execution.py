"""Functions that return futures: the answer is sent when they complete, and no thread waits until then."""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc_ext
from cudafuture import CancelledError, CUDAFuture, InvalidStateError, wait_all
from cudafuture.testing import World
from rpc_ext import async_execution, remote, rpc_async, rpc_sync
from rpc_ext import session as rpc_session
from support.parity import answers
from support.patience import PATIENCE
from support.rpc_callees import (
    ME,
    Adder,
    Gate,
    add,
    alone,
    around,
    by_torchs_decorator,
    chain,
    fails_at_the_end,
    fan_out,
    forward,
    is_refused_to_wait,
    make_by_hand,
    of_torch,
    of_torch_failed,
    pending,
    raises,
    same,
    submit_add,
    waits,
    waits_for_another,
    working,
)

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("rpc-async")]

ONES = torch.ones(2, 2)


def by_sync(function: Any, *args: Any) -> Any:
    return rpc_sync(ME, function, args)


def by_async(function: Any, *args: Any) -> Any:
    return rpc_async(ME, function, args).wait(timeout=PATIENCE)


def by_remote(function: Any, *args: Any) -> Any:
    return remote(ME, function, args).to_here()


MODES = pytest.mark.parametrize("call", [by_sync, by_async, by_remote])


# ---- what the function returns


@answers(
    "test_async_function_simple",
    "test_async_function_nested",
    "test_async_function_nested_remote",
    "test_async_function_chained",
    "test_async_function_chained_remote",
    "test_async_function_with_future_ctor",
    "test_async_function_with_future_ctor_remote",
    "test_async_function_multi_chained",
    "test_async_function_multi_chained_async",
    "test_async_function_multi_chained_remote",
    "test_async_function_multi_fanout",
    "test_async_function_multi_fanout_async",
    "test_async_function_multi_fanout_remote",
)
@MODES
@pytest.mark.parametrize(
    ("function", "args", "value"),
    [
        (forward, (ME, add, 1, 2), 3),
        (forward, (ME, forward, ME, forward, ME, add, 1, 2), 3),
        (chain, (ME, 1, 30), 31),
        (make_by_hand, (ME, 1, 2), 4),
        (fan_out, (ME, 1, 20), 210),
        (submit_add, (1, 2), 3),
        (of_torch, (3,), 3),
        (by_torchs_decorator, (3,), 3),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_future_outcome_is_reply(
    worker: rpc_ext.Session, call: Callable[..., Any], function: Any, args: Any, value: Any
) -> None:
    assert call(function, *args) == value


@answers(
    "test_async_static_method",
    "test_async_static_method_remote",
    "test_async_class_method",
    "test_async_class_method_remote",
)
@MODES
def test_methods_of_every_kind_return_futures(worker: rpc_ext.Session, call: Callable[..., Any]) -> None:
    assert torch.equal(call(Adder(ONES).later, ME, 2), ONES + 2)
    assert call(Adder.static_later, ME, 1, 2) == 3
    assert call(Adder.static_above, ME, 1, 2) == 3
    assert call(Adder.class_later, ME, 1, 2) == 4
    assert call(Adder.class_above, ME, 1, 2) == 4


def test_decorated_function_works_directly(worker: rpc_ext.Session) -> None:
    assert submit_add(1, 2).wait(timeout=PATIENCE) == 3
    assert submit_add.__name__ == "submit_add"


@async_execution
def returns_no_future() -> Any:
    return 3


def is_not_decorated() -> CUDAFuture[int]:
    return CUDAFuture.completed(3)


@answers(
    "test_async_function_wrong_return_type",
    "test_async_function_wrong_return_type_async",
    "test_async_function_wrong_return_type_remote",
)
@MODES
def test_result_without_future_is_refused(worker: rpc_ext.Session, call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"returns_no_future .* must return a CUDAFuture, not 3"):
        call(returns_no_future)


def test_unannounced_future_is_explained(worker: rpc_ext.Session) -> None:
    with pytest.raises(TypeError, match=r"must be decorated with @rpc_ext\.async_execution"):
        rpc_sync(ME, is_not_decorated)
    with pytest.raises(TypeError, match=r"must be decorated with @rpc_ext\.async_execution"):
        rpc_sync(ME, functools.partial(submit_add, 1, 2))


# ---- failures


@async_execution
def raises_before() -> CUDAFuture[Any]:
    raise LookupError("before there is a future")


@async_execution
def cancel() -> CUDAFuture[Any]:
    future: CUDAFuture[Any] = CUDAFuture()
    future.cancel()
    return future


@async_execution
def complete_with(kind: str) -> CUDAFuture[Any]:
    return CUDAFuture.completed({"lambda": lambda: 1, "future": CUDAFuture()}[kind])


@answers("test_async_function_raise", "test_async_function_raise_async", "test_async_function_raise_remote")
@MODES
def test_failed_future_fails_call(worker: rpc_ext.Session, call: Callable[..., Any]) -> None:
    for function, args, error in (
        (raises_before, (), LookupError),
        (forward, (ME, raises, LookupError("later")), LookupError),
        (of_torch_failed, (), KeyError),
        (cancel, (), CancelledError),
    ):
        with pytest.raises(error):
            call(function, *args)


def test_unsendable_outcome_fails_call(worker: rpc_ext.Session) -> None:
    for kind in ("lambda", "future"):
        with pytest.raises(Exception, match=r"pickle|async_execution"):
            rpc_sync(ME, complete_with, (kind,))


def test_pending_future_lets_call_time_out(worker: rpc_ext.Session, gate: Gate) -> None:
    with pytest.raises(TimeoutError, match="pending on worker 'me'"):
        rpc_sync(ME, pending, (gate,), timeout=0.1)
    assert rpc_ext.statistics().serving == 1
    gate.futures[0].set_result(1)  # its answer is late, and dropped
    assert rpc_sync(ME, add, (1, 2)) == 3
    assert rpc_ext.statistics().serving == 0


# ---- threads


def test_pending_futures_hold_no_thread(worker: rpc_ext.Session, gate: Gate) -> None:
    futures = [rpc_async(ME, pending, (gate,)) for _ in range(100)]
    assert rpc_sync(ME, add, (1, 2)) == 3  # by the only thread there is
    statistics = rpc_ext.statistics()
    assert (statistics.serving, statistics.served) == (100, 101)
    for i, future in enumerate(reversed(gate.futures)):
        future.set_result(i)
    assert wait_all(futures, timeout=PATIENCE) == list(range(99, -1, -1))


def test_any_thread_may_complete_with_tensors(worker: rpc_ext.Session, gate: Gate) -> None:
    future = rpc_async(ME, pending, (gate,))
    assert gate.reached.wait(PATIENCE)
    thread = threading.Thread(target=gate.futures[0].set_result, args=({"a": [ONES]},))
    thread.start()
    thread.join()
    assert torch.equal(future.wait(timeout=PATIENCE)["a"][0], ONES)


def test_wait_on_only_thread_is_refused(worker: rpc_ext.Session) -> None:
    for function in (is_refused_to_wait, local_to_here):
        assert "@rpc_ext.async_execution" in rpc_sync(ME, function, (ME,))
        assert "@rpc_ext.async_execution" in remote(ME, function, (ME,)).to_here()
    error = rpc_async(ME, waits_for_another, (ME, add, 1, 2)).exception(timeout=PATIENCE)
    assert isinstance(error, InvalidStateError)


def local_to_here(to: Any) -> str:
    try:
        return str(remote(to, add, (1, 1)).to_here())
    except InvalidStateError as e:
        return str(e)


@answers("test_nested_rpc")
def test_one_of_two_threads_may_wait(tmp_path: Path) -> None:
    with alone(tmp_path / "rendezvous", num_worker_threads=2):
        assert rpc_sync(ME, waits_for_another, (ME, add, 1, 2)) == 3
        assert "1 of the 2 threads" in rpc_sync(ME, waits_for_another, (ME, is_refused_to_wait, ME))
        assert rpc_sync(ME, waits_for_another, (ME, add, 1, 2)) == 3  # the thread that has waited counts no more


def test_wait_for_room_on_thread_is_refused(tmp_path: Path) -> None:
    gate = Gate("room")
    with alone(tmp_path / "rendezvous", num_worker_threads=1, max_in_flight=2):
        future = rpc_async(ME, forward, (ME, forward, ME, add, 1, 2))
        with pytest.raises(InvalidStateError, match="has to wait for room"):
            future.wait(timeout=PATIENCE)
        gate.open()


def test_waiting_functions_hold_many_threads(tmp_path: Path, gate: Gate) -> None:
    with alone(tmp_path / "rendezvous", num_worker_threads=3):
        futures = [rpc_async(ME, waits, (gate, i)) for i in range(3)]
        last = rpc_async(ME, same, (3,))
        assert gate.reached.wait(PATIENCE)
        gate.open()
        assert wait_all([*futures, last], timeout=PATIENCE) == [0, 1, 2, 3]


def test_early_call_waits_for_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, found = rpc_session.start, []  # type: ignore[attr-defined]

    def call() -> None:
        try:
            found.append(rpc_sync(ME, add, (1, 2)))
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=call)

    def others_are_faster(*args: Any) -> Any:
        started = start(*args)
        thread.start()
        while thread.is_alive() and not found and "_after_beginning" not in names_of_frames(thread):
            os.sched_yield()
        return started

    monkeypatch.setattr(rpc_session, "start", others_are_faster)
    with alone(tmp_path / "rendezvous"):
        thread.join(PATIENCE)
    assert found == [3]


def names_of_frames(thread: threading.Thread) -> list[str]:
    frame = sys._current_frames().get(thread.ident or 0)
    return [entry.name for entry in traceback.extract_stack(frame)] if frame is not None else []


# ---- several workers of one thread each


def in_a_ring(file: str, secret: str | None) -> list[Any]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with working(f"w{rank}", rank, size, file, num_worker_threads=1, secret=secret):
        path = [(rank + i) % size for i in range(1, 3 * size + 1)]
        found = [rpc_async(path[0], around, (path[1:], 0)) for _ in range(20)]
        error: Any = rpc_async(path[0], fails_at_the_end, (path[1:], 0)).exception(timeout=PATIENCE)
        assert [future.wait(timeout=PATIENCE) for future in found] == [path] * 20
        assert (type(error), str(error), error.worker) == (LookupError, "at the end", f"w{path[-1]}")
        refused = [rpc_sync(other, is_refused_to_wait, (rank,)) for other in range(size) if other != rank]
        assert all("1 threads" in text for text in refused)
        return path


@answers("test_multi_layer_nested_async_rpc", "test_expected_src")
@pytest.mark.slow
@pytest.mark.world(3)
@pytest.mark.parametrize("secret", [None, "sixteen bytes and more"], ids=["open", "signed"])
def test_calls_circle_single_threaded_workers(world: World, tmp_path: Path, secret: str | None) -> None:
    paths = world.run(in_a_ring, str(tmp_path / "rendezvous"), secret)
    assert [path[0] for path in paths] == [1, 2, 0]
