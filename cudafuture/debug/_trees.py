"""The futures of one process that are pending, and who waits for them, as trees.

::

    pending()
        _C.pending()            every pending CUDAFuture of the collector, then the walk of core/pending.h: JSON
        trees_of(graph)         Pending: the trees, and the threads
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cudafuture import _C

__all__ = ["Pending", "PendingFuture", "ThreadReport", "pending", "trees_of"]

_DEEPEST = 40  # levels that are indented


@dataclass(eq=False, repr=False)
class PendingFuture:
    """A pending future, and the futures that it waits for."""

    description: str
    """Its operation with the place, the number and the bytes, or what made it; its age; the line that made it."""
    reason: str = ""
    """Reason why it is pending although it waits for no other future; empty: an operation, or it waits for others."""
    count: int = 1
    """Number of futures of the same kind that it stands for, in a process with very many."""
    operation: dict[str, Any] | None = None
    """The facts of an engine's operation: "name", "place" (the kind), "of" (its name), "number", "bytes"."""
    needs_one: bool = False
    """True if one of the futures that it waits for is enough."""
    waits_for: list[PendingFuture] = field(default_factory=list)
    """The pending futures that it is made from; empty: nothing in this process is known to hold it up."""
    threads: list[ThreadReport] = field(default_factory=list)
    """The threads that are blocked in its ``wait()``."""
    running_in: list[ThreadReport] = field(default_factory=list)
    """The threads that run its callback."""
    blocked_by: list[ThreadReport] = field(default_factory=list)
    """The threads behind whose callbacks its own callback is queued."""

    def __repr__(self) -> str:
        return f"<PendingFuture {self.description}, waits for {len(self.waits_for)}>"

    @property
    def waiting_threads(self) -> tuple[str, ...]:
        """The threads that are blocked in its ``wait()``, each with its name and the line that waits."""
        return tuple(thread.waiting for thread in self.threads)

    def _causes(self) -> Iterator[PendingFuture]:
        """Yield what the future waits for: its parts, and what the threads wait for that should complete it."""
        yield from self.waits_for
        for thread in (*self.running_in, *self.blocked_by):
            if thread.awaited is not None and thread.awaited is not self:
                yield thread.awaited


@dataclass(eq=False, repr=False)
class ThreadReport:
    """A thread that is in a wait or in a callback."""

    thread: int
    """Its number in the system."""
    name: str
    is_main: bool
    activities: list[dict[str, Any]]
    """Its waits and callbacks, outermost first: "kind", "seconds", "line" or "function", "subject"."""
    awaited: PendingFuture | None = None
    """The pending future that it waits for; None: it runs, or the device has not finished."""

    def __repr__(self) -> str:
        return f"<ThreadReport {self.title}, {len(self.activities)} activities>"

    @property
    def title(self) -> str:
        """The name of the thread, or its number."""
        return f"'{self.name}'" if self.name else "'MainThread'" if self.is_main else str(self.thread)

    @property
    def is_waiting(self) -> bool:
        """True if it is blocked in a wait."""
        return bool(self.activities[-1]["kind"] == "wait")

    @property
    def seconds(self) -> float:
        """Seconds for which it has been in its innermost wait or callback."""
        return float(self.activities[-1]["seconds"])

    @property
    def has_timeout(self) -> bool:
        """True if its wait ends by itself."""
        return bool(self.activities[-1].get("has_timeout"))

    @property
    def line(self) -> str:
        """The line of the program that waits; "?": it is not known."""
        return str(self.activities[-1].get("line", "?"))

    @property
    def waiting(self) -> str:
        """The thread, and the line that waits."""
        return f"{self.title} at {self.line}"

    @property
    def callback(self) -> str:
        """The outermost callback that it runs, and for how long; empty: it runs none."""
        first = next((one for one in self.activities if one["kind"] == "callback"), None)
        if first is None:
            return ""
        function = first.get("function") or "a callback"
        return f"{function}, for {first['seconds']:.3g} s in thread {self.title}" + (
            f", which waits at {self.line}" if self.is_waiting else ""
        )


@dataclass(eq=False, repr=False)
class Pending:
    """The pending futures of a process: a tree for each one that no other waits for."""

    trees: tuple[PendingFuture, ...]
    threads: tuple[ThreadReport, ...] = ()

    def __repr__(self) -> str:
        return f"<Pending with {len(self.trees)} trees>"

    def __str__(self) -> str:
        """Return the trees, one line for each future and each thread; the parts of a future are shown once."""
        lines = [f"deadlock: {cycle}" for cycle in self.deadlocks()]
        shown: set[int] = set()
        stack = [(tree, 0) for tree in reversed(self.trees)]
        while stack:
            future, depth = stack.pop()
            indent = "  " * min(depth, _DEEPEST)
            is_repeated = id(future) in shown and bool(future.waits_for)
            lines.append(indent + line_of(future) + (" (see above)" if is_repeated else ""))
            if id(future) in shown:
                continue
            shown.add(id(future))
            lines += [f"{indent}  {line}" for line in _details(future)]
            stack += [(part, depth + 1) for part in reversed(future.waits_for)]
        for thread in self.threads:  # their callbacks have no children, or their waits are for devices
            if thread.awaited is None and not any(thread in one.running_in for one in self.futures()):
                lines.append(f"thread {thread.title} {_activity(thread)}")
        return "\n".join(lines) if lines else "no future is pending"

    def futures(self) -> Iterator[PendingFuture]:
        """Yield each future of the trees once.

        >>> [future.description for future in pending(_C.CUDAFuture(name="read")).futures()]
        ["future 'read', ...s old..."]
        """
        seen: set[int] = set()
        stack = list(reversed(self.trees))
        while stack:
            future = stack.pop()
            if id(future) not in seen:
                seen.add(id(future))
                yield future
                stack += reversed(future.waits_for)

    def deadlocks(self) -> list[str]:
        """Name the cycles of futures that wait for one another through the threads that should complete them.

        >>> pending(_C.CUDAFuture(name="read")).deadlocks()
        []
        """
        return [
            " waits for ".join(line_of(one) + _where(one) for one in (*cycle, cycle[0]))
            for cycle in cycles((one for one in self.futures()), PendingFuture._causes)
        ]


def cycles(nodes: Iterable[Any], causes: Any) -> list[list[Any]]:
    """Return one cycle through each node that is the first in a search to close one; without recursion."""
    found: list[list[Any]] = []
    done: set[int] = set()
    for root in nodes:
        path: list[Any] = []
        place: dict[int, int] = {}
        stack: list[tuple[Any, Iterator[Any]]] = []

        def enter(node: Any) -> None:
            place[id(node)] = len(path)  # noqa: B023
            path.append(node)  # noqa: B023
            stack.append((node, iter(causes(node))))  # noqa: B023

        if id(root) not in done:
            enter(root)
        while stack:
            node, rest = stack[-1]
            cause = next(rest, None)
            if cause is None:
                stack.pop()
                path.pop()
                del place[id(node)]
                done.add(id(node))
            elif id(cause) in place:
                found.append(path[place[id(cause)] :])
            elif id(cause) not in done:
                enter(cause)
    return found


def line_of(future: PendingFuture) -> str:
    """Return the text of one future."""
    count = f"{future.count} like " if future.count > 1 else ""
    return count + future.description + (f" ({future.reason})" if future.reason else "")


def _where(future: PendingFuture) -> str:
    threads = [*future.running_in, *future.blocked_by]
    return f" [{threads[0].callback}]" if threads and threads[0].callback else ""


def _details(future: PendingFuture) -> Iterator[str]:
    for thread in future.threads:
        yield f"awaited by thread {thread.waiting}"
    for thread in future.running_in:
        yield f"runs: {thread.callback}"
    for thread in future.blocked_by:
        yield f"behind {thread.callback}"


def _activity(thread: ThreadReport) -> str:
    if thread.callback:
        return f"runs {thread.callback}"
    last = thread.activities[-1]
    return f"waits at {thread.line} for the device work of {last['subject']}, for {last['seconds']:.3g} s"


def trees_of(graph: dict[str, Any], roots: bool = False) -> Pending:
    """Build the trees from what the walk in C++ tells. `roots`: only those of the given futures."""
    futures = [
        PendingFuture(
            one["text"], one.get("reason", ""), one.get("count", 1), one.get("operation"), one.get("needs_one", False)
        )
        for one in graph["futures"]
    ]
    threads = [ThreadReport(one["thread"], one["name"], one["is_main"], one["activities"]) for one in graph["threads"]]
    below: set[int] = set()
    for future, one in zip(futures, graph["futures"], strict=True):
        indices = dict.fromkeys(one.get("waits_for", ()))
        below.update(indices)
        future.waits_for = [futures[index] for index in indices]
        future.blocked_by = [threads[index] for index in one.get("blocked_by", ())]
    for thread in threads:
        for activity in thread.activities:
            if "future" in activity and activity["kind"] == "callback":
                futures[activity["future"]].running_in.append(thread)
        if thread.is_waiting and "future" in thread.activities[-1]:
            thread.awaited = futures[thread.activities[-1]["future"]]
            thread.awaited.threads.append(thread)
    if roots:
        return Pending(tuple(futures[index] for index in graph["roots"]))
    tops = [future for index, future in enumerate(futures) if index not in below]
    covered = {id(future) for future in Pending(tuple(tops)).futures()}
    tops += [future for future in futures if id(future) not in covered]  # in a cycle
    return Pending(tuple(tops), tuple(threads))


def pending(*futures: _C.CUDAFuture[Any]) -> Pending:
    """Return the pending futures of this process as trees, from what waits down to what is waited for.

    The root of a tree is a future that no other pending future is made from. Below it are the parts of a combination,
    or the parent of a callback's future. The leaves are the operations that hold up the rest. The function looks at
    every object of the garbage collector and holds the GIL meanwhile. ``python -m cudafuture ps`` shows another
    process; it finds the futures that operations, threads and combinations lead to.

    Args:
        futures: the roots; none: all.

    Raises:
        TypeError: a root is no CUDAFuture.

    >>> from cudafuture import CUDAFuture, gather
    >>> read = CUDAFuture(name="read weight")
    >>> both = gather(read.then(lambda f: f.value() + 1), CUDAFuture(name="all_reduce"))
    >>> print(pending(both))
    gather of 2, ...s old...
      then of 'read weight', ...s old...
        future 'read weight', ...s old... (no known operation)
      future 'all_reduce', ...s old... (lost: only combinations refer to it, so nothing can complete it)
    """
    for future in futures:
        if not isinstance(future, _C.CUDAFuture):
            remedy = "; it takes them one by one: pending(*futures)" if isinstance(future, (list, tuple, set)) else ""
            raise TypeError(f"pending() takes CUDAFutures, not {type(future).__name__}{remedy}")
    return trees_of(json.loads(_C.pending(list(futures))), bool(futures))
