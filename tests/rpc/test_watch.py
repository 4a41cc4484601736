"""The liveness of workers: one dies, falls silent, or stays."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rpc_ext
from cudafuture import CUDAFuture, executors
from cudafuture.errors import AuthenticationError, InvalidStateError, WorkerLostError
from rpc_ext import RemoteStore, rpc_sync, serve_store, watch
from support.ranks import run_ranks
from support.rpc_callees import alone, wait_for
from support.rpc_workers import LONG, be_lost, begin, go_on, wait_for_release

BRIEF = 0.5  # seconds that a silent worker is waited for

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("rpc-watch")]


def be_watched(rank: int, store: str, sent: int, patience: float) -> Any:
    with begin(rank, 2, store) as session:
        if rank == 1:
            be_lost()
        callee = rpc_sync("callee", os.getpid)
        watched = watch("callee", patience=patience)
        rpc_sync("callee", os.getpid)
        assert not watched.done()
        os.kill(callee, sent)
        error = watched.exception(timeout=LONG)
        with contextlib.suppress(ProcessLookupError):
            os.kill(callee, signal.SIGKILL)
        assert isinstance(error, WorkerLostError)
        assert error.worker == "callee"
        rpc_ext.shutdown(graceful=False)
        del session
        return type(error.__cause__).__name__


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "patience", "cause"), [(signal.SIGKILL, LONG, "NoneType"), (signal.SIGSTOP, BRIEF, "TimeoutError")]
)
def test_dead_or_silent_worker_is_lost(tmp_path: Path, sent: int, patience: float, cause: str) -> None:
    found = run_ranks(2, be_watched, str(tmp_path / "store"), sent, patience, lost=[1])
    assert found[0] == cause


def lose_a_client_while_blocked(rank: int, store: str, folder: str) -> int:
    """The program of the service blocks the callback thread while a client dies."""
    with begin(rank, 2, store):
        if rank == 1:
            wait_for_release()
            with RemoteStore("caller", timeout=LONG) as remote:
                remote.write("x", torch.ones(3)).wait(timeout=LONG)
                be_lost()
        over = threading.Event()
        with serve_store(folder) as service:
            client = rpc_sync("callee", os.getpid)
            rpc_sync("callee", go_on)
            wait_for(lambda: service.statistics().bytes_written > 0)
            CUDAFuture.completed(None).add_done_callback(lambda _: over.wait(LONG), executor=executors.callback_thread)
            os.kill(client, signal.SIGKILL)
            try:
                wait_for(lambda: service.statistics().clients == 0)
            finally:
                over.set()
        rpc_ext.shutdown(graceful=False)
        return 0


@pytest.mark.slow
def test_service_drops_dead_client_despite_callback(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "store"), str(tmp_path / "served"))
    assert run_ranks(2, lose_a_client_while_blocked, *arguments, lost=[1])[0] == 0


def test_watch_ends_with_rpc(tmp_path: Path) -> None:
    with alone(tmp_path / "store"):
        watched, cancelled = watch("me"), watch(0)
        assert cancelled.cancel()
        with pytest.raises(ValueError, match="patience is a positive number"):
            watch("me", patience=0)
        with pytest.raises(ValueError, match="there is no worker 'you'"):
            watch("you")
    assert watched.wait(timeout=LONG) is None
    with pytest.raises(InvalidStateError):
        watch("me")


def test_watch_ends_with_its_session(tmp_path: Path) -> None:
    with alone(tmp_path / "first"):
        watched = watch("me")
    with alone(tmp_path / "second"):
        assert watched.wait(timeout=LONG) is None


# ---- a client of a store service that falls silent


def fall_silent(rank: int, store: str, folder: str) -> Any:
    with begin(rank, 2, store):
        if rank == 0:
            with serve_store(folder, patience=BRIEF) as service:
                dist.barrier()  # the client has written
                client = rpc_sync("callee", os.getpid)
                os.kill(client, signal.SIGSTOP)
                wait_for(lambda: service.statistics().clients == 0)
                os.kill(client, signal.SIGCONT)
                dist.barrier()  # the client has read
                return service.store.keys()
        content = torch.arange(10)
        wait_for(serves)
        with RemoteStore("caller", namespace="kept") as named, RemoteStore("caller") as private:
            for remote in (named, private):
                remote.write("x", content).wait(timeout=LONG)
            dist.barrier()
            while not (error := private.read("x").exception(timeout=LONG)):
                pass
            assert torch.equal(named.read("x").wait(timeout=LONG), content)
        dist.barrier()
        assert isinstance(error, AuthenticationError)
        return str(error)


def serves() -> bool:
    try:
        RemoteStore("caller").close()
    except InvalidStateError:
        return False
    return True


@pytest.mark.slow
def test_silent_client_recovers_only_named_session(tmp_path: Path) -> None:
    keys, said = run_ranks(2, fall_silent, str(tmp_path / "store"), str(tmp_path / "served"))
    assert len(keys) == 1
    assert f"worker 'callee' was silent for {BRIEF:g} s, and its private keys were deleted" in said
    assert "namespace=" in said
