"""What clients of an offload have done and seen, and whether one store can have been behind all of it.

A client writes a line to a file of its own when it begins something, and when that has ended: so what it has begun is
known also when it was killed. All times are of the one clock that the processes of a machine have.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

MIB = 1 << 20
SIZES = {"zero": 0, "small": 100, "page": 64 << 10, "meg": MIB, "large": 20 * MIB}  # bytes; the last is in two pieces
KEYS = ("zero", "small a", "small b", "small c", "small d", "page a", "page b", "meg", "large", "any a", "any b")

CLOCKS = 0.1e9  # nanoseconds by which a service may take a client's deadline for later than it is

Version = int | None
"""what is under a key; None: nothing"""


# ---- contents


def size_of(key: str, version: int) -> int:
    """Return how many bytes a version of a key has: of the keys "any", each has another size."""
    kind = key.split()[0]
    if kind == "any":
        (kind,) = random.Random(f"{key} {version}").choices([*SIZES], weights=[4, 8, 6, 4, 1])
    return SIZES[kind]


def content_of(key: str, version: int) -> torch.Tensor:
    """Return what a version of a key is: bytes of which each eight are of the version and the place alone."""
    size = size_of(key, version)
    if size == 0:
        return torch.empty(0, version, dtype=torch.uint8)
    words = torch.arange(-(-size // 8)) * 0x9E37_79B9 + zlib.crc32(key.encode()) * version
    words[0] = version
    return words.view(torch.uint8)[:size].clone()


def version_of(key: str, content: torch.Tensor) -> int:
    """Return the version that something is. It is a whole one, or that is an AssertionError."""
    version = content.shape[1] if content.dim() == 2 else int(content[:8].clone().view(torch.int64))
    assert torch.equal(content, content_of(key, version)), f"what is under {key!r} was never written there"
    return version


# ---- what is noted


class Journal:
    """Where a client notes what it does. A line is there for good when it is written, also if the process is killed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._lock = threading.Lock()
        self._number = 0

    def begun(self, changes: Mapping[str, Version]) -> int:
        """Note that something begins, and to which versions it changes which keys; return its number."""
        with self._lock:
            self._number += 1
            self._write("begun", self._number, now(), changes)
            return self._number

    def limit(self, number: int, seconds: float) -> None:
        """Note that it takes no effect any more when so many seconds from now are over, unless that has begun."""
        self._write("limit", number, now() + int(seconds * 1e9), None)

    def ended(self, number: int, changed: bool = True) -> int:
        """Note that it has ended, and whether it has changed anything; return when that was."""
        at = now()
        self._write("ended", number, at, changed)
        return at

    def seen(self, begin: int, end: int, versions: Mapping[str, Version]) -> None:
        """Note what was there at some time between two times."""
        self._write("seen", begin, end, versions)

    def _write(self, *line: object) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def now() -> int:
    return time.monotonic_ns()


# ---- what follows


class Change(NamedTuple):
    """A key got a version, or may have, between two times."""

    client: str
    number: int
    key: str
    version: Version
    begin: float
    end: float  # math.inf: nobody knows
    limit: float = math.inf  # when its time was over

    def is_before(self, other: Change) -> bool:
        """Return True if this change came first: it ended or expired before, or its client requested it earlier.

        An expired change may still take effect if the service had begun it, but not after a later change.
        """
        if self.end < other.begin or self.limit + CLOCKS < other.begin:
            return True
        return self.client == other.client and self.number < other.number


class Sight(NamedTuple):
    """A key had a version, at some time between two times."""

    key: str
    version: Version
    begin: float
    end: float


class History:
    """What several clients have noted."""

    def __init__(self, journals: Iterable[Path]) -> None:
        self.ended = 0
        self.changes: list[Change] = []
        self.sights: list[Sight] = []
        for path in journals:
            self._read(path.stem, [json.loads(line) for line in path.read_text().splitlines()])

    def _read(self, client: str, lines: Sequence[tuple[str, int, int, Mapping[str, Version]]]) -> None:
        ends = {number: (end, changed) for what, number, end, changed in lines if what == "ended"}
        limits = {number: limit for what, number, limit, _ in lines if what == "limit"}
        self.ended += len(ends)
        for what, first, second, versions in lines:
            if what == "begun":
                end, changed = ends.get(first, (math.inf, True))
                if changed:
                    limit = limits.get(first, math.inf)
                    self.changes += [Change(client, first, *item, second, end, limit) for item in versions.items()]
            elif what == "seen":
                self.sights += [Sight(*item, first, second) for item in versions.items()]

    def expect_one_store(self) -> None:
        """See that whatever was seen was there: begun before, and not replaced for sure by what had ended before."""
        changes: dict[str, list[Change]] = {}
        for change in self.changes:
            changes.setdefault(change.key, [Change("", 0, change.key, None, -math.inf, -math.inf)]).append(change)
        for sight in self.sights:
            of_key = changes.get(sight.key, [Change("", 0, sight.key, None, -math.inf, -math.inf)])
            replaced = [change for change in of_key if change.end < sight.begin]
            sources = [change for change in of_key if change.version == sight.version and change.begin < sight.end]
            assert sources, f"{sight}: nobody has written that"
            current = [source for source in sources if not any(source.is_before(later) for later in replaced)]
            assert current, f"{sight}: it was replaced already, of {sources}"
