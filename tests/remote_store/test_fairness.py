"""Clients that overload a disk: the memory of their server is bounded, and other clients make progress.

The disk gives no result before the test lets it go, so whatever is counted meanwhile does not change any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc_ext
from cudafuture import CUDAFuture, collect_all, wait_all
from cudafuture.io import Engine
from remote_store import messages as wire
from remote_store.seams import put_of, release_at_end, send
from rpc_ext.store import _calls as services
from rpc_ext.store._wire import PART
from rpc_ext.store.client import RemoteStore
from rpc_ext.store.service import serve_store
from support.patience import PATIENCE
from support.rpc_callees import ME, alone, wait_for

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("remote-store")]

WINDOW = 2 * PART  # of a client: the least that there is
MEG = torch.full((1 << 20,), 4, dtype=torch.uint8)
SMALL = torch.arange(64 << 10, dtype=torch.int32).view(torch.uint8)[: 64 << 10]
LARGE = torch.full((PART // 2,), 3, dtype=torch.uint8)
PIECES = torch.full((PART + 100,), 5, dtype=torch.uint8)


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_ext.Session]:
    """Start a worker with two threads: no request may block one until the disk is done."""
    with alone(tmp_path_factory.mktemp("rpc") / "rendezvous", num_worker_threads=2) as session:
        yield session


def make_idle_engine() -> Engine:
    return Engine("threads", _faults={"held": True})


@pytest.fixture
def served_folder(tmp_path: Path) -> Path:
    """Return the folder of a closed service with tensors that opening it does not read."""
    folder = tmp_path / "served"
    with serve_store(folder, durable=True), RemoteStore(ME, namespace="kept") as remote:
        remote.writev({f"{i}": MEG for i in range(16)} | {"large": LARGE}).wait(timeout=PATIENCE)
    return folder


def start_flood(remote: RemoteStore, kind: str) -> list[CUDAFuture[Any]]:
    """Start far more operations than fit into a window."""
    if kind == "reads":
        return [remote.read(f"{i % 16}", torch.empty_like(MEG)) for i in range(1000)]
    return [remote.write(f"flood {i}", SMALL) for i in range(3000)]


FLOODS = pytest.mark.parametrize("kind", ["reads", "writes"])


@FLOODS
def test_flooding_client_blocks_no_other(served_folder: Path, kind: str) -> None:
    with (
        make_idle_engine() as engine,
        serve_store(served_folder, durable=True, engine=engine, memory=2 * WINDOW, clients=2) as service,
        RemoteStore(ME, namespace="kept") as flooding,
        RemoteStore(ME, namespace="kept") as other,
        release_at_end(engine),
    ):
        flood = start_flood(flooding, kind)
        wait_for(lambda: service.statistics().in_flight > WINDOW - PART // 2)
        mine: list[CUDAFuture[Any]] = [other.read("large"), other.write("mine", LARGE)]
        # More than a window and one of them: so both are with the disk, and thousands that were asked for earlier wait.
        wait_for(lambda: service.statistics().in_flight > WINDOW + LARGE.nbytes)
        assert not any(future.done() for future in (*flood, *mine))
        engine._native.release_held()
        assert torch.equal(mine[0].wait(timeout=PATIENCE), LARGE)
        mine[1].wait(timeout=PATIENCE)
        assert torch.equal(other.read("mine").wait(timeout=PATIENCE), LARGE)
        wait_all(flood, timeout=PATIENCE)


@FLOODS
def test_service_memory_bounds_requests_in_flight(served_folder: Path, kind: str) -> None:
    clients, memory = 3, 3 * WINDOW
    with (
        make_idle_engine() as engine,
        serve_store(served_folder, durable=True, engine=engine, memory=memory, clients=clients) as service,
        contextlib.ExitStack() as open_,
    ):
        remotes = [open_.enter_context(RemoteStore(ME, namespace="kept")) for _ in range(clients)]
        open_.enter_context(release_at_end(engine))
        floods = [future for remote in remotes for future in start_flood(remote, kind)]
        if kind == "writes":
            floods += [remote.write(f"pieces {i}", PIECES) for i, remote in enumerate(remotes)]
        wait_for(lambda: service.statistics().in_flight > memory - clients * PART)
        assert not any(future.done() for future in floods)
        assert service.statistics().most_in_flight <= memory
        engine._native.release_held()
        wait_all(floods, timeout=PATIENCE)
        found = service.statistics()
        assert found.in_flight == 0
        assert memory - clients * PART < found.most_in_flight <= memory


def test_client_without_window_gets_no_extra_memory(tmp_path: Path) -> None:
    """Check that requests in flight keep within the memory of the service, whether they are refused or wait."""
    data = torch.zeros(PART, dtype=torch.uint8)
    count = 10
    with (
        make_idle_engine() as engine,
        serve_store(tmp_path / "served", engine=engine, memory=2 * WINDOW, clients=2) as service,
        RemoteStore(ME, namespace="kept") as remote,
        release_at_end(engine),
    ):
        served = rpc_ext.statistics().served
        entries = [put_of(f"{i}", data)[0] for i in range(count)]
        puts = [send(remote, wire.PUT, [entry], data) for entry in entries]
        wait_for(lambda: rpc_ext.statistics().served >= served + count)
        rpc_ext.rpc_sync(ME, services.keys, ("store", remote._token), timeout=PATIENCE)
        in_flight = service.statistics().in_flight
        engine._native.release_held()
        collect_all(puts).wait(timeout=PATIENCE)
        for put in puts:
            put.exception()
        assert in_flight <= 2 * WINDOW
        assert service.statistics().most_in_flight <= 2 * WINDOW
