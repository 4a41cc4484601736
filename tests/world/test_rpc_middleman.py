"""Messages that are changed or exchanged on their way between two workers of a job with a secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import rpc as torch_rpc

import rpc_ext
from cudafuture.errors import AuthenticationError
from cudafuture.testing import World
from rpc_ext import rpc_sync
from world.attacker import HEADER_SIZE, REPLY, REQUEST
from world.middleman import Change, joined, relayed
from world.rpc_callees import add

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("rpc-middleman")]

rpc: Any = torch_rpc


def flip(at: int) -> Change:
    def change(data: bytearray, begin: int) -> None:
        data[begin + at] ^= 1

    return change


class Recorder:
    """Keeps the header of a frame, and puts it on another that has the same payload: that is the first one again."""

    def __init__(self) -> None:
        self._header = b""

    def keep(self, data: bytearray, begin: int) -> None:
        self._header = bytes(data[begin : begin + HEADER_SIZE])

    def put(self, data: bytearray, begin: int) -> None:
        data[begin : begin + HEADER_SIZE] = self._header


PARTS = {
    "magic": 3,
    "version": 4,
    "type": 6,
    "sender": 8,
    "receiver": 12,
    "counter": 16,
    "signature": 24,
    "end of the signature": 55,
    "payload": 56,
}


@pytest.mark.world(2)
@pytest.mark.parametrize("direction", [REQUEST, REPLY])
def test_a_message_that_was_changed_on_its_way_is_an_error_at_the_caller(
    world: World, tmp_path: Path, direction: int
) -> None:
    def run() -> Any:
        rank, seen = dist.get_rank(), dict[str, Any]()
        if rank == 1:
            with joined(1, tmp_path / "file", None, seen):
                dist.barrier()
                return dict(rpc_ext.statistics().refused)
        errors = {}
        with relayed(seen) as relay, joined(0, tmp_path / "file", relay, seen):
            for what, at in PARTS.items():
                for call in (rpc_sync, rpc.rpc_sync):
                    assert call("w1", add, (1, 2)) == 3
                    relay.change_next(direction, flip(at))
                    with pytest.raises(RuntimeError, match="was refused") as caught:
                        call("w1", add, (1, 2))
                    if call is rpc_sync:
                        errors[what] = f"{type(caught.value).__name__}: {caught.value}"
            assert relay.changed == 2 * len(PARTS)
            assert rpc_ext.statistics().destinations["w1"].in_flight == 0
            dist.barrier()
            return errors, dict(rpc_ext.statistics().refused)

    (errors, at_caller), at_callee = world.run(run)
    assert errors.keys() == PARTS.keys()
    for what, error in errors.items():
        assert error.startswith("AuthenticationError"), error
        assert "'w1'" in error
        assert ("it is not signed" if what == "magic" else "its signature is wrong") in error
    if direction == REPLY:
        assert (at_caller, at_callee) == ({"w1": 2 * len(PARTS)}, {})
    else:
        assert at_caller == {}
        assert at_callee == {"": 2, "w0": 2 * len(PARTS) - 4, "w1": 2}


@pytest.mark.world(2)
@pytest.mark.parametrize("direction", [REQUEST, REPLY])
def test_a_message_that_was_recorded_is_not_taken_for_another(world: World, tmp_path: Path, direction: int) -> None:
    def run() -> Any:
        rank, seen = dist.get_rank(), dict[str, Any]()
        if rank == 1:
            with joined(1, tmp_path / "file", None, seen):
                dist.barrier()
                return None
        recorder = Recorder()
        with relayed(seen) as relay, joined(0, tmp_path / "file", relay, seen):
            relay.change_next(direction, recorder.keep)
            assert rpc_sync("w1", add, (1, 2)) == 3
            relay.change_next(direction, recorder.put)
            with pytest.raises(AuthenticationError) as caught:
                rpc_sync("w1", add, (1, 2))
            assert relay.changed == 2
            assert rpc_sync("w1", add, (1, 2)) == 3
            dist.barrier()
            return str(caught.value)

    said, _ = world.run(run)
    assert ("it was received before" if direction == REQUEST else "it was signed as another message") in said
