"""Futures of calls and of remote offloaders are completed, whatever raises on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture
from rpc_ext import _offload_transport, _staging
from rpc_ext._minder import _Minder
from rpc_ext._offload_errors import named
from rpc_ext._offload_flow import Flow
from rpc_ext._offload_operations import Operations
from rpc_ext._offload_tally import Tally

pytestmark = pytest.mark.usefixtures("on_the_host")

PATIENCE = 60


class Sealed(Exception):
    """An exception that takes no attributes and cannot be copied."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        raise TypeError("not to be copied")


class Due(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def test_what_is_due_and_raises_does_not_end_the_timer_thread(caplog: pytest.LogCaptureFixture) -> None:
    minder = _Minder()
    looked: CUDAFuture[None] = CUDAFuture()

    def fail(_: float) -> float | None:
        raise OSError("while it was looked at")

    bad: Any = Due(look=fail)
    good: Any = Due(look=lambda _: looked.set_result(None))
    with minder._changed:  # both are due in one round, the one that raises first
        minder._due = {bad: 0.0, good: 0.0}
        minder._line = [(0.0, -2, bad), (0.0, -1, good)]
    minder.mind(Due(look=lambda _: None), 0.0)  # type: ignore[arg-type]
    looked.wait(timeout=PATIENCE)
    minder.end()
    assert "while it was looked at" in caplog.text


def test_an_error_that_takes_no_notes_ends_a_tally() -> None:
    tally = Tally(2, lambda i, error: named(error, f"write {i}", "there"))
    error = Sealed("sealed")
    tally.ended(0, None, error)
    tally.ended(1, 1)
    assert tally.future.exception(timeout=PATIENCE) is error


def test_an_operation_whose_value_is_no_tensor_fails() -> None:
    operations = Operations()
    future = operations.begin("read", "x", lambda: CUDAFuture.completed([1]))
    assert isinstance(future.exception(timeout=PATIENCE), AttributeError)
    operations.wait()


def test_a_request_is_completed_when_the_next_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow(1)
    sent: CUDAFuture[int] = CUDAFuture()
    request = flow.send(1, lambda: sent)

    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(flow, "_go_on", refuse)
    sent.set_result(3)
    assert request.wait(timeout=PATIENCE) == 3


def test_copies_that_cannot_be_put_together_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[torch.Tensor]:
        raise MemoryError("no memory for a list")

    monkeypatch.setattr(_staging, "_replaced", refuse)
    outcome: CUDAFuture[tuple[Any, Any]] = CUDAFuture()
    _staging.to_host([torch.ones(1)], ["cpu"], 0, 0, lambda *told: outcome.set_result(told))
    tensors, error = outcome.wait(timeout=PATIENCE)
    assert tensors is None
    assert isinstance(error, MemoryError)


def test_one_read_that_raises_leaves_the_others_of_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ZeroDivisionError("of the first")
    failed: list[BaseException] = []
    arrived: list[object] = []

    def refuse(*_: object) -> None:
        raise error

    gets: Any = [
        SimpleNamespace(arrived=refuse, fail=failed.append),
        SimpleNamespace(arrived=lambda *what: arrived.append(what), fail=failed.append),
    ]
    monkeypatch.setattr(_offload_transport, "opened", lambda *_: ([], [(get, ("header", "data")) for get in gets]))
    transport: Any = SimpleNamespace(_gets=SimpleNamespace(add=lambda _: None))
    together: Any = SimpleNamespace(end=lambda: None, take=lambda _: True)
    _offload_transport.Transport._arrived(transport, gets, together, CUDAFuture.completed(None))  # type: ignore[arg-type]
    assert failed == [error]
    assert arrived == [("header", "data")]
