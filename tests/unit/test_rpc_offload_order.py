"""Late requests of a client to an offload service."""

from __future__ import annotations

import time
from unittest import mock

import pytest

from rpc_ext import _offload_order
from rpc_ext._offload_order import RequestOrder, Stamp


class Clock:
    """The service's clock, which a test sets."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_offload_order, "time", mock.Mock(monotonic=clock.monotonic))
    return clock


class Order(RequestOrder):
    """Counts what is late."""

    def __init__(self, sent: float) -> None:
        self.dropped = 0
        super().__init__(sent, self._count)

    def _count(self) -> None:
        self.dropped += 1


def test_an_earlier_change_of_a_key_is_late_once_a_later_one_has_arrived(clock: Clock) -> None:
    order, until = Order(clock.now), {"a": clock.now + 60, "b": clock.now + 60}
    first, second = (Stamp(i, clock.now, clock.now + 60) for i in (1, 2))
    order.change(second, {"a": second.expires})
    order.change(first, until)
    assert isinstance(order.late(first, until, "a"), TimeoutError)
    assert order.late(first, until, "b") is None
    assert order.late(second, until, "a") is None
    assert order.dropped == 1


def test_a_request_is_late_after_its_deadline_whatever_the_clocks_say(clock: Clock) -> None:
    client = -5e6  # seconds that the client's clock is ahead
    start = clock.now

    def sent(at: float, seconds: float) -> Stamp:
        now = start + client + at
        return Stamp(1, now, now + seconds)

    clock.now = start + 0.2  # the request to begin takes 0.2 s
    order = Order(start + client)
    clock.now = start + 10.05  # a faster one tells the difference of the clocks better
    order.expect_in_time(sent(10.0, 1.0))
    clock.now = start + 20.9
    order.expect_in_time(sent(20.0, 1.0))
    clock.now = start + 31.1
    with pytest.raises(TimeoutError, match=r"0\.05 s after its deadline"):
        order.expect_in_time(sent(30.0, 1.0))
    order.expect_in_time(Stamp(2, start + client, 0.0))  # no deadline
    assert order.dropped == 1


def test_the_first_request_of_a_session_is_late_after_its_deadline(clock: Clock) -> None:
    order = Order(clock.now)
    first = Stamp(1, clock.now, clock.now + 1)
    clock.now += 30
    with pytest.raises(TimeoutError, match="29 s after its deadline"):
        order.expect_in_time(first)


def test_a_change_that_waits_is_late_when_its_own_deadline_passes(clock: Clock) -> None:
    """The request of which it is a part has a later one."""
    order = Order(clock.now)
    stamp, until = Stamp(1, clock.now, clock.now + 60), {"a": clock.now + 1, "b": clock.now + 60}
    order.expect_in_time(stamp)
    order.change(stamp, until)
    assert order.late(stamp, until, "a") is None
    clock.now += 2
    assert isinstance(order.late(stamp, until, "a"), TimeoutError)
    assert order.late(stamp, until, "b") is None


@pytest.mark.parametrize("seconds", [1.0, 0.0])
def test_changes_are_forgotten_when_no_earlier_request_can_come(clock: Clock, seconds: float) -> None:
    order = Order(clock.now)
    for i in range(10_000):
        stamp = Stamp(i + 1, clock.now, clock.now + seconds if seconds else 0.0)
        order.expect_in_time(stamp)
        order.change(stamp, {f"{i}": stamp.expires})
        clock.now += 0.01
    assert len(order._changes) < 2 * _offload_order._PURGE
