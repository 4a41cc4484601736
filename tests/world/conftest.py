"""What the tests of remote calls share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rpc_ext
from world.rpc_callees import Gate, alone


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[rpc_ext.Session]:
    """Give a worker with one thread, which calls itself: a call that held the thread up would be noticed."""
    with alone(tmp_path / "rendezvous", num_worker_threads=1) as session:
        yield session


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Iterator[Gate]:
    """Give something that functions wait for until the test, or its end, opens it."""
    gate = Gate(request.node.name)
    yield gate
    gate.open()
