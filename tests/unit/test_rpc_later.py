"""Answers that are kept until they are asked for."""

from __future__ import annotations

from unittest import mock

import pytest

from cudafuture import CUDAFuture
from cudafuture.errors import NotFoundError
from rpc_ext._later import Later


def test_an_answer_is_taken_once_by_its_number() -> None:
    later: Later[str] = Later()
    answers = [CUDAFuture.completed("a"), CUDAFuture.completed("b")]
    numbers = [later.keep(answer) for answer in answers]
    assert [later.take(number) for number in reversed(numbers)] == answers[::-1]
    for number in (*numbers, 7):
        with pytest.raises(NotFoundError, match=f"no answer is kept under number {number}"):
            later.take(number)


def test_what_nobody_asks_for_is_not_kept_for_ever() -> None:
    later: Later[str] = Later()
    old = later.keep(CUDAFuture.completed("old"))
    with mock.patch("rpc_ext._later._KEPT", 0.0):
        new = later.keep(CUDAFuture.completed("new"))
    assert later.take(new).value() == "new"
    with pytest.raises(NotFoundError):
        later.take(old)
