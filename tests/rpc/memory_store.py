"""A torch.distributed.Store in this process, which a test can interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable


class MemoryStore:
    """A torch.distributed.Store in this process. It counts requests."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.requests = 0
        self.on_set: Callable[[str], None] = lambda key: None
        self.lock = threading.RLock()  # guards what precedes

    def set(self, key: str, value: str, /) -> None:
        with self.lock:
            self.requests += 1
            self.records[key] = value.encode()
        self.on_set(key)

    def add(self, key: str, number: int, /) -> int:
        with self.lock:
            self.requests += 1
            self.records[key] = b"%d" % (int(self.records.get(key, b"0")) + number)
            return int(self.records[key])

    def get(self, key: str, /) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        with self.lock:
            self.requests += 1
            return [self.records[key] for key in keys]

    def check(self, keys: list[str], /) -> bool:
        with self.lock:
            self.requests += 1
            return all(key in self.records for key in keys)

    def plant(self, key: str, record: bytes) -> None:
        """Put something there as another process."""
        with self.lock:
            self.records[key] = record
