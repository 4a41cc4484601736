"""Tensors that an offload service keeps for a client until it has fetched their parts."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from cudafuture.errors import InvalidStateError
from cudafuture.storage import Offloader
from rpc_ext.offload import _reading as reading
from rpc_ext.offload._order import RequestOrder
from rpc_ext.offload._reading import KeptReads
from rpc_ext.offload._wire import PIECE, Fetch, Operation
from unit.storing import PATIENCE


def test_a_part_is_fetched_once_and_the_tensor_is_dropped_with_the_last(tmp_path: Path) -> None:
    with Offloader(tmp_path / "store") as store:
        store.write("x", torch.zeros(2 * PIECE + 1, dtype=torch.uint8)).wait(timeout=PATIENCE)
        kept = KeptReads(RequestOrder(time.perf_counter(), lambda: None))
        (snapshot,) = store.snapshots(["x"])
        assert snapshot is not None
        kept.keep(Operation(1, 0, 0.0, "x"), snapshot, has_first=True)
        assert kept.take(Fetch(1, 2)) == (snapshot, "x")
        for part in (0, 2, 3):
            with pytest.raises(InvalidStateError, match="does not keep this read"):
                kept.take(Fetch(1, part))
        kept.take(Fetch(1, 1))
        with pytest.raises(InvalidStateError):
            kept.take(Fetch(1, 1))
        kept.keep(Operation(2, 0, 0.0, "x"), snapshot, has_first=False)
        kept.drop(2)
        with pytest.raises(InvalidStateError):
            kept.take(Fetch(2, 0))


def test_a_tensor_is_dropped_when_the_time_of_its_read_is_over(tmp_path: Path) -> None:
    """So a client that timed out keeps no old tensor on the disk."""
    with Offloader(tmp_path / "store") as store:
        store.write("x", torch.zeros(PIECE + 1, dtype=torch.uint8)).wait(timeout=PATIENCE)
        now = time.perf_counter()
        kept = KeptReads(RequestOrder(now, lambda: None))
        with mock.patch.object(reading._timer, "schedule") as schedule:
            for i, seconds in enumerate((PATIENCE, 2 * PATIENCE), start=1):
                (snapshot,) = store.snapshots(["x"])
                assert snapshot is not None
                kept.keep(Operation(i, 0, now + seconds, "x"), snapshot, has_first=True)
        due = [call.args[1] for call in schedule.call_args_list]
        assert due == pytest.approx([now + PATIENCE, now + 2 * PATIENCE], abs=PATIENCE / 2)
        with mock.patch.object(reading.time, "perf_counter", return_value=now + 1.5 * PATIENCE):
            again = kept.look(now + 1.5 * PATIENCE)
        assert again == pytest.approx(now + 2 * PATIENCE, abs=PATIENCE / 4)
        with pytest.raises(InvalidStateError):
            kept.take(Fetch(1, 1))
        kept.take(Fetch(2, 1))
