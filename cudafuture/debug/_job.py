"""The processes of a job together: the ranks that wait for one another, the one that lags, and deadlocks.

::

    look_at(processes)       asks all of them at once
        JobReport.waits()          rank 0 ── all_reduce #12 of group 'dp', not issued ──► rank 3
        JobReport.verdicts()       a cycle: a deadlock;  a rank that others wait for, and that waits for none: it lags
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cudafuture._arguments import listed
from cudafuture._progress import GroupProgress
from cudafuture.debug._processes import PATIENCE, ProcessReport, ask, progress_of
from cudafuture.debug._trees import PendingFuture, ThreadReport, cycles

__all__ = ["JobReport", "RankWait", "WaitingProcess", "look_at"]

_MOST_AT_ONCE = 256
_PAUSE = 0.5  # seconds


@dataclass(frozen=True)
class WaitingProcess:
    """The threads of a process that wait: the main one, or those that serve calls and run callbacks."""

    report: ProcessReport
    is_main: bool

    def threads(self) -> list[ThreadReport]:
        """Return its threads that are blocked in a wait."""
        pending = self.report.pending
        threads = () if pending is None else pending.threads
        return [one for one in threads if one.is_main == self.is_main and one.is_waiting]


@dataclass(frozen=True)
class RankWait:
    """A thread of one process waits for something that another process has to do."""

    of: WaitingProcess
    thread: ThreadReport
    operation: PendingFuture
    on: WaitingProcess
    what: str
    """The thing that the other process has not done."""

    @property
    def is_certain(self) -> bool:
        """False for a call, whose worker may have other threads that serve, and for a wait that ends by itself."""
        is_call = self.operation.operation is not None and self.operation.operation.get("place") == "worker"
        return not is_call and not self.thread.has_timeout

    def __str__(self) -> str:
        return f"{self.of.report.title} waits for {self.on.report.title}: {self.what}; it waits at {self.thread.line}"


@dataclass(frozen=True, repr=False)
class JobReport:
    """Reports of the processes of a job."""

    reports: tuple[ProcessReport, ...]
    earlier: JobReport | None = None
    """Report of a moment before: a wait counts if it was there, too. None: there is none."""

    def __repr__(self) -> str:
        return f"<JobReport of {len(self.reports)} processes>"

    def __str__(self) -> str:
        """Return the trees of each process, and what they add up to."""
        parts = [_section(report) for report in self.reports]
        verdicts = self.verdicts()
        return "\n\n".join([*parts, "\n".join(verdicts)] if verdicts else parts)

    def waits(self) -> list[RankWait]:
        """Return the waits of threads for what another process has to do.

        >>> look_at([0]).waits()
        []
        """
        waits = [
            wait for report in self.reports for is_main in (True, False) for wait in self._waits_of(report, is_main)
        ]
        if self.earlier is None:
            return waits
        before = {_identity(wait): wait.thread.seconds for wait in self.earlier.waits()}
        return [wait for wait in waits if wait.thread.seconds > before.get(_identity(wait), wait.thread.seconds)]

    def _waits_of(self, report: ProcessReport, is_main: bool) -> Iterator[RankWait]:
        of = WaitingProcess(report, is_main)
        for thread in of.threads():
            if thread.awaited is None:
                continue
            for operation in _operations_below(thread.awaited):
                for other, what in self._holders(report, operation):
                    on = WaitingProcess(other, True)
                    if operation.operation is not None and operation.operation.get("place") == "worker":
                        on = WaitingProcess(other, False)  # the thread that serves the call
                    elif not on.threads():
                        on = WaitingProcess(other, False)
                    yield RankWait(of, thread, operation, on, what)

    def _holders(self, report: ProcessReport, operation: PendingFuture) -> Iterator[tuple[ProcessReport, str]]:
        """Yield the processes that hold up an operation, each with what it has not done."""
        facts = operation.operation or {}
        for other in self.reports:
            if other.process == report.process:
                continue
            group = None if other.progress is None else other.progress.group(facts.get("group", ""))
            if group is not None and "peer" in facts:
                if group.rank == facts["peer"] and not self._is_matched(report, other, facts):
                    yield other, f"{operation.description}, is not matched there"
            elif group is None and self._is_absent(report, other, facts):
                yield other, f"{operation.description}, is not issued there (it has issued none)"
            elif group is not None and "number" in facts and group.issued <= facts["number"]:
                last = f"its last one was {group.last} #{group.issued - 1}" if group.issued else "it has issued none"
                yield other, f"{operation.description}, is not issued there ({last})"
            elif group is not None and (instead := self._issued_instead(other, facts)):
                yield other, f"{operation.description}, has {instead} in its place there"
            elif group is not None and other.problem and "number" in facts and group.ended <= facts["number"]:
                yield other, f"{operation.description}, has not ended there"
            elif facts.get("place") == "worker" and other.worker and other.worker == facts.get("of"):
                yield other, f"{operation.description}, is not answered"

    def _is_matched(self, report: ProcessReport, other: ProcessReport, facts: dict[str, Any]) -> bool:
        """Return True if the other end of a message is pending on a process: then the data are on the way."""
        group = None if report.progress is None else report.progress.group(facts["group"])
        return any(
            one["group"] == facts["group"]
            and group is not None
            and one.get("peer", group.rank) == group.rank  # of a recv from any rank: none
            and ("recv" in one["name"]) != ("recv" in facts["name"])
            for one in self._messages[other.process]
        )

    def _is_absent(self, report: ProcessReport, other: ProcessReport, facts: dict[str, Any]) -> bool:
        """Return True if a process is in the group of an operation, but has no progress there: it has issued nothing.

        It is known for groups of all ranks only, whose numbers are those of the processes. A process whose rank another
        one has in the group is of another job.
        """
        group = None if report.progress is None else report.progress.group(facts.get("group", ""))
        if group is None or other.rank is None or other.progress is None or "number" not in facts:
            return False
        is_of_all = group.size == other.progress.world_size and group.rank == report.rank
        present = {one.rank for one in self.reports if one.progress is not None and one.progress.group(group.id)}
        return is_of_all and 0 <= other.rank < group.size and other.rank not in present

    @cached_property
    def _messages(self) -> dict[int, list[dict[str, Any]]]:
        """The facts of the pending messages of each process."""
        return {
            report.process: [
                future.operation
                for future in (() if report.pending is None else report.pending.futures())
                if future.operation is not None
                and "group" in future.operation
                and ("send" in future.operation["name"] or "recv" in future.operation["name"])
            ]
            for report in self.reports
        }

    def _issued_instead(self, report: ProcessReport, facts: dict[str, Any]) -> str:
        """Return the pending operation of another name that a process has issued in the place of one; empty: none."""
        found = self._collectives[report.process].get((facts["group"], facts.get("number", -1)))
        name = None if found is None or found.operation is None else found.operation["name"]
        return "" if found is None or name == facts["name"] else found.description

    @cached_property
    def _collectives(self) -> dict[int, dict[tuple[Any, Any], PendingFuture]]:
        """The pending operations of each process on groups, by the id of the group and their number."""
        return {
            report.process: {
                (future.operation["group"], future.operation["number"]): future
                for future in (() if report.pending is None else report.pending.futures())
                if future.operation is not None and {"group", "number"} <= future.operation.keys()
            }
            for report in self.reports
        }

    def verdicts(self) -> list[str]:
        """Name the deadlocks and the ranks that hold up others, one line or more for each.

        >>> look_at([0]).verdicts()
        []
        """
        waits = self.waits()
        of: dict[WaitingProcess, list[RankWait]] = defaultdict(list)
        held: dict[int, list[RankWait]] = defaultdict(list)
        for wait in waits:
            of[wait.of].append(wait)
            held[wait.on.report.process].append(wait)
        lines: list[str] = []
        nodes = {id(node): node for node in dict.fromkeys(one for wait in waits for one in (wait.of, wait.on))}
        same = {node: node for node in nodes.values()}
        circles = cycles(nodes.values(), lambda node: [same[wait.on] for wait in of.get(node, ()) if wait.is_certain])
        in_circle: set[int] = set()
        for circle in circles:
            lines.append("deadlock, unless another thread of these processes goes on:")
            for node, following in zip(circle, [*circle[1:], circle[0]], strict=True):
                in_circle.add(node.report.process)
                lines.append("  " + str(next(wait for wait in of[node] if same[wait.on] is following)))
        for process, held_up in held.items():
            report = held_up[0].on.report
            if process in in_circle or (not report.problem and of.get(held_up[0].on)):
                continue  # it waits for another
            lines.append(_lag(report, held_up))
        named = in_circle | held.keys()
        return [*lines, *(line for process, line in self._behind() if process not in named)]

    def _was_behind(self, report: ProcessReport, group: GroupProgress) -> bool:
        """Return True if a process has issued nothing on a group since the earlier report."""
        if self.earlier is None:
            return True
        same = next((one for one in self.earlier.reports if one.process == report.process), None)
        before = None if same is None or same.progress is None else same.progress.group(group.id)
        return before is not None and before.issued == group.issued

    def _behind(self) -> Iterator[tuple[int, str]]:
        """Yield the processes that have issued less on a group than others, which have not ended what they issued.

        That is all that is known if nothing of the library waits: torch's C++ code does, such as DDP's.
        """
        groups: dict[str, list[tuple[ProcessReport, GroupProgress]]] = defaultdict(list)
        for report in self.reports:
            for group in () if report.progress is None else report.progress.groups:
                if group.id and report.progress is not None and report.progress.group(group.id) is group:
                    groups[group.id].append((report, group))
        for members in groups.values():
            leader, most = max(members, key=lambda one: one[1].issued)
            for report, group in members:
                if group.issued < most.issued and most.ended <= group.issued and self._was_behind(report, group):
                    last = (
                        f"its last one was {group.last} #{group.issued - 1}" if group.issued else "it has issued none"
                    )
                    yield (
                        report.process,
                        f"{report.title} is behind {leader.title} on group '{group.name}': "
                        f"#{group.issued} is not issued there ({last}); {_state(report)}",
                    )


def _lag(report: ProcessReport, held_up: list[RankWait]) -> str:
    others = ", ".join(dict.fromkeys(wait.of.report.title for wait in held_up))
    return f"{report.title} holds up {others}: {held_up[0].what}; {_state(report)}"


def _state(report: ProcessReport) -> str:
    """Return what a process does that holds up others."""
    if report.problem:
        return report.problem
    waiting = [thread for thread in (report.pending.threads if report.pending else ()) if thread.is_waiting]
    waiting.sort(key=lambda thread: not thread.is_main)
    if waiting and waiting[0].awaited is not None:
        return f"it waits for {waiting[0].awaited.description} at {waiting[0].line}"
    return "no wait is known there"


def _identity(wait: RankWait) -> tuple[Any, ...]:
    facts = wait.operation.operation or {}
    names = tuple(facts.get(key) for key in ("name", "of", "number", "peer"))
    return (wait.of.report.process, wait.thread.thread, wait.on.report.process, names)


def _operations_below(future: PendingFuture) -> Iterator[PendingFuture]:
    """Yield the operations that a future waits for, through its parts and through the threads of its callbacks."""
    seen: set[int] = set()
    stack = [future]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.operation is not None:
            yield one
        if not one.needs_one:
            stack += reversed([*one._causes()])


def _section(report: ProcessReport) -> str:
    lines = [report.title + (f": {report.problem}" if report.problem else "")]
    if report.pending is not None:
        lines += ["  " + line for line in str(report.pending).splitlines()]
    elif report.progress is not None:
        lines += [
            f"  group '{group.name}': {group.issued} issued, {group.ended} ended, the last was {group.last}"
            for group in report.progress.groups
            if group.issued
        ]
    return "\n".join(lines)


def look_at(processes: Iterable[int], folder: Path | None = None, patience: float = PATIENCE) -> JobReport:
    """Ask several processes at once; see `ask`.

    If some hold up others, it asks again half a second later: what only seemed so, since the answers are not of one
    moment, or since the data of a message were on the way, is then gone.

    >>> look_at([0])
    <JobReport of 1 processes>
    """
    numbers = list(dict.fromkeys(listed("processes", processes, "process numbers")))
    first = _ask_all(numbers, folder, patience)
    if not first.verdicts():
        return first
    time.sleep(_PAUSE)
    return replace(_ask_all(numbers, folder, patience), earlier=first)


def _ask_all(numbers: list[int], folder: Path | None, patience: float) -> JobReport:
    if not numbers:
        return JobReport(())
    with concurrent.futures.ThreadPoolExecutor(min(len(numbers), _MOST_AT_ONCE)) as threads:
        reports = list(threads.map(lambda process: ask(process, folder, patience), numbers))
    # A process that answered early may have gone on meanwhile: what it has issued by now holds up no other.
    reports = [replace(one, progress=progress_of(one.process, folder) or one.progress) for one in reports]
    return JobReport(tuple(sorted(reports, key=lambda one: (one.rank is None, one.rank or 0, one.process))))
