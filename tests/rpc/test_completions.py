"""Failures on the threads of RPC are reported, and end nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture
from rpc_ext import _staging
from rpc_ext._timer import _Timer
from support.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("on_the_host")


class Due(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def test_raising_entry_spares_timer_thread(caplog: pytest.LogCaptureFixture) -> None:
    timer = _Timer()
    looked: CUDAFuture[None] = CUDAFuture()

    def fail(_: float) -> float | None:
        raise OSError("while it was looked at")

    bad: Any = Due(look=fail)
    good: Any = Due(look=lambda _: looked.set_result(None))
    with timer._changed:  # both are due in one round, the one that raises first
        timer.schedule(bad, 0.0)
        timer.schedule(good, 0.0)
    looked.wait(timeout=PATIENCE)
    timer.end()
    assert "while it was looked at" in caplog.text


def test_failed_copies_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[torch.Tensor]:
        raise MemoryError("no memory for a list")

    monkeypatch.setattr(_staging, "_replaced", refuse)
    copies = _staging.to_host([torch.ones(1)], ["cpu"], 0, 0)
    assert isinstance(copies.exception(timeout=PATIENCE), MemoryError)
