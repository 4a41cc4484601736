"""Gloo's thread has ended: what it would have completed fails, whatever is raised on the way."""

from __future__ import annotations

import pytest

from cudafuture import _C
from cudafuture.distributed import _gloo


def test_overdue_check_continues_after_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    raised = [RuntimeError("of one group"), SystemExit(1)]  # the second ends the loop

    def fail_overdue(*_: object) -> None:
        raise raised.pop(0)

    monkeypatch.setattr(_C, "fail_overdue", fail_overdue)
    monkeypatch.setattr(_gloo, "_PAUSE", 0)
    with pytest.raises(SystemExit):
        _gloo._fail_overdue()
    assert "of one group" in caplog.text
