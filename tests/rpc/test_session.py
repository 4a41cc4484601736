"""The functions that a session calls at its end, and the pool that it receives tensors into."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc as torch_rpc

import rpc_ext
from cudafuture import InvalidStateError
from rpc_ext import _agent, _engine, rpc_sync
from rpc_ext import session as rpc_session
from support.child import run_script
from support.rpc_callees import ME, alone, raises, same

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("rpc-session")]

MIB = 1 << 20


# ---- functions called at the end


def end_with_torch() -> None:
    torch_rpc.shutdown(graceful=False)
    with pytest.raises(InvalidStateError, match="has ended RPC"):
        rpc_ext.shutdown()


ENDS = {
    "graceful": rpc_ext.shutdown,
    "at once": lambda: rpc_ext.shutdown(graceful=False),
    "torch first": end_with_torch,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_shutdown_functions_run_once_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[], None]
) -> None:
    called: list[tuple[str, bool]] = []

    def make_hook(name: str) -> Callable[[], None]:
        return lambda: called.append((name, _engine.has_agent()))

    monkeypatch.setattr(rpc_session, "_called_at_every_end", list(rpc_session._called_at_every_end))
    rpc_session.call_at_end(make_hook("every session"))
    with alone(tmp_path / "rendezvous") as session:
        session.call_at_end(make_hook("first"))
        session.call_at_end(make_hook("second"))
        end()
    expected = ["every session", "first", "second"]
    assert called == [(name, False) for name in expected]
    with pytest.raises(InvalidStateError, match="has ended"):
        session.call_at_end(make_hook("too late"))
    with alone(tmp_path / "again"):
        pass
    assert called[3:] == [("every session", False)]


def test_raising_shutdown_function_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    called: list[int] = []
    with alone(tmp_path / "rendezvous") as session:
        session.call_at_end(lambda: raises(LookupError("expected")))
        session.call_at_end(lambda: called.append(1))
    assert called == [1]
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "registered for the end of RPC" in record.getMessage()
    assert "LookupError: expected" in caplog.text


def test_interrupted_shutdown_function_raises_last(tmp_path: Path) -> None:
    called: list[int] = []
    with alone(tmp_path / "rendezvous") as session:
        session.call_at_end(lambda: raises(KeyboardInterrupt()))
        session.call_at_end(lambda: called.append(1))
        with pytest.raises(KeyboardInterrupt):
            rpc_ext.shutdown()
    assert called == [1]
    with alone(tmp_path / "again"):
        assert rpc_sync(ME, same, (1,)) == 1


AT_EXIT = """
import sys, rpc_ext
session = rpc_ext.init_rpc("me", rank=0, world_size=1, init_method=f"file://{sys.argv[1]}")
session.call_at_end(lambda: print("ended", flush=True))
"""


def test_shutdown_functions_run_at_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    done = run_script(AT_EXIT, str(tmp_path / "rendezvous"))
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


# ---- the pool that tensors are received into


def count_received(tensor: torch.Tensor) -> int:
    """Send a tensor to this worker and back; return the bytes received outside of the pool."""
    before = rpc_ext.statistics().received_outside
    assert torch.equal(rpc_sync(ME, same, (tensor,)), tensor)
    return rpc_ext.statistics().received_outside - before


@pytest.mark.parametrize("receive_memory", [64 * MIB, 4096, 0], ids=["pool", "small pool", "no pool"])
def test_receive_memory_sets_pool_size(tmp_path: Path, receive_memory: int) -> None:
    tensor = torch.arange(2 * MIB // 4, dtype=torch.int32)
    with alone(tmp_path / "rendezvous", receive_memory=receive_memory):
        outside = count_received(tensor)
        assert count_received(tensor[: MIB // 8].clone()) == 0  # smaller tensors never use the pool
    assert outside == (2 * tensor.nbytes if receive_memory == 4096 else 0)


def test_received_tensor_uses_pool_memory(tmp_path: Path) -> None:
    with alone(tmp_path / "rendezvous", receive_memory=64 * MIB):
        kept = rpc_sync(ME, same, (torch.ones(2 * MIB // 4),))
        pool = _agent._pools[64 * MIB]
        assert pool.free <= 62 * MIB
    with alone(tmp_path / "again", receive_memory=0):
        free = pool.free
        plain = rpc_sync(ME, same, (torch.ones(2 * MIB // 4),))
        assert pool.free == free
    assert torch.equal(kept, plain)


@pytest.mark.parametrize(("receive_memory", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_invalid_receive_memory_is_refused(receive_memory: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        rpc_ext.init_rpc(ME, rank=0, world_size=1, receive_memory=receive_memory)
