"""The agreement of workers on the session that they begin."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from rpc.memory_store import MemoryStore
from rpc_ext import _rendezvous
from rpc_ext._rendezvous import agree
from support.patience import PATIENCE

SHORT = 0.05  # seconds, where it has to come to that


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def all_agree(pool: ThreadPoolExecutor, store: MemoryStore, size: int) -> set[int]:
    met = [pool.submit(agree, store, rank, size, PATIENCE) for rank in range(size)]
    return {each.result(PATIENCE) for each in met}


@pytest.mark.parametrize("size", [1, 2, 7])
def test_workers_share_new_number_each_time(store: MemoryStore, pool: ThreadPoolExecutor, size: int) -> None:
    numbers = [all_agree(pool, store, size) for _ in range(3)]
    assert [len(each) for each in numbers] == [1, 1, 1]
    assert len(set.union(*numbers)) == 3


@pytest.mark.parametrize("first", [0, 1, 2])
def test_abandoned_start_delays_nobody_else(store: MemoryStore, pool: ThreadPoolExecutor, first: int) -> None:
    with pytest.raises(TimeoutError):
        agree(store, first, 3, SHORT)
    assert len(all_agree(pool, store, 3)) == 1


def test_restarting_worker_joins_waiting_ones(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    others = [pool.submit(agree, store, rank, 3, PATIENCE) for rank in (0, 1)]
    for _ in range(3):  # each time its start is given up, and the others have a session with it, or not yet
        with pytest.raises(TimeoutError):
            agree(Stale(store), 2, 3, 0.0)
    last = agree(store, 2, 3, PATIENCE)
    assert {each.result(PATIENCE) for each in others} == {last}


class Stale:
    """The store as a worker sees it that gives up before the others' session is there."""

    def __init__(self, store: MemoryStore) -> None:
        self.set, self.add, self.get, self.multi_get = store.set, store.add, store.get, store.multi_get

    def check(self, keys: list[str]) -> bool:
        return False


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_absent_workers_are_named(store: MemoryStore, rank: int) -> None:
    with pytest.raises(TimeoutError, match=f"worker {', '.join(str(r) for r in range(3) if r != rank)} of 3 has not"):
        agree(store, rank, 3, SHORT)


def test_vanished_worker_is_named(store: MemoryStore, pool: ThreadPoolExecutor) -> None:
    all_agree(pool, store, 3)
    missing = [pool.submit(agree, store, rank, 3, 5 * SHORT) for rank in (0, 1)]
    for each in missing:
        with pytest.raises(TimeoutError, match="worker 2 of 3 has not arrived"):
            each.result(PATIENCE)


@pytest.mark.parametrize("record", [b"\x80", b"9" * 5000, b"-1", b"0", b"1 2", b""])
@pytest.mark.parametrize("step", ["come/1", "session/1/1"])
def test_overwritten_record_is_restored(store: MemoryStore, pool: ThreadPoolExecutor, step: str, record: bytes) -> None:
    written: list[str] = []

    def write_over(key: str) -> None:
        if key == step and not written:
            written.append(key)
            store.plant(key, record)

    store.on_set = write_over
    assert len(all_agree(pool, store, 3)) == 1
    assert written == [step]


@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", ["come", "seen"])
def test_waiting_polls_store_slowly(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, size: int, rank: int, stage: str
) -> None:
    """All workers but the last one are there, for five minutes of a clock that the test winds."""
    now = [0.0]
    clock = mock.Mock(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(_rendezvous, "time", clock)
    for other in set(range(size)) - {rank} - ({size - 1} if stage == "come" else set()):
        store.plant(f"come/{other}", b"1")
    if rank:
        store.plant(f"session/{rank}/1", b"1")
    with pytest.raises(TimeoutError, match="has not arrived within 300 s"):
        agree(store, rank, size, 300.0)
    assert store.requests <= 5 * 300 + 3 * size


@pytest.mark.parametrize("pause", [0.1 * i for i in range(1, 60)])
def test_second_start_begins_soon(store: MemoryStore, monkeypatch: pytest.MonkeyPatch, pause: float) -> None:
    """The first worker finds the records of the start before, and the other one comes so many seconds later."""
    store.plant("come/1", b"1")
    store.plant("tries/1", b"1")
    now, others = [0.0], list[_rendezvous._Rendezvous]()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= pause and not others:
            others.append(_rendezvous._Rendezvous(store, 1, 2))
        for other in others:
            other._find()

    monkeypatch.setattr(_rendezvous, "time", mock.Mock(monotonic=lambda: now[0], sleep=sleep))
    agree(store, 0, 2, 300.0)
    assert now[0] - pause <= 1.6
