"""What the owner of an RRef promises, while the arguments that its value is made of are still on their way."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest

from cudafuture import CUDAFuture
from rpc_ext._promises import Promises

TICKET = (1, 7)


@pytest.mark.parametrize("first", ["take", "keep"])
def test_both_sides_come_in_either_order(first: str) -> None:
    promises = Promises()
    outcome: CUDAFuture[int] = CUDAFuture()
    if first == "keep":
        promises.keep(TICKET, outcome)
    taken = promises.take(TICKET)
    if first == "take":
        assert len(promises) == 1
        promises.keep(TICKET, outcome)
    assert len(promises) == 0
    assert not taken.done()
    outcome.set_result(3)
    assert taken.value() == 3


def test_a_value_that_could_not_be_made_fails_who_has_taken_it() -> None:
    promises = Promises()
    taken = promises.take(TICKET)
    promises.keep(TICKET, CUDAFuture.failed(LookupError("not there")))
    with pytest.raises(LookupError, match="not there"):
        taken.value()


def test_what_is_given_up_fails_and_may_be_kept_nonetheless() -> None:
    promises = Promises()
    taken = promises.take(TICKET)
    promises.give_up(TICKET, TimeoutError("never came"))
    with pytest.raises(TimeoutError, match="never came"):
        taken.value()
    promises.keep(TICKET, CUDAFuture.completed(3))
    assert isinstance(taken.exception(), TimeoutError)
    assert len(promises) == 0


def test_what_was_kept_cannot_be_given_up() -> None:
    promises = Promises()
    taken = promises.take(TICKET)
    promises.keep(TICKET, CUDAFuture.completed(3))
    promises.give_up(TICKET, TimeoutError("too late"))
    assert taken.value() == 3
    assert len(promises) == 0


def test_what_is_never_taken_or_never_kept_is_forgotten_in_the_end() -> None:
    promises = Promises()
    taken, given_up = promises.take((0, 1)), promises.take((0, 2))
    promises.give_up((0, 2), LookupError("never came"))
    promises.keep((0, 3), CUDAFuture.completed(3))
    with mock.patch("rpc_ext._promises._KEPT", -1.0):
        last = promises.take(TICKET)
    assert len(promises) == 1
    assert isinstance(taken.exception(), TimeoutError)
    assert isinstance(given_up.exception(), LookupError)
    promises.keep(TICKET, CUDAFuture.completed(4))
    assert last.value() == 4


def test_tickets_do_not_mix() -> None:
    promises = Promises()
    tickets = list(itertools.product(range(3), range(3)))
    taken = [promises.take(ticket) for ticket in tickets]
    for ticket in reversed(tickets):
        promises.keep(ticket, CUDAFuture.completed(ticket))
    assert [future.value() for future in taken] == tickets
