"""Large tensors that a client of a store service writes in parts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError, QuotaError
from cudafuture.io import Engine, digest
from cudafuture.store import DiskStore
from rpc_ext import _C
from rpc_ext.store._session import prefix_of
from rpc_ext.store._upload import Uploads
from rpc_ext.store._wire import PIECE, Put
from support.patience import PATIENCE

LARGE = torch.zeros(PIECE + 64, dtype=torch.uint8)


class Client:
    """The uploads of one client, and the ends of its parts."""

    def __init__(self, store: DiskStore, capacity: int | None = None) -> None:
        prefix = prefix_of("a namespace", is_private=False)
        self.namespace = _C.Namespace(store.native_access(), prefix, capacity, [])
        self.order = _C.RequestOrder(time.perf_counter(), None)
        self.uploads = Uploads(store, self.namespace, self.order)

    def put(self, part: int, *, sequence: int = 1, after: int = 0) -> CUDAFuture[BaseException | None]:
        data = LARGE[part * PIECE : (part + 1) * PIECE]
        entry = Put(
            sequence, after, 0.0, "x", torch.uint8, (LARGE.nbytes,), LARGE.nbytes, part, 0, len(data), digest(data)
        )
        end: CUDAFuture[BaseException | None] = CUDAFuture()
        self.uploads.put(entry, data, end.set_result)
        return end


def test_last_part_completes_tensor(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "store") as store:
        client = Client(store)
        assert client.put(1).wait(timeout=PATIENCE) is None
        assert client.namespace.keys() == []
        assert client.put(0).wait(timeout=PATIENCE) is None
        assert client.namespace.keys() == ["x"]
        assert torch.equal(store.read(client.namespace.prefix + "x").wait(timeout=PATIENCE), LARGE)


def test_aborted_upload_fails_all_parts(tmp_path: Path) -> None:
    with (
        Engine("threads", block_size=1 << 18, _faults={"held": True}) as engine,
        DiskStore(tmp_path / "store", engine=engine) as store,
    ):
        client = Client(store, capacity=LARGE.nbytes)
        ends = [client.put(0), client.put(1)]
        client.uploads.fail(1, TimeoutError("the client gave it up"))
        engine._native.release_held()
        assert [str(end.wait(timeout=PATIENCE)) for end in ends] == ["the client gave it up"] * 2
        with pytest.raises(TimeoutError, match="gave it up"):
            client.put(1)
        assert (client.namespace.keys(), client.namespace.is_empty) == ([], True)
        store.flush().wait(timeout=PATIENCE)
        assert store.statistics().used == 0


def test_failed_upload_unblocks_later_operations(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "store") as store:
        client = Client(store, capacity=LARGE.nbytes - 1)
        with pytest.raises(QuotaError):
            client.put(0)
        assert client.order.arrive("x", 1, lambda: None, client.namespace)
        client = Client(store)
        client.put(0).wait(timeout=PATIENCE)
        turns: list[int] = []
        assert not client.namespace.enter("x", False, lambda: turns.append(0))
        client.uploads.fail(1, TimeoutError("the client gave it up"))
        assert turns == [0]


def test_upload_commits_after_earlier_operation(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "store") as store:
        client = Client(store)
        assert client.put(0, sequence=2, after=1).wait(timeout=PATIENCE) is None
        last = client.put(1, sequence=2, after=1)
        store.flush().wait(timeout=PATIENCE)
        assert (last.done(), client.namespace.keys()) == (False, [])
        client.order.pass_on("x", 1)
        assert last.wait(timeout=PATIENCE) is None
        assert client.namespace.keys() == ["x"]


def test_parts_after_session_end_are_refused(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "store") as store:
        client = Client(store)
        client.put(0).wait(timeout=PATIENCE)
        client.uploads.end()
        with pytest.raises(InvalidStateError, match="session has ended"):
            client.put(1)
        assert client.namespace.is_empty
