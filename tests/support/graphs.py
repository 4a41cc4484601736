"""Model of a graph of futures, in plain Python: the oracle of test_property.

A node is a future. When it is done, its consumers go into one queue, first in, first out, which the outermost
completion works off. Values are numbers, lists and tuples of them. Errors are tuples of a type's name and arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["pending", "completed", "failed", "cancelled"]
Outcome = tuple[State, Any]  # the value, or the error, or None
Error = tuple[Any, ...]
Kind = Literal["root", "then", "then_async", "gather", "collect_all", "collect_any"]
Transform = Literal["add", "recover", "raise"]  # the action of a callback of then()

CANCELLED: Error = ("CancelledError",)
DROPPED: Error = ("InvalidStateError",)  # of those that wait for a future which was dropped
ALL_FAILED = "AllFailedError"


@dataclass(eq=False)
class Node:
    """One future: what it is made of, how it ended, and who waits for it."""

    key: int
    kind: Kind = "root"
    parents: Sequence[Node] = ()  # of then(): the future; of then_async() also the inner one; of a gather its parts
    transform: Transform = "add"
    cancels_parts: bool = False
    depth: int = 0  # of the lists in its value

    state: State = "pending"
    outcome: Any = None
    consumers: list[Callable[[], object]] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)  # nodes that it keeps alive while it is pending

    @property
    def done(self) -> bool:
        return self.state != "pending"

    @property
    def error(self) -> Error:
        return CANCELLED if self.state == "cancelled" else self.outcome

    @property
    def is_whole(self) -> bool:
        return self.kind in ("gather", "collect_all", "collect_any")

    @property
    def keeps(self) -> Sequence[Node]:
        """The nodes that a pending node keeps alive."""
        return (*self.children, *(self.parents if self.is_whole else ())) if not self.done else ()


class Model:
    """Futures as nodes; `log` is the order in which callbacks were called."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self._queue: deque[Callable[[], object]] = deque()
        self._draining = False

    def finish(self, node: Node, state: State, outcome: Any = None) -> bool:
        if node.done:
            return False
        node.state, node.outcome = state, outcome
        self._queue.extend(node.consumers)
        node.consumers, node.children = [], []
        for part in node.parents if node.is_whole else ():
            part.children = [child for child in part.children if child is not node]
        self._drain()
        return True

    def cancel(self, node: Node) -> bool:
        if not self.finish(node, "cancelled"):
            return False
        for part in node.parents if node.cancels_parts else ():
            self.cancel(part)
        return True

    def _drain(self) -> None:
        if self._draining:
            return
        self._draining = True
        while self._queue:
            self._queue.popleft()()
        self._draining = False

    def _attach(self, node: Node, consumer: Callable[[], object], child: Node | None = None) -> None:
        if node.done:
            self._queue.append(consumer)
            self._drain()
            return
        node.consumers.append(consumer)
        if child is not None:
            node.children.append(child)

    def add_done_callback(self, node: Node, mark: object) -> None:
        self._attach(node, lambda: self.log.append(("callback", node.key, mark, node.state)))

    def begin(self, node: Node) -> None:
        """Make a node wait for its parents."""
        if node.kind == "then":
            self._attach(node.parents[0], lambda: self._run_then(node), node)
        elif node.kind == "then_async":
            self._attach(node.parents[0], lambda: self._run_then_async(node), node)
        elif node.is_whole:
            left = [len(node.parents)]
            for part in node.parents:
                if node.done:  # a part that was done already has decided
                    break
                self._attach(part, lambda part=part: self._part_done(node, part, left), node)  # type: ignore[misc]

    def _run_then(self, node: Node) -> None:
        if not node.done:
            self._log_call(node)
            self.finish(node, *expected_outcome(node))

    def _run_then_async(self, node: Node) -> None:
        if node.done:
            return
        self._log_call(node)
        if node.parents[0].state == "completed":
            self._attach(node.parents[1], lambda: self.finish(node, *expected_outcome(node)) and None, node)
        else:
            self.finish(node, *expected_outcome(node))

    def _log_call(self, node: Node) -> None:
        if node.parents[0].state == "completed" or node.parents[0].error != DROPPED:
            self.log.append(("then", node.key))

    def _part_done(self, whole: Node, part: Node, left: list[int]) -> None:
        left[0] -= 1
        completed = part.state == "completed"
        if left[0] == 0 or (whole.kind == "gather" and not completed) or (whole.kind == "collect_any" and completed):
            self.finish(whole, *expected_outcome(whole, part))

    def drop_unreachable(self, nodes: Iterable[Node], held: Iterable[Node]) -> set[Node]:
        """Fail the children of pending futures that are unreachable; return these futures."""
        alive = reachable(held)
        gone = {n for n in nodes if not n.done and n not in alive}
        for orphan in {child for n in gone for child in n.children if child in alive}:
            self.finish(orphan, "failed", DROPPED)
        return gone


def reachable(held: Iterable[Node]) -> set[Node]:
    alive: set[Node] = set()
    left = list(held)
    while left:
        node = left.pop()
        if node not in alive:
            alive.add(node)
            left += node.keeps
    return alive


def expected_outcome(node: Node, part: Node | None = None) -> Outcome:
    """Return how a node ends whose parents are done; `part` is the one that decided about a gather."""
    first, *others = node.parents
    if node.kind == "then":
        return _outcome_of_transform(first, node.transform)
    if node.kind == "then_async":
        return (others[0].state, others[0].outcome) if first.state == "completed" else ("failed", first.error)
    if node.kind == "collect_all":
        return "completed", [int(p.state == "completed") for p in node.parents]
    assert part is not None
    if node.kind == "gather":
        if part.state != "completed":
            return "failed", part.error
        return "completed", [p.outcome for p in node.parents]
    if part.state == "completed":
        return "completed", (list(node.parents).index(part), part.outcome)
    return "failed", all_failed([p.error for p in node.parents])


def all_failed(errors: Sequence[Error]) -> Error:
    """Return the error of a collect_any; that of a dropped part shows through."""
    return DROPPED if DROPPED in errors else (ALL_FAILED, *errors)


def _outcome_of_transform(parent: Node, transform: Transform) -> Outcome:
    if parent.state == "completed":
        number = digest(parent.outcome)
        return ("failed", ("KeyError", number)) if transform == "raise" else ("completed", number + 1)
    if transform == "recover" and parent.error != DROPPED:
        return "completed", -1
    return "failed", parent.error


def digest(value: Any) -> int:
    """Make a small number of any value, so that values do not grow with the graph."""
    if not isinstance(value, tuple | list):
        return int(value) % 1_000_003
    number = 17
    for part in value:
        number = (31 * number + digest(part)) % 1_000_003
    return number
