"""Records of what clients changed and read, and a check that one store explains all of it.

Each client appends a line to a file when an operation begins and when it ends. So the operations in flight of a killed
client are known. All times are from the monotonic clock, which the processes of a machine share.

The outcome of a change is one of three:

- acknowledged: it took effect between its begin and its end;
- failed: it has no effect, then or later;
- unknown (a timeout, a lost worker, a killed client): it takes effect once and as a whole, or never.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

CLOCKS = 0.1e9  # nanoseconds by which the clocks of client and service may seem to differ

Version = int | None
"""the version of a key's tensor; None: the key does not exist"""


def now() -> int:
    return time.monotonic_ns()


class Journal:
    """The file of one client. A line that has been written survives a kill of the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._lock = threading.Lock()
        self._number = 0

    def record_begin(self, changes: Mapping[str, Version]) -> int:
        """Record that an operation begins, with the version that it gives to each key; return its number."""
        with self._lock:
            self._number += 1
            self._write("begun", self._number, now(), changes)
            return self._number

    def record_limit(self, number: int, seconds: float) -> None:
        """Record that the operation has so many seconds from now on."""
        self._write("limit", number, now() + int(seconds * 1e9), None)

    def record_end(self, number: int, changed: bool = True) -> int:
        """Record that the operation was acknowledged, or that it failed without a change; return the time."""
        at = now()
        self._write("ended", number, at, changed)
        return at

    def record_read(self, begin: int, end: int, versions: Mapping[str, Version]) -> None:
        """Record the versions that a read between two times returned."""
        self._write("seen", begin, end, versions)

    def _write(self, *line: object) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Change(NamedTuple):
    """A write or deletion of one key by one client."""

    client: str
    number: int  # in the order of the client's calls
    key: str
    version: Version
    begin: float
    end: float = math.inf  # when it was acknowledged; inf: the outcome is unknown
    limit: float = math.inf  # its deadline
    has_failed: bool = False


class Sight(NamedTuple):
    """A read: the version of a key at some time between two times."""

    key: str
    version: Version
    begin: float
    end: float


class History:
    """The changes and reads of all clients."""

    def __init__(self, changes: Iterable[Change] = (), sights: Iterable[Sight] = ()) -> None:
        self.changes, self.sights = [*changes], [*sights]
        self.outcomes: Counter[str] = Counter()  # of operations, reads included

    @staticmethod
    def of(journals: Iterable[Path]) -> History:
        """Read the history from the files of the clients."""
        history = History()
        for path in journals:
            history._read(path.stem, [json.loads(line) for line in path.read_text().splitlines()])
        return history

    def _read(self, client: str, lines: list[tuple[str, int, int, Any]]) -> None:
        ends = {number: (end, changed) for what, number, end, changed in lines if what == "ended"}
        limits = {number: limit for what, number, limit, _ in lines if what == "limit"}
        for what, first, second, versions in lines:
            if what == "begun":
                end, changed = ends.get(first, (math.inf, True))
                self.outcomes["failed" if not changed else "unknown" if end == math.inf else "acknowledged"] += 1
                limit = limits.get(first, math.inf)
                for key, version in versions.items():
                    self.changes.append(Change(client, first, key, version, second, end, limit, not changed))
            elif what == "seen":
                self.sights += [Sight(key, version, first, second) for key, version in versions.items()]

    def expect_one_store(self) -> None:
        """Check that each read returned a version that a sequential order of all operations allows.

        Raises:
            AssertionError: no client wrote the version before the end of the read, its write failed, or a later change
                had replaced it before the read began.
        """
        changes: defaultdict[str, list[Change]] = defaultdict(list)
        for change in self.changes:
            changes[change.key].append(change)
        sights: defaultdict[str, list[Sight]] = defaultdict(list)
        for sight in self.sights:
            sights[sight.key].append(sight)
        for key, of_key in sights.items():
            _expect_one_key(changes[key], of_key)


def _expect_one_key(changes: list[Change], sights: list[Sight]) -> None:
    first = Change("", 0, sights[0].key, None, -math.inf, -math.inf)
    possible = sorted((first, *(change for change in changes if not change.has_failed)), key=lambda each: each.begin)
    of_version: defaultdict[Version, list[Change]] = defaultdict(list)
    for change in possible:
        of_version[change.version].append(change)
    effects = {change: change.end for change in possible}
    for sight in sights:
        if sight.version is not None:  # deletions cannot be told apart
            for change in of_version[sight.version]:
                effects[change] = min(effects[change], sight.end)
    replacements = _Replacements(effects)
    for sight in sights:
        of_this_version = of_version[sight.version]
        sources = of_this_version[: bisect.bisect_left(of_this_version, sight.end, key=lambda each: each.begin)]
        assert sources, f"{sight}: no client has written that version"
        is_current = any(not replacements.is_replaced(each, sight.begin) for each in reversed(sources))
        assert is_current, f"{sight}: it was replaced already, of {sources[-9:]}"


class _Replacements:
    """The changes of a key in the order of the times at which they had taken effect, with maxima of their properties.

    A change whose outcome is unknown had taken effect when its version was seen. Order by calls and by deadlines is
    promised only for changes that are acknowledged.
    """

    def __init__(self, effects: Mapping[Change, float]) -> None:
        self._effects = effects
        self._begins = _Maxima()
        self._acknowledged_begins = _Maxima()
        self._acknowledged_numbers: defaultdict[str, _Maxima] = defaultdict(_Maxima)  # by client
        for change, effect in sorted(effects.items(), key=lambda item: item[1]):
            self._begins.add(effect, change.begin)
            if change.end < math.inf:
                self._acknowledged_begins.add(effect, change.begin)
                self._acknowledged_numbers[change.client].add(effect, change.number)

    def is_replaced(self, change: Change, at: float) -> bool:
        """Return True if a change that had taken effect at a time cannot precede this one."""
        return (
            self._effects[change] < self._begins.before(at)
            or change.limit + CLOCKS < self._acknowledged_begins.before(at)
            or change.number < self._acknowledged_numbers[change.client].before(at)
        )


class _Maxima:
    """The largest of the values that were added before a time. They are added in the order of their times."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._largest: list[float] = []

    def add(self, at: float, value: float) -> None:
        self._times.append(at)
        self._largest.append(max(value, self._largest[-1]) if self._largest else value)

    def before(self, at: float) -> float:
        end = bisect.bisect_left(self._times, at)
        return self._largest[end - 1] if end else -math.inf
