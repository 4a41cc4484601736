"""What a service and its clients keep within: the calls of RPC, memory, quotas, and folders that are their own."""

from __future__ import annotations

import contextlib
import re
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from cudafuture import CUDAFuture, wait_all
from cudafuture.errors import (
    AuthenticationError,
    ChecksumError,
    InvalidStateError,
    NotFoundError,
    QuotaError,
    StorageError,
)
from cudafuture.storage import Offloader, digest
from rpc_ext import _offload_calls as calls
from rpc_ext import rpc_sync
from rpc_ext._offload_wire import PIECE, Header, pack
from rpc_ext.offload_service import serve_offload
from rpc_ext.remote_offloader import RemoteOffloader
from world.offload_clients import stamp
from world.offload_seams import held, let_go_at_the_end
from world.rpc_callees import ME, PATIENCE, alone, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("remote-offloader")]

CAPACITY = PIECE + 64  # of a namespace
UPLOAD = b"u" * 16
LAST = Header("last", torch.uint8, (CAPACITY,), CAPACITY, UPLOAD, piece=1, pieces=2, length=64)
SMALL = Header("small", torch.uint8, (64,), 64, length=64)
LONG = "long " + "k" * 1016

needs_a_worker = pytest.mark.usefixtures("worker")


def put(remote: RemoteOffloader, headers: list[Header], data: object) -> Any:
    """Write as a client could that minds no rules."""
    return rpc_sync(ME, calls.put, ("offload", remote._token, stamp(remote), pack(headers), data), timeout=PATIENCE)


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


# ---- the calls of RPC


@pytest.mark.parametrize(
    "limits", [{"max_bytes_in_flight": 96 << 20}, {"max_in_flight": 2}], ids=["so many bytes", "so many calls"]
)
def test_what_rpc_has_no_room_for_waits_without_the_caller(tmp_path: Path, limits: dict[str, Any]) -> None:
    """The windows of two clients together are more than RPC takes, and so is what each of them has of calls."""
    data = torch.full((4 << 20,), 7, dtype=torch.uint8)
    asked: list[CUDAFuture[int]] = []

    def ask() -> None:
        with contextlib.suppress(InvalidStateError):  # the offloader is closed: the test has failed
            asked.extend(remote.write(f"{i}", data) for i in range(40) for remote in remotes)

    with (
        alone(tmp_path / "rendezvous", num_worker_threads=2, **limits),
        held() as engine,
        serve_offload(tmp_path / "served", engine=engine, memory=16 * PIECE, clients=2),
        RemoteOffloader(ME) as one,
        RemoteOffloader(ME) as other,
        let_go_at_the_end(engine),
    ):
        remotes = one, other
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(PATIENCE / 2)
        assert not asking.is_alive()
        assert len(asked) == 80
        assert not any(write.done() for write in asked)
        engine._native.let_go()
        assert wait_all(asked, timeout=PATIENCE) == [data.nbytes] * 80
        for remote in remotes:
            reads = [remote.read(f"{i}") for i in range(40)]
            assert all(torch.equal(read, data) for read in wait_all(reads, timeout=PATIENCE))


# ---- memory


@needs_a_worker
@pytest.mark.parametrize("end", ["given up", "closed"])
def test_what_a_client_claims_to_have_costs_no_memory(tmp_path: Path, end: str) -> None:
    pieces = 1 << 22
    nbytes = (pieces - 1) * PIECE + 1  # about 64 TiB
    last = Header("x", torch.uint8, (nbytes,), nbytes, UPLOAD, piece=pieces - 1, pieces=pieces, length=1)
    with serve_offload(tmp_path / "served") as service, RemoteOffloader(ME, namespace="kept") as remote:
        tracemalloc.start()
        try:
            with RemoteOffloader(ME, namespace="kept") as hostile:
                put(hostile, [last], b"\1")
                if end == "given up":
                    rpc_sync(ME, calls.give_up, ("offload", hostile._token, UPLOAD), timeout=PATIENCE)
            wait_for(lambda: service.statistics().clients == 1 and not len(service.store))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 100 << 20
        remote.write("x", torch.ones(3)).wait(timeout=PATIENCE)
        assert remote.keys() == ["x"]


@needs_a_worker
def test_bytes_that_are_more_than_a_request_carries_are_refused(tmp_path: Path) -> None:
    with serve_offload(tmp_path / "served") as service, RemoteOffloader(ME) as remote:
        with pytest.raises(ValueError, match="more than"):
            put(remote, [SMALL], bytes(5 * PIECE))
        found = service.statistics()
        assert (found.refused, found.most_under_way) == (1, 0)
        assert remote.keys() == []


@needs_a_worker
@pytest.mark.parametrize(
    "places",
    [[(0, 64), (0, 64)], [(0, 128), (64, 64)], [(64, 64), (0, 128)], [(0, 65), (64, 1)], [(64, 1)] + [(0, 256)] * 100],
    ids=["the same", "one in the other", "the other way round", "a byte", "many"],
)
def test_tensors_that_share_bytes_are_refused(tmp_path: Path, places: list[tuple[int, int]]) -> None:
    """As many tensors as a block has headers would make a lot of what has come."""
    headers = [SMALL._replace(key=f"{i}", at=at, length=n, nbytes=n, shape=(n,)) for i, (at, n) in enumerate(places)]
    with serve_offload(tmp_path / "served") as service, RemoteOffloader(ME) as remote:
        with pytest.raises(ValueError, match="another"):
            put(remote, headers, zeros(256))
        assert service.statistics().refused == 1
        assert remote.keys() == []
        remote.writev({"a": zeros(64), "none": zeros(0), "nothing": zeros(0), "b": zeros(1)}).wait(timeout=PATIENCE)
        assert remote.keys() == ["a", "none", "nothing", "b"]


@needs_a_worker
@pytest.mark.parametrize("name", ["nobody", "", f"{ME} ", 7, None])
def test_a_client_is_on_a_worker_that_there_is(tmp_path: Path, name: Any) -> None:
    """Nobody would notice when another one is gone."""
    with serve_offload(tmp_path / "served", clients=1) as service:
        with pytest.raises(AuthenticationError):
            rpc_sync(ME, calls.begin, ("offload", bytes(16), None, name, 0.0), timeout=PATIENCE)
        assert service.statistics().clients == 0
        RemoteOffloader(ME).close()


# ---- quotas


MALFORMED: dict[str, tuple[list[Header], Callable[[], object]]] = {
    "a whole and a piece": ([SMALL, LAST._replace(at=64)], lambda: zeros(128)),
    "a piece and a whole": ([LAST, SMALL._replace(at=64)], lambda: zeros(128)),
    "two pieces": ([LAST, LAST._replace(key="b", at=64)], lambda: zeros(128)),
    "sparse": ([SMALL], lambda: zeros(64).to_sparse()),
    "shared": ([SMALL, SMALL._replace(key="b")], lambda: zeros(64)),
    "cut off": ([SMALL, SMALL._replace(key="b", at=64)], lambda: zeros(127)),
}


def expect_whole_quota(remote: RemoteOffloader) -> None:
    """See that nothing in the namespace takes room, by taking all of it."""
    remote.write("all", zeros(CAPACITY)).wait(timeout=PATIENCE)
    remote.delete("all").wait(timeout=PATIENCE)


@needs_a_worker
@pytest.mark.parametrize("kind", MALFORMED)
def test_what_is_refused_takes_no_quota(tmp_path: Path, kind: str) -> None:
    headers, data = MALFORMED[kind]
    with (
        serve_offload(tmp_path / "served", namespace_capacity=CAPACITY) as service,
        RemoteOffloader(ME, namespace="kept") as hostile,
        RemoteOffloader(ME, namespace="kept") as other,
    ):
        for i in range(3):
            with pytest.raises((ValueError, TypeError)):
                put(hostile, headers, data())
            assert service.statistics().refused == i + 1
        assert other.keys() == []
        expect_whole_quota(other)


CHANGED: dict[str, tuple[list[Header], int]] = {  # headers of 64 zeros each, and which of them has another checksum
    "alone": ([SMALL], 0),
    "of two": ([SMALL, SMALL._replace(key="other", at=64)], 1),
    "of a long key": ([SMALL._replace(key=LONG)], 0),
    "of a long key and another": ([SMALL, SMALL._replace(key=LONG, at=64)], 1),
    "empty": ([SMALL, Header("empty", torch.uint8, (0,), at=64)], 1),
}


@needs_a_worker
@pytest.mark.parametrize(("headers", "changed"), CHANGED.values(), ids=list(CHANGED))
def test_what_was_changed_on_the_way_is_refused_alone(tmp_path: Path, headers: list[Header], changed: int) -> None:
    headers = [h._replace(checksum=digest(zeros(h.length)) ^ (i == changed)) for i, h in enumerate(headers)]
    with (
        serve_offload(tmp_path / "served", namespace_capacity=CAPACITY) as service,
        RemoteOffloader(ME, namespace="kept") as remote,
    ):
        answer = put(remote, headers, zeros(128))
        assert [i for i, _ in answer.failures] == [changed]
        assert isinstance(answer.failures[0][1], ChecksumError)
        assert repr(headers[changed].key) in str(answer.failures[0][1])
        assert remote.keys() == [h.key for i, h in enumerate(headers) if i != changed]
        assert service.statistics().refused == 1
        remote.deletev(remote.keys()).wait(timeout=PATIENCE)
        expect_whole_quota(remote)


@needs_a_worker
@pytest.mark.parametrize("piece", [0, 1])
def test_a_piece_that_was_changed_on_the_way_gives_up_all(tmp_path: Path, piece: int) -> None:
    with (
        serve_offload(tmp_path / "served", namespace_capacity=CAPACITY) as service,
        RemoteOffloader(ME, namespace="kept") as remote,
    ):
        for i, length in enumerate((PIECE, 64)):
            header = LAST._replace(piece=i, length=length, checksum=digest(zeros(length)) ^ (i == piece))
            if i > piece:
                with pytest.raises(InvalidStateError, match="was given up"):
                    put(remote, [header], zeros(length))
            else:
                assert bool(put(remote, [header], zeros(length)).failures) == (i == piece)
        assert remote.keys() == []
        assert service.statistics().refused == 1
        expect_whole_quota(remote)


@needs_a_worker
def test_one_of_many_that_was_changed_costs_the_others_nothing(tmp_path: Path) -> None:
    """They are not written again: there would be no room for each of them alone, on a page of its own."""
    count, wrong = 3000, 17
    good = digest(zeros(64))
    with (
        serve_offload(tmp_path / "served", capacity=2 << 20, namespace_capacity=64 * count) as service,
        RemoteOffloader(ME, namespace="kept") as remote,
    ):
        for _ in range(3):
            headers = [SMALL._replace(key=f"{i}", at=64 * i, checksum=good ^ (i == wrong)) for i in range(count)]
            answer = put(remote, headers, zeros(64 * count))
            assert [i for i, _ in answer.failures] == [wrong]
            assert len(remote.keys()) == count - 1
            remote.deletev(remote.keys()).wait(timeout=PATIENCE)
        assert service.store.statistics().writes <= 3 * (count + 1)
        headers = [SMALL._replace(key=f"{i}", at=64 * i, checksum=good) for i in range(count)]
        assert put(remote, headers, zeros(64 * count)).failures == []
        with pytest.raises(QuotaError):
            remote.write("one more", zeros(1)).wait(timeout=PATIENCE)


@needs_a_worker
def test_bytes_may_begin_anywhere_in_their_memory(tmp_path: Path) -> None:
    numbers = torch.arange(65, dtype=torch.uint8)
    four = Header("x", torch.float32, (16,), 64, length=64)
    with serve_offload(tmp_path / "served") as service, RemoteOffloader(ME) as remote:
        assert put(remote, [four], numbers[1:]).failures == []
        assert torch.equal(remote.read("x").wait(timeout=PATIENCE), numbers[1:].clone().view(torch.float32))
        assert service.statistics().refused == 0


@needs_a_worker
@pytest.mark.parametrize(
    ("keys", "size"),
    [(["a"], 100), (["a", "b"], 100), ([LONG], 100), (["a", LONG], 100), (["a"], 2 << 20), (["a"], CAPACITY)],
    ids=["small", "two", "of a long key", "one of a long key", "alone", "pieces"],
)
def test_a_store_that_refuses_at_once_takes_no_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str], size: int
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise StorageError("refused")

    with (
        serve_offload(tmp_path / "served", namespace_capacity=CAPACITY) as service,
        RemoteOffloader(ME, namespace="kept") as one,
        RemoteOffloader(ME, namespace="kept") as other,
    ):
        for name in ("write", "writev"):
            monkeypatch.setattr(service.store, name, refuse)
        for _ in range(3):
            error = one.writev({key: zeros(size) for key in keys}).exception(timeout=PATIENCE)
            assert isinstance(error, StorageError)
            assert "refused" in str(error)
        monkeypatch.undo()
        assert other.keys() == []
        expect_whole_quota(other)


# ---- folders


@needs_a_worker
@pytest.mark.parametrize(
    "keys",
    [["weights"], ["l"], ["learning rates of all layers"], ["keys_of_layer_017~"], ["k", "p0/1", "exp_avg 1"]],
    ids=["one", "of one letter", "as of a list", "as of a private one", "several"],
)
def test_a_folder_of_somebody_elses_is_refused_and_keeps_its_keys(tmp_path: Path, keys: list[str]) -> None:
    tensors = {key: torch.arange(100) + i for i, key in enumerate(keys)}
    with Offloader(tmp_path / "theirs", durable=True) as store:
        store.writev(tensors).wait(timeout=PATIENCE)
    with pytest.raises(StorageError, match="keys"):
        serve_offload(tmp_path / "theirs", durable=True)
    with Offloader(tmp_path / "theirs", durable=True) as store:
        assert store.keys() == keys
        assert all(map(torch.equal, store.readv(keys).wait(timeout=PATIENCE), tensors.values()))
    serve_offload(tmp_path / "mine", durable=True).close()  # by the same name


@needs_a_worker
@pytest.mark.parametrize(
    "damage",
    [lambda _: zeros(10), lambda record: record[:-3], lambda _: zeros(0), lambda _: torch.ones(5)],
    ids=["zeros", "cut off", "empty", "of numbers"],
)
def test_a_damaged_list_of_pieces_is_named_and_nothing_is_removed(
    tmp_path: Path, damage: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with serve_offload(tmp_path, durable=True), RemoteOffloader(ME, namespace="kept") as remote:
        remote.writev({"small": torch.ones(3), "large": zeros(CAPACITY)}).wait(timeout=PATIENCE)
    with Offloader(tmp_path, durable=True) as store:
        (listed,) = (name for name in store.keys() if name.startswith("l"))  # noqa: SIM118
        store.write(listed, damage(store.read(listed).wait(timeout=PATIENCE))).wait(timeout=PATIENCE)
        names = store.keys()
    with pytest.raises(ChecksumError, match=re.escape(listed)):
        serve_offload(tmp_path, durable=True)
    with Offloader(tmp_path, durable=True) as store:
        assert store.keys() == names


@needs_a_worker
@pytest.mark.parametrize("sizes", [(100, CAPACITY), (CAPACITY, 100)], ids=["by a large one", "by a small one"])
def test_a_key_whose_old_name_the_disk_kept_is_deleted_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    def expect_none(remote: RemoteOffloader) -> None:
        assert remote.keys() == []
        assert "x" not in remote
        assert isinstance(remote.read("x").exception(timeout=PATIENCE), NotFoundError)
        assert isinstance(remote.delete("x").exception(timeout=PATIENCE), NotFoundError)

    with (
        serve_offload(tmp_path, durable=True, namespace_capacity=2 * CAPACITY) as service,
        RemoteOffloader(ME, namespace="kept") as remote,
    ):
        remote.write("x", zeros(sizes[0])).wait(timeout=PATIENCE)
        for name in ("delete", "deletev"):
            monkeypatch.setattr(service.store, name, lambda *_: CUDAFuture.failed(StorageError("the disk", errno=5)))
        remote.write("x", zeros(sizes[1])).wait(timeout=PATIENCE)
        monkeypatch.undo()
        assert remote.read("x").wait(timeout=PATIENCE).nbytes == sizes[1]
        remote.delete("x").wait(timeout=PATIENCE)
        expect_none(remote)
        remote.write("all", zeros(2 * CAPACITY)).wait(timeout=PATIENCE)
        remote.delete("all").wait(timeout=PATIENCE)
    with serve_offload(tmp_path, durable=True), RemoteOffloader(ME, namespace="kept") as remote:
        expect_none(remote)
