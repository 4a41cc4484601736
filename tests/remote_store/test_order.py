"""The order of a client's operations at a store service, and of all operations on one key."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cudafuture.store import DiskStore
from rpc_ext import _C
from support.soak import soak_count


@pytest.fixture
def order() -> _C.RequestOrder:
    return _C.RequestOrder(time.perf_counter(), None)


@pytest.fixture
def space(tmp_path: Path) -> _C.Namespace:
    with DiskStore(tmp_path / "store") as store:
        return _C.Namespace(store.native_access(), "a namespace/", None, [])


def never() -> None:
    raise AssertionError("it has its turn already")


# ---- one client


def test_later_change_supersedes_earlier_one(order: _C.RequestOrder) -> None:
    until = time.perf_counter() + 60
    assert order.note_change("a", 2, until)
    assert not order.note_change("a", 1, until)
    assert order.note_change("b", 1, until)


def test_deadline_ignores_clock_differences() -> None:
    ahead = 5e6  # seconds that the client's clock is ahead
    clients = time.perf_counter() + ahead
    order = _C.RequestOrder(clients - 100, None)  # the request to begin took 100 s
    assert order.late(clients - 50) is None
    order.note_arrival(clients, 0)  # a faster one tells the difference of the clocks better
    assert order.late(clients - 50) == pytest.approx(50, abs=10)
    assert order.late(clients + 50) is None
    order.note_arrival(clients - 100, 0)  # a slower one does not
    assert order.late(clients - 50) == pytest.approx(50, abs=10)
    assert order.late(0.0) is None  # no deadline
    assert order.left(0.0) == float("inf")
    assert order.left(clients + 50) == pytest.approx(50, abs=10)


def test_operation_waits_for_predecessor(order: _C.RequestOrder) -> None:
    begun: list[int] = []

    def begin(number: int) -> Callable[[], None]:
        def begin() -> None:
            begun.append(number)
            order.pass_on("a", number)

        return begin

    for i in (5, 3, 2):
        assert not order.arrive("a", i - 1, begin(i), None)
    assert order.arrive("b", 0, never, None)
    assert order.arrive("a", 0, never, None)
    order.pass_on("a", 1)
    assert begun == [2, 3]
    assert order.arrive("a", 3, never, None)
    order.pass_on("a", 4)
    assert begun == [2, 3, 5]


def test_reordered_operations_begin_in_order() -> None:
    numbers = random.Random(1)
    for _ in range(soak_count(200)):
        order = _C.RequestOrder(time.perf_counter(), None)
        last: dict[str, int] = {}
        operations = []
        for i in range(1, 40):
            key = numbers.choice("abc")
            operations.append((i, last.get(key, 0), key))
            last[key] = i
        begun: list[tuple[int, int, str]] = []

        def begin(
            operation: tuple[int, int, str], order: _C.RequestOrder = order, begun: list[tuple[int, int, str]] = begun
        ) -> None:
            begun.append(operation)
            order.pass_on(operation[2], operation[0])

        for operation in numbers.sample(operations, len(operations)):
            if order.arrive(operation[2], operation[1], lambda operation=operation: begin(operation), None):  # type: ignore[misc]
                begin(operation)
        for key in "abc":
            assert [o for o in begun if o[2] == key] == [o for o in operations if o[2] == key]


def test_done_predecessor_delays_no_operation(order: _C.RequestOrder) -> None:
    order.note_arrival(time.perf_counter(), 5)
    assert order.arrive("a", 4, never, None)


def test_session_end_starts_waiting_operations(order: _C.RequestOrder) -> None:
    begun: list[int] = []
    for i in (7, 3):
        assert not order.arrive("a", i, lambda i=i: begun.append(i), None)  # type: ignore[misc]
    order.end()
    assert begun == [3, 7]
    assert order.arrive("a", 9, never, None)  # a request that was on its way to the session


@pytest.mark.parametrize("has_deadline", [True, False])
def test_old_operations_are_forgotten(order: _C.RequestOrder, has_deadline: bool) -> None:
    now = time.perf_counter()
    for i in range(1, 10_000):
        order.note_arrival(now, i)
        order.note_change(f"{i}", i, now - 60 if has_deadline else 0.0)
        order.pass_on(f"{i}", i)
    assert order.remembered < 5000


# ---- one key


def test_changes_of_key_run_one_by_one(space: _C.Namespace) -> None:
    begun: list[int] = []

    def enter(key: str, is_change: bool, number: int = -1) -> bool:
        return space.enter(key, is_change, lambda: begun.append(number))

    assert enter("a", True)
    assert enter("b", True)
    for i, is_change in enumerate([False, False, True, False, True]):
        assert not enter("a", is_change, i)
    space.leave("b")
    assert begun == []
    space.leave("a")
    assert begun == [0, 1, 2]
    space.leave("a")
    assert begun == [0, 1, 2, 3, 4]
    space.leave("a")
    assert enter("a", False)
    assert enter("a", False)
    assert enter("a", True)


def test_change_waits_for_earlier_reads(space: _C.Namespace) -> None:
    turns: list[object] = []

    def read() -> None:
        turns.append(space.enter("a", True, lambda: turns.append("change")))
        turns.append("read")

    assert space.enter("a", True, never)
    assert not space.enter("a", False, read)
    space.leave("a")
    assert turns == [False, "read", "change"]


def test_long_operation_chains_use_no_stack(order: _C.RequestOrder, space: _C.Namespace) -> None:
    begun = 0

    def begin(number: int) -> None:
        def change() -> None:
            nonlocal begun
            begun += 1
            space.leave("a")

        if space.enter("a", True, change):
            change()
        order.pass_on("a", number)

    for i in reversed(range(2, 20_000)):
        assert not order.arrive("a", i - 1, lambda i=i: begin(i), space)  # type: ignore[misc]
    begin(1)
    assert begun == 19_999


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_failed_start_blocks_no_operation(space: _C.Namespace) -> None:
    begun: list[int] = []
    assert space.enter("a", True, never)

    def fail() -> None:
        raise MemoryError("no memory")

    assert not space.enter("a", False, fail)
    assert not space.enter("a", False, lambda: begun.append(1))
    space.leave("a")
    assert begun == [1]
