"""Bounds of a service and its clients: calls of RPC, memory, quotas, and their own folders."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

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
from cudafuture.io import Engine, digest
from cudafuture.io.engine import PAGE
from cudafuture.store import DiskStore
from remote_store import messages as wire
from remote_store.messages import MOST_ENTRIES, Put
from remote_store.seams import change_of, in_time, make_idle_engine, put_of, release_at_end, send
from rpc_ext import rpc_sync
from rpc_ext.store import _calls as services
from rpc_ext.store._wire import LONGEST_KEY, PART
from rpc_ext.store.client import RemoteStore
from rpc_ext.store.service import serve_store
from support.patience import PATIENCE
from support.rpc_callees import ME, alone, wait_for

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("remote-store")]

CAPACITY = PART + 64  # of a namespace
LONG = "long " + "k" * (LONGEST_KEY - 5)

needs_a_worker = pytest.mark.usefixtures("worker")


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def make_small(key: str = "small", *, at: int = 0) -> Put:
    """Return the entry of 64 zeros."""
    return put_of(key, zeros(64), at=at)[0]


def make_last(key: str = "last", *, at: int = 0) -> Put:
    """Return the entry of the last 64 bytes of zeros that travel in two parts."""
    return put_of(key, zeros(CAPACITY), part=1, at=at)[0]


def put(remote: RemoteStore, entries: list[Put], data: torch.Tensor) -> wire.Answer:
    """Write like a client that ignores all rules."""
    return send(remote, wire.PUT, entries, data).wait(timeout=PATIENCE)


# ---- the calls of RPC


@pytest.mark.parametrize(
    "limits", [{"max_bytes_in_flight": 96 << 20}, {"max_in_flight": 2}], ids=["so many bytes", "so many calls"]
)
def test_full_rpc_blocks_no_caller(tmp_path: Path, limits: dict[str, Any]) -> None:
    """The windows of two clients exceed the capacity of RPC, and so do the calls of each."""
    data = torch.full((4 << 20,), 7, dtype=torch.uint8)
    asked: list[CUDAFuture[int]] = []

    def ask() -> None:
        with contextlib.suppress(InvalidStateError):  # the store is closed: the test has failed
            asked.extend(remote.write(f"{i}", data) for i in range(40) for remote in remotes)

    with (
        alone(tmp_path / "rendezvous", num_worker_threads=2, **limits),
        make_idle_engine() as engine,
        serve_store(tmp_path / "served", engine=engine, memory=16 * PART, clients=2),
        RemoteStore(ME) as one,
        RemoteStore(ME) as other,
        release_at_end(engine),
    ):
        remotes = one, other
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(PATIENCE / 2)
        assert not asking.is_alive()
        assert len(asked) == 80
        assert not any(write.done() for write in asked)
        engine._native.release_held()
        assert wait_all(asked, timeout=PATIENCE) == [data.nbytes] * 80
        for remote in remotes:
            reads = [remote.read(f"{i}") for i in range(40)]
            assert all(torch.equal(read, data) for read in wait_all(reads, timeout=PATIENCE))


# ---- memory


def most_resident() -> int:
    """Return the peak of the process's resident memory, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])


@needs_a_worker
@pytest.mark.parametrize("end", ["given up", "closed"])
@pytest.mark.parametrize("parts", [2, 1 << 22], ids=["32 MiB", "64 TiB"])
def test_claimed_size_takes_no_memory(tmp_path: Path, parts: int, end: str) -> None:
    nbytes = (parts - 1) * PART + 1
    entry, data = put_of("x", zeros(1))
    entry = entry._replace(shape=(nbytes,), nbytes=nbytes, part=parts - 1)
    with (
        serve_store(tmp_path / "served", namespace_capacity=1 << 47) as service,
        RemoteStore(ME, namespace="kept") as remote,
    ):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, at what is resident now
        before = most_resident()
        with RemoteStore(ME, namespace="kept") as hostile:
            answer = put(hostile, [entry], data)
            assert [*answer.errors] == ([] if parts == 2 else [0])
            assert all(isinstance(error, StorageError) for error in answer.errors.values())  # the disk is smaller
            if end == "given up":
                send(hostile, wire.ABANDON, [change_of("x", sequence=entry.sequence)]).wait(timeout=PATIENCE)
        wait_for(lambda: service.statistics().clients == 1 and not len(service.store))
        assert most_resident() - before < 100 << 20
        remote.write("x", torch.ones(3)).wait(timeout=PATIENCE)
        assert remote.keys() == ["x"]
        assert service.store.statistics().used == 12


@needs_a_worker
def test_parts_do_not_wait_for_room_in_engine(tmp_path: Path) -> None:
    """The worker has one thread, and the engine has room for one part."""
    held = {"held": True}
    with (
        Engine("threads", queue_depth=1, block_size=1 << 18, max_pending=1, _faults=held) as engine,
        serve_store(tmp_path / "served", engine=engine),
        RemoteStore(ME) as remote,
        release_at_end(engine),
    ):
        write = remote.write("x", zeros(2 * PART + 64))
        wait_for(lambda: engine.statistics().pending == 3)
        assert remote.keys() == []
        assert not write.done()
        engine._native.release_held()
        assert write.wait(timeout=PATIENCE) == 2 * PART + 64


@needs_a_worker
def test_oversized_request_is_refused(tmp_path: Path) -> None:
    with serve_store(tmp_path / "served") as service, RemoteStore(ME) as remote:
        with pytest.raises(ValueError, match=f"up to {PART} bytes"):
            put(remote, [make_small()], zeros(5 * PART))
        found = service.statistics()
        assert (found.refused, found.most_in_flight) == (1, 0)
        assert remote.keys() == []


@needs_a_worker
@pytest.mark.parametrize(
    "places",
    [[(0, 64), (0, 64)], [(0, 128), (64, 64)], [(64, 64), (0, 128)], [(0, 65), (64, 1)], [(64, 1)] + [(0, 256)] * 100],
    ids=["the same", "one in the other", "the other way round", "a byte", "many"],
)
def test_overlapping_entries_are_refused(tmp_path: Path, places: list[tuple[int, int]]) -> None:
    """One received tensor per entry would multiply the bytes of the request."""
    entries = [put_of(f"{i}", zeros(n), at=at)[0] for i, (at, n) in enumerate(places)]
    with serve_store(tmp_path / "served") as service, RemoteStore(ME) as remote:
        with pytest.raises(ValueError, match="another"):
            put(remote, entries, zeros(256))
        assert service.statistics().refused == 1
        assert remote.keys() == []
        remote.writev({"a": zeros(64), "none": zeros(0), "nothing": zeros(0), "b": zeros(1)}).wait(timeout=PATIENCE)
        assert remote.keys() == ["a", "none", "nothing", "b"]


@needs_a_worker
@pytest.mark.parametrize("name", ["nobody", "", f"{ME} ", 7, None])
def test_client_needs_known_worker(tmp_path: Path, name: Any) -> None:
    """The service could not notice the death of an unknown worker."""
    with serve_store(tmp_path / "served", clients=1) as service:
        with pytest.raises(AuthenticationError):
            rpc_sync(ME, services.begin, ("store", bytes(16), None, name, 0.0), timeout=PATIENCE)
        assert service.statistics().clients == 0
        RemoteStore(ME).close()


@needs_a_worker
@pytest.mark.parametrize("verb", [wire.PUT, wire.DELETE], ids=["put", "delete"])
def test_ended_session_frees_waiting_requests(tmp_path: Path, verb: int) -> None:
    """The awaited request never arrives."""
    with serve_store(tmp_path / "served", memory=2 * PART, clients=1) as service:
        with RemoteStore(ME, namespace="kept") as remote:
            data = torch.ones(1 << 20, dtype=torch.uint8)
            entry, _ = put_of("x", data, after=1 << 50)
            if verb == wire.PUT:
                waiting = send(remote, verb, [entry], data)
            else:
                waiting = send(remote, verb, [change_of("x", after=1 << 50)])
            assert remote.keys() == []
            assert service.statistics().in_flight == (data.nbytes if verb == wire.PUT else 0)
            assert not waiting.done()
        waiting.exception(timeout=PATIENCE)
        wait_for(lambda: service.statistics().clients == service.statistics().in_flight == 0)


# ---- quotas


MALFORMED: dict[str, tuple[list[Put], torch.Tensor]] = {
    "a whole and a part": ([make_small(), make_last(at=64)], zeros(128)),
    "a part and a whole": ([make_last(), make_small(at=64)], zeros(128)),
    "two parts": ([make_last(), make_last("b", at=64)], zeros(128)),
    "twice the same key": ([make_small(), make_small(at=64)], zeros(128)),
    "numbers": ([make_small()], torch.zeros(1 << 14)),
    "shared": ([make_small(), make_small("b")], zeros(64)),
    "cut off": ([make_small(), make_small("b", at=64)], zeros(127)),
}


def expect_whole_quota(remote: RemoteStore) -> None:
    """Check that no bytes of the quota are in use, by using all of it."""
    remote.write("all", zeros(CAPACITY)).wait(timeout=PATIENCE)
    remote.delete("all").wait(timeout=PATIENCE)


@needs_a_worker
@pytest.mark.parametrize("kind", MALFORMED)
def test_refused_write_takes_no_quota(tmp_path: Path, kind: str) -> None:
    entries, data = MALFORMED[kind]
    with (
        serve_store(tmp_path / "served", namespace_capacity=CAPACITY) as service,
        RemoteStore(ME, namespace="kept") as hostile,
        RemoteStore(ME, namespace="kept") as other,
    ):
        for i in range(3):
            with pytest.raises((ValueError, TypeError)):
                put(hostile, entries, data)
            assert service.statistics().refused == i + 1
        assert other.keys() == []
        expect_whole_quota(other)


CHANGED: dict[str, tuple[list[Put], int]] = {  # entries of zeros, and which of them has another digest
    "alone": ([make_small()], 0),
    "of two": ([make_small(), make_small("other", at=64)], 1),
    "of a long key": ([make_small(LONG)], 0),
    "of a long key and another": ([make_small(), make_small(LONG, at=64)], 1),
    "empty": ([make_small(), put_of("empty", zeros(0), at=64)[0]], 1),
}


@needs_a_worker
@pytest.mark.parametrize(("entries", "changed"), CHANGED.values(), ids=list(CHANGED))
def test_corrupted_entry_is_refused_alone(tmp_path: Path, entries: list[Put], changed: int) -> None:
    entries = [
        e._replace(digest=digest(zeros(e.length)) ^ (i == changed), expires=in_time()) for i, e in enumerate(entries)
    ]
    with (
        serve_store(tmp_path / "served", namespace_capacity=CAPACITY) as service,
        RemoteStore(ME, namespace="kept") as remote,
        RemoteStore(ME, namespace="kept") as other,
    ):
        answer = put(remote, entries, zeros(128))
        assert [*answer.errors] == [changed]
        assert isinstance(answer.errors[changed], ChecksumError)
        assert repr(entries[changed].key) in str(answer.errors[changed])
        assert remote.keys() == [e.key for i, e in enumerate(entries) if i != changed]
        assert service.statistics().refused == 1
        other.deletev(other.keys()).wait(timeout=PATIENCE)
        expect_whole_quota(other)


@needs_a_worker
@pytest.mark.parametrize("part", [0, 1])
def test_corrupted_part_aborts_write(tmp_path: Path, part: int) -> None:
    with (
        serve_store(tmp_path / "served", namespace_capacity=CAPACITY) as service,
        RemoteStore(ME, namespace="kept") as remote,
    ):
        sequence = make_last().sequence
        for i in range(2):
            entry, data = put_of("last", zeros(CAPACITY), part=i, sequence=sequence)
            answer = put(remote, [entry._replace(digest=entry.digest ^ (i == part))], data)
            assert [*answer.errors] == ([0] if i >= part else [])
            if i >= part:
                assert isinstance(answer.errors[0], ChecksumError)
        entry, data = put_of("last", zeros(CAPACITY), part=part, sequence=sequence)
        assert isinstance(put(remote, [entry], data).errors[0], ChecksumError)  # it comes too late
        assert remote.keys() == []
        assert service.statistics().refused == 1
        expect_whole_quota(remote)


@needs_a_worker
def test_corrupted_entry_spares_other_entries(tmp_path: Path) -> None:
    """The service does not write them again: the store has no room for each on a separate page."""
    count, wrong = MOST_ENTRIES, 17

    def entries(changed: int | None) -> list[Put]:
        found = [make_small(f"{i}", at=64 * i) for i in range(count)]
        return [entry._replace(digest=entry.digest ^ (i == changed)) for i, entry in enumerate(found)]

    with (
        serve_store(tmp_path / "served", capacity=2 << 20, namespace_capacity=64 * count) as service,
        RemoteStore(ME, namespace="kept") as remote,
        RemoteStore(ME, namespace="kept") as other,
    ):
        for _ in range(3):
            answer = put(remote, entries(wrong), zeros(64 * count))
            assert [*answer.errors] == [wrong]
            assert len(remote.keys()) == count - 1
            other.deletev(other.keys()).wait(timeout=PATIENCE)
        assert service.store.statistics().writes <= 3 * (count + 1)
        assert put(remote, entries(None), zeros(64 * count)).errors == {}
        with pytest.raises(QuotaError):
            other.write("one more", zeros(1)).wait(timeout=PATIENCE)


@needs_a_worker
@pytest.mark.parametrize("size", [16, 1 << 16], ids=["in the message", "beside it"])
def test_data_needs_no_alignment(tmp_path: Path, size: int) -> None:
    data = torch.randint(256, (4 * size + 1,), dtype=torch.uint8)[1:]
    numbers = data.clone().view(torch.int32)
    entry, _ = put_of("x", numbers)
    with serve_store(tmp_path / "served") as service, RemoteStore(ME) as remote:
        assert put(remote, [entry], data).errors == {}
        assert torch.equal(remote.read("x").wait(timeout=PATIENCE), numbers)
        assert service.statistics().refused == 0


@needs_a_worker
@pytest.mark.parametrize(
    ("keys", "size"),
    [(["a"], 100), (["a", "b"], 100), ([LONG], 100), (["a", LONG], 100), (["a"], 2 << 20), (["a"], CAPACITY)],
    ids=["small", "two", "of a long key", "one of a long key", "alone", "parts"],
)
def test_refusing_store_takes_no_quota(tmp_path: Path, keys: list[str], size: int) -> None:
    with (
        serve_store(tmp_path / "served", capacity=2 * (PART + PAGE), namespace_capacity=CAPACITY),
        RemoteStore(ME, namespace="kept") as one,
        RemoteStore(ME, namespace="kept") as other,
    ):
        with RemoteStore(ME) as full, RemoteStore(ME) as as_full:
            wait_all([client.write("all", zeros(CAPACITY)) for client in (full, as_full)], timeout=PATIENCE)
            for _ in range(3):
                error = one.writev({key: zeros(size) for key in keys}).exception(timeout=PATIENCE)
                assert isinstance(error, QuotaError)
                assert f"no room for {size} bytes" in str(error)
            wait_all([client.delete("all") for client in (full, as_full)], timeout=PATIENCE)
        assert other.keys() == []
        expect_whole_quota(other)


# ---- folders


@needs_a_worker
@pytest.mark.parametrize(
    "keys",
    [["weights"], ["k"], ["k0123456789abcdef"], ["keys_of_layer_017~"], ["k" + "0" * 16 + "/x", "p0/1", "exp_avg 1"]],
    ids=["one", "of one letter", "as of a namespace", "as of a private one", "several, and one of a service"],
)
def test_foreign_folder_is_refused_unchanged(tmp_path: Path, keys: list[str]) -> None:
    tensors = {key: torch.arange(100) + i for i, key in enumerate(keys)}
    with DiskStore(tmp_path / "theirs", durable=True) as store:
        store.writev(tensors).wait(timeout=PATIENCE)
    with pytest.raises(StorageError, match="keys"):
        serve_store(tmp_path / "theirs", durable=True)
    with DiskStore(tmp_path / "theirs", durable=True) as store:
        assert store.keys() == keys
        assert all(map(torch.equal, store.readv(keys).wait(timeout=PATIENCE), tensors.values()))
    serve_store(tmp_path / "mine", durable=True).close()  # by the same name


@needs_a_worker
@pytest.mark.parametrize("size", [100, CAPACITY], ids=["small", "parts"])
def test_undeleted_key_stays_until_final_deletion(tmp_path: Path, size: int) -> None:
    def expect_none(remote: RemoteStore) -> None:
        assert remote.keys() == []
        assert "x" not in remote
        assert isinstance(remote.read("x").exception(timeout=PATIENCE), NotFoundError)
        assert isinstance(remote.delete("x").exception(timeout=PATIENCE), NotFoundError)

    with (
        serve_store(tmp_path, durable=True, namespace_capacity=2 * CAPACITY) as service,
        RemoteStore(ME, namespace="kept") as remote,
    ):
        remote.write("x", zeros(size)).wait(timeout=PATIENCE)
        service.store.close()
        assert isinstance(remote.delete("x").exception(timeout=PATIENCE), InvalidStateError)
        assert remote.keys() == ["x"]
    with (
        serve_store(tmp_path, durable=True, namespace_capacity=2 * CAPACITY),
        RemoteStore(ME, namespace="kept") as remote,
    ):
        assert remote.read("x").wait(timeout=PATIENCE).nbytes == size
        with pytest.raises(QuotaError):
            remote.write("all", zeros(2 * CAPACITY)).wait(timeout=PATIENCE)
        remote.delete("x").wait(timeout=PATIENCE)
        expect_none(remote)
        remote.write("all", zeros(2 * CAPACITY)).wait(timeout=PATIENCE)
        remote.delete("all").wait(timeout=PATIENCE)
    with serve_store(tmp_path, durable=True), RemoteStore(ME, namespace="kept") as remote:
        expect_none(remote)
