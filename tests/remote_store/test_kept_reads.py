"""Tensors that a store service keeps for a client until it has fetched their parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture.errors import InvalidStateError
from remote_store import messages as wire
from remote_store.messages import Fetch
from remote_store.seams import change_of, send
from rpc_ext import RemoteStore, StoreService, serve_store
from rpc_ext.store._wire import PART
from support.patience import PATIENCE
from support.rpc_callees import ME, alone, wait_for

pytestmark = pytest.mark.world

LARGE = torch.arange(2 * PART + 8, dtype=torch.uint8)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[StoreService]:
    with alone(tmp_path / "rendezvous"), serve_store(tmp_path / "store") as service:
        yield service


@pytest.fixture
def remote(service: StoreService) -> Iterator[RemoteStore]:
    with RemoteStore(ME) as remote:
        remote.write("x", LARGE).wait(timeout=PATIENCE)
        yield remote


def fetch(remote: RemoteStore, sequence: int, part: int) -> torch.Tensor:
    """Return the bytes of a part; raise the error of the service."""
    answer = send(remote, wire.FETCH, [Fetch(sequence, part)]).wait(timeout=PATIENCE)
    if answer.errors:
        raise answer.errors[0]
    return answer.data


def test_last_fetched_part_drops_tensor(service: StoreService, remote: RemoteStore) -> None:
    entry = change_of("x")
    answer = send(remote, wire.GET, [entry]).wait(timeout=PATIENCE)
    assert torch.equal(answer.data, LARGE[:PART])
    remote.write("x", torch.zeros(8)).wait(timeout=PATIENCE)  # the read keeps the tensor that it has found
    assert torch.equal(fetch(remote, entry.sequence, 2), LARGE[2 * PART :])
    for part in (0, 2, 3):
        with pytest.raises(InvalidStateError, match="does not keep this read"):
            fetch(remote, entry.sequence, part)
    used = service.store.statistics().used
    assert torch.equal(fetch(remote, entry.sequence, 1), LARGE[PART : 2 * PART])
    wait_for(lambda: service.store.statistics().used <= used - LARGE.nbytes)
    with pytest.raises(InvalidStateError):
        fetch(remote, entry.sequence, 1)


def test_abandoned_read_is_dropped(service: StoreService, remote: RemoteStore) -> None:
    entry = change_of("x")
    send(remote, wire.GET, [entry]).wait(timeout=PATIENCE)
    send(remote, wire.ABANDON, [entry]).wait(timeout=PATIENCE)
    with pytest.raises(InvalidStateError):
        fetch(remote, entry.sequence, 1)


def test_expired_read_is_dropped(service: StoreService, remote: RemoteStore) -> None:
    """A client that timed out thus keeps no old tensor on the disk."""
    remote.write("y", LARGE).wait(timeout=PATIENCE)
    long = change_of("x", expires=time.perf_counter() + 2 * PATIENCE)
    assert not send(remote, wire.GET, [long]).wait(timeout=PATIENCE).errors
    for seconds in (0.2, 2.0, 20.0):  # a busy machine may deliver the request after the shorter ones
        short = change_of("y", expires=time.perf_counter() + seconds)
        if not send(remote, wire.GET, [short]).wait(timeout=PATIENCE).errors:
            break
    remote.writev({"x": torch.zeros(8), "y": torch.zeros(8)}).wait(timeout=PATIENCE)
    wait_for(lambda: service.store.statistics().used < 2 * LARGE.nbytes)
    with pytest.raises(InvalidStateError):
        fetch(remote, short.sequence, 1)
    assert torch.equal(fetch(remote, long.sequence, 1), LARGE[PART : 2 * PART])
    assert torch.equal(fetch(remote, long.sequence, 2), LARGE[2 * PART :])
