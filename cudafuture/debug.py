"""The futures of this process that are pending, and who waits for them.

::

    pending()
        the garbage collector        every pending CUDAFuture
        _C.blocked_threads           the threads in a wait, each with its future
        _C.parts, _C.dependents      the parts of a combination; the callbacks' children of a future
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cudafuture import _C
from cudafuture._frames import line_of

__all__ = ["Pending", "PendingFuture", "pending"]

_DEEPEST = 40  # levels that are indented


@dataclass(frozen=True, eq=False, repr=False)
class PendingFuture:
    """A pending future, and the futures that it waits for."""

    description: str
    """The repr of the future: its operation, its age, with ``CUDAFUTURE_DEBUG=origin`` also the line that made it."""
    waiting_threads: tuple[str, ...]
    """The threads that are blocked in its ``wait()``, each with its name and the line that waits."""
    waits_for: tuple[PendingFuture, ...]
    """The pending futures that it is made from; empty: nothing in this process is known to hold it up."""

    def __repr__(self) -> str:
        return f"<PendingFuture {self.description}, waits for {len(self.waits_for)}>"


@dataclass(frozen=True, eq=False, repr=False)
class Pending:
    """Result of ``pending``: a tree for each future that no other one waits for."""

    trees: tuple[PendingFuture, ...]

    def __repr__(self) -> str:
        return f"<Pending with {len(self.trees)} trees>"

    def __str__(self) -> str:
        """Return the trees, one line for each future and each thread; the parts of a future are shown once."""
        lines: list[str] = []
        shown: set[int] = set()
        stack = [(tree, 0) for tree in reversed(self.trees)]
        while stack:
            future, depth = stack.pop()
            indent = "  " * min(depth, _DEEPEST)
            is_repeated = id(future) in shown and bool(future.waits_for)
            lines.append(indent + future.description + (" (see above)" if is_repeated else ""))
            if id(future) in shown:
                continue
            shown.add(id(future))
            lines += [f"{indent}  awaited by thread {thread}" for thread in future.waiting_threads]
            stack += [(part, depth + 1) for part in reversed(future.waits_for)]
        return "\n".join(lines) if lines else "no future is pending"


def pending(*futures: _C.CUDAFuture[Any]) -> Pending:
    """Return the pending futures of this process as trees, from what waits down to what is waited for.

    The root of a tree is a future that no other pending future is made from. Below it are the parts of a combination,
    or the parent of a callback's future. The leaves are the operations that hold up the rest. The function looks at
    every object of the garbage collector and holds the GIL meanwhile. It does not find a future that the program has
    dropped and only an engine keeps.

    Args:
        futures: the roots; none: all.

    Raises:
        TypeError: a root is no CUDAFuture.

    >>> from cudafuture import CUDAFuture, gather
    >>> read = CUDAFuture(name="read weight")
    >>> both = gather(read.then(lambda f: f.value() + 1), CUDAFuture(name="all_reduce"))
    >>> print(pending(both))
    <CUDAFuture pending, gather of 'read weight', 'all_reduce', ...s old>
      <CUDAFuture 'read weight' pending, then of 'read weight', ...s old>
        <CUDAFuture 'read weight' pending, ...s old>
      <CUDAFuture 'all_reduce' pending, ...s old>
    """
    found = {id(f): f for f in gc.get_objects() if type(f) is _C.CUDAFuture and not f.done()}
    for future in futures:  # also those that gc.freeze() hides
        if not isinstance(future, _C.CUDAFuture):
            raise TypeError(f"pending() takes CUDAFutures, not {type(future).__name__}")
        if not future.done():
            found[id(future)] = future
    threads: dict[int, list[str]] = {}
    for thread, future in _C.blocked_threads():
        found.setdefault(id(future), future)
        threads.setdefault(id(future), []).append(_described(thread))
    parents = {key: [id(part) for part in _C.parts(future) if id(part) in found] for key, future in found.items()}
    for key, future in list(found.items()):
        for dependent in _C.dependents(future):
            if id(dependent) in parents:
                parents[id(dependent)].append(key)
    made: dict[int, PendingFuture] = {}
    for key in _parents_first(parents):
        waits_for = tuple(made[parent] for parent in dict.fromkeys(parents[key]) if parent in made)
        made[key] = PendingFuture(repr(found[key]), tuple(threads.get(key, ())), waits_for)
    below = {parent for several in parents.values() for parent in several}
    roots = [key for key in found if key not in below] if not futures else [id(future) for future in futures]
    return Pending(tuple(made[key] for key in roots if key in made))


def _parents_first(parents: dict[int, list[int]]) -> Iterator[int]:
    """Yield each key after its parents, without recursion; chains of futures are deep."""
    yielded: set[int] = set()
    for root in parents:
        stack = [root]
        entered: set[int] = set()
        while stack:
            key = stack[-1]
            if key in yielded:
                stack.pop()
            elif key in entered:
                stack.pop()
                yielded.add(key)
                yield key
            else:
                entered.add(key)
                stack += [parent for parent in parents[key] if parent not in yielded and parent not in entered]


def _described(ident: int) -> str:
    name = next((thread.name for thread in threading.enumerate() if thread.ident == ident), str(ident))
    return f"'{name}' at {line_of(sys._current_frames().get(ident))}"
