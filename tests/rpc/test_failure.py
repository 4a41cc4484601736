"""Exceptions on their way from one worker to another, without any worker."""

from __future__ import annotations

import itertools
import pickle
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudafuture.errors import AuthenticationError, RemoteError, StorageError, WorkerLostError
from rpc_ext._failure import RemoteFailure, describe, of_answer, of_engine, rebuild


class OfTwo(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class OfItsMessage(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(f"there is no {what}")


class AboutItself(Exception):
    """Error whose text has an attribute that only the constructor sets."""

    def __init__(self, code: int, lock: object) -> None:
        super().__init__(lock)
        self.code, self.lock = code, lock

    def __str__(self) -> str:
        return f"code {self.code} {self.lock is None}"


class OfNow(Exception):
    """Says something else whenever it is asked."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.times = 0

    def __str__(self) -> str:
        self.times += 1
        return f"code {self.args[0]} at {self.times}"


def raise_and_catch(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as e:
        return e


def send_and_return(error: BaseException, worker: str = "w1") -> Any:
    """Send an error to another worker and back, as bytes."""
    failure = RemoteFailure(*pickle.loads(pickle.dumps(tuple(describe(raise_and_catch(error), worker)))))
    return rebuild(failure)


@settings(deadline=None)
@given(st.text(), st.sampled_from([ValueError, KeyError, RuntimeError, StorageError, RemoteError]))
def test_any_text_arrives(text: str, cls: type[Exception]) -> None:
    got = send_and_return(cls(text))
    assert (type(got), str(got)) == (cls, str(cls(text)))


def test_constructor_with_other_arguments_is_skipped() -> None:
    got = send_and_return(OfTwo(3, "expected"))
    assert (type(got), str(got), got.code) == (OfTwo, "3: expected", 3)


def test_constructor_makes_message_once() -> None:
    got = send_and_return(send_and_return(send_and_return(OfItsMessage("bread"))))
    assert str(got) == "there is no bread"


def test_changing_text_keeps_arguments() -> None:
    got = send_and_return(OfNow(7))
    assert got.args == (7,)
    assert str(got).startswith("code 7 at ")


def test_attributes_travel_once() -> None:
    error: Any = ValueError("expected")
    error.blob = bytes(1 << 20)
    assert len(pickle.dumps(tuple(describe(error, "w1")))) < 1.5 * (1 << 20)
    got = send_and_return(error)
    assert (got.args, len(got.blob)) == (("expected",), 1 << 20)


def test_picklable_attributes_arrive() -> None:
    error = OfTwo(3, "expected")
    error.lock, error.more = lambda: 1, [1, 2]  # type: ignore[attr-defined]
    got = send_and_return(error)
    assert (type(got), got.code, got.more) == (OfTwo, 3, [1, 2])
    assert not hasattr(got, "lock")


def test_unprintable_error_is_remote_error() -> None:
    got = send_and_return(AboutItself(3, lambda: 1))
    assert type(got) is RemoteError
    assert str(got).endswith("AboutItself: code 3 False")


def test_unknown_type_is_remote_error() -> None:
    failure = describe(raise_and_catch(ValueError("expected")), "w1")
    for changed in (
        failure._replace(module="no.such.module", pickled=b"garbage"),
        failure._replace(qualname="NoSuchError", pickled=None),
        failure._replace(module="os", qualname="getpid", pickled=None),
        failure._replace(module="", qualname="", pickled=None),
    ):
        got: Any = rebuild(changed)
        assert type(got) is RemoteError
        assert (got.type_name, got.worker) == (f"{changed.module}.{changed.qualname}", "w1")
        assert str(got) == f"{got.type_name}: expected"
        assert got.remote_traceback == failure.traceback


def test_pickle_of_other_object_is_rejected() -> None:
    for other in (KeyError("other"), 3, SystemExit(3)):
        got = rebuild(describe(ValueError("expected"), "w1")._replace(pickled=pickle.dumps(other)))
        assert (type(got), str(got)) == (ValueError, "expected")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_exit_exceptions_end_only_own_process(error: BaseException) -> None:
    got = send_and_return(error)
    assert type(got) is RemoteError
    assert got.type_name == f"builtins.{type(error).__name__}"


def test_worker_and_traceback_are_noted() -> None:
    got = send_and_return(ValueError("expected"))
    assert got.worker == "w1"
    assert "in raise_and_catch" in got.remote_traceback
    assert got.__notes__ == [f"raised on worker 'w1':\n{got.remote_traceback.rstrip()}"]


def test_each_worker_adds_own_note() -> None:
    error: Any = ValueError("expected")
    error.__notes__ = ["of the user"]
    sizes = []
    for i in range(12):
        error = send_and_return(error, f"w{i}")
        sizes.append(sum(map(len, error.__notes__)))
    assert error.__notes__[0] == "of the user"
    assert [note.split("'")[1] for note in error.__notes__[1:]] == [f"w{i}" for i in range(12)]
    assert error.worker == "w0"  # where it was raised
    assert max(b - a for a, b in itertools.pairwise(sizes)) < 2 * sizes[0]
    if sys.version_info >= (3, 11):
        assert "of the user" in error.remote_traceback


def test_error_keeps_its_worker() -> None:
    assert send_and_return(WorkerLostError("gone", worker="third")).worker == "third"


def test_invalid_notes_are_harmless() -> None:
    for notes in (3, [3, "text"], None):
        error: Any = ValueError("expected")
        error.__notes__ = notes
        got = send_and_return(error)
        assert (type(got), str(got)) == (ValueError, "expected")
        assert "raised on worker 'w1'" in got.__notes__[-1]


# ---- what the engine says

OUTSIDE_POOL = (
    'this->inThreadPool() INTERNAL ASSERT FAILED at "/x/rpc/tensorpipe_agent.cpp":862, please report a bug to PyTorch. '
    "Future marked complete from outside the thread pool\nException raised from operator() (most recent call first):"
)


def test_engine_errors_name_worker() -> None:
    for kind, message, error in (
        (1, "", TimeoutError),
        (2, "the reply was refused: its signature is wrong", AuthenticationError),
        (0, "the message was refused: it is not signed", AuthenticationError),
        (0, "eof (this error originated at tensorpipe/x.cc:1)", WorkerLostError),
        (0, "RPC agent is shutting down", WorkerLostError),
        (0, OUTSIDE_POOL, WorkerLostError),
        (0, "anything else", RemoteError),
        (0, "Traceback: the message was refused: by the function", RemoteError),
        (0, "it says (this error originated at tensorpipe/x.cc:1) and goes on", RemoteError),
    ):
        got: Any = of_engine(kind, message, "add", "w1", 2.5)
        assert type(got) is error
        assert "add" in str(got)
        assert "'w1'" in str(got)
        assert message in str(got)
        assert getattr(got, "worker", "w1") == "w1"
    assert "within 2.5 s" in str(of_engine(1, "", "add", "w1", 2.5))


def test_unreadable_reply_explains_itself() -> None:
    got: Any = of_answer(LookupError("expected"), "add", "w1")
    assert (type(got), str(got)) == (LookupError, "expected")
    assert got.__notes__ == ["the answer of worker 'w1' to add cannot be read here"]
    assert type(of_answer(SystemExit(3), "add", "w1")) is RemoteError
