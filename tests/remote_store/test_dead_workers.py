"""Stores on workers that die: every future completes and names the worker, and no read returns a partial write."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc_ext
from cudafuture.errors import InvalidStateError, StorageError, WorkerLostError
from cudafuture.io import Engine
from rpc_ext import rpc_sync
from rpc_ext.store._wire import PART
from rpc_ext.store.client import RemoteStore
from rpc_ext.store.service import serve_store
from support.ranks import run_ranks
from support.rpc_callees import wait_for
from support.rpc_workers import LONG, be_lost, begin, go_on, wait_for_release

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("remote-store-survival")]

LARGE = PART // 4 * 2 + 100  # float32s: three parts


def tensor_of(i: int) -> torch.Tensor:
    return torch.full((LARGE if i % 5 == 0 else 1000,), float(i))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def use_a_server_that_dies(rank: int, store: str, folder: str, reads: bool) -> list[str]:
    session = begin(rank, 2, store)
    if rank == 1:
        serve_store(folder, durable=True)
        rpc_sync("caller", go_on)
        be_lost()
    wait_for_release()
    remote = RemoteStore("callee", namespace="kept")
    first = {f"{i}": tensor_of(i) for i in range(10)}
    remote.writev(first).wait(timeout=LONG)
    more = [remote.read(f"{i}") if reads else remote.write(f"new {i}", tensor_of(i)) for i in range(40)]
    rpc_ext.rpc_async("callee", die)
    errors = [future.exception(timeout=LONG) for future in more]
    for i, error in enumerate(errors):
        if error is not None and i >= 10:
            assert isinstance(error, (WorkerLostError, LookupError)), error
            assert "callee" in str(error) or "callee" in "".join(getattr(error, "__notes__", ()))
    assert isinstance(remote.write("late", torch.ones(1)).exception(timeout=LONG), WorkerLostError)
    # the messages that abandon operations end after the futures of the operations
    wait_for(lambda: session.statistics().destinations["callee"].in_flight == 0)
    rpc_ext.shutdown(graceful=False)
    return [f"new {i}" for i, error in enumerate(errors) if error is None] if not reads else []


def look_again(rank: int, store: str, folder: str, done: list[str]) -> None:
    begin(rank, 1, store)
    with serve_store(folder, durable=True) as service, RemoteStore("caller", namespace="kept") as remote:
        keys = remote.keys()
        assert {f"{i}" for i in range(10)} | {*done} <= {*keys}
        for key in keys:
            assert torch.equal(remote.read(key).wait(timeout=LONG), tensor_of(int(key.removeprefix("new "))))
        service.store.flush().wait(timeout=LONG)
        assert len(service.store) == len(keys), "parts of no tensor are left"
    rpc_ext.shutdown()


@pytest.mark.parametrize("reads", [False, True], ids=["writes", "reads"])
def test_operations_end_when_server_dies(tmp_path: Path, reads: bool) -> None:
    folder = str(tmp_path / "served")
    done = run_ranks(2, use_a_server_that_dies, str(tmp_path / "one"), folder, reads, lost=[1])[0]
    run_ranks(1, look_again, str(tmp_path / "two"), folder, done)


def serve_a_client_that_dies(rank: int, store: str, folder: str) -> dict[str, Any]:
    begin(rank, 2, store)
    if rank == 1:
        wait_for_release()
        private, shared = RemoteStore("caller"), RemoteStore("caller", namespace="shared")
        private.write("mine", torch.ones(100)).wait(timeout=LONG)
        shared.write("everybody's", torch.ones(100)).wait(timeout=LONG)
        pending = [shared.write(f"large {i}", tensor_of(0)) for i in range(20)]
        pending[0].wait(timeout=LONG)
        die()
    with serve_store(folder, namespace_capacity=1 << 30) as service:
        rpc_sync("callee", go_on)
        shared = RemoteStore("caller", namespace="shared")
        end = time.monotonic() + LONG
        while service.statistics().clients != 1 or "large 0" not in shared:
            assert time.monotonic() < end
        keys = shared.keys()
        for key in keys:
            if key.startswith("large"):
                assert torch.equal(shared.read(key).wait(timeout=LONG), tensor_of(0))
        shared.deletev(keys).wait(timeout=LONG)
        while len(service.store) or service.statistics().in_flight:  # no future tells when a removal ends
            assert time.monotonic() < end
            service.store.flush().wait(timeout=LONG)
        assert service.store.statistics().used == 0
        shared.write("whole", torch.empty(1 << 28, dtype=torch.uint8)).wait(timeout=LONG)  # no bytes are leaked
    rpc_ext.shutdown(graceful=False)
    return {"keys": keys}


def test_dead_client_state_is_freed(tmp_path: Path) -> None:
    served = run_ranks(2, serve_a_client_that_dies, str(tmp_path / "store"), str(tmp_path / "served"), lost=[1])[0]
    assert "everybody's" in served["keys"]
    assert "large 0" in served["keys"]


def use_a_disk_that_fails(rank: int, store: str, folder: str) -> None:
    begin(rank, 1, store)
    with (
        Engine("threads", _faults={"no_space": 0.3, "seed": 1}) as engine,
        serve_store(folder, engine=engine) as service,
        RemoteStore("caller") as remote,
    ):
        writes = {f"{i}": remote.write(f"{i}", tensor_of(i)) for i in range(60)}
        failed = {key for key, write in writes.items() if write.exception(timeout=LONG) is not None}
        assert 0 < len(failed) < 60
        for key in failed:
            assert isinstance(writes[key].exception(), StorageError)
        assert {*remote.keys()} == {*writes} - failed
        for key in remote.keys():  # noqa: SIM118
            assert torch.equal(remote.read(key).wait(timeout=LONG), tensor_of(int(key)))
        service.store.flush().wait(timeout=LONG)
        assert service.store.statistics().bytes >= sum(tensor_of(int(key)).nbytes for key in remote.keys())  # noqa: SIM118
    rpc_ext.shutdown()


def test_disk_error_fails_its_operations(tmp_path: Path) -> None:
    run_ranks(1, use_a_disk_that_fails, str(tmp_path / "store"), str(tmp_path / "served"))


def serve_until_rpc_ends(rank: int, store: str, folder: str) -> None:
    for turn in range(2):
        begin(rank, 1, f"{store}{turn}")
        service = serve_store(folder, durable=True)
        remote = RemoteStore("caller", namespace="kept")
        assert remote.keys() == [f"{i}" for i in range(turn)]
        remote.write(f"{turn}", torch.ones(3)).wait(timeout=LONG)
        rpc_ext.shutdown()
        with pytest.raises(InvalidStateError, match="closed"):
            service.store.write("late", torch.ones(3))
        remote.close()


def test_service_ends_with_rpc(tmp_path: Path) -> None:
    run_ranks(1, serve_until_rpc_ends, str(tmp_path / "store"), str(tmp_path / "served"))


def serve_before_rpc(rank: int, store: str, folder: str) -> None:
    if rank == 1:
        with serve_store(folder) as service:
            begin(rank, 2, store)
            rpc_ext.shutdown(timeout=LONG)
            assert service.statistics().bytes_written == 400
            assert "cudafuture-io" in threads(), "what an engine's thread is called"
        return
    begin(rank, 2, store)
    with RemoteStore("callee") as remote:  # needs no signal: it serves before RPC can find it
        remote.write("x", torch.ones(100)).wait(timeout=LONG)
        assert torch.equal(remote.read("x").wait(timeout=LONG), torch.ones(100))
        assert "cudafuture-io" not in threads(), "a client needs no engine of its own"
    rpc_ext.shutdown(timeout=LONG)


def threads() -> set[str]:
    return {comm.read_text().strip() for comm in Path("/proc/self/task").glob("*/comm")}


def test_service_can_begin_before_rpc(tmp_path: Path) -> None:
    run_ranks(2, serve_before_rpc, str(tmp_path / "store"), str(tmp_path / "served"))
