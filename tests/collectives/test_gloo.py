"""Gloo's thread has ended: what it would have completed fails, whatever is raised on the way."""

from __future__ import annotations

import pytest

from cudafuture import _C, CUDAFuture, timer
from cudafuture.distributed import _gloo
from support.patience import PATIENCE


def test_overdue_check_continues_after_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    raised: list[Exception] = [RuntimeError("of one group"), LookupError("of another group")]
    checked: CUDAFuture[None] = CUDAFuture()

    def fail_overdue(*_: object) -> None:
        if raised:
            raise raised.pop(0)
        if not checked.done():
            checked.set_result(None)

    monkeypatch.setattr(_C, "fail_overdue", fail_overdue)
    monkeypatch.setattr(_gloo, "_INTERVAL", 0.001)
    check = _gloo._OverdueCheck()
    timer.schedule(check, 0)
    checked.wait(timeout=PATIENCE)
    timer.cancel(check)
    assert "of one group" in caplog.text
    assert "of another group" in caplog.text
