"""Batches of which something cannot be sent, and what becomes of the rest."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rpc_ext
from cudafuture import CUDAFuture, wait_all
from rpc_ext import _batching, batch, rpc_async
from support.patience import PATIENCE
from support.rpc_callees import ME, Gate, add, alone, same, sees, waits

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("rpc-batch")]


def test_unknown_function_fails_own_calls(worker: rpc_ext.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("not_there")
    exec("def function(): pass", module.__dict__)
    with batch(ME), monkeypatch.context() as patch:
        before = [rpc_async(ME, add, (i, 1)) for i in range(3)]
        patch.setitem(sys.modules, "not_there", module)
        lost = rpc_async(ME, module.function)
        patch.delitem(sys.modules, "not_there")
        after = [rpc_async(ME, add, (i, 1)) for i in range(300)]
    assert isinstance(lost.exception(timeout=PATIENCE), ModuleNotFoundError)
    assert wait_all(before, timeout=PATIENCE) == [1, 2, 3]
    assert wait_all(after, timeout=PATIENCE) == list(range(1, 301))


def test_methods_carry_their_objects(worker: rpc_ext.Session) -> None:
    numbers = {"one": 1}
    with batch(ME):
        sums = rpc_async(ME, torch.ones(2).add, (1,))
        before = rpc_async(ME, numbers.__getitem__, ("one",))
        numbers["one"] = 2
        after = rpc_async(ME, numbers.__getitem__, ("one",))
        others = [rpc_async(ME, add, (i, 1)) for i in range(3)]
    assert sums.wait(timeout=PATIENCE).tolist() == [2, 2]
    assert (before.wait(timeout=PATIENCE), after.wait(timeout=PATIENCE)) == (1, 2)
    assert wait_all(others, timeout=PATIENCE) == [1, 2, 3]


def test_error_while_packing_fails_its_calls(worker: rpc_ext.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("expected")

    with monkeypatch.context() as patch:
        patch.setattr(_batching._BatchMessage, "_send", fails)
        with batch(ME):
            futures = [rpc_async(ME, same, (i,), timeout=PATIENCE + i % 2) for i in range(2000)]
        assert all(isinstance(future.exception(timeout=PATIENCE), MemoryError) for future in futures)
    assert rpc_ext.statistics().destinations[ME].in_flight == 0
    with batch(ME):
        again = [rpc_async(ME, add, (i, 1)) for i in range(3)]
    assert wait_all(again, timeout=PATIENCE) == [1, 2, 3]


def test_call_cancelled_before_sending_is_skipped(worker: rpc_ext.Session, gate: Gate) -> None:
    with batch(ME):
        first = rpc_async(ME, waits, (gate,))
        assert gate.reached.wait(PATIENCE)
        futures = [rpc_async(ME, sees, (gate, i)) for i in range(4)]
        assert futures[1].cancel()
        gate.open()
    first.wait(timeout=PATIENCE)
    assert [future.wait(timeout=PATIENCE) for future in (futures[0], *futures[2:])] == [0, 2, 3]
    assert gate.seen == [0, 2, 3]
    assert rpc_ext.statistics().destinations[ME].in_flight == 0


# ---- room


def test_caller_without_blocking_gets_room_eventually(tmp_path: Path) -> None:
    with alone(tmp_path / "rendezvous", max_in_flight=4), batch(ME):
        futures: list[CUDAFuture[Any]] = []
        while len(futures) < 20:
            with contextlib.suppress(BlockingIOError):
                futures.append(rpc_async(ME, same, (len(futures),), non_blocking=True))
        assert wait_all(futures, timeout=PATIENCE) == list(range(20))


def test_nested_batches_share_room(tmp_path: Path) -> None:
    with alone(tmp_path / "rendezvous", max_in_flight=4), batch(ME):
        outer = [rpc_async(ME, same, (i,)) for i in range(4)]
        with batch(ME):
            inner = [rpc_async(ME, same, (i,), timeout=PATIENCE) for i in range(4)]
        assert wait_all([*outer, *inner], timeout=PATIENCE) == [*range(4), *range(4)]
