"""The check of histories: it accepts what the documentation allows, and finds each violation."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest

from remote_store.contents import KEYS, content_of, version_of
from remote_store.history import CLOCKS, Change, History, Journal, Sight, Version

LATE = 3 * CLOCKS


def write(client: str, number: int, version: Version, begin: float, end: float = math.inf, **options: object) -> Change:
    return Change(client, number, "x", version, begin, end, **options)  # type: ignore[arg-type]


def read(version: Version, begin: float, end: float) -> Sight:
    return Sight("x", version, begin, end)


FIRST = write("a", 1, 1, 10, 20)
SECOND = write("a", 2, 2, 30, 40)
UNKNOWN = write("a", 3, 3, 50)
DELETION = write("a", 4, None, 60, 70)
FAILED = write("b", 1, 4, 10, 20, has_failed=True)
OTHER = write("b", 2, 5, 30, 40)  # at the same time as SECOND
EXPIRED = write("b", 3, 6, 50, limit=60)
AFTER_EXPIRY = write("a", 5, 7, LATE, LATE + 10)
UNKNOWN_LATER = write("a", 4, 8, 60)

ALLOWED = {
    "nothing before the first write": ([FIRST], [read(None, 0, 5)]),
    "old or new during a write": ([FIRST], [read(None, 12, 15), read(1, 16, 18)]),
    "new after a write": ([FIRST, SECOND], [read(2, 41, 45)]),
    "old or new during a replacement": ([FIRST, SECOND], [read(1, 25, 35), read(2, 25, 35)]),
    "either of two concurrent writes": ([FIRST, SECOND, OTHER], [read(2, 41, 45)]),
    "the other of two concurrent writes": ([FIRST, SECOND, OTHER], [read(5, 41, 45)]),
    "an unknown write took effect": ([FIRST, SECOND, UNKNOWN], [read(3, 60, 70)]),
    "an unknown write had no effect": ([FIRST, SECOND, UNKNOWN], [read(2, 60, 70)]),
    "an unknown write takes effect late": ([SECOND, UNKNOWN], [read(2, 60, 70), read(3, 80, 90)]),
    "an unknown deletion takes effect": ([FIRST, write("b", 1, None, 30)], [read(1, 40, 50), read(None, 60, 70)]),
    "a deletion after an unknown write": ([UNKNOWN, DELETION], [read(3, 52, 58), read(None, 71, 75)]),
    "an expired write before a later write": (
        [EXPIRED, AFTER_EXPIRY],
        [read(6, 100, 110), read(7, LATE + 20, LATE + 30)],
    ),
    "an expired write during a later write": ([EXPIRED, AFTER_EXPIRY], [read(6, LATE + 1, LATE + 2)]),
    "an unknown write of another client after an acknowledged one": (
        [write("b", 1, 9, 10), SECOND],
        [read(2, 41, 45), read(9, 50, 60)],
    ),
    "an earlier unknown write after a later unknown one": (
        [UNKNOWN, UNKNOWN_LATER],
        [read(8, 70, 80), read(3, 90, 100)],
    ),
}

FORBIDDEN = {
    "a version that no client wrote": ([FIRST], [read(9, 25, 35)], "no client"),
    "a version before its write begins": ([FIRST], [read(1, 0, 5)], "no client"),
    "a version of a failed write": ([FAILED], [read(4, 25, 35)], "no client"),
    "nothing after an acknowledged write": ([FIRST], [read(None, 21, 25)], "replaced"),
    "an acknowledged write is lost": ([FIRST, SECOND], [read(1, 41, 45)], "replaced"),
    "an acknowledged deletion is undone": ([SECOND, DELETION], [read(2, 71, 75)], "replaced"),
    "an unknown write undoes a later deletion of its client": ([UNKNOWN, DELETION], [read(3, 71, 75)], "replaced"),
    "an unknown write undoes a later write of its client": (
        [UNKNOWN, write("a", 4, 9, 60, 70)],
        [read(9, 71, 75), read(3, 80, 90)],
        "replaced",
    ),
    "an unknown deletion undoes a later write of its client": (
        [FIRST, write("a", 2, None, 30), write("a", 3, 9, 40, 50)],
        [read(None, 60, 70)],
        "replaced",
    ),
    "an earlier write in flight undoes a later one of its client": (
        [write("a", 1, 1, 10, 90), write("a", 2, 2, 20, 30)],
        [read(1, 40, 50)],
        "replaced",
    ),
    "an expired write undoes a write of another client": (
        [EXPIRED, AFTER_EXPIRY],
        [read(6, LATE + 20, LATE + 30)],
        "replaced",
    ),
    "an old version after an unknown write was read": (
        [FIRST, write("b", 1, 9, 30)],
        [read(9, 40, 50), read(1, 60, 70)],
        "replaced",
    ),
    "a seen unknown write undoes a write that began later": (
        [write("b", 1, 9, 10), SECOND],
        [read(9, 20, 25), read(2, 41, 45), read(9, 50, 60)],
        "replaced",
    ),
}


@pytest.mark.parametrize(("changes", "sights"), ALLOWED.values(), ids=list(ALLOWED))
def test_sequential_histories_are_accepted(changes: list[Change], sights: list[Sight]) -> None:
    History(changes, sights).expect_one_store()


@pytest.mark.parametrize(("changes", "sights", "why"), FORBIDDEN.values(), ids=list(FORBIDDEN))
def test_violations_are_found(changes: list[Change], sights: list[Sight], why: str) -> None:
    with pytest.raises(AssertionError, match=f"{why}.*") as caught:
        History(changes, sights).expect_one_store()
    assert repr(sights[-1]) in str(caught.value)


def test_keys_are_checked_separately() -> None:
    other = Sight("y", 1, 25, 35)
    with pytest.raises(AssertionError, match="no client"):
        History([FIRST], [other]).expect_one_store()
    History([FIRST, SECOND, FIRST._replace(key="y")], [other, read(2, 41, 45)]).expect_one_store()


@pytest.mark.parametrize(("seen", "is_possible"), [(1, False), (2, True), (3, True), (4, False), (None, False)])
def test_journals_keep_outcomes(tmp_path: Path, seen: int | None, is_possible: bool) -> None:
    journal = Journal(tmp_path / "a.journal")
    for version in (1, 2):
        journal.record_end(journal.record_begin({"x": version}))
    journal.record_limit(journal.record_begin({"x": 3}), 1.0)  # no end: unknown
    journal.record_end(journal.record_begin({"x": 4}), changed=False)
    at = journal.record_end(journal.record_begin({}))
    Journal(tmp_path / "b.journal").record_read(at + 1, at + 2, {"x": seen})
    history = History.of(tmp_path.glob("*.journal"))
    assert history.outcomes == {"acknowledged": 3, "unknown": 1, "failed": 1}
    with contextlib.nullcontext() if is_possible else pytest.raises(AssertionError):
        history.expect_one_store()


@pytest.mark.parametrize("key", KEYS)
def test_torn_values_are_found(key: str) -> None:
    one, other = content_of(key, 5), content_of(key, 6)
    assert version_of(key, one) == 5
    if key == "zero" or one.shape != other.shape:
        return
    other[:8] = one[:8]
    with pytest.raises(AssertionError, match="never written"):
        version_of(key, other)
    one[-1] ^= 1
    with pytest.raises(AssertionError, match="never written"):
        version_of(key, one)


def test_values_carry_key() -> None:
    with pytest.raises(AssertionError, match="never written"):
        version_of("small a", content_of("small b", 5))
