"""Offload to a worker that is this one: what is written comes back, and whoever breaks the rules is refused."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc_ext
from cudafuture import CUDAFuture, wait_all
from cudafuture.errors import AuthenticationError, ChecksumError, InvalidStateError, NotFoundError, QuotaError
from cudafuture.storage import Engine, digest
from cudafuture.storage.engine import PAGE
from rpc_ext import _offload_calls as calls
from rpc_ext import rpc_sync
from rpc_ext._offload_wire import LONGEST_KEY, PIECE, Header, Wanted, pack, pack_wanted
from rpc_ext.offload_service import OffloadService, serve_offload
from rpc_ext.remote_offloader import RemoteOffloader
from soak import soak_count
from world.offload_clients import stamp
from world.rpc_callees import ME, PATIENCE, alone

pytestmark = pytest.mark.xdist_group("remote-offloader")


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_ext.Session]:
    with alone(tmp_path_factory.mktemp("rpc") / "rendezvous", num_worker_threads=4) as session:
        yield session


@pytest.fixture
def clients(service: OffloadService) -> Iterator[tuple[RemoteOffloader, RemoteOffloader]]:
    """Give two clients with the same keys."""
    with RemoteOffloader(ME, namespace="shared") as one, RemoteOffloader(ME, namespace="shared") as other:
        yield one, other


def numbered(size: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + seed


def test_many_come_back_in_few_requests(remote: RemoteOffloader, service: OffloadService) -> None:
    tensors = {f"{i}": numbered(4000 + i, i) for i in range(500)}
    assert remote.writev(tensors).wait(timeout=PATIENCE) == sum(t.nbytes for t in tensors.values())
    assert all(map(torch.equal, remote.readv(tensors).wait(timeout=PATIENCE), tensors.values()))
    outs = [torch.empty_like(t) for t in tensors.values()]
    remote.readv(list(tensors), outs).wait(timeout=PATIENCE)
    assert all(map(torch.equal, outs, tensors.values()))
    assert sorted(remote.keys()) == sorted(tensors)
    assert service.statistics().requests < 60


def test_what_does_not_fit_into_one_answer_comes_with_the_next(remote: RemoteOffloader) -> None:
    tensors = {f"{i}": numbered(PIECE // 4 // 3, i) for i in range(8)}
    remote.writev(tensors).wait(timeout=PATIENCE)
    assert all(map(torch.equal, remote.readv(tensors).wait(timeout=PATIENCE), tensors.values()))


def test_a_client_that_reads_while_another_replaces_a_key_gets_the_old_or_the_new_tensor(
    clients: tuple[RemoteOffloader, RemoteOffloader],
) -> None:
    remote, another = clients
    size = PIECE // 4 + 1000
    remote.write("x", torch.full((size,), -1.0)).wait(timeout=PATIENCE)
    for turn in range(soak_count(100)):
        write = remote.write("x", torch.full((size,), float(turn)))
        reads = [another.read("x") for _ in range(3)]
        write.wait(timeout=PATIENCE)
        for read in reads:
            (value,) = read.wait(timeout=PATIENCE).unique().tolist()
            assert value in (turn - 1, turn)


@pytest.mark.parametrize("size", [PIECE // 4 + 1000, 1000], ids=["pieces", "small"])
@pytest.mark.parametrize("other", [PIECE // 4 + 1000, 500], ids=["by pieces", "by a small one"])
def test_a_tensor_that_is_replaced_while_it_is_looked_for_is_read_anew(
    service: OffloadService,
    clients: tuple[RemoteOffloader, RemoteOffloader],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    other: int,
) -> None:
    remote, another = clients
    remote.write("x", torch.zeros(size)).wait(timeout=PATIENCE)
    readv = service.store.readv

    def readv_too_late(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        another.write("x", torch.ones(other)).wait(timeout=PATIENCE)
        service.store.flush().wait(timeout=PATIENCE)  # the old pieces are gone
        return readv(*args, **kwargs)

    monkeypatch.setattr(service.store, "readv", readv_too_late)
    assert torch.equal(remote.read("x").wait(timeout=PATIENCE), torch.ones(other))


def test_a_key_that_is_deleted_while_it_is_looked_for_is_named(
    service: OffloadService, clients: tuple[RemoteOffloader, RemoteOffloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, another = clients
    remote.write("x", torch.zeros(3)).wait(timeout=PATIENCE)
    readv = service.store.readv

    def readv_too_late(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        another.delete("x").wait(timeout=PATIENCE)
        return readv(*args, **kwargs)

    monkeypatch.setattr(service.store, "readv", readv_too_late)
    error = remote.read("x").exception(timeout=PATIENCE)
    assert isinstance(error, NotFoundError)
    assert str(error) == "there is no key 'x'"


@pytest.mark.parametrize(
    "answer",
    [
        calls.Answer([]),
        calls.Answer([], b"no headers", b"12"),
        calls.Answer([(0, KeyError("x"))]),
        calls.Answer([], b"", b"", [0, 7]),
        ("no", "answer"),
    ],
    ids=["nothing", "no headers", "too few", "of others", "none"],
)
def test_every_read_ends_whatever_is_answered(
    remote: RemoteOffloader, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr("rpc_ext._offload_desk.Desk.get", lambda *_: CUDAFuture.completed(answer))
    reads = [remote.read(f"{i}") for i in range(3)]
    assert all(read.exception(timeout=PATIENCE) is not None for read in reads)


@pytest.mark.parametrize("nbytes", [1 << 20, (6 << 20) + 100, PIECE])
def test_received_tensors_are_aligned_for_disks(worker: rpc_ext.Session, nbytes: int) -> None:
    tensor = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8)
    outside = rpc_ext.statistics().received_outside
    back = rpc_sync(ME, torch.clone, (tensor,), timeout=PATIENCE)
    assert torch.equal(back, tensor)
    assert back.data_ptr() % PAGE == 0
    assert rpc_ext.statistics().received_outside == outside


def test_errors_name_worker_and_key(remote: RemoteOffloader) -> None:
    error = remote.read("weights").exception(timeout=PATIENCE)
    assert error is not None
    if hasattr(error, "__notes__"):
        assert any(f"read weights on worker '{ME}'" in note for note in error.__notes__)


def test_private_keys_go_with_their_client_and_shared_ones_stay(service: OffloadService) -> None:
    with RemoteOffloader(ME) as one, RemoteOffloader(ME) as other, RemoteOffloader(ME, namespace="shared") as shared:
        one.write("x", numbered(1, 1)).wait(timeout=PATIENCE)
        shared.write("x", numbered(1, 2)).wait(timeout=PATIENCE)
        assert "x" not in other
        assert service.statistics().clients == 3
    wait_all([rpc_ext.rpc_async(ME, int)], timeout=PATIENCE)
    with RemoteOffloader(ME, namespace="shared") as again:
        assert again.read("x").wait(timeout=PATIENCE).tolist() == [2]
        while len(service.store) > 1:  # the end of a client is told to the service, and not waited for
            service.store.flush().wait(timeout=PATIENCE)


def test_a_durable_service_has_its_keys_again(tmp_path: Path) -> None:
    large = numbered(PIECE // 4 + 7)
    with serve_offload(tmp_path, durable=True), RemoteOffloader(ME, namespace="states") as remote:
        assert remote.durable
        remote.writev({"small": numbered(3), "large": large}).wait(timeout=PATIENCE)
        RemoteOffloader(ME).write("private", numbered(3)).wait(timeout=PATIENCE)
    with serve_offload(tmp_path, durable=True) as service, RemoteOffloader(ME, namespace="states") as remote:
        assert remote.keys() == ["small", "large"]
        assert torch.equal(remote.read("large").wait(timeout=PATIENCE), large)
        service.store.flush().wait(timeout=PATIENCE)
        assert len(service.store) == 4


def test_the_quota_of_a_namespace_is_kept(tmp_path: Path) -> None:
    with serve_offload(tmp_path, namespace_capacity=1000), RemoteOffloader(ME) as remote:
        both = remote.write("a", numbered(200)), remote.write("b", numbered(100))
        errors = [future.exception(timeout=PATIENCE) for future in both]
        assert sum(isinstance(error, QuotaError) for error in errors) == 1
        assert isinstance(remote.write("c", numbered(PIECE)).exception(timeout=PATIENCE), QuotaError)
        with RemoteOffloader(ME) as other:
            other.write("a", numbered(200)).wait(timeout=PATIENCE)


@pytest.mark.parametrize("key", ["x", "k" * 1020])
@pytest.mark.parametrize("nbytes", [12 << 20, 50 << 20], ids=["whole", "in pieces"])
def test_a_full_store_names_the_tensor_and_its_size(tmp_path: Path, key: str, nbytes: int) -> None:
    """The store behind the service has other names for its keys, and the last piece that fits no more is smaller."""
    with serve_offload(tmp_path / "full", name="full", capacity=10 << 20), RemoteOffloader(ME, name="full") as remote:
        error = remote.write(key, torch.zeros(nbytes, dtype=torch.uint8)).exception(timeout=PATIENCE)
        assert isinstance(error, QuotaError)
        assert str(error).startswith(f"no room for {nbytes} bytes: ")
        assert str(10 << 20) in str(error)
        if sys.version_info >= (3, 11):  # exceptions have notes
            assert error.__notes__ == [f"write {key} on worker 'me'", f"in CUDAFuture 'write {key}'"]


def test_a_service_takes_so_many_clients(tmp_path: Path) -> None:
    with serve_offload(tmp_path, clients=1), RemoteOffloader(ME), pytest.raises(BlockingIOError, match="1 clients"):
        RemoteOffloader(ME)


def test_arguments(service: OffloadService, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already"):
        serve_offload(tmp_path / "another")
    for wrong in ({"clients": 0}, {"memory": PIECE}, {"name": ""}):
        with pytest.raises(ValueError, match=r"memory|name"):
            serve_offload(tmp_path / "another", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidStateError, match="serves no offload called 'other'"):
        RemoteOffloader(ME, name="other")
    with serve_offload(tmp_path / "another", name="other"), RemoteOffloader(ME, name="other") as remote:
        remote.write("x", numbered(3)).wait(timeout=PATIENCE)


def test_what_has_begun_cannot_be_cancelled_and_flush_and_close_wait_for_it(service: OffloadService) -> None:
    with RemoteOffloader(ME, namespace="shared") as remote:
        write = remote.write("x", numbered(PIECE))
        assert not write.cancel()
        missing = remote.read("no")
        assert not missing.cancel()
        remote.flush().wait(timeout=PATIENCE)  # of what changes something
        assert write.done()
        assert isinstance(missing.exception(timeout=PATIENCE), NotFoundError)
        last = remote.write("y", numbered(PIECE))
    assert last.done()
    with RemoteOffloader(ME, namespace="shared") as remote:
        assert remote.keys() == ["x", "y"]


def test_a_write_that_fails_releases_its_memory(service: OffloadService, remote: RemoteOffloader) -> None:
    remote._transport._token = b"wrong"
    write = remote.write("x", numbered(PIECE))
    assert write.released is not None
    write.released.wait(timeout=PATIENCE)
    assert isinstance(write.exception(timeout=PATIENCE), AuthenticationError)


def test_the_time_that_an_operation_waits_for_room_counts(tmp_path: Path) -> None:
    engine = Engine("threads", queue_depth=8, block_size=1 << 18, _faults={"held": True})
    with serve_offload(tmp_path / "slow", name="slow", engine=engine, memory=2 * PIECE, clients=1):
        try:
            with RemoteOffloader(ME, name="slow", timeout=1) as remote:
                data = numbered(PIECE // 4)
                writes = {f"{i}": remote.write(f"{i}", data) for i in range(6)}
                assert remote.statistics().under_way == 2 * PIECE
                assert remote.statistics().waiting == 4 * PIECE
                for key, write in writes.items():
                    error = write.exception(timeout=PATIENCE)
                    assert isinstance(error, TimeoutError)
                    assert f"write {key}: " in str(error)
                    assert ME in str(error)
        finally:
            engine._native.let_go()


def test_a_client_that_does_not_count_what_it_asks_for_is_refused(tmp_path: Path) -> None:
    engine = Engine("threads", queue_depth=8, block_size=1 << 18, _faults={"held": True})
    with serve_offload(tmp_path / "slow", name="slow", engine=engine, memory=2 * PIECE, clients=1) as service:
        try:
            with RemoteOffloader(ME, name="slow") as remote:
                remote._transport.flow.window = 1 << 40
                data = numbered(PIECE // 4)
                writes = [remote.write(f"{i}", data) for i in range(6)]
                while (statistics := service.statistics()).under_way + statistics.refused * PIECE < 6 * PIECE:
                    assert not writes[0].done()
                assert (statistics.under_way, statistics.refused) == (4 * PIECE, 2)
                engine._native.let_go()
                errors = [write.exception(timeout=PATIENCE) for write in writes]
            assert [type(error) for error in errors if error is not None] == [BlockingIOError] * 2
        finally:
            engine._native.let_go()


def test_a_client_says_what_it_has_done(remote: RemoteOffloader) -> None:
    none = remote.statistics()
    assert (none.pending, none.operations, none.failed, none.under_way, none.waiting) == (0, 0, 0, 0, 0)
    assert none.window == (1 << 30) // 16
    assert math.isnan(none.latency_p50)
    remote.writev({f"{i}": numbered(100) for i in range(4)}).wait(timeout=PATIENCE)
    remote.read("0").wait(timeout=PATIENCE)
    assert remote.read("no").exception(timeout=PATIENCE) is not None
    remote.delete("1").wait(timeout=PATIENCE)
    some = remote.statistics()
    assert (some.bytes_written, some.bytes_read, some.operations, some.failed) == (1600, 400, 4, 1)
    assert (some.under_way, some.waiting) == (0, 0)
    assert 0 < some.latency_p50 <= some.latency_p99


def test_errors_of_one_request_are_each_ones_own(remote: RemoteOffloader) -> None:
    remote._transport._token = b"wrong"
    errors = [write.exception(timeout=PATIENCE) for write in [remote.write(f"{i}", numbered(1)) for i in range(50)]]
    assert all(isinstance(error, AuthenticationError) for error in errors)
    for i, error in enumerate(errors):
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("write ")]
        assert notes == [f"write {i} on worker '{ME}'"]


def test_what_is_under_way_keeps_within_the_window(tmp_path: Path) -> None:
    with serve_offload(tmp_path, memory=4 * PIECE, clients=2) as service, RemoteOffloader(ME) as remote:
        wait_all([remote.write(f"{i}", numbered(PIECE // 4)) for i in range(8)], timeout=PATIENCE)
        wait_all([remote.read(f"{i}") for i in range(8)], timeout=PATIENCE)
        assert PIECE <= service.statistics().most_under_way <= 2 * PIECE


# ---- who breaks the rules


def files_in(folder: Path) -> list[str]:
    """Return the names of what is in a folder, but for the store's own files."""
    return sorted(path.name for path in folder.rglob("*") if not path.name.startswith("slab-"))


def hostile(numbers: random.Random, token: bytes, other: bytes) -> tuple[Any, tuple[Any, ...]]:
    """Return a request that must be refused."""
    data = torch.zeros(64, dtype=torch.uint8)
    header = Header("x", torch.uint8, (64,), 64, length=64)
    large = Header("x", torch.uint8, (PIECE + 64,), PIECE + 64, b"u" * 16, piece=1, pieces=2, length=64)

    headers = [
        header._replace(shape=(-64,)),
        header._replace(shape=(-8, -8)),
        header._replace(nbytes=1 << 60, shape=(1 << 60,)),
        header._replace(length=numbers.randrange(65, 1 << 60)),
        header._replace(at=64 * numbers.randrange(1, 1 << 50)),
        header._replace(piece=numbers.randrange(1, 1 << 30)),
        header._replace(pieces=numbers.randrange(2, 1 << 30)),
        header._replace(checksum=numbers.randrange(1, 1 << 60)),
        large._replace(piece=2),
        large._replace(upload=bytes(16)),
    ]
    good = pack([header])
    blocks = [pack([h]) for h in headers] + [
        good[: numbers.randrange(len(good))],
        good + b"x",
        pack([large, large]),
        pack([header, header]),
    ]
    longest = (LONGEST_KEY + 1 + numbers.randrange(60_000)).to_bytes(2, "little")
    blocks += [good[:10] + longest + good[12:], good.replace(b"x", b"\0"), good.replace(b"x", b"\xff")]
    kind = numbers.randrange(6)
    if kind == 0:
        return calls.put, (numbers.choice([b"", b"x" * 16, other[::-1], None, 3]), stamp(), good, data)
    if kind == 1:
        return calls.get, (token, stamp(), numbers.choice([b"", None, good, b"x" * numbers.randrange(100)]))
    if kind == 2:
        wrong = [None, "text", data.float(), data.reshape(8, 8), torch.zeros(PIECE + 1, dtype=torch.uint8)]
        return calls.put, (token, stamp(), good, numbers.choice(wrong))
    if kind == 3:
        return calls.get, (
            token,
            stamp(),
            pack_wanted([Wanted("secret", numbers.randbytes(16), numbers.randrange(1 << 32))]),
        )
    return calls.put, (token, stamp(), numbers.choice(blocks), data)


def test_hostile_requests_are_refused_and_change_nothing(service: OffloadService, tmp_path: Path) -> None:
    numbers = random.Random(1)
    with RemoteOffloader(ME, namespace="mine") as mine, RemoteOffloader(ME, namespace="other") as other:
        other.write("secret", numbered(100)).wait(timeout=PATIENCE)
        token, others = (remote._token for remote in (mine, other))
        refused = service.statistics().refused
        before = files_in(tmp_path)
        for _ in range(soak_count(500)):
            fn, args = hostile(numbers, token, others)
            try:
                answer = rpc_sync(ME, fn, ("offload", *args), timeout=PATIENCE)
            except (ValueError, TypeError, AuthenticationError, ChecksumError):
                continue
            assert answer.failures, (fn, args)
            assert not answer.block
        assert service.statistics().refused > refused
        assert mine.keys() == []
        assert other.read("secret").wait(timeout=PATIENCE).tolist() == numbered(100).tolist()
        assert files_in(tmp_path) == before
        mine.write("x", numbered(3)).wait(timeout=PATIENCE)
        assert "x" in mine


def test_keys_are_found_and_files_trimmed_for_clients_only(remote: RemoteOffloader, service: OffloadService) -> None:
    token = remote._token
    refused = service.statistics().refused
    block = pack_wanted([Wanted("x")])
    for arguments in (("offload", b"x" * len(token), block), ("offload", None, block)):
        with pytest.raises(AuthenticationError):
            rpc_sync(ME, calls.find_keys, arguments)
        with pytest.raises(AuthenticationError):
            rpc_sync(ME, calls.trim, arguments[:2])
    for wrong in (b"", block[:-1], block + b"x", "x", None):
        with pytest.raises(ValueError, match=r"block|headers|cut off"):
            rpc_sync(ME, calls.find_keys, ("offload", token, wrong))
    assert service.statistics().refused == refused + 9
    assert rpc_sync(ME, calls.find_keys, ("offload", token, block)) == [None]


def test_bytes_that_were_changed_on_the_way_are_refused(remote: RemoteOffloader, service: OffloadService) -> None:
    data = torch.ones(64, dtype=torch.uint8)
    header = Header("x", torch.uint8, (64,), 64, length=64, checksum=digest(torch.zeros(64, dtype=torch.uint8)))
    answer = rpc_sync(ME, calls.put, ("offload", remote._token, stamp(remote), pack([header]), data))
    with pytest.raises(ChecksumError, match=r"key 'x': the 64 bytes .* are not those that were sent"):
        answer.expect_success()
    assert remote.keys() == []
    assert service.statistics().refused == 1
