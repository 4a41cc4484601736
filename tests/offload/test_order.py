"""The order of a client's operations at an offload service, and of all operations on one key."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from unittest import mock

import pytest

from rpc_ext.offload import _order as module
from rpc_ext.offload._order import KeyQueues, RequestOrder
from rpc_ext.offload._wire import Operation
from soak import soak_count


class Clock:
    """The service's clock, which a test sets."""

    def __init__(self) -> None:
        self.now = time.perf_counter()

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", mock.Mock(perf_counter=clock.perf_counter))
    return clock


class Order(RequestOrder):
    """Counts dropped operations."""

    def __init__(self, sent: float) -> None:
        self.dropped = 0
        super().__init__(sent, self._count)

    def _count(self) -> None:
        self.dropped += 1


def never(_: list[int]) -> None:
    raise AssertionError("it has its turn already")


# ---- one client


def test_an_earlier_change_of_a_key_is_superseded_once_a_later_one_has_arrived(clock: Clock) -> None:
    order, until = Order(clock.now), clock.now + 60
    assert order.note_change(Operation(2, 0, until, "a")) is None
    superseded = order.note_change(Operation(1, 0, until, "a"))
    assert isinstance(superseded, TimeoutError)
    assert "after a later one" in str(superseded)
    assert order.note_change(Operation(1, 0, until, "b")) is None
    assert order.dropped == 1


def test_an_operation_is_late_after_its_deadline_whatever_the_clocks_say(clock: Clock) -> None:
    ahead = -5e6  # seconds that the client's clock is ahead
    start = clock.now

    def arrives(sent: float, seconds: float) -> TimeoutError | None:
        order.note_arrival(start + ahead + sent, 0)
        return order.late([Operation(1, 0, start + ahead + sent + seconds, "a")]).get(0)

    clock.now = start + 0.2  # the request to begin takes 0.2 s
    order = Order(start + ahead)
    clock.now = start + 10.05  # a faster one tells the difference of the clocks better
    assert arrives(10.0, 1.0) is None
    clock.now = start + 20.9
    assert arrives(20.0, 1.0) is None
    clock.now = start + 31.1
    late = arrives(30.0, 1.0)
    assert late is not None
    assert "0.05 s after its deadline" in str(late)
    assert order.late([Operation(2, 0, 0.0, "a")]) == {}  # no deadline
    assert order.dropped == 1


def test_an_operation_waits_for_the_one_before_it(clock: Clock) -> None:
    order = Order(clock.now)
    begun: list[int] = []

    def begin(number: int) -> Callable[[list[int]], None]:
        def begin(_: list[int]) -> None:
            begun.append(number)
            order.pass_on([operations[number]])

        return begin

    operations = {i: Operation(i, i - 1, 0.0, "a") for i in range(1, 6)}
    for i in (5, 3, 2):
        assert not order.arrive([operations[i]], begin(i))
    assert order.arrive([Operation(9, 0, 0.0, "b")], never)
    assert order.arrive([operations[1]], never)
    order.pass_on([operations[1]])
    assert begun == [2, 3]
    assert order.arrive([operations[4]], never)
    order.pass_on([operations[4]])
    assert begun == [2, 3, 5]


def test_operations_that_arrive_in_any_order_begin_in_theirs(clock: Clock) -> None:
    numbers = random.Random(1)
    for _ in range(soak_count(200)):
        order = Order(clock.now)
        last: dict[str, int] = {}
        operations = []
        for i in range(1, 40):
            key = numbers.choice("abc")
            operations.append(Operation(i, last.get(key, 0), 0.0, key))
            last[key] = i
        begun: list[Operation] = []

        def begin(operation: Operation, order: Order = order, begun: list[Operation] = begun) -> None:
            begun.append(operation)
            order.pass_on([operation])

        for operation in numbers.sample(operations, len(operations)):
            if order.arrive([operation], lambda _, operation=operation: begin(operation)):  # type: ignore[misc]
                begin(operation)
        for key in "abc":
            assert [o for o in begun if o.key == key] == [o for o in operations if o.key == key]


def test_an_operation_does_not_wait_for_one_that_is_done_at_the_client(clock: Clock) -> None:
    order = Order(clock.now)
    order.note_arrival(clock.now, 5)
    assert order.arrive([Operation(6, 4, 0.0, "a")], never)


@pytest.mark.parametrize("seconds", [1.0, 0.0])
def test_operations_are_forgotten_when_no_earlier_one_can_arrive(clock: Clock, seconds: float) -> None:
    order = Order(clock.now)
    for i in range(1, 10_000):
        operation = Operation(i, 0, clock.now + seconds if seconds else 0.0, f"{i}")
        order.note_arrival(clock.now, i)
        order.note_change(operation)
        order.pass_on([operation])
        clock.now += 0.01
    assert len(order._changes) < 2 * module._PURGE
    assert len(order._latest) < 3 * module._PURGE


# ---- one key


def test_changes_of_a_key_have_their_turn_one_by_one() -> None:
    queues = KeyQueues()
    begun: list[int] = []

    def enter(key: str, is_change: bool, number: int = -1) -> bool:
        return queues.enter([Operation(1, 0, 0.0, key)], [0], is_change, lambda _: begun.append(number)) == [0]

    assert enter("a", True)
    assert enter("b", True)
    for i, is_change in enumerate([False, False, True, False, True]):
        assert not enter("a", is_change, i)
    queues.leave(["b"])
    assert begun == []
    queues.leave(["a"])
    assert begun == [0, 1, 2]
    queues.leave(["a"])
    assert begun == [0, 1, 2, 3, 4]
    queues.leave(["a"])
    assert enter("a", False)
    assert enter("a", False)
    assert enter("a", True)


def test_a_change_waits_until_the_reads_before_it_have_begun() -> None:
    queues = KeyQueues()
    operation = Operation(1, 0, 0.0, "a")
    turns: list[object] = []

    def read(_: list[int]) -> None:
        turns.append(queues.enter([operation], [0], True, lambda _: turns.append("change")))
        turns.append("read")

    assert queues.enter([operation], [0], True, never) == [0]
    queues.enter([operation], [0], False, read)
    queues.leave(["a"])
    assert turns == [[], "read", "change"]


def test_long_chains_of_operations_take_no_stack(clock: Clock) -> None:
    order, queues, begun = Order(clock.now), KeyQueues(), 0
    operations = [Operation(i, i - 1, 0.0, "a") for i in range(1, 20_000)]

    def begin(operation: Operation) -> None:
        def change(_: list[int]) -> None:
            nonlocal begun
            begun += 1
            queues.leave(["a"])

        if queues.enter([operation], [0], True, change):
            change([0])
        order.pass_on([operation])

    for operation in reversed(operations[1:]):
        assert not order.arrive([operation], lambda _, operation=operation: begin(operation))  # type: ignore[misc]
    begin(operations[0])
    assert begun == len(operations)


def test_an_operation_that_cannot_begin_holds_up_no_other(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    queues, begun = KeyQueues(), CountedTurns()
    assert queues.enter([Operation(1, 0, 0.0, "a")], [0], True, never)

    def fail(_: list[int]) -> None:
        raise MemoryError("no memory")

    queues.enter([Operation(2, 0, 0.0, "a")], [0], False, fail)
    queues.enter([Operation(3, 0, 0.0, "a")], [0], False, begun)
    queues.leave(["a"])
    assert begun.count == 1
    assert "no memory" in caplog.text


class CountedTurns:
    """Counts its calls."""

    count = 0

    def __call__(self, _: list[int]) -> None:
        self.count += 1
