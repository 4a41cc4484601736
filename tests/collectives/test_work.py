"""A Work whose class is written in Python: its future is completed, whatever its methods raise."""

from __future__ import annotations

from typing import Any

import pytest

from cudafuture import CUDAFuture, _work
from support.patience import PATIENCE


class Work:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def wait(self) -> None:
        pass

    def result(self) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [1]


@pytest.mark.parametrize("error", [KeyError("k"), SystemExit(1)])
def test_raising_result_fails_future(error: BaseException) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    _work.follow(Work(error), future)
    assert future.exception(timeout=PATIENCE) is error


def test_completed_future_stays_completed() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    future.set_result(7)
    _work._wait(Work(), future)
    assert future.wait() == 7
