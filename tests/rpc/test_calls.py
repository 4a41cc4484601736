"""Calls of functions and their futures: arguments, results, timeouts, callbacks. One worker that calls itself."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc as torch_rpc

import rpc_ext
from cudafuture import CancelledError, CUDAFuture, InvalidStateError, collect_all, executors, submit, wait_all
from cudafuture.errors import CallsFailedError
from rpc_ext import broadcast_call, map_call, remote, rpc_async, rpc_sync
from support.parity import answers
from support.patience import PATIENCE
from support.rpc_callees import ME, Adder, Gate, add, alone, raises, same, waits

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("nothing_in_flight"), pytest.mark.xdist_group("rpc-calls")]

ONES = torch.ones(2, 2)


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_ext.Session]:
    with alone(tmp_path_factory.mktemp("rpc") / "rendezvous", num_worker_threads=4) as session:
        yield session


# ---- who is called


@answers("test_send_to_rank", "test_self_add", "test_add", "test_add_with_id", "test_int_callee", "test_worker_id")
def test_worker_has_name_rank_or_info(worker: rpc_ext.Session) -> None:
    assert worker.workers == [ME]
    for to in (ME, 0, torch_rpc.get_worker_info(), torch_rpc.get_worker_info(ME)):
        assert rpc_sync(to, add, (1, 2)) == 3
        assert rpc_async(to, add, (1, 2)).wait() == 3
        assert rpc_ext.remote(to, add, (1, 2)).to_here() == 3


@pytest.mark.parametrize("call", [rpc_async, rpc_sync, rpc_ext.remote])
@pytest.mark.parametrize(
    ("to", "error"), [("you", ValueError), (1, ValueError), (-1, ValueError), (0.5, TypeError), (None, TypeError)]
)
def test_unknown_worker_is_refused(call: Any, to: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="worker"):
        call(to, add, (1, 2))


@pytest.mark.parametrize("to", [True, False])
def test_bool_is_no_rank(to: Any) -> None:
    with pytest.raises(TypeError, match="rank"):
        rpc_async(to, add, (1, 2))


@answers("test_op_with_invalid_args")
def test_wrong_arguments_take_no_room(worker: rpc_ext.Session) -> None:
    assert rpc_sync(ME, add, (1, 1)) == 2  # until the first reply the median is nan, which equals nothing
    before = rpc_ext.statistics().destinations[ME]
    with pytest.raises(TypeError, match="callable"):
        rpc_async(ME, 3)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        rpc_async(ME, add, 3)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        rpc_async(ME, add, (1,), priority="high")  # type: ignore[call-overload]
    for timeout in (-1, math.nan):
        with pytest.raises(ValueError, match="seconds"):
            rpc_async(ME, add, (1,), timeout=timeout)
    with pytest.raises(Exception, match=r"pickle|local"):
        rpc_async(ME, add, (lambda: 1,))
    assert rpc_ext.statistics().destinations[ME] == before
    with pytest.raises(TypeError, match="add"):
        rpc_sync(ME, add, (1,), {"d": 1})


# ---- what is called


@answers(
    "test_py_class_constructor",
    "test_py_class_instance_method",
    "test_py_class_method",
    "test_py_class_static_method",
    "test_py_function_exception",
)
def test_picklable_callable_is_called() -> None:
    assert rpc_sync(ME, Adder, (4,)).get() == 4
    assert rpc_sync(ME, Adder(4).add, (3,)) == 7
    assert rpc_sync(ME, Adder(4), (3,)) == 7
    assert rpc_sync(ME, Adder.of, (4,)).value == 4
    assert rpc_sync(ME, Adder.double, (4,)) == 8
    assert rpc_sync(ME, functools.partial(add, 1, c=3), (2,)) == 6
    assert rpc_sync(ME, len, ([1, 2],)) == 2
    assert rpc_sync(ME, operator.itemgetter(1), ("abc",)) == "b"
    assert torch.equal(rpc_sync(ME, torch.add, (ONES, ONES), {"alpha": 2}), ONES * 3)
    assert torch.equal(rpc_sync(ME, torch.Tensor.add, (ONES, 1)), ONES * 2)
    with pytest.raises(TypeError, match="same"):
        rpc_sync(ME, same, (1, 2, 3))


def negative_is_refused(a: torch.Tensor, b: int) -> torch.Tensor:
    if b < 0:
        raise ValueError("expected")
    return a + b


@answers("test_stress_heavy_rpc_torchscript", "test_wait_all_exit_early_script_function")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")  # torch 2.13 has the former, 2.15 the latter
def test_torchscript_function_is_refused() -> None:
    scripted = torch.jit.script(negative_is_refused)
    for call in (rpc_async, rpc_sync, rpc_ext.remote):
        with pytest.raises(TypeError, match=r"ScriptFunction 'negative_is_refused': use torch\.distributed\.rpc"):
            call(ME, scripted, (ONES, 3))
    with pytest.raises(TypeError, match="ScriptFunction"):
        rpc_ext.map_call([ME], scripted, [(ONES, 3)])
    assert torch.equal(torch_rpc.rpc_sync(ME, scripted, (ONES, 3)), ONES + 3)
    with pytest.raises(RuntimeError, match="expected"):
        torch_rpc.rpc_sync(ME, scripted, (ONES, -1))


@answers(
    "test_multi_rpc",
    "test_stress_light_rpc",
    "test_stress_heavy_rpc",
    "test_py_multi_async_call",
    "test_py_tensors_multi_async_call",
    "test_world_size_one",
)
def test_many_concurrent_calls_get_own_replies() -> None:
    futures = [rpc_async(ME, add, (torch.full((i,), i), 1)) for i in range(200)]
    for i, value in enumerate(wait_all(futures, timeout=PATIENCE)):
        assert torch.equal(value, torch.full((i,), i + 1))


# ---- distributed autograd


@answers("test_owner_rref_backward", "test_user_rref_backward")
def test_torch_calls_carry_gradients_back() -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with dist_autograd.context() as context:
        product = torch_rpc.rpc_sync(ME, torch.mul, (a, b))
        loss = torch_rpc.remote(ME, torch.dot, (product, b)).to_here()
        dist_autograd.backward(context, [loss])
        gradients = dist_autograd.get_gradients(context)
    assert torch.allclose(gradients[a], (b * b).detach())
    assert torch.allclose(gradients[b], (2 * a * b).detach())


def test_distributed_autograd_context_refuses_calls(worker: rpc_ext.Session) -> None:
    made = worker.statistics().destinations[ME].calls
    rref = rpc_ext.remote(ME, add, (1, 2))
    with dist_autograd.context():
        for call in (rpc_async, rpc_sync, rpc_ext.remote, rref.rpc_async().bit_length, rref.remote().bit_length):
            args: Any = (ME, add, (ONES, 1)) if call in (rpc_async, rpc_sync, rpc_ext.remote) else ()
            with pytest.raises(
                InvalidStateError, match=r"lose gradients.*use torch\.distributed\.rpc\.rpc_async there"
            ):
                call(*args)
        with pytest.raises(InvalidStateError, match=r"map_call\(\) inside a torch\.distributed\.autograd\.context"):
            rpc_ext.map_call([ME], add, [(ONES, 1)])
    assert worker.statistics().destinations[ME].calls == made
    assert rpc_sync(ME, add, (1, 2)) == 3


def test_raising_function_writes_nothing_on_callee(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError, match="expected") as caught:
        rpc_sync(ME, raises, (KeyError("expected"),))
    assert "expected" in caught.value.remote_traceback  # type: ignore[attr-defined]
    assert capfd.readouterr().err == ""
    assert not caplog.records


# ---- the future


@answers("test_future_done", "test_future_wait_twice", "test_mark_future_twice", "test_future_done_exception")
def test_call_returns_ordinary_future() -> None:
    future = rpc_async(ME, add, (ONES, 1), priority=-1)
    assert future.wait() is future.wait() is future.value()
    assert future.done()
    assert (future.priority, future.name) == (-1, "add on me")
    with pytest.raises(InvalidStateError):
        future.set_result(1)
    failed: CUDAFuture[None] = rpc_async(ME, raises, (ValueError("expected"),))
    for _ in range(2):
        with pytest.raises(ValueError, match="expected"):
            failed.wait()
    assert failed.done()


@answers("test_callback_simple", "test_callback_chain", "test_callback_multi", "test_add_done_callback")
def test_callbacks_run_in_order_on_callback_thread(gate: Gate) -> None:
    callback_thread = CUDAFuture[None]()
    callback_thread.set_result(None)
    expected = callback_thread.then(lambda _: threading.get_ident(), executor=executors.callback_thread).wait()
    seen: list[Any] = []
    future = rpc_async(ME, waits, (gate, 1))
    last = future
    for i in range(20):
        future.add_done_callback(lambda f, i=i: seen.append((i, threading.get_ident())))  # type: ignore[misc]
        last = last.then(lambda f: f.value() + 1)
    ran = future.then(lambda _: threading.get_ident())
    served = rpc_async(ME, threading.get_ident)
    gate.open()
    assert last.wait(timeout=PATIENCE) == 21
    assert ran.wait(timeout=PATIENCE) == expected
    assert seen == [(i, expected) for i in range(20)]
    assert served.wait() not in {expected, threading.get_ident()}  # functions are the agent's threads'


def test_callback_runs_on_its_executor(gate: Gate) -> None:
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_ident).result()
        future = rpc_async(ME, waits, (gate, 1))
        child = future.then(lambda _: threading.get_ident(), executor=pool)
        gate.open()
        assert child.wait(timeout=PATIENCE) == thread


@answers("test_callback_in_rpc", "test_callback_with_ret", "test_future_in_rpc", "test_future_nested_callback")
def test_callback_makes_and_awaits_calls() -> None:
    nested = rpc_async(ME, add, (ONES, 1)).then_async(lambda f: rpc_async(ME, add, (f.value(), 1)))
    waited = rpc_async(ME, add, (ONES, 1)).then(lambda f: rpc_sync(ME, add, (f.value(), 2)))
    assert torch.equal(nested.wait(timeout=PATIENCE), ONES + 2)
    assert torch.equal(waited.wait(timeout=PATIENCE), ONES + 3)


@answers(
    "test_callback_with_error", "test_callback_wrong_arg_num", "test_callback_wrong_arg_type", "test_callback_none"
)
def test_callback_error_stays_its_own() -> None:
    future: CUDAFuture[None] = rpc_async(ME, raises, (ValueError("expected"),))

    def look(f: CUDAFuture[Any]) -> None:
        with pytest.raises(ValueError, match="expected"):
            f.wait()
        raise RuntimeError("another")

    children: list[tuple[CUDAFuture[Any], type[Exception], str]] = [
        (future.then(look), RuntimeError, "another"),
        (future.then(add), TypeError, r"unsupported operand"),
        (future.then(lambda: 1), TypeError, "positional"),  # type: ignore[misc,arg-type]
    ]
    for child, error, text in children:
        with pytest.raises(error, match=text):
            child.wait(timeout=PATIENCE)
    with pytest.raises(TypeError):
        future.then(None)  # type: ignore[arg-type]
    assert isinstance(future.exception(), ValueError)


@answers("test_wait_all", "test_wait_all_multiple_call", "test_wait_all_with_exception")
def test_call_futures_combine_with_others() -> None:
    mixed = [rpc_async(ME, add, (i, 1)) for i in range(5)] + [submit(add, 5, 1), CUDAFuture.completed(7)]
    assert wait_all(mixed, timeout=PATIENCE) == [1, 2, 3, 4, 5, 6, 7]
    done = collect_all([*mixed, rpc_async(ME, raises, (KeyError(1),))]).wait(timeout=PATIENCE)
    assert [type(f.exception()) for f in done[-2:]] == [type(None), KeyError]


@answers("test_wait_all_exit_early_python", "test_wait_all_exit_early_builtin", "test_wait_all_with_partial_exception")
def test_wait_all_stops_at_first_failure(gate: Gate) -> None:
    hanging = rpc_async(ME, waits, (gate,))
    with pytest.raises(ValueError, match="expected"):
        wait_all([hanging, rpc_async(ME, raises, (ValueError("expected"),))], timeout=PATIENCE)
    assert not hanging.done()


def test_calls_are_awaited() -> None:
    async def main() -> Any:
        first, second = await asyncio.gather(rpc_async(ME, add, (1, 2)), rpc_async(ME, add, (ONES, 2)))
        with pytest.raises(KeyError):
            await rpc_async(ME, raises, (KeyError("x"),))
        return first, second

    first, second = asyncio.run(main())
    assert first == 3
    assert torch.equal(second, ONES + 2)


def test_callback_has_its_callers_context(gate: Gate) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    child = rpc_async(ME, waits, (gate,)).then(lambda _: variable.get())
    gate.open()
    assert child.wait(timeout=PATIENCE) == 7


# ---- timeouts


@answers("test_rpc_timeouts", "test_wait_all_timeout")
@pytest.mark.parametrize("timeout", [0.05, 0.0001])  # the engine counts in milliseconds
def test_slow_call_names_function_and_worker(gate: Gate, timeout: float) -> None:
    future = rpc_async(ME, waits, (gate,), timeout=timeout)
    with pytest.raises(TimeoutError, match=r"waits on worker 'me' has not answered within"):
        future.wait(timeout=PATIENCE)
    with pytest.raises(TimeoutError, match="waits"):
        rpc_sync(ME, waits, (gate,), timeout=timeout)


@pytest.mark.parametrize("timeout", [math.inf, 1e8, 1e300])
def test_infinite_and_huge_timeouts_are_unlimited(timeout: float, gate: Gate) -> None:
    future = rpc_async(ME, waits, (gate, 1), timeout=timeout)
    assert gate.reached.wait(PATIENCE)
    assert not future.done()
    gate.open()
    assert future.wait(timeout=PATIENCE) == 1


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan])
def test_call_is_given_some_time(timeout: float) -> None:
    """For torch's RPC 0 is no limit, and for a wait no time at all."""
    rref = remote(ME, add, (1, 2))
    assert rref.to_here(timeout=math.inf) == 3  # also of a value that is there
    calls: list[Callable[[], Any]] = [
        lambda: rpc_async(ME, add, (1, 2), timeout=timeout),
        lambda: remote(ME, add, (1, 2), timeout=timeout),
        lambda: rref.to_here(timeout=timeout),
        lambda: rpc_ext.barrier([ME], timeout=timeout),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"math\.inf for no limit"):
            call()


def test_torch_calls_work_during_session() -> None:
    assert torch.equal(torch_rpc.rpc_sync(ME, torch.add, (ONES, 1)), ONES + 1)
    assert torch_rpc.rpc_async(ME, add, (1, 2)).wait() == 3
    assert torch_rpc.remote(ME, add, (1, 2)).to_here() == 3
    with pytest.raises(ValueError, match="expected"):
        torch_rpc.rpc_sync(ME, raises, (ValueError("expected"),))


# ---- cancelling


def test_reply_to_cancelled_call_is_dropped(
    gate: Gate, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = rpc_async(ME, waits, (gate, ONES)), rpc_async(ME, waits, (gate,), timeout=PATIENCE)
    child = good.then(lambda f: f.cancelled())
    assert gate.reached.wait(PATIENCE)
    assert good.cancel()
    assert bad.cancel()
    assert child.wait(timeout=PATIENCE) is True
    with pytest.raises(CancelledError):
        good.wait()
    assert rpc_ext.statistics().destinations[ME].in_flight == 2  # the functions run all the same
    gate.open()
    assert rpc_sync(ME, add, (1, 2)) == 3
    assert good.cancelled()
    assert not caplog.records
    assert capfd.readouterr().err == ""


# ---- several workers (one, several times)


def test_broadcast_and_map_return_results() -> None:
    assert broadcast_call([ME, 0], add, (1,), {"b": 2}).wait(timeout=PATIENCE) == [3, 3]
    assert map_call([ME, 0], add, [(1,), (2, 3)], {"c": 1}).wait(timeout=PATIENCE) == [2, 6]
    assert broadcast_call([], add).wait(timeout=PATIENCE) == []
    with pytest.raises(ValueError, match=r"workers has . elements, and args_per_worker ."):
        map_call([ME], add, [(1,), (2,)])
    with pytest.raises(ValueError, match="nobody"):
        broadcast_call([ME, "nobody"], add, (1,))


def test_repeated_worker_has_both_outcomes() -> None:
    error = map_call([ME, ME, 0], divmod, [(7, 0), (7, 2), (9, 0)]).exception(timeout=PATIENCE)
    assert isinstance(error, CallsFailedError)
    assert str(error).startswith("2 of 3 calls have failed")
    assert list(error.failures) == ["me[0]", "me[2]"]
    assert error.results == {"me[1]": (3, 1)}


def test_impossible_call_spares_others() -> None:
    error = map_call([ME, ME], same, [(1,), (lambda: 1,)]).exception(timeout=PATIENCE)
    assert isinstance(error, CallsFailedError)
    assert error.results == {"me[0]": 1}
    assert "lambda" in str(error.failures["me[1]"])
    with pytest.raises(TypeError, match="callable"):
        map_call([ME], 3, [(1,)])  # type: ignore[call-overload]


def test_failed_broadcast_has_errors_by_worker(gate: Gate) -> None:
    with pytest.raises(CallsFailedError, match=r"1 of 1 calls have failed\n  me: KeyError: 'x'") as caught:
        broadcast_call([ME], raises, (KeyError("x"),)).wait(timeout=PATIENCE)
    assert list(caught.value.failures) == [ME]
    with pytest.raises(CallsFailedError, match="TimeoutError"):
        broadcast_call([ME], waits, (gate,), timeout=0.05).wait(timeout=PATIENCE)
