"""The keys of a namespace, in the order in which they were written last, and the bytes of their tensors."""

from __future__ import annotations

import threading

from cudafuture.errors import QuotaError
from rpc_ext._offload_wire import Header

__all__ = ["Index"]


class Index:
    """The keys and the quota of a namespace.

    Args:
        capacity: bytes that its tensors may have, including unfinished writes; None: no limit of its own.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._headers: dict[str, Header | None] = {}  # by key; None: of one piece, and the store knows the rest
        self._used = self._tensors = 0  # of the keys, and of what is being written
        self._is_gone = False

    @property
    def used(self) -> int:
        """Bytes of its tensors, including unfinished writes."""
        return self._used

    @property
    def is_empty(self) -> bool:
        """True without tensors and unfinished writes."""
        return not self._tensors

    def keys(self) -> list[str]:
        """Return the keys."""
        with self._lock:
            return list(self._headers)

    def header(self, key: str) -> Header | None:
        """Return the header of a tensor in pieces."""
        return self._headers.get(key)

    def restore(self, sizes: list[int]) -> None:
        """Count the tensors of a store that was opened again, whatever the capacity."""
        with self._lock:
            self._used, self._tensors = sum(sizes), len(sizes)

    def take(self, nbytes: int) -> None:
        """Count a tensor that is to be written.

        Raises:
            QuotaError: there is no room for it.
        """
        with self._lock:
            if self.capacity is not None and self._used + nbytes > self.capacity:
                raise QuotaError(
                    f"no room for {nbytes} bytes in the namespace: {self._used} of {self.capacity} are in use"
                )
            self._used += nbytes
            self._tensors += 1

    def give_back(self, nbytes: int) -> None:
        """Count a tensor no more."""
        with self._lock:
            self._used -= nbytes
            self._tensors -= 1

    def add(self, key: str, header: Header | None) -> bool:
        """Note that a key was written; return False where the namespace has gone meanwhile."""
        with self._lock:
            self._headers.pop(key, None)
            if not self._is_gone:
                self._headers[key] = header
            return not self._is_gone

    def remove(self, key: str) -> None:
        """Note that a key was deleted."""
        with self._lock:
            self._headers.pop(key, None)

    def clear(self) -> dict[str, Header | None]:
        """Forget all keys for good; return them with their headers."""
        with self._lock:
            self._is_gone = True
            keys, self._headers = self._headers, {}
            return keys
