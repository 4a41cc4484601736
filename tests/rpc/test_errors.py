"""Errors of calls: the error of the function, with its type, message, remote traceback and worker."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch

import rpc_ext
from cudafuture import CUDAFuture, InvalidStateError, wait
from cudafuture.errors import (
    CancelledError,
    ChecksumError,
    NotFoundError,
    RemoteError,
    StorageError,
    WorkerLostError,
)
from rpc_ext import async_execution, rpc_async, rpc_sync
from support.parity import answers
from support.patience import PATIENCE
from support.rpc_callees import ME, alone, forward, raises, same, wait_for

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("nothing_in_flight"), pytest.mark.xdist_group("rpc-errors")]


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_ext.Session]:
    with alone(tmp_path_factory.mktemp("rpc") / "rendezvous", num_worker_threads=4) as session:
        yield session


def error_of(function: Any, *args: Any) -> Any:
    error = rpc_async(ME, function, args).exception(timeout=PATIENCE)
    assert error is not None
    return error


# ---- errors of many kinds


class Plain(Exception):
    pass


class OfTwo(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class OfKeyword(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class OfItsNumber(Exception):
    """Error that makes its message of its argument, and when unpickled a second one of the first."""

    def __init__(self, number: object) -> None:
        super().__init__(f"number {number}")
        self.number = number


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("unpicklable")
        self.lock = lambda: 1


class RefusesToPickle(Exception):
    def __reduce__(self) -> NoReturn:
        raise TypeError("not me")


class RefusesToUnpickle(Exception):
    def __reduce__(self) -> Any:
        return _refuse, ()


class Slotted(Exception):
    __slots__ = ("code",)


class Falsy(Exception):
    def __len__(self) -> int:
        return 0


class AboutAWorker(Exception):
    worker = "somebody else"


class WithoutText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _refuse() -> NoReturn:
    raise RuntimeError("cannot be made here")


KINDS: list[tuple[Callable[[], Exception], str]] = [
    (lambda: Plain("expected"), "expected"),
    (lambda: ValueError("expected"), "expected"),
    (lambda: KeyError("expected"), "'expected'"),
    (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "can't decode byte 0xff"),
    (lambda: FileNotFoundError(2, "no such", "file"), "[Errno 2] no such: 'file'"),
    (lambda: OfTwo(7, "expected"), "7: expected"),
    (lambda: OfKeyword(code=7), "code 7"),
    (lambda: OfItsNumber(3), "number 3"),
    (Unpicklable, "unpicklable"),
    (lambda: RefusesToPickle("expected"), "expected"),
    (lambda: RefusesToUnpickle("expected"), "expected"),
    (lambda: Slotted("expected"), "expected"),
    (lambda: Falsy("expected"), "expected"),
    (lambda: AboutAWorker("expected"), "expected"),
    (lambda: StopIteration(3), "3"),
    (lambda: InvalidStateError("expected"), "expected"),
    (lambda: CancelledError("expected"), "expected"),
    (lambda: TimeoutError("expected"), "expected"),
    (lambda: torch.OutOfMemoryError("expected"), "expected"),
]


def raise_kind(index: int) -> NoReturn:
    error = KINDS[index][0]()
    raise error


@answers("test_py_raise_in_user_func", "test_custom_exception_throw_during_reconstruction", "test_remote_throw")
@pytest.mark.parametrize("index", range(len(KINDS)))
def test_error_keeps_type_and_message(index: int) -> None:
    error = error_of(raise_kind, index)
    assert type(error) is type(KINDS[index][0]())
    assert KINDS[index][1] in str(error)
    assert len(str(error)) <= len(str(KINDS[index][0]()))
    with pytest.raises(type(error)):
        rpc_ext.remote(ME, raise_kind, (index,)).to_here(timeout=PATIENCE)

    (note,) = (note for note in error.__notes__ if note.startswith("raised on worker 'me':\nTraceback (most recent"))  # type: ignore[attr-defined]
    assert "raise_kind" in note
    if type(error) not in (Slotted, AboutAWorker):
        assert error.worker == ME  # type: ignore[attr-defined]
        assert "raise_kind" in error.remote_traceback  # type: ignore[attr-defined]


def test_error_keeps_its_own_text() -> None:
    assert error_of(raise_kind, 5).code == 7  # though its constructor cannot be called with its message
    assert not hasattr(error_of(raise_kind, 8), "lock")  # which does not pickle
    assert error_of(raise_kind, 7).number == 3
    assert error_of(raise_kind, 13).worker == "somebody else"
    found = error_of(raise_kind, 4)
    assert (found.errno, found.strerror, found.filename) == (2, "no such", "file")


@pytest.mark.parametrize("error", [StorageError, ChecksumError], ids=lambda e: e.__name__)
def test_library_errors_keep_attributes(error: type[StorageError]) -> None:
    sent = error("short", path="data", offset=5, wanted=8, got=3)
    got = error_of(raises, sent)
    assert type(got) is error
    assert (got.errno, got.path, got.offset, got.wanted, got.got) == (sent.errno, "data", 5, 8, 3)
    assert str(got) == str(sent)
    missing = error_of(raises, NotFoundError("key"))
    assert (type(missing), str(missing)) == (NotFoundError, str(NotFoundError("key")))


def test_error_without_text_still_arrives() -> None:
    error = error_of(raise_without_text)
    assert type(error) is WithoutText
    assert "raise_without_text" in error.remote_traceback  # type: ignore[attr-defined]


def raise_without_text() -> NoReturn:
    raise WithoutText


@answers("test_py_raise_in_user_func_escaped_str")
def test_multiline_message_is_not_escaped() -> None:
    text = "\nfirst line\n\tsecond \\n line\u00e9\x00\udc80"
    assert error_of(raises, ValueError(text)).args == (text,)


# ---- errors that are of no type here


def raise_local() -> NoReturn:
    class Local(Exception):
        pass

    raise Local("expected")


def raise_of_no_module() -> NoReturn:
    raise type("Made", (Exception,), {"__module__": "no.such.module"})("expected")


def test_unknown_error_type_is_remote_error() -> None:
    for function, name in (
        (raise_local, f"{__name__}.raise_local.<locals>.Local"),
        (raise_of_no_module, "no.such.module.Made"),
    ):
        error = error_of(function)
        assert type(error) is RemoteError
        assert (error.type_name, error.worker) == (name, ME)
        assert str(error) == f"{name}: expected"
        assert function.__name__ in error.remote_traceback


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_exit_exceptions_do_not_end_caller(error: type[BaseException]) -> None:
    got = error_of(raises, error(3))
    assert type(got) is RemoteError
    assert got.type_name == f"{error.__module__}.{error.__qualname__}"
    assert rpc_sync(ME, same, (1,)) == 1  # nor the callee's thread


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs exception groups")
def test_groups_of_errors_arrive() -> None:
    got = error_of(raises, ExceptionGroup("two", [ValueError(1), KeyError("k")]))  # type: ignore[name-defined]  # noqa: F821
    assert [type(e) for e in got.exceptions] == [ValueError, KeyError]
    got = error_of(raises, BaseExceptionGroup("base", [KeyboardInterrupt()]))  # type: ignore[name-defined]  # noqa: F821
    assert type(got) is RemoteError


# ---- what led to an error


def raise_chained() -> NoReturn:
    try:
        raise KeyError("the cause")
    except KeyError as e:
        error = ValueError("the effect")
        if hasattr(error, "add_note"):
            error.add_note("a note of the callee")
        raise error from e


def test_remote_traceback_has_causes_and_notes() -> None:
    error = error_of(raise_chained)
    assert "the cause" in error.remote_traceback
    assert "direct cause" in error.remote_traceback
    if sys.version_info >= (3, 11):
        assert "a note of the callee" in error.__notes__
        assert "a note of the callee" in error.remote_traceback


@async_execution
def through(path: int) -> CUDAFuture[Any]:
    return rpc_async(ME, through, (path - 1,)) if path else rpc_async(ME, raise_kind, (7,))


def test_each_worker_adds_one_note() -> None:
    def size(error: Any) -> int:
        return sum(len(note) for note in error.__notes__)

    errors = [error_of(through, n) for n in (1, 2, 3, 20)]
    assert [sum(note.startswith("raised on") for note in e.__notes__) for e in errors] == [3, 4, 5, 22]
    step = size(errors[1]) - size(errors[0])
    assert size(errors[3]) < size(errors[0]) + 30 * step
    assert errors[3].number == 3
    assert str(errors[3]) == "number 3"


def test_error_keeps_name_of_lost_worker() -> None:
    error = error_of(raises, WorkerLostError("gone", worker="third"))
    assert (type(error), error.worker) == (WorkerLostError, "third")


# ---- values that do not pickle, here or there


class Bomb:
    """Pickles, and raises where it is unpickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return raises, (self.error,)


class Reluctant:
    def __reduce__(self) -> NoReturn:
        raise LookupError("does not pickle")


def give(kind: str) -> Any:
    return {"lambda": lambda: 1, "future": CUDAFuture(), "bomb": Bomb(LookupError("bang")), "raises": Reluctant()}[kind]


@answers("test_pickle_future")
@pytest.mark.parametrize("call", [rpc_async, rpc_sync, rpc_ext.remote])
def test_unpicklable_arguments_fail_immediately(call: Any) -> None:
    for argument, error, text in (
        (CUDAFuture(), TypeError, "CUDAFuture"),
        (lambda: 1, Exception, "lambda"),
        (Reluctant(), LookupError, "does not pickle"),
    ):
        with pytest.raises(error, match=text):
            call(ME, same, (argument,))
    assert rpc_sync(ME, same, (torch.ones(1),)).item() == 1


@answers("test_function_not_on_callee")
def test_unreadable_arguments_fail_call() -> None:
    error = error_of(same, Bomb(AttributeError("no such function here")))
    assert type(error) is AttributeError
    assert error.worker == ME  # type: ignore[attr-defined]
    assert error_of(same, Bomb(SystemExit(3))).type_name == "builtins.SystemExit"
    with pytest.raises(AttributeError, match="no such function"):
        rpc_ext.remote(ME, same, (Bomb(AttributeError("no such function here")),)).to_here()


@answers("test_return_future", "test_return_future_async", "test_return_future_remote")
def test_unpicklable_reply_fails_call() -> None:
    assert "pickle" in str(error_of(give, "lambda"))
    assert type(error_of(give, "raises")) is LookupError
    assert "async_execution" in str(error_of(give, "future"))  # which says what is to be done


def test_unreadable_reply_fails_call_with_reason() -> None:
    before = rpc_ext.statistics().destinations[ME]
    error = error_of(give, "bomb")
    assert (type(error), str(error)) == (LookupError, "bang")
    assert "the answer of worker 'me' to give cannot be read here" in error.__notes__
    after = rpc_ext.statistics().destinations[ME]
    assert (after.failed, after.in_flight) == (before.failed + 1, 0)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_exiting_reply_does_not_end_caller(error: type[BaseException]) -> None:
    got = error_of(make, error)
    assert type(got) is RemoteError
    assert error.__name__ in str(got)


def make(error: type[BaseException]) -> Bomb:
    return Bomb(error(3))


@async_execution
def drop() -> CUDAFuture[Any]:
    return CUDAFuture()


def test_future_dropped_on_callee_fails_call() -> None:
    assert "dropped before it completed" in str(error_of(drop))
    with rpc_ext.batch(ME):
        futures = [rpc_async(ME, drop), rpc_async(ME, same, (1,))]
    assert "dropped" in str(futures[0].exception(timeout=PATIENCE))
    assert futures[1].wait(timeout=PATIENCE) == 1
    assert rpc_ext.statistics().serving == 0


# ---- the number of reports, and their places


def test_every_waiter_gets_unlogged_error(caplog: pytest.LogCaptureFixture) -> None:
    future: CUDAFuture[None] = rpc_async(ME, raises, (ValueError("expected"),))
    for _ in range(3):
        with pytest.raises(ValueError, match="expected"):
            future.wait(timeout=PATIENCE)
    nested = rpc_async(ME, forward, (ME, raises, ValueError("nested")))
    with pytest.raises(ValueError, match="nested"):
        nested.wait(timeout=PATIENCE)
    del future, nested
    gc.collect()
    assert not caplog.records


def test_unseen_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    future: Any = rpc_async(ME, raises, (ValueError("unseen"),))
    wait([future], timeout=PATIENCE)
    with caplog.at_level(logging.ERROR):
        del future
        wait_for(lambda: gc.collect() >= 0 and bool(caplog.records))  # the agent's thread may have it for a moment
    (record,) = caplog.records
    assert "raises on me" in record.getMessage()
