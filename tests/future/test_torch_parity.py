"""Behaviour that PyTorch's own tests of its futures check, asked of CUDAFuture.

A test names those that it answers. The differences are in docs/coming-from-torch.md.
"""

from __future__ import annotations

import concurrent.futures
import functools
import io
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, InvalidStateError, collect_all, gather, wait_all
from support.parity import CANNOT_PICKLE, answers, find_answered, find_explained, torch_tests

Seen = list[Any]


def add_one(future: CUDAFuture[Any]) -> Any:
    return future.wait() + 1


def raise_value_error(_: object) -> Any:
    raise ValueError("expected")


def no_arguments() -> None: ...


# ---- done, wait, value


@answers("test_done", "test_future_done")
def test_done_follows_outcome() -> None:
    future = CUDAFuture[torch.Tensor]()
    assert not future.done()
    future.set_result(torch.ones(2, 2))
    assert future.done()


@answers("test_done_exception", "test_future_done_exception")
def test_failed_future_is_done_too() -> None:
    child = CUDAFuture.completed(1).then(raise_value_error)
    assert child.done()
    with pytest.raises(ValueError, match="expected"):
        child.wait()
    assert child.done()


@answers("test_wait")
def test_wait_returns_value() -> None:
    value = torch.ones(2, 2)
    future = CUDAFuture[torch.Tensor]()
    future.set_result(value)
    assert future.wait() is value
    assert future.value() is value


@answers("test_wait_multi_thread")
def test_wait_returns_value_of_other_thread() -> None:
    future = CUDAFuture[int]()
    about_to_wait = threading.Event()

    def set_it() -> None:
        about_to_wait.wait()
        future.set_result(5)

    thread = threading.Thread(target=set_it)
    thread.start()
    about_to_wait.set()
    assert future.wait(timeout=60) == 5
    thread.join()


@answers("test_mark_future_twice")
def test_future_is_completed_once() -> None:
    future = CUDAFuture[int]()
    future.set_result(1)
    with pytest.raises(InvalidStateError, match="completed already") as caught:
        future.set_result(1)
    assert isinstance(caught.value, RuntimeError), "what torch raises"
    assert future.wait() == 1


@answers("test_mark_future_twice")
def test_torch_completed_future_refuses_result() -> None:
    source = torch.futures.Future[int]()
    future = CUDAFuture.from_torch(source)
    source.set_result(1)
    assert future.wait(timeout=60) == 1
    with pytest.raises(InvalidStateError):
        future.set_result(2)


@answers("test_pickle_future", "test_return_future", "test_return_future_async", "test_return_future_remote")
@pytest.mark.parametrize("save", [pickle.dumps, lambda f: torch.save(f, io.BytesIO())], ids=["pickle", "torch.save"])
def test_future_does_not_pickle(save: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=CANNOT_PICKLE):
        save(CUDAFuture[int]())


# ---- failures


@answers("test_set_exception")
def test_wait_and_value_raise_exception_itself() -> None:
    error = ValueError("expected")
    future = CUDAFuture[int]()
    future.set_exception(error)
    for look in (future.wait, future.value, future.result):
        with pytest.raises(ValueError, match="expected") as caught:
            look()
        assert caught.value is error


@answers("test_set_exception")
def test_then_keeps_exception_type() -> None:
    # torch: RuntimeError("Got the following error when running the callback: ...")
    error = ValueError("expected")
    child = CUDAFuture[int].failed(error).then(lambda f: f.value())
    assert child.exception() is error


@answers("test_set_exception_multithreading")
@pytest.mark.parametrize("through_then", [False, True])
def test_exception_reaches_waiting_thread(through_then: bool) -> None:
    error = ValueError("expected")
    future = CUDAFuture[int]()
    caught: Seen = []
    waiting = threading.Event()

    def wait() -> None:
        awaited = future.then(lambda f: f.value()) if through_then else future
        waiting.set()
        with pytest.raises(ValueError, match="expected") as info:
            awaited.wait(timeout=60)
        caught.append(info.value)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    future.set_exception(error)
    thread.join()
    assert caught == [error]


@answers("test_future_wait_twice", "test_wait_all_with_exception")
def test_each_wait_raises_failure() -> None:
    futures = [CUDAFuture[int].failed(ValueError("expected")) for _ in range(20)]
    with pytest.raises(ValueError, match="expected"):
        wait_all(futures)
    for future in futures:
        for _ in range(2):
            with pytest.raises(ValueError, match="expected"):
                future.wait()


# ---- then


@answers("test_then", "test_callback_simple")
def test_then_returns_future_of_result() -> None:
    elsewhere: concurrent.futures.Future[list[list[float]]] = concurrent.futures.Future()
    future = CUDAFuture[torch.Tensor]()
    child = future.then(add_one)
    future.then(lambda f: elsewhere.set_result((f.wait() + 2).tolist()))
    future.set_result(torch.ones(2, 2))
    assert future.wait().tolist() == [[1, 1], [1, 1]]
    assert child.wait().tolist() == [[2, 2], [2, 2]]
    assert elsewhere.result(timeout=60) == [[3, 3], [3, 3]]
    assert future.wait().tolist() == [[1, 1], [1, 1]]


@answers("test_chained_then", "test_callback_chain")
def test_each_chain_link_has_own_value() -> None:
    future = CUDAFuture[int]()
    links = [future]
    for _ in range(20):
        links.append(links[-1].then(add_one))
    future.set_result(1)
    assert [link.wait() for link in links] == list(range(1, 22))


@answers("test_callback_multi")
def test_future_runs_many_callbacks() -> None:
    def add(index: int, future: CUDAFuture[int]) -> int:
        return future.wait() + index

    future = CUDAFuture[int]()
    children = [future.then(functools.partial(add, index)) for index in range(10)]
    future.set_result(2)
    assert [child.wait() for child in children] == list(range(2, 12))


@answers("test_then_wrong_arg", "test_callback_wrong_arg_type")
def test_callback_gets_future_not_value() -> None:
    # torch: RuntimeError with the text of this one
    child = CUDAFuture.completed(5).then(lambda future: str(future + 1))  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"unsupported operand type.*CUDAFuture.*int"):
        child.wait()


@answers("test_then_no_arg", "test_callback_wrong_arg_num")
@pytest.mark.parametrize(
    ("callback", "complaint"),
    [(no_arguments, "takes 0 positional arguments but 1 was given"), (lambda a, b, c: a, "missing 2 required")],
)
def test_callback_with_wrong_signature_fails_child(callback: Any, complaint: str) -> None:
    future = CUDAFuture.completed(5)
    with pytest.raises(TypeError, match=complaint):
        future.then(callback).wait()
    assert future.wait() == 5


@answers("test_then_raise")
def test_raising_callback_fails_only_child() -> None:
    future = CUDAFuture[int]()
    child = future.then(raise_value_error)
    future.set_result(5)
    assert future.wait() == 5
    with pytest.raises(ValueError, match="expected"):  # torch: RuntimeError
        child.wait()


@answers("test_callback_with_error")
def test_callback_may_replace_failure() -> None:
    def callback(future: CUDAFuture[int]) -> int:
        with pytest.raises(ValueError, match="expected"):
            future.wait()
        raise KeyError("another")

    child = CUDAFuture[int].failed(ValueError("expected")).then(callback)
    with pytest.raises(KeyError, match="another"):
        child.wait()


@answers("test_callback_none")
def test_none_is_refused_as_callback() -> None:
    future = CUDAFuture[int]()
    for register in (future.then, future.then_async, future.add_done_callback):
        with pytest.raises(TypeError, match="takes a callable that takes the future"):
            register(None)  # type: ignore[arg-type]


@answers("test_callback_with_ret")
def test_callback_may_wait_for_own_work() -> None:
    def callback(future: CUDAFuture[int]) -> int:
        inner = CUDAFuture[int]()
        threading.Thread(target=inner.set_result, args=(future.wait() + 1,)).start()
        return inner.then(lambda f: f.wait() + 1).wait(timeout=60)

    future = CUDAFuture[int]()
    child = future.then(callback)
    future.set_result(1)
    assert child.wait(timeout=60) == 3


@answers("test_callback_in_rpc", "test_future_in_rpc", "test_async_function_with_future_ctor")
@answers("test_async_function_with_future_ctor_remote")
def test_callback_may_complete_awaited_future() -> None:
    asked, answer = CUDAFuture[int](), CUDAFuture[int]()
    asked.then(lambda f: answer.set_result(f.wait() + 2))
    thread = threading.Thread(target=asked.set_result, args=(1,))
    thread.start()
    assert answer.wait(timeout=60) == 3
    thread.join()


@answers("test_future_nested_callback")
def test_callbacks_inside_callbacks() -> None:
    first, second, answer = CUDAFuture[int](), CUDAFuture[int](), CUDAFuture[int]()

    def callback(future: CUDAFuture[int]) -> None:
        second.then(lambda f: answer.set_result(f.wait() + future.wait()))

    first.then(callback)
    for future, value in ((first, 1), (second, 2)):
        threading.Thread(target=future.set_result, args=(value,)).start()
    assert answer.wait(timeout=60) == 3


# ---- add_done_callback


@answers("test_add_done_callback_simple", "test_add_done_callback")
def test_done_callback_runs_before_set_result_returns() -> None:
    future = CUDAFuture[int]()
    seen: Seen = []
    future.add_done_callback(lambda f: seen.append(f.wait()))
    assert seen == []
    future.set_result(5)
    assert seen == [5]
    assert future.wait() == 5


@answers("test_add_done_callback_maintains_callback_order")
@answers("test_interleaving_then_and_add_done_callback_maintains_callback_order")
def test_both_callback_kinds_keep_order() -> None:
    future = CUDAFuture[int]()
    seen: Seen = []
    future.add_done_callback(lambda f: seen.append(f.wait() + 1))
    child = future.then(lambda f: list(seen))
    future.add_done_callback(lambda f: seen.append(f.wait() + 2))
    future.set_result(5)
    assert child.wait() == [6]
    assert seen == [6, 7]


@answers("test_add_done_callback_error_is_ignored", "test_add_done_callback_no_arg_error_is_ignored")
@pytest.mark.parametrize("callback", [raise_value_error, no_arguments])
def test_done_callback_error_is_only_logged(callback: Any, caplog: pytest.LogCaptureFixture) -> None:
    future = CUDAFuture[int]()
    seen: Seen = []
    future.add_done_callback(callback)
    future.add_done_callback(seen.append)
    with caplog.at_level(logging.ERROR, logger="cudafuture"):
        future.set_result(5)
    assert future.wait() == 5
    assert seen == [future]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], (ValueError, TypeError))


@answers("test_interleaving_then_and_add_done_callback_propagates_error")
def test_then_keeps_error_done_callback_drops(caplog: pytest.LogCaptureFixture) -> None:
    future = CUDAFuture[int]()
    child = future.then(raise_value_error)
    future.add_done_callback(raise_value_error)
    future.set_result(5)
    assert future.wait() == 5
    with pytest.raises(ValueError, match="expected"):
        child.wait()
    assert len(caplog.records) == 1


# ---- many futures


@answers("test_collect_all")
def test_collect_all_waits_for_last() -> None:
    futures = [CUDAFuture[int](), CUDAFuture.completed(2)]
    every = collect_all(futures)
    thread = threading.Thread(target=futures[0].set_result, args=(1,))
    thread.start()
    assert [future.wait() for future in every.wait(timeout=60)] == [1, 2]
    thread.join()


@answers("test_wait_all")
def test_wait_all_returns_or_raises() -> None:
    one, two = CUDAFuture.completed(1), CUDAFuture.completed(2)
    assert wait_all([one, two]) == [1, 2]
    with pytest.raises(ValueError, match="expected"):  # torch: RuntimeError
        wait_all([one.then(raise_value_error), two])


@answers("test_wait_all_with_partial_exception")
def test_wait_all_raises_single_failure() -> None:
    futures = [CUDAFuture.completed(i) for i in range(10)]
    with pytest.raises(ValueError, match="expected"):
        wait_all([*futures, CUDAFuture[int].failed(ValueError("expected"))])


@answers("test_wait_all_exit_early_python", "test_wait_all_exit_early_builtin")
@answers("test_wait_all_exit_early_script_function")
@pytest.mark.parametrize(
    "wait", [wait_all, lambda fs, timeout: gather(*fs).wait(timeout=timeout)], ids=["all", "gather"]
)
def test_wait_all_raises_despite_pending_future(wait: Callable[..., object]) -> None:
    failed = [CUDAFuture[int].failed(ValueError("expected")) for _ in range(2)]
    with pytest.raises(ValueError, match="expected"):
        wait([CUDAFuture[int](), *failed], timeout=0)


@answers("test_wait_none")
@pytest.mark.parametrize("combine", [wait_all, collect_all, lambda fs: gather(*fs)], ids=["wait", "collect", "gather"])
def test_none_is_refused_as_future(combine: Callable[[Any], object]) -> None:
    # torch: RuntimeError("Future can't be None")
    with pytest.raises(TypeError, match="CUDAFuture"):
        combine([None])


# ---- and none was forgotten


def test_every_torch_test_has_answer() -> None:
    left = torch_tests() - find_answered() - find_explained()
    assert not left, "answer these with a test, or explain them in docs/coming-from-torch.md"


def test_every_answer_has_torch_test() -> None:
    assert find_answered() - torch_tests() == set()
