"""Behaviour of calls that PyTorch's RPC suite checks, asked of CUDAFuture: one worker that calls itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import rpc

from cudafuture import CUDAFuture, InvalidStateError, collect_all, gather, wait_all
from support.parity import CANNOT_PICKLE, answers

F = TypeVar("F", bound=Callable[..., Any])

ME = "me"
ONES = torch.ones(2, 2)

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("rpc")]


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file: Path = tmp_path_factory.mktemp("rpc") / "rendezvous"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file}", num_worker_threads=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # init_rpc uses what torch calls deprecated
        rpc.init_rpc(ME, rank=0, world_size=1, rpc_backend_options=options)
    yield
    rpc.shutdown()


def call(function: Any, *args: object) -> CUDAFuture[Any]:
    return CUDAFuture.from_torch(rpc.rpc_async(ME, function, args=args))


def add_one(future: CUDAFuture[torch.Tensor]) -> torch.Tensor:
    return future.wait() + 1


# ---- functions that are called


def raise_value_error() -> None:
    raise ValueError("expected")


def raise_type_error() -> None:
    raise TypeError("expected")


def raise_key_error() -> None:
    raise KeyError("expected")


def async_execution(function: F) -> F:
    """Decorate with torch's decorator, which has no types."""
    decorated: F = rpc.functions.async_execution(function)
    return decorated


@async_execution
def chain(tensor: torch.Tensor, added: int) -> torch.futures.Future[torch.Tensor]:
    return call(torch.add, tensor, 1).then(lambda f: f.wait() + added).to_torch()


@async_execution
def make_by_hand(tensor: torch.Tensor, added: int) -> torch.futures.Future[torch.Tensor]:
    future = CUDAFuture[torch.Tensor]()
    call(torch.add, tensor, 1).then(lambda f: future.set_result(f.wait() + added))
    return future.to_torch()


@async_execution
def fan_out(tensor: torch.Tensor, times: int) -> torch.futures.Future[torch.Tensor]:
    parts = [call(torch.add, tensor, i) for i in range(times)]
    return gather(*parts).then(lambda f: torch.stack(f.value()).sum(0)).to_torch()


@async_execution
def fail() -> torch.futures.Future[Any]:
    return CUDAFuture.failed(ValueError("expected")).to_torch()


@async_execution
def not_bridged() -> CUDAFuture[int]:
    return CUDAFuture.completed(1)


def waits_in_the_callee(tensor: torch.Tensor) -> torch.Tensor:
    return call(torch.add, tensor, 1).then(add_one).wait(timeout=60)


# ---- the caller's future


@answers("test_callback_simple", "test_callback_chain", "test_future_done", "test_mark_future_twice")
def test_call_completes_cuda_future() -> None:
    future = call(torch.add, ONES, 1)
    last = future
    for _ in range(20):
        last = last.then(add_one)
    assert torch.equal(last.wait(timeout=60), ONES + 21)
    assert future.done()
    with pytest.raises(InvalidStateError):
        future.set_result(ONES)


@answers("test_future_done_exception", "test_future_wait_twice", "test_callback_with_error")
@pytest.mark.parametrize(
    ("function", "error"),
    [(raise_value_error, ValueError), (raise_type_error, TypeError)],
)
def test_remote_error_has_torch_type(function: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="expected"):
        rpc.rpc_async(ME, function).wait()
    future = call(function)
    for _ in range(2):
        with pytest.raises(error, match="expected"):
            future.wait(timeout=60)
    assert future.done()
    assert isinstance(future.then(lambda f: f.value()).exception(timeout=60), error)


def test_other_remote_error_is_runtime_error() -> None:
    error = call(raise_key_error).exception(timeout=60)
    with pytest.raises(RuntimeError, match="KeyError") as caught:
        rpc.rpc_async(ME, raise_key_error).wait()
    assert type(error) is caught.type
    assert "KeyError" in str(error)


@answers("test_wait_all_with_exception", "test_wait_all_with_partial_exception")
def test_one_remote_failure_is_raised() -> None:
    futures = [call(torch.add, ONES, i) for i in range(10)]
    assert [v[0, 0].item() for v in wait_all(futures, timeout=60)] == list(range(1, 11))
    with pytest.raises(Exception, match="expected"):
        wait_all([*futures, call(raise_value_error)], timeout=60)
    assert all(f.done() for f in collect_all(futures).wait(timeout=60))


@answers("test_callback_in_rpc", "test_callback_with_ret")
def test_callee_may_wait_for_own_chain() -> None:
    assert torch.equal(call(waits_in_the_callee, ONES).wait(timeout=60), ONES + 2)
    nested = call(torch.add, ONES, 1).then_async(lambda f: call(torch.add, f.wait(), 1)).then(add_one)
    assert torch.equal(nested.wait(timeout=60), ONES + 3)


@answers("test_rref_get_future")
def test_remote_reference_has_future() -> None:
    reference = rpc.remote(ME, torch.add, args=(ONES, 1))
    assert CUDAFuture.from_torch(reference._get_future()).wait(timeout=60) is None
    assert torch.equal(reference.to_here(), ONES + 1)


# ---- async_execution, which checks the class of what the function returns


@answers("test_async_function_with_future_ctor", "test_async_function_with_future_ctor_remote")
@pytest.mark.parametrize("function", [chain, make_by_hand])
def test_async_execution_takes_bridged_future(function: Any) -> None:
    assert torch.equal(rpc.rpc_sync(ME, function, args=(ONES, 2)), ONES + 3)
    assert torch.equal(rpc.remote(ME, function, args=(ONES, 2)).to_here(), ONES + 3)


def test_one_call_makes_many() -> None:
    assert torch.equal(call(fan_out, ONES, 4).wait(timeout=60), ONES * 4 + 6)


def test_failed_bridged_future_fails_call() -> None:
    with pytest.raises(RuntimeError, match="expected"):
        rpc.rpc_sync(ME, fail)


def test_async_execution_refuses_cuda_future() -> None:
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
        rpc.rpc_sync(ME, not_bridged)


@answers("test_pickle_future", "test_return_future", "test_return_future_async", "test_return_future_remote")
def test_future_cannot_be_argument_or_result() -> None:
    with pytest.raises(TypeError, match=CANNOT_PICKLE):
        rpc.rpc_async(ME, len, args=([CUDAFuture[int]()],))
    with pytest.raises(RuntimeError, match=CANNOT_PICKLE):
        rpc.rpc_sync(ME, CUDAFuture)
