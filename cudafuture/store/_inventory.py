"""Inventory of the keys on stores that can die before this process does."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Literal

from cudafuture.errors import NotFoundError, WorkerLostError

__all__ = ["Inventory", "Verb"]

Verb = Literal["write", "read", "delete", "ask"]


class Inventory:
    """Inventory of keys by store, derived from the outcomes of calls, because a dead store cannot list its keys.

    Args:
        places: the names of the stores; facts about other stores are ignored.
    """

    def __init__(self, places: Iterable[str]) -> None:
        self._lock = threading.Lock()  # guards the fields below; no other lock is taken under it
        self._keys: dict[str, dict[str, None]] = {place: {} for place in places}  # by store; a dict keeps the order
        self._lost: set[str] = set()

    def __contains__(self, place: str) -> bool:
        return place in self._keys

    def lost(self) -> dict[str, list[str]]:
        """Return the keys of the stores that are lost."""
        with self._lock:
            return {place: list(self._keys[place]) for place in sorted(self._lost)}

    def found(self, place: str, keys: Iterable[str]) -> None:
        """Record that keys are on a store."""
        if place in self._keys:
            with self._lock:
                self._keys[place].update(dict.fromkeys(keys))

    def ended(self, verb: Verb, place: str, keys: Sequence[str], error: BaseException | None) -> None:
        """Record the outcome of a call; without an error it succeeded."""
        if place not in self._keys:
            return
        gone = isinstance(error, WorkerLostError)
        if gone:
            with self._lock:
                self._lost.add(place)
        if verb == "delete" and (
            error is None or isinstance(error, NotFoundError)
        ):  # all keys that existed are deleted
            with self._lock:
                for key in keys:
                    self._keys[place].pop(key, None)
        elif verb == "read" and error is None:
            self.found(place, keys)
        elif verb == "write" and (error is None or gone or isinstance(error, TimeoutError) or len(keys) > 1):
            self.found(place, keys)  # after a failure, some of them may have been written
