"""Which of a client's requests to an offload service are late."""

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


def test_an_earlier_change_of_a_key_is_late_once_a_later_one_has_arrived() -> None:
    order = RequestOrder()
    first, second = Stamp(1, 0.0, 0.0), Stamp(2, 0.0, 0.0)
    order.change(second, ["a"])
    order.change(first, ["a", "b"])
    assert isinstance(order.late(first, "a"), TimeoutError)
    assert order.late(first, "b") is None
    assert order.late(second, "a") is None
    assert order.dropped == 1


def test_a_request_is_late_after_its_deadline_whatever_the_clocks_say(clock: Clock) -> None:
    order, client = RequestOrder(), -5e6  # what the client's clock says when the service's says 0
    start = clock.now

    def sent(at: float, seconds: float) -> Stamp:
        now = start + client + at
        return Stamp(1, now, now + seconds)

    clock.now = start + 0.2  # the first request takes 0.2 s
    order.expect_in_time(sent(0.0, 1.0))
    clock.now = start + 10.05  # a faster one tells the difference of the clocks better
    order.expect_in_time(sent(10.0, 1.0))
    clock.now = start + 20.9
    order.expect_in_time(sent(20.0, 1.0))
    clock.now = start + 31.1
    with pytest.raises(TimeoutError, match=r"0\.05 s after its deadline"):
        order.expect_in_time(sent(30.0, 1.0))
    order.expect_in_time(Stamp(2, start + client, 0.0))  # no deadline
    assert order.dropped == 1


def test_a_change_that_waits_is_late_when_its_deadline_passes(clock: Clock) -> None:
    order = RequestOrder()
    stamp = Stamp(1, clock.now, clock.now + 1)
    order.expect_in_time(stamp)
    order.change(stamp, ["a"])
    assert order.late(stamp, "a") is None
    clock.now += 2
    assert isinstance(order.late(stamp, "a"), TimeoutError)


def test_changes_are_forgotten_when_no_earlier_request_can_come(clock: Clock) -> None:
    order = RequestOrder()
    for i in range(10_000):
        stamp = Stamp(i + 1, clock.now, clock.now + 1)
        order.expect_in_time(stamp)
        order.change(stamp, [f"{i}"])
        clock.now += 0.01
    assert len(order._changes) < 2 * _offload_order._PURGE
