"""Fixtures that the tests of RPC and of remote stores share: a worker that calls itself, and its store service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rpc_ext
from support.rpc_callees import ME, Gate, alone, wait_for


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[rpc_ext.Session]:
    """Give a worker with one thread, which calls itself: a call that held the thread up would be noticed."""
    with alone(tmp_path / "rendezvous", num_worker_threads=1) as session:
        yield session


@pytest.fixture
def nothing_in_flight() -> None:
    """Wait for the calls of the tests before, where the tests of a module share a worker and count."""
    wait_for(lambda: all(each.in_flight == 0 for each in rpc_ext.statistics().destinations.values()))


@pytest.fixture
def service(worker: rpc_ext.Session, tmp_path: Path) -> Iterator[rpc_ext.StoreService]:
    """Give a store service of this worker."""
    with rpc_ext.serve_store(tmp_path / "served") as service:
        yield service


@pytest.fixture
def remote(service: rpc_ext.StoreService) -> Iterator[rpc_ext.RemoteStore]:
    """Give a client of that service, of the same worker."""
    with rpc_ext.RemoteStore(ME) as remote:
        yield remote


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Iterator[Gate]:
    """Give something that functions wait for until the test, or its end, opens it."""
    gate = Gate(request.node.name)
    yield gate
    gate.open()
