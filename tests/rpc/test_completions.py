"""Failures on the threads of RPC are reported, and end nothing else."""

from __future__ import annotations

import pytest
import torch

from cudafuture import CUDAFuture, InvalidStateError
from rpc_ext import _staging
from rpc_ext._serve import Server
from support.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("on_the_host")


def test_failed_copies_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[torch.Tensor]:
        raise MemoryError("no memory for a list")

    monkeypatch.setattr(_staging, "_replaced", refuse)
    copies = _staging.to_host([torch.ones(1)], ["cpu"], 0, 0)
    assert isinstance(copies.exception(timeout=PATIENCE), MemoryError)


def test_ended_session_fails_reference_futures() -> None:
    server = Server("me", 1)
    before: CUDAFuture[int] = CUDAFuture()
    done: CUDAFuture[int] = CUDAFuture()
    after: CUDAFuture[int] = CUDAFuture()
    server.fail_at_end(before)
    server.fail_at_end(done)
    done.set_result(1)
    assert len(server._awaited) == 1
    server.close()
    server.fail_at_end(after)
    for future in (before, after):
        assert isinstance(future.exception(timeout=0), InvalidStateError)
    assert done.value() == 1
    assert not server._awaited
