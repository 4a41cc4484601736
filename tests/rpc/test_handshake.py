"""The handshake of workers, over a store that any process can write to."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cudafuture.errors import AuthenticationError
from rpc.memory_store import MemoryStore
from rpc_ext import _handshake
from rpc_ext._handshake import Handshake
from support.patience import PATIENCE
from support.soak import soak_count

SECRET = b"a secret that nobody else knows"
ANOTHER = b"a secret that somebody else knows"
SHORT = 0.05  # seconds, where it has to come to that


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def handshake(
    store: Any, rank: int, size: int = 2, secret: bytes | None = SECRET, timeout: float = PATIENCE
) -> Handshake:
    return Handshake(store, rank, size, secret, timeout)


def all_begin(pool: ThreadPoolExecutor, *handshakes: Handshake) -> list[tuple[list[Any], bytes]]:
    begun = [pool.submit(one.begin, {"rank": rank}) for rank, one in enumerate(handshakes)]
    return [one.result(PATIENCE) for one in begun]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline


# ---- together


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("secret", [SECRET, None])
def test_workers_share_records_and_key(
    store: MemoryStore, pool: ThreadPoolExecutor, size: int, secret: bytes | None
) -> None:
    begun = all_begin(pool, *(handshake(store, rank, size, secret) for rank in range(size)))
    assert [values for values, _ in begun] == [[{"rank": rank} for rank in range(size)]] * size
    (key,) = {key for _, key in begun}
    assert len(key) == (0 if secret is None else 32)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_order_of_arrival_does_not_matter(store: MemoryStore, pool: ThreadPoolExecutor, order: tuple[int, ...]) -> None:
    begun: list[Future[Any]] = []
    for rank in order:
        until(lambda: all(store.check([f"hello/{earlier}"]) for earlier in order[: len(begun)]))
        begun.append(pool.submit(handshake(store, rank, 3).begin, rank))
    assert all(one.result(PATIENCE)[0] == [0, 1, 2] for one in begun)


def test_each_session_has_own_key(pool: ThreadPoolExecutor) -> None:
    keys = set()
    for _ in range(3):
        store = MemoryStore()
        keys.add(all_begin(pool, handshake(store, 0), handshake(store, 1))[0][1])
    assert len(keys) == 3


def test_rounds_follow_first_records(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    both = [handshake(store, rank) for rank in range(2)]
    all_begin(pool, *both)
    for step in ("one", "two"):
        found = [pool.submit(one.round, step, [rank, None]) for rank, one in enumerate(both)]
        assert [one.result(PATIENCE) for one in found] == [[[0, None], [1, None]]] * 2
    deadline = time.monotonic() + PATIENCE
    met = [pool.submit(one.round, "end", rank, deadline=deadline) for rank, one in enumerate(both)]
    assert [one.result(PATIENCE) for one in met] == [[0, 1]] * 2


@pytest.mark.parametrize("secret", [SECRET, None])
def test_record_is_json_without_secret(store: MemoryStore, pool: ThreadPoolExecutor, secret: bytes | None) -> None:
    all_begin(pool, handshake(store, 0, secret=secret), handshake(store, 1, secret=secret))
    for record in store.records.values():
        mac, _, body = record.decode().partition(" ")
        assert json.loads(body).keys() == {"value"}
        assert (mac == "unsigned") == (secret is None)
        assert SECRET not in record
        assert SECRET.hex().encode() not in record


# ---- those who do not come, or do not know


def test_absent_worker_is_named(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    absent = [pool.submit(handshake(store, rank, 4, timeout=SHORT).begin, rank) for rank in (0, 2)]
    for one in absent:
        with pytest.raises(TimeoutError, match=r"worker 1, 3 of 4 has not arrived within 0\.05 s \(hello\)"):
            one.result(PATIENCE)


@pytest.mark.parametrize("other", [ANOTHER, None])
def test_worker_with_other_secret_is_named(store: MemoryStore, pool: ThreadPoolExecutor, other: bytes | None) -> None:
    workers = [handshake(store, 0, 3, timeout=1), handshake(store, 1, 3, other, timeout=1)]
    begun = [pool.submit(one.begin, 0) for one in workers]
    for rank, one in enumerate(begun):
        with pytest.raises(AuthenticationError) as caught:
            one.result(PATIENCE)
        assert f"worker {1 - rank} of 3 has not proven" in str(caught.value)
        assert "worker 2 of 3 has not arrived" in str(caught.value)
        assert workers[rank].passed_over == 1


def test_names_are_reported_once_known(store: MemoryStore) -> None:
    one = handshake(store, 0, 2, timeout=SHORT)
    one.names = ["first", "second"]
    with pytest.raises(TimeoutError, match=r"worker 1 \('second'\) of 2 has not arrived"):
        one.round("ready", True)


# ---- those who write to the store


class Bomb:
    """Object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def sign(value: object) -> bytes:
    return b"0" * 64 + b" " + json.dumps({"value": value}).encode()


GARBAGE = {
    "nothing": b"",
    "a space": b" ",
    "no UTF-8": b"\xff\xfe\x00",
    "not ASCII": b"\xc3\xa9 {}",
    "no JSON": b"0" * 64 + b" {",
    "no value": b"0" * 64 + b" {}",
    "unsigned": b"unsigned " + json.dumps({"value": {"nonce": "0", "value": 1}}).encode(),
    "deep": b"0" * 64 + b" " + b"[" * 100_000,
    "deep and unsigned": b"unsigned " + b"[" * 100_000,
    "a wrong signature": sign({"nonce": "0", "value": 1}),
    "a list": sign([]),
    "large": b"x" * (1 << 20),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_skipped_until_worker_arrives(store: MemoryStore, pool: ThreadPoolExecutor, garbage: bytes) -> None:
    for step in ("hello", "proof"):
        store.plant(f"{step}/1", garbage)
    first = handshake(store, 0)
    begun = pool.submit(first.begin, 0)
    until(lambda: first.passed_over == 1)
    assert pool.submit(handshake(store, 1).begin, 1).result(PATIENCE)[0] == [0, 1]
    assert begun.result(PATIENCE)[0] == [0, 1]


@pytest.mark.parametrize("garbage", [g for name, g in GARBAGE.items() if name != "unsigned"])
def test_garbage_is_skipped_without_secret(store: MemoryStore, pool: ThreadPoolExecutor, garbage: bytes) -> None:
    store.plant("hello/1", garbage)
    first = handshake(store, 0, secret=None)
    begun = pool.submit(first.begin, 0)
    until(lambda: first.passed_over == 1)
    assert pool.submit(handshake(store, 1, secret=None).begin, 1).result(PATIENCE)[0] == [0, 1]
    assert begun.result(PATIENCE)[0] == [0, 1]


@pytest.mark.soak
@pytest.mark.parametrize("secret", [SECRET, None], ids=["signed", "unsigned"])
def test_corrupted_records_are_skipped(store: MemoryStore, secret: bytes | None) -> None:
    """A record is as its worker has written it, or none. Without a secret it may be any that has the form."""
    value = {"nonce": "0" * 64, "value": {"devices": ["cpu"], "number": 3, "text": "\N{SNOWMAN}"}}
    handshake(store, 1, secret=secret)._show("hello", value)
    record = store.get("hello/1")
    numbers = random.Random(1)
    for _ in range(soak_count(100_000)):
        changed = mutate(record, numbers)
        store.plant("hello/1", changed)
        one = handshake(store, 0, secret=secret, timeout=0.0)
        with contextlib.suppress(AuthenticationError):
            seen = one.round("hello", 0, lambda found: isinstance(found, dict) and {*found} == {*value})[1]
            assert changed == record if secret else {*seen} == {*value}


def mutate(record: bytes, numbers: random.Random) -> bytes:
    """Return a record with some bytes changed, removed, repeated or added."""
    changed = bytearray(record)
    for _ in range(numbers.choice([1, 1, 2, 8])):
        at = numbers.randrange(len(changed) + 1)
        end = min(len(changed), at + numbers.choice([1, 2, 30, 300]))
        new = [
            numbers.randbytes(end - at),
            b"",
            changed[at:end] * numbers.choice([2, 3]),
            numbers.choice([b"[" * 2000, b"9" * 5000, b'{"value": ', b"NaN", b"\\ud800", b"\0", b" ", b"e9999"]),
        ][numbers.randrange(4)]
        changed[at:end] = new
    return bytes(changed)


def test_nothing_is_unpickled(store: MemoryStore, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    for i, (step, rank) in enumerate(itertools.product(("hello", "proof", "ready"), (0, 1))):
        bomb = pickle.dumps({"devices": Bomb(tmp_path / str(i))})
        store.plant(f"{step}/{rank}", bomb if i % 2 else b"0" * 64 + b" " + bomb)
    both = [handshake(store, rank) for rank in range(2)]
    all_begin(pool, *both)
    for ready in [pool.submit(one.round, "ready", True) for one in both]:
        assert ready.result(PATIENCE) == [True, True]
    assert not list(tmp_path.iterdir())
    pickle.loads(pickle.dumps(Bomb(tmp_path / "armed")))
    assert list(tmp_path.iterdir())


def test_overwritten_record_is_restored(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    begun = pool.submit(handshake(store, 0).begin, 0)
    until(lambda: store.check(["hello/0"]))
    mine = store.get("hello/0")
    for garbage in GARBAGE.values():
        store.plant("hello/0", garbage)
        until(lambda: store.get("hello/0") == mine)
    with store.lock:
        del store.records["hello/0"]
    until(lambda: store.check(["hello/0"]) and store.get("hello/0") == mine)
    assert pool.submit(handshake(store, 1).begin, 1).result(PATIENCE)[0] == [0, 1]
    assert begun.result(PATIENCE)[0] == [0, 1]


def test_restoration_is_logged_once_per_step(
    store: MemoryStore, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    first = handshake(store, 0, 3)
    with caplog.at_level(logging.WARNING, "rpc_ext.authentication"):
        begun = pool.submit(first.begin, 0)
        for i in range(10):
            store.plant("hello/1", b"garbage %d" % i)
            until(lambda count=i + 1: first.passed_over == count)  # type: ignore[misc]
        store.plant("hello/2", b"garbage")
        until(lambda: "worker 2 (hello)" in caplog.text)
        messages = caplog.messages[:]
        others = [pool.submit(handshake(store, rank, 3).begin, rank) for rank in (1, 2)]
        for one in (begun, *others):
            one.result(PATIENCE)
    assert ["worker 1 (hello)" in message for message in messages] == [True, False]
    assert ["worker 2 (hello)" in message for message in messages] == [False, True]


# ---- records that are signed, and old


def record_session(pool: ThreadPoolExecutor, size: int = 2) -> tuple[dict[str, bytes], bytes]:
    """Return what a session has left in its store, and its key."""
    store = MemoryStore()
    begun = all_begin(pool, *(handshake(store, rank, size) for rank in range(size)))
    return dict(store.records), begun[0][1]


def test_old_session_records_do_not_block(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    old, old_key = record_session(pool)
    for place, record in old.items():
        store.plant(place, record)
    first = pool.submit(handshake(store, 0).begin, "new")  # takes the old one's hello, at first
    until(lambda: store.get("proof/0") != old["proof/0"])
    second = pool.submit(handshake(store, 1).begin, "new")
    (values, key), (_, same_key) = first.result(PATIENCE), second.result(PATIENCE)
    assert values == ["new", "new"]
    assert key == same_key != old_key


def test_single_worker_rejects_old_session(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    # With its key, the messages of that session would be taken once more.
    old, _ = record_session(pool)

    def write_over(key: str) -> None:
        store.records.update(old)

    store.on_set = write_over  # so fast that the worker never sees what it has written itself
    with pytest.raises(AuthenticationError, match=r"worker 1 of 2 has not proven within 0\.5 s"):
        handshake(store, 0, timeout=0.5).begin("new")


def test_proof_belongs_to_one_worker(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    def reflect(key: str) -> None:
        step, _, rank = key.partition("/")
        if rank == "0":
            store.plant(f"{step}/1", store.get(key))

    store.on_set = reflect
    with pytest.raises(AuthenticationError, match="worker 1 of 2 has not proven"):
        handshake(store, 0, timeout=SHORT).begin(0)


def test_record_belongs_to_step_and_size(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    both = [handshake(store, rank) for rank in range(2)]
    all_begin(pool, *both)
    for shown in [pool.submit(one.round, "one", True) for one in both]:
        shown.result(PATIENCE)
    both[0]._timeout = SHORT
    store.plant("two/1", store.get("one/1"))
    with pytest.raises(AuthenticationError, match=r"\(two\)"):
        both[0].round("two", True)
    old, _ = record_session(pool, size=3)
    store.plant("hello/1", old["hello/1"])
    with pytest.raises(AuthenticationError, match=r"worker 1 of 2 .* \(hello\)"):
        handshake(store, 0, timeout=SHORT).begin(0)


@pytest.mark.parametrize("size", [2, 64])
def test_waiting_polls_store_slowly(store: MemoryStore, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """All workers but the last one are there, for five minutes of a clock that the test winds."""
    now = [0.0]
    clock = mock.Mock(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(_handshake, "time", clock)
    for rank in range(1, size - 1):
        handshake(store, rank, size, timeout=0.0)._show("shutdown", True)
    store.requests = 0
    with pytest.raises(TimeoutError, match=f"worker {size - 1} of {size} has not arrived within 300 s"):
        handshake(store, 0, size, timeout=300.0).round("shutdown", True)
    assert store.requests <= 5 * 300 + 2 * size


@pytest.mark.parametrize("size", [2, 64])
def test_waiting_for_proofs_polls_slowly(store: MemoryStore, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    now = [0.0]
    clock = mock.Mock(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(_handshake, "time", clock)
    for rank in range(1, size):
        handshake(store, rank, size, timeout=0.0)._show("hello", {"nonce": f"{rank}", "value": rank})
    store.requests = 0
    with pytest.raises(TimeoutError, match="has not arrived within 300 s"):
        handshake(store, 0, size, timeout=300.0).begin(0)
    assert store.requests <= 5 * 300 + 2 * size


@pytest.mark.parametrize("size", [2, 64])
def test_complete_records_need_one_request(store: MemoryStore, size: int) -> None:
    for rank in range(1, size):
        handshake(store, rank, size)._show("step", rank)
    store.requests = 0
    assert handshake(store, 0, size).round("step", 0) == list(range(size))
    assert store.requests <= 6


def test_only_newest_records_are_restored(store: MemoryStore) -> None:
    """So a worker that needs many rounds to end asks for no more in each."""
    one = handshake(store, 0, 1)
    for i in range(10):
        assert one.round(f"idle/{i}", i) == [i]
    written = dict(store.records)
    store.records.clear()
    assert one.round("last", True) == [True]
    assert {*store.records} == {"idle/7/0", "idle/8/0", "idle/9/0", "last/0"}
    assert all(store.get(key) == written[key] for key in store.records if key != "last/0")
