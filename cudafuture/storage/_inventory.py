"""Which keys lie on stores that can die before this process does, and which of those have."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Literal

from cudafuture.errors import NotFoundError, WorkerLostError

__all__ = ["Inventory", "Verb"]

Verb = Literal["write", "read", "delete", "ask"]


class Inventory:
    """Learns what is where from the outcomes of calls: a dead store cannot be asked any more.

    Args:
        places: the names of the stores; what is said of any other one is passed over.
    """

    def __init__(self, places: Iterable[str]) -> None:
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._keys: dict[str, dict[str, None]] = {place: {} for place in places}  # by place, in the order of a dict
        self._lost: set[str] = set()

    def __contains__(self, place: str) -> bool:
        return place in self._keys

    def lost(self) -> dict[str, list[str]]:
        """Return the keys of the places that are gone."""
        with self._lock:
            return {place: list(self._keys[place]) for place in sorted(self._lost)}

    def found(self, place: str, keys: Iterable[str]) -> None:
        """Keys are there."""
        if place in self._keys:
            with self._lock:
                self._keys[place].update(dict.fromkeys(keys))

    def ended(self, verb: Verb, place: str, keys: Sequence[str], error: BaseException | None) -> None:
        """A call has ended; without an error it has succeeded."""
        if place not in self._keys:
            return
        gone = isinstance(error, WorkerLostError)
        if gone:
            with self._lock:
                self._lost.add(place)
        if verb == "delete" and (
            error is None or isinstance(error, NotFoundError)
        ):  # all those that were there are gone
            with self._lock:
                for key in keys:
                    self._keys[place].pop(key, None)
        elif verb == "read" and error is None:
            self.found(place, keys)
        elif verb == "write" and (error is None or gone or isinstance(error, TimeoutError) or len(keys) > 1):
            self.found(place, keys)  # or it is not known which of them are
