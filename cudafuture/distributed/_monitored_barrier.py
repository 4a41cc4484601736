"""Barrier over the group's store that names the ranks that have not arrived.

::

    every rank       set("3/arrived/<rank>")
    rank 0           wait for all arrivals ──► compare_set("3/verdict")
    other ranks      wait for "3/verdict"

It needs no connections between the ranks, so its timeout holds for a group's first barrier too. A failed barrier breaks
nothing: the next one has other keys. A rank that arrives late finds the verdict and fails at once.

The barriers of each serial queue have their own keys. All ranks enter the barriers of a queue in the same order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from cudafuture.distributed._side_group import store_of

__all__ = ["Deadline", "MonitoredBarrier"]

_PASSED = "passed"
_SHORTEST = timedelta(milliseconds=1)  # the store takes 0 for no limit


class Deadline:
    """Deadline of a timeout that starts now."""

    def __init__(self, timeout: timedelta) -> None:
        self.milliseconds = round(timeout.total_seconds() * 1000)
        self._end = time.monotonic() + timeout.total_seconds()

    def is_over(self) -> bool:
        """Return True if the timeout has passed."""
        return time.monotonic() >= self._end

    def remaining(self) -> timedelta:
        """Return the time that is left, at least a millisecond."""
        return max(timedelta(seconds=self._end - time.monotonic()), _SHORTEST)


class MonitoredBarrier:
    """Barriers of one serial queue on one rank, entered one after the other."""

    def __init__(self, group: dist.ProcessGroup, queue: str) -> None:
        self._store: Store = store_of(group, f"monitored_barrier/{queue}")
        self._rank, self._size = group.rank(), group.size()
        self._sequence = 0
        self._written: list[str] = []  # keys that this rank deletes when all ranks have passed a later barrier
        self._obsolete: list[str] = []

    def enter(self, deadline: Deadline, wait_all_ranks: bool) -> None:
        """Block until every rank has entered.

        Raises:
            RuntimeError: some rank did not enter before the deadline, or the store is gone.
        """
        sequence = self._sequence
        self._sequence += 1
        self._store.set(_arrival(sequence, self._rank), "")
        self._written.append(_arrival(sequence, self._rank))
        self._delete_obsolete()
        if self._rank == 0:
            self._lead(sequence, deadline, wait_all_ranks)
        else:
            self._follow(sequence, deadline)
        # Every rank has entered this barrier, so none reads the keys of an earlier one.
        self._obsolete = self._written
        self._written = [_verdict(sequence)] if self._rank == 0 else []

    def _lead(self, sequence: int, deadline: Deadline, wait_all_ranks: bool) -> None:
        """Wait for the arrivals and publish the verdict."""
        had_time = not deadline.is_over()
        missing = self._missing(sequence, range(1, self._size), deadline)
        if not missing:
            verdict = self._decide(sequence, _PASSED)
            if verdict != _PASSED:
                self._written.append(_verdict(sequence))
                raise RuntimeError(f"[Rank 0]: {verdict}")
            return
        ranks = ", ".join(map(str, missing))
        within = f"in {deadline.milliseconds} ms"
        if wait_all_ranks:
            error = f"Ranks {ranks} failed to pass monitoredBarrier {within}"
        elif had_time:
            error = f"Rank {missing[0]} failed to pass monitoredBarrier {within}"
        else:
            error = f"Rank 0 timed out in monitoredBarrier after {deadline.milliseconds} ms; missing ranks: {ranks}"
        self._decide(sequence, error)
        self._written.append(_verdict(sequence))
        raise RuntimeError(f"[Rank 0]: {error}")

    def _follow(self, sequence: int, deadline: Deadline) -> None:
        """Wait for the verdict of rank 0, or fail the barrier for all ranks."""
        if not self._wait([_verdict(sequence)], deadline):
            others = (rank for rank in range(self._size) if rank != self._rank)
            missing = ", ".join(str(r) for r in others if not self._store.check([_arrival(sequence, r)])) or "none"
            verdict = self._decide(
                sequence,
                f"Rank {self._rank} failed to pass monitoredBarrier in {deadline.milliseconds} ms: rank 0 had not "
                f"released it; missing ranks: {missing}",
            )
        else:
            verdict = self._store.get(_verdict(sequence)).decode()
        if verdict != _PASSED:
            raise RuntimeError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {verdict}"
            )

    def _missing(self, sequence: int, ranks: Iterable[int], deadline: Deadline) -> list[int]:
        """Return the ranks that have not arrived at the deadline."""
        keys = {rank: _arrival(sequence, rank) for rank in ranks}
        if self._wait(list(keys.values()), deadline):
            return []
        return [rank for rank, key in keys.items() if not self._store.check([key])]

    def _wait(self, keys: list[str], deadline: Deadline) -> bool:
        """Wait until the store has the keys; return False if the deadline passes first."""
        if not keys or self._store.check(keys):
            return True
        if deadline.is_over():
            return False
        try:
            self._store.wait(keys, deadline.remaining())
        except RuntimeError:
            if not deadline.is_over():
                raise  # the store is gone
            return self._store.check(keys)
        return True

    def _decide(self, sequence: int, verdict: str) -> str:
        """Publish a verdict unless another rank has published one; return the published verdict."""
        return self._store.compare_set(_verdict(sequence), "", verdict).decode()

    def _delete_obsolete(self) -> None:
        for key in self._obsolete:
            with contextlib.suppress(RuntimeError):  # some stores cannot delete
                self._store.delete_key(key)
        self._obsolete = []


def _arrival(sequence: int, rank: int) -> str:
    return f"{sequence}/arrived/{rank}"


def _verdict(sequence: int) -> str:
    return f"{sequence}/verdict"
