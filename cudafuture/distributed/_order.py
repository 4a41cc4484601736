"""Comparison of the collectives that the ranks issue, with their call sites, for CUDAFUTURE_DEBUG=order.

Each rank writes an entry for each collective into the group's store: the operation, and the source line that issued
it. A thread compares the entries as they arrive. The future completes when all ranks have shown the same operation. At
the first difference it fails, even if the collective itself would hang, and names both call sites.
"""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch.distributed as dist

from cudafuture import _C, _frames
from cudafuture.distributed._side_group import store_of
from cudafuture.errors import CollectiveError, InvalidStateError

if TYPE_CHECKING:
    from cudafuture.distributed._group import Issuer
    from cudafuture.distributed._issue import Issue

__all__ = ["checked"]

T = TypeVar("T")

_PAUSE = 0.002  # seconds between two checks of the store


def checked(future: _C.CUDAFuture[T], issue: Issue, process_group: dist.ProcessGroup) -> _C.CUDAFuture[T]:
    """Return a future with the outcome of `future`, once every rank has shown that it issued the same operation."""
    if issue.operation.is_matched_by_peer:
        return future
    result: _C.CUDAFuture[T] = _C.issued(issue.operation.name, issue.group.callbacks, issue)
    entry = _Entry(issue, future, result)
    try:
        _Comparison.of(issue.issuer, process_group).add(entry)
    except Exception as e:  # for example, the store is gone or no thread can be started; the collective was issued
        entry.fail(e)
    return result


class _Entry:
    """One collective that waits for the entries of the other ranks."""

    def __init__(self, issue: Issue, future: _C.CUDAFuture[Any], result: _C.CUDAFuture[Any]) -> None:
        self.issue = issue
        self.future = future
        self.result = result
        self.unseen = {r for r in range(issue.group.size) if r != issue.group.rank}
        operation = issue.operation
        shown = f"{operation.name} {issue.signature}" if operation.has_same_tensors else operation.name
        if issue.is_staged:
            shown += " on a device"
        self.shown = {"what": shown.strip(), "where": _frames.call_site()}

    def compare(self, rank: int, other: dict[str, str]) -> CollectiveError | None:
        self.unseen.discard(rank)
        if other["what"] == self.shown["what"]:
            return None
        issue = self.issue
        return CollectiveError(
            f"the ranks of group '{issue.group.name}' issue different collectives"
            f"{f' in serial queue {issue.issuer.queue!r}' if issue.issuer.queue else ''}, first as #{issue.sequence}:\n"
            f"  rank {issue.group.rank}: {self.shown['what']} at {self.shown['where']}\n"
            f"  rank {rank}: {other['what']} at {other['where']}",
            operation=issue.operation.name,
            group=issue.group.name,
            rank=issue.group.rank,
            sequence=issue.sequence,
            shapes=issue.shapes,
        )

    def fail(self, error: BaseException) -> None:
        """Fail the future, unless it is done."""
        with contextlib.suppress(InvalidStateError):
            self.result.set_exception(self.issue.error(error))

    def settle(self) -> None:
        """Take the outcome of the future, which is done."""
        error = self.future.exception()
        with contextlib.suppress(InvalidStateError):  # a difference was found first
            if error is None:
                self.result.set_result(self.future.wait(non_blocking=True))
            elif self.unseen:
                cause = f"{error.__cause__ or error} (ranks {sorted(self.unseen)} have not issued it)"
                self.result.set_exception(self.issue.error(RuntimeError(cause)))
            else:
                _C.fail(self.result, error)


class _Comparison:
    """Entries of one issuer, compared in a thread while there are any."""

    _all: ClassVar[dict[int, _Comparison]] = {}
    _lock = threading.Lock()

    def __init__(self, issuer: Issuer, process_group: dist.ProcessGroup) -> None:
        self.issuer = issuer
        self.store = store_of(process_group, f"order/{issuer.queue or ''}")
        self.lock = threading.Lock()  # guards what follows
        self.entries: list[_Entry] = []
        self.running = False

    @classmethod
    def of(cls, issuer: Issuer, process_group: dist.ProcessGroup) -> _Comparison:
        with cls._lock:
            known = cls._all.get(id(issuer))
            if known is None or known.issuer is not issuer:
                known = cls._all[id(issuer)] = cls(issuer, process_group)
            return known

    def add(self, entry: _Entry) -> None:
        self.store.set(f"{entry.issue.sequence}/{entry.issue.group.rank}", json.dumps(entry.shown))
        with self.lock:
            if not self.running:
                threading.Thread(target=self._loop, name="cudafuture-order", daemon=True).start()  # may raise
                self.running = True
            self.entries.append(entry)

    def _loop(self) -> None:
        pause = threading.Event()
        while True:
            with self.lock:
                entries = list(self.entries)
                if not entries:
                    self.running = False
                    return
            for entry in entries:
                if self._advance(entry):
                    with self.lock:
                        self.entries.remove(entry)
            pause.wait(_PAUSE)

    def _advance(self, entry: _Entry) -> bool:
        """Compare with the entries that have arrived; return True if nothing is left to do."""
        try:
            return self._compare(entry)
        except BaseException as e:  # the thread continues for the other entries
            entry.fail(e)
            return True

    def _compare(self, entry: _Entry) -> bool:
        try:
            for rank in sorted(entry.unseen):
                key = f"{entry.issue.sequence}/{rank}"
                if self.store.check([key]):
                    difference = entry.compare(rank, json.loads(self.store.get(key)))
                    if difference is not None:
                        entry.fail(difference)
                        return True
        except RuntimeError as e:  # the store is gone, with the rank that kept it
            if entry.future.done():
                entry.settle()
            else:
                entry.fail(e)
            return True
        if not entry.future.done() or (entry.unseen and entry.future.exception() is None):
            return False
        entry.settle()
        return True
