"""CUDAFUTURE_DEBUG=order: whatever the comparison meets, every future of it is completed."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cudafuture import _C, CUDAFuture, executors
from cudafuture.distributed import _operations, _order
from cudafuture.distributed._group import Issuer
from support.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("on_the_host")


class Store:
    """A store that answers with what the test has put there."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.error: BaseException | None = None

    def set(self, key: str, value: str) -> None:
        if self.error is not None:
            raise self.error
        self.entries[key] = value

    def check(self, keys: list[str]) -> bool:
        if self.error is not None:
            raise self.error
        return all(key in self.entries for key in keys)

    def get(self, key: str) -> str:
        return self.entries[key]


class Ranks:
    """Rank 0 of a group of two, whose other rank is the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store()
        monkeypatch.setattr(_order, "store_of", lambda *_: self.store)
        monkeypatch.setattr(_C, "issued", lambda *_: CUDAFuture[Any]())
        self.group = SimpleNamespace(size=2, rank=0, name="two", callbacks=executors.inline)
        self.issuer = Issuer(None, None)
        self.sequence = -1

    def issue(self, future: CUDAFuture[Any]) -> CUDAFuture[Any]:
        self.sequence += 1
        issue: Any = SimpleNamespace(
            operation=_operations.ALL_REDUCE,
            group=self.group,
            issuer=self.issuer,
            sequence=self.sequence,
            signature="float32[1]",
            shapes=((1,),),
            is_staged=False,
            error=lambda cause: cause,
        )
        return _order.checked(future, issue, None)  # type: ignore[arg-type]

    def show(self, sequence: int, shown: str | None = None) -> None:
        agreed = json.dumps({"what": "all_reduce float32[1]", "where": "here"})
        self.store.entries[f"{sequence}/1"] = agreed if shown is None else shown


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.mark.parametrize(
    ("shown", "error"), [("no JSON", ValueError), ('{"where": "here"}', KeyError), ("[]", TypeError)]
)
def test_unreadable_entry_fails_only_its_future(ranks: Ranks, shown: str, error: type[Exception]) -> None:
    pending: CUDAFuture[int] = CUDAFuture()
    other, bad = ranks.issue(pending), ranks.issue(CUDAFuture())
    ranks.show(1, shown)
    assert isinstance(bad.exception(timeout=PATIENCE), error)
    ranks.show(0)
    pending.set_result(7)
    assert other.wait(timeout=PATIENCE) == 7


@pytest.mark.parametrize("error", [OSError("no store"), SystemExit(1)])
def test_raising_store_fails_every_future(ranks: Ranks, error: BaseException) -> None:
    futures = [ranks.issue(CUDAFuture()) for _ in range(3)]
    ranks.store.error = error
    assert [future.exception(timeout=PATIENCE) for future in futures] == [error] * 3


def test_cancelled_future_delays_no_other(ranks: Ranks) -> None:
    cancelled, other = ranks.issue(CUDAFuture()), ranks.issue(CUDAFuture.completed(7))
    assert cancelled.cancel()
    ranks.show(0, json.dumps({"what": "barrier", "where": "there"}))
    ranks.show(1)
    assert other.wait(timeout=PATIENCE) == 7


def test_cancelled_collective_cancels_its_waiters(ranks: Ranks) -> None:
    collective: CUDAFuture[int] = CUDAFuture()
    shown = ranks.issue(collective)
    collective.cancel()
    ranks.show(0)
    with pytest.raises(Exception, match="cancelled"):
        shown.wait(timeout=PATIENCE)


@pytest.mark.parametrize("error", [RuntimeError("no store"), OSError("no store")])
def test_collective_that_cannot_be_shown_is_not_compared(ranks: Ranks, error: Exception) -> None:
    ranks.store.error = error
    assert ranks.issue(CUDAFuture.completed(7)).wait(timeout=PATIENCE) == 7


def test_missing_thread_fails_only_one_future(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first = ranks.issue(CUDAFuture.completed(1))
    assert "can't start" in str(first.exception(timeout=PATIENCE))
    second = ranks.issue(CUDAFuture.completed(2))
    ranks.show(1)
    assert second.wait(timeout=PATIENCE) == 2


def test_revocable_entry_is_not_compared(ranks: Ranks) -> None:
    issuing = json.dumps({"what": "barrier", "where": "there", "is_issuing": True})
    first = ranks.issue(CUDAFuture.completed(1))
    ranks.show(0, issuing)
    second = ranks.issue(CUDAFuture.completed(2))
    ranks.show(1)
    assert second.wait(timeout=PATIENCE) == 2  # the thread has seen the entry of the first
    assert not first.done()
    ranks.show(0)
    assert first.wait(timeout=PATIENCE) == 1
    third = ranks.issue(CUDAFuture.failed(RuntimeError("lost")))  # it may have failed because of the difference
    ranks.show(2, issuing)
    assert "barrier at there" in str(third.exception(timeout=PATIENCE))


def test_finished_operation_ends_pause(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_order, "_PAUSE", 100 * PATIENCE)
    pending: CUDAFuture[int] = CUDAFuture()
    shown = ranks.issue(pending)
    ranks.show(0)
    pending.set_result(7)
    assert shown.wait(timeout=PATIENCE) == 7


def test_early_failure_is_still_compared(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one rank's arguments contradict each other, so that it fails at the call."""
    monkeypatch.setattr(_order, "_CHECKS_AFTER_FAILURE", 10**9)
    failed = ranks.issue(CUDAFuture.failed(RuntimeError("enforce fail")))
    later = ranks.issue(CUDAFuture.completed(2))
    ranks.show(1)
    assert later.wait(timeout=PATIENCE) == 2  # the thread has looked for the entry of the other rank
    ranks.show(0, json.dumps({"what": "barrier", "where": "there"}))
    assert "barrier at there" in str(failed.exception(timeout=PATIENCE))
