"""Comparison of the collectives that the ranks issue, with their call sites, for CUDAFUTURE_DEBUG=order.

Each rank writes an entry for each collective into the group's store: the operation, and the source line that issued it.
A thread compares the entries as they arrive. The future completes when all ranks have shown the same operation. At the
first difference it fails, even if the collective itself would hang, and names both call sites.

On the backend "cudafuture" that includes what torch's own functions issue (`compare` in ``_backend.py``).

``_order_messages.py`` compares the two ends of each send and recv in the same way.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import torch.distributed as dist

from cudafuture import _C
from cudafuture.distributed._order_entry import OrderEntry, difference, of_collective
from cudafuture.distributed._side_group import store_of
from cudafuture.errors import CollectiveError, InvalidStateError

if TYPE_CHECKING:
    from cudafuture.distributed._group import Issuer
    from cudafuture.distributed._numbered_operation import NumberedOperation

__all__ = ["Compared", "Comparison", "checked", "queued", "refusals"]

T = TypeVar("T")
_logger = logging.getLogger("cudafuture.distributed")

_PAUSE = 0.002  # seconds between two checks of the store
_PATIENCE = 10.0  # seconds for the entries of ranks that have not issued an operation which has succeeded here
_CHECKS_AFTER_FAILURE = 250  # for the entries of ranks that have not issued a failed operation yet

refusals: WeakSet[BaseException] = WeakSet()
"""Errors of the operations that the backend refused at the call: they were not issued."""


def checked(
    future: _C.CUDAFuture[T],
    issue: NumberedOperation,
    process_group: dist.ProcessGroup,
    function: Callable[..., Any] | None = None,
    roles: str = "",
) -> _C.CUDAFuture[T]:
    """Return a future with the outcome of `future`, once every rank has shown that it issued the same operation."""
    if issue.operation.is_matched_by_peer:
        return future
    compared = Compared(issue, of_collective(issue, function, roles))
    compared.show(issue.issuer, process_group, issue.sequence)
    return compared.follow(future)


def queued(issue: NumberedOperation, function: Callable[..., Any]) -> Compared:
    """Return the comparison of an operation that a serial queue issues later, and shows there."""
    return Compared(issue, of_collective(issue, function, ""))


class Compared:
    """One operation that waits for the entries of other ranks."""

    waits_for_all = True
    """The result waits for the entries of all ranks, even if the operation has succeeded."""

    def __init__(self, issue: NumberedOperation, entry: OrderEntry) -> None:
        self.issue = issue
        self.entry = entry
        self.future: _C.CUDAFuture[Any] | None = None
        self.result: _C.CUDAFuture[Any] | None = None
        self.failure: BaseException | None = None  # of the comparison, before there was a result
        self.sequence = issue.sequence
        self.heading = ""  # of the message if there is a difference
        self.unseen: dict[int, str] = {}  # the keys of the entries of other ranks
        self.checks_left = _CHECKS_AFTER_FAILURE
        self.done_at: float | None = None  # seconds of time.monotonic
        self.wake: threading.Event | None = None  # wakes the thread that completes the result

    def show(self, issuer: Issuer, process_group: dist.ProcessGroup, sequence: int) -> None:
        """Write the entry, with its place in the order of `issuer`, and begin to compare."""
        group = self.issue.group
        beside = f" in serial queue {issuer.queue!r}" if issuer.queue else ""
        self.heading = f"the ranks of group '{group.name}' issue different collectives{beside}, first as #{sequence}"
        self.sequence = sequence
        self.unseen = {r: f"{sequence}/{r}" for r in range(group.size) if r != group.rank}
        comparison = Comparison.of(issuer, process_group)
        comparison.write(self, f"{sequence}/{group.rank}", self.entry)
        comparison.add(self)

    def follow(self, future: _C.CUDAFuture[T]) -> _C.CUDAFuture[T]:
        """Return a future with the outcome of `future`, unless a difference is found first."""
        issue = self.issue
        result: _C.CUDAFuture[T] = _C.issued(issue.operation.name, issue.group.callbacks, issue)
        self.result, self.future = result, future
        if self.failure is not None:
            self.fail(self.failure)
        future.add_done_callback(self._end, executor=_C.callback_thread)
        return result

    def _end(self, future: _C.CUDAFuture[Any]) -> None:
        try:
            self.note_end(future)
            if self.wake is None:
                self.settle()
            else:
                self.wake.set()
        except BaseException as e:
            self.fail(e)

    def note_end(self, future: _C.CUDAFuture[Any]) -> None:
        """Record that the operation is done."""

    def fail(self, error: BaseException) -> None:
        """Fail the result, unless it is done."""
        if self.result is None:
            self.failure = error
            return
        with contextlib.suppress(InvalidStateError):
            self.result.set_exception(self.issue.error(error))

    def fits(self, rank: int, other: OrderEntry) -> bool:
        """Compare with the entry of another rank; if they differ, fail the result and return False."""
        issue = self.issue
        is_wanted = self.unseen.pop(rank, None) is not None  # False: the program has just skipped this recv
        lines = difference(issue.group.rank, self.entry, rank, other)
        if lines is None or not is_wanted:
            return True
        message = f"{self.heading}:\n{lines}"
        _logger.error("%s", message)  # a caller in C++ may wait for the operation itself, which hangs
        self.fail(
            CollectiveError(
                message,
                operation=issue.operation.name,
                group=issue.group.name,
                rank=issue.group.rank,
                sequence=self.sequence,
                shapes=issue.shapes,
            )
        )
        return False

    def settle(self) -> None:
        """Give the result the outcome of the future, which is done."""
        assert self.future is not None
        assert self.result is not None
        error = self.future.exception()
        with contextlib.suppress(InvalidStateError):  # a difference was found first
            if error is None:
                self.result.set_result(self.future.wait(non_blocking=True))
            elif self.unseen:
                cause = f"{error.__cause__ or error} (ranks {sorted(self.unseen)} have not issued it)"
                self.result.set_exception(self.issue.error(RuntimeError(cause)))
            else:
                _C.fail(self.result, error)


class Comparison:
    """Entries of one issuer, compared in a thread while there are any."""

    _lock = threading.Lock()

    def __init__(self, issuer: Issuer, process_group: dist.ProcessGroup) -> None:
        self.store = store_of(process_group, f"order/{issuer.queue or ''}")
        self.lock = threading.RLock()  # guards what follows
        self.entries: list[Compared] = []
        self.running = False
        self.wake = threading.Event()
        self.messages: Counter[str] = Counter()  # so far, by sender, receiver and tag
        self.pending_recvs: list[Any] = []  # messages, see _order_messages.py

    @classmethod
    def of(cls, issuer: Issuer, process_group: dist.ProcessGroup) -> Comparison:
        with cls._lock:
            comparison = issuer.comparison
            if not isinstance(comparison, cls):
                issuer.comparison = comparison = cls(issuer, process_group)
            return comparison

    def write(self, entry: Compared, key: str, value: OrderEntry) -> None:
        """Show other ranks a value for an entry: itself, or {} if there is nothing to compare."""
        try:
            self.store.set(key, json.dumps(value))
        except Exception:  # for example, the store is gone, with the rank that kept it: nothing can be compared
            entry.unseen = {}

    def add(self, entry: Compared) -> None:
        """Compare the entry from now on."""
        try:
            with self.lock:
                if not self.running:
                    threading.Thread(target=self._loop, name="cudafuture-order", daemon=True).start()  # may raise
                    self.running = True
                entry.wake = self.wake
                self.entries.append(entry)
        except Exception as e:  # for example, no thread can be started
            entry.fail(e)

    def _loop(self) -> None:
        pause = _PAUSE
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
            # An operation that is done lacks at most entries that other ranks are about to write.
            pause = _PAUSE / 10 if self.wake.wait(pause) else _PAUSE
            self.wake.clear()

    def _advance(self, entry: Compared) -> bool:
        """Compare with the entries that have arrived; return True if nothing is left to do."""
        try:
            return self._compare(entry)
        except BaseException as e:  # the thread continues for the other entries
            entry.fail(e)
            return True

    def _compare(self, entry: Compared) -> bool:
        future = entry.future
        if future is None:  # it is about to be issued
            return False
        is_done = future.done()
        if is_done and entry.done_at is None:
            entry.done_at = time.monotonic()
        # Asked before the other end of a message is looked up, which is shown before it is issued.
        has_failed = is_done and future.exception() is not None
        is_issuing = False
        try:
            for rank, key in sorted(entry.unseen.items()):
                other = json.loads(self.store.get(key)) if self.store.check([key]) else {}
                if "is_issuing" in other and not has_failed:  # the other rank may yet withdraw it
                    is_issuing = True
                elif other != {} and not entry.fits(rank, other):
                    return True
        except RuntimeError:  # the store is gone, with the rank that kept it
            if not is_done:
                entry.unseen = {}
                return False
            entry.settle()
            return True
        if has_failed and entry.unseen and entry.checks_left > 0:
            entry.checks_left -= 1
            return False
        waited = time.monotonic() - entry.done_at if entry.done_at is not None else 0.0
        if is_done and not has_failed and entry.unseen and waited > _PATIENCE:
            _logger.warning(
                "%s has succeeded, and ranks %s have not shown within %g s that they issued it: it is not compared",
                entry.issue,
                sorted(entry.unseen),
                _PATIENCE,
            )
            entry.settle()
            return True
        if not is_done or (not has_failed and (is_issuing or (entry.unseen and entry.waits_for_all))):
            return False
        entry.settle()
        return True
