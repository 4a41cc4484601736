"""A remote store served by this worker: reads return the written tensors, and hostile requests are refused."""

from __future__ import annotations

import contextlib
import math
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc_ext
from cudafuture import CUDAFuture, executors, wait_all
from cudafuture.errors import (
    AuthenticationError,
    ChecksumError,
    InvalidStateError,
    NotFoundError,
    QuotaError,
    TensorError,
)
from cudafuture.io import Engine
from cudafuture.io.engine import PAGE
from remote_store import messages as wire
from remote_store.seams import (
    HandledInPython,
    Redirected,
    change_of,
    expect_idle,
    in_time,
    put_of,
    redirect_replies,
    send,
    send_body,
)
from rpc_ext import rpc_sync
from rpc_ext._channel import Reply
from rpc_ext.store import _calls as services
from rpc_ext.store._handler import RequestHandler
from rpc_ext.store._wire import LONGEST_KEY, PART, TOKEN
from rpc_ext.store.client import RemoteStore
from rpc_ext.store.service import StoreService, serve_store
from support.patience import PATIENCE
from support.rpc_callees import ME, alone
from support.soak import soak_count

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("remote-store")]

HOUR = 3600.0


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_ext.Session]:
    with alone(tmp_path_factory.mktemp("rpc") / "rendezvous", num_worker_threads=4) as session:
        yield session


@pytest.fixture
def clients(service: StoreService) -> Iterator[tuple[RemoteStore, RemoteStore]]:
    """Open two clients of one namespace."""
    with RemoteStore(ME, namespace="shared") as one, RemoteStore(ME, namespace="shared") as other:
        yield one, other


def make_numbers(size: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + seed


def test_many_tensors_take_few_requests(remote: RemoteStore, service: StoreService) -> None:
    tensors = {f"{i}": make_numbers(4000 + i, i) for i in range(500)}
    assert remote.writev(tensors).wait(timeout=PATIENCE) == sum(t.nbytes for t in tensors.values())
    assert all(map(torch.equal, remote.readv(tensors).wait(timeout=PATIENCE), tensors.values()))
    outs = [torch.empty_like(t) for t in tensors.values()]
    remote.readv(list(tensors), outs).wait(timeout=PATIENCE)
    assert all(map(torch.equal, outs, tensors.values()))
    assert sorted(remote.keys()) == sorted(tensors)
    assert service.statistics().requests < 60


def test_large_batches_take_several_answers(remote: RemoteStore) -> None:
    tensors = {f"{i}": make_numbers(PART // 4 // 3, i) for i in range(8)}
    remote.writev(tensors).wait(timeout=PATIENCE)
    assert all(map(torch.equal, remote.readv(tensors).wait(timeout=PATIENCE), tensors.values()))


def test_read_during_replacement_sees_old_or_new(
    clients: tuple[RemoteStore, RemoteStore],
) -> None:
    remote, another = clients
    size = PART // 4 + 1000
    remote.write("x", torch.full((size,), -1.0)).wait(timeout=PATIENCE)
    for turn in range(soak_count(100)):
        write = remote.write("x", torch.full((size,), float(turn)))
        reads = [another.read("x") for _ in range(3)]
        write.wait(timeout=PATIENCE)
        for read in reads:
            (value,) = read.wait(timeout=PATIENCE).unique().tolist()
            assert value in (turn - 1, turn)


def change_before_rest(
    remote: RemoteStore, change: Callable[[], CUDAFuture[Any]]
) -> contextlib.AbstractContextManager[None]:
    """Delay the first reply to a read of a client until a change by another client is done."""

    def take_late(message: Redirected, body: bytes, tensors: list[torch.Tensor]) -> None:
        if message.verb == wire.GET:
            change().add_done_callback(lambda _: message.answered(body, tensors), executor=executors.inline)
        else:
            message.answered(body, tensors)

    return redirect_replies(remote, take_late)


@pytest.mark.parametrize("size", [3 * PART // 4 + 1000, PART // 4 + 1000], ids=["parts", "two parts"])
@pytest.mark.parametrize("other", [PART // 4 + 1000, 500, None], ids=["by parts", "by a small one", "by nothing"])
def test_change_during_read_keeps_old_tensor(
    clients: tuple[RemoteStore, RemoteStore], size: int, other: int | None
) -> None:
    """Also its later parts, which the client asks for when the key has another tensor."""
    remote, another = clients
    remote.write("x", make_numbers(size)).wait(timeout=PATIENCE)
    changes: list[CUDAFuture[Any]] = []

    def change() -> CUDAFuture[Any]:
        changes.append(another.delete("x") if other is None else another.write("x", torch.ones(other)))
        return changes[0]

    with change_before_rest(remote, change):
        assert torch.equal(remote.read("x").wait(timeout=PATIENCE), make_numbers(size))
    assert changes[0].done()
    if other is None:
        error = remote.read("x").exception(timeout=PATIENCE)
        assert isinstance(error, NotFoundError)
        assert str(error) == "there is no key 'x'"
    else:
        assert torch.equal(remote.read("x").wait(timeout=PATIENCE), torch.ones(other))


FOUND = wire.Found(torch.uint8, (64,), 64, 0, 64, 0, None)
ANSWERS: dict[str, tuple[bytes, list[torch.Tensor]]] = {
    "nothing": (b"", []),
    "no entries": wire.pack_answer(wire.GET, 3),
    "of another version": (b"\0" + wire.pack_answer(wire.GET, 3, {}, [FOUND] * 3)[0][1:], []),
    "too few": wire.pack_answer(wire.GET, 3, {}, [FOUND], torch.zeros(64, dtype=torch.uint8)),
    "to others": wire.pack_answer(wire.GET, 2, {}, [FOUND] * 2, torch.zeros(64, dtype=torch.uint8)),
    "errors of others": wire.pack_answer(wire.GET, 3, {i: KeyError("x") for i in (7, 8, 9)}),
    "more errors": wire.pack_answer(wire.GET, 3, {i: KeyError("x") for i in range(9)}),
    "no errors": (wire.ANSWER.pack(wire.VERSION, 3, 1) + b"none", []),
    "no bytes": wire.pack_answer(wire.GET, 3, {}, [FOUND] * 3),
    "bytes of others": wire.pack_answer(wire.GET, 3, {}, [FOUND] * 3, torch.zeros(64, dtype=torch.uint8)),
    "other bytes": wire.pack_answer(
        wire.GET, 3, {}, [FOUND._replace(at=64 * i) for i in range(3)], torch.ones(192, dtype=torch.uint8)
    ),
    "numbers": (wire.pack_answer(wire.GET, 3, {}, [FOUND] * 3)[0], [torch.ones(64)]),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))
def test_invalid_answers_end_every_read(remote: RemoteStore, answer: tuple[bytes, list[torch.Tensor]]) -> None:
    def give(_: RequestHandler, __: bytes, ___: list[torch.Tensor], reply: Reply) -> None:
        reply.send(*answer)

    with HandledInPython(give):
        reads = remote.readv([f"{i}" for i in range(3)]), remote.read("a"), remote.read("b", torch.empty(1 << 20))
        assert all(read.exception(timeout=PATIENCE) is not None for read in reads)
    remote.write("a", make_numbers(3)).wait(timeout=PATIENCE)
    assert torch.equal(remote.read("a").wait(timeout=PATIENCE), make_numbers(3))
    expect_idle(remote)


@pytest.mark.parametrize("nbytes", [1 << 20, (6 << 20) + 100, PART])
def test_received_tensors_are_aligned_for_disks(worker: rpc_ext.Session, nbytes: int) -> None:
    tensor = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8)
    outside = rpc_ext.statistics().received_outside
    back = rpc_sync(ME, torch.clone, (tensor,), timeout=PATIENCE)
    assert torch.equal(back, tensor)
    assert back.data_ptr() % PAGE == 0
    assert rpc_ext.statistics().received_outside == outside


def test_errors_name_worker_and_key(remote: RemoteStore) -> None:
    error = remote.read("weights").exception(timeout=PATIENCE)
    assert error is not None
    if hasattr(error, "__notes__"):
        assert any(f"read weights on worker '{ME}'" in note for note in error.__notes__)


def test_only_shared_keys_outlive_client(service: StoreService) -> None:
    with RemoteStore(ME) as one, RemoteStore(ME) as other, RemoteStore(ME, namespace="shared") as shared:
        one.write("x", make_numbers(1, 1)).wait(timeout=PATIENCE)
        shared.write("x", make_numbers(1, 2)).wait(timeout=PATIENCE)
        assert "x" not in other
        assert service.statistics().clients == 3
    wait_all([rpc_ext.rpc_async(ME, int)], timeout=PATIENCE)
    with RemoteStore(ME, namespace="shared") as again:
        assert again.read("x").wait(timeout=PATIENCE).tolist() == [2]
        while len(service.store) > 1:  # close() does not wait for the service
            service.store.flush().wait(timeout=PATIENCE)


def test_durable_service_restores_keys(tmp_path: Path) -> None:
    large = make_numbers(PART // 4 + 7)
    with serve_store(tmp_path, durable=True), RemoteStore(ME, namespace="states") as remote:
        assert remote.durable
        remote.writev({"small": make_numbers(3), "large": large}).wait(timeout=PATIENCE)
        RemoteStore(ME).write("private", make_numbers(3)).wait(timeout=PATIENCE)
    with serve_store(tmp_path, durable=True) as service, RemoteStore(ME, namespace="states") as remote:
        assert remote.keys() == ["small", "large"]
        assert torch.equal(remote.read("large").wait(timeout=PATIENCE), large)
        service.store.flush().wait(timeout=PATIENCE)
        assert len(service.store) == 2


def test_namespace_keeps_within_quota(tmp_path: Path) -> None:
    with serve_store(tmp_path, namespace_capacity=1000), RemoteStore(ME) as remote:
        both = remote.write("a", make_numbers(200)), remote.write("b", make_numbers(100))
        errors = [future.exception(timeout=PATIENCE) for future in both]
        assert sum(isinstance(error, QuotaError) for error in errors) == 1
        assert isinstance(remote.write("c", make_numbers(PART)).exception(timeout=PATIENCE), QuotaError)
        with RemoteStore(ME) as other:
            other.write("a", make_numbers(200)).wait(timeout=PATIENCE)


@pytest.mark.parametrize("key", ["x", "k" * LONGEST_KEY])
@pytest.mark.parametrize("nbytes", [12 << 20, 50 << 20], ids=["whole", "in parts"])
def test_full_store_error_names_tensor_and_size(tmp_path: Path, key: str, nbytes: int) -> None:
    """The store behind the service has other names for its keys, and none of the parts alone is too large."""
    with serve_store(tmp_path / "full", name="full", capacity=10 << 20), RemoteStore(ME, name="full") as remote:
        error = remote.write(key, torch.zeros(nbytes, dtype=torch.uint8)).exception(timeout=PATIENCE)
        assert isinstance(error, QuotaError)
        assert str(error).startswith(f"no room for {nbytes} bytes: ")
        assert str(10 << 20) in str(error)
        if sys.version_info >= (3, 11):  # exceptions have notes
            assert error.__notes__ == [f"write {key} on worker 'me'", f"in CUDAFuture 'write {key}'"]


def test_key_has_1_to_1000_bytes(remote: RemoteStore) -> None:
    longest = "\u00e4" * (LONGEST_KEY // 2)
    remote.write(longest, make_numbers(3)).wait(timeout=PATIENCE)
    assert remote.keys() == [longest]
    assert torch.equal(remote.read(longest).wait(timeout=PATIENCE), make_numbers(3))
    remote.delete(longest).wait(timeout=PATIENCE)
    for key in ("", longest + "k", "k" * 1001):
        for ask in (
            lambda: remote.write(key, make_numbers(3)),  # noqa: B023
            lambda: remote.read(key),  # noqa: B023
            lambda: remote.delete(key),  # noqa: B023
            lambda: remote.stat(key),  # noqa: B023
            lambda: remote.find([key]),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=f"1 to 1000 bytes of UTF-8, not {len(key.encode())}"):
                ask()
    assert remote.keys() == []


def test_service_limits_clients(tmp_path: Path) -> None:
    with serve_store(tmp_path, clients=1), RemoteStore(ME), pytest.raises(BlockingIOError, match="1 clients"):
        RemoteStore(ME)


def test_wrong_arguments_are_refused(service: StoreService, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already"):
        serve_store(tmp_path / "another")
    for wrong in ({"clients": 0}, {"memory": PART}, {"name": ""}):
        with pytest.raises(ValueError, match=r"memory|name"):
            serve_store(tmp_path / "another", **wrong)
    with pytest.raises(InvalidStateError, match="serves no store called 'other'"):
        RemoteStore(ME, name="other")
    with serve_store(tmp_path / "another", name="other"), RemoteStore(ME, name="other") as remote:
        remote.write("x", make_numbers(3)).wait(timeout=PATIENCE)


def test_started_operation_cannot_be_cancelled(service: StoreService) -> None:
    with RemoteStore(ME, namespace="shared") as remote:
        write = remote.write("x", make_numbers(PART))
        assert not write.cancel()
        missing = remote.read("no")
        assert not missing.cancel()
        remote.flush().wait(timeout=PATIENCE)  # of what changes something
        assert write.done()
        assert isinstance(missing.exception(timeout=PATIENCE), NotFoundError)
        last = remote.write("y", make_numbers(PART))
    assert last.done()
    with RemoteStore(ME, namespace="shared") as remote:
        assert remote.keys() == ["x", "y"]


def test_failed_write_releases_memory(service: StoreService, remote: RemoteStore) -> None:
    remote._window.token = bytes(TOKEN)
    write = remote.write("x", make_numbers(PART))
    assert write.released is not None
    write.released.wait(timeout=PATIENCE)
    assert isinstance(write.exception(timeout=PATIENCE), AuthenticationError)


def test_waiting_for_room_counts_toward_timeout(tmp_path: Path) -> None:
    engine = Engine("threads", queue_depth=8, block_size=1 << 18, _faults={"held": True})
    with serve_store(tmp_path / "slow", name="slow", engine=engine, memory=2 * PART, clients=1):
        try:
            with RemoteStore(ME, name="slow", timeout=HOUR) as remote:
                data = make_numbers(PART // 4)
                writes = {f"{i}": remote.write(f"{i}", data) for i in range(6)}
                assert remote.statistics().in_flight == 2 * PART
                assert remote.statistics().waiting == 4 * PART
                remote._window.look(time.perf_counter() + 2 * HOUR)
                for key, write in writes.items():
                    error = write.exception(timeout=PATIENCE)
                    assert isinstance(error, TimeoutError)
                    assert f"write {key}: " in str(error)
                    assert ME in str(error)
        finally:
            engine._native.release_held()


def test_client_beyond_window_is_refused(tmp_path: Path) -> None:
    engine = Engine("threads", queue_depth=8, block_size=1 << 18, _faults={"held": True})
    with serve_store(tmp_path / "slow", name="slow", engine=engine, memory=2 * PART, clients=1) as service:
        try:
            with RemoteStore(ME, name="slow") as remote:
                remote._window.size = 1 << 40
                data = make_numbers(PART // 4)
                writes = [remote.write(f"{i}", data) for i in range(6)]
                while (statistics := service.statistics()).in_flight + statistics.refused * PART < 6 * PART:
                    assert not writes[0].done()
                assert (statistics.in_flight, statistics.refused) == (4 * PART, 2)
                engine._native.release_held()
                errors = [write.exception(timeout=PATIENCE) for write in writes]
            assert [type(error) for error in errors if error is not None] == [BlockingIOError] * 2
        finally:
            engine._native.release_held()


def test_client_statistics_count_operations(remote: RemoteStore) -> None:
    none = remote.statistics()
    assert (none.pending, none.operations, none.failed, none.in_flight, none.waiting) == (0, 0, 0, 0, 0)
    assert none.window == (1 << 30) // 16
    assert math.isnan(none.latency_p50)
    remote.writev({f"{i}": make_numbers(100) for i in range(4)}).wait(timeout=PATIENCE)
    remote.read("0").wait(timeout=PATIENCE)
    assert remote.read("no").exception(timeout=PATIENCE) is not None
    remote.delete("1").wait(timeout=PATIENCE)
    some = remote.statistics()
    assert (some.bytes_written, some.bytes_read, some.operations, some.failed) == (1600, 400, 4, 1)
    assert (some.in_flight, some.waiting) == (0, 0)
    assert 0 < some.latency_p50 <= some.latency_p99


def test_each_operation_has_own_error(remote: RemoteStore) -> None:
    remote._window.token = bytes(TOKEN)
    errors = [write.exception(timeout=PATIENCE) for write in [remote.write(f"{i}", make_numbers(1)) for i in range(50)]]
    assert all(isinstance(error, AuthenticationError) for error in errors)
    for i, error in enumerate(errors):
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("write ")]
        assert notes == [f"write {i} on worker '{ME}'"]


def test_window_bounds_bytes_in_flight(tmp_path: Path) -> None:
    with serve_store(tmp_path, memory=4 * PART, clients=2) as service, RemoteStore(ME) as remote:
        wait_all([remote.write(f"{i}", make_numbers(PART // 4)) for i in range(8)], timeout=PATIENCE)
        wait_all([remote.read(f"{i}") for i in range(8)], timeout=PATIENCE)
        assert PART <= service.statistics().most_in_flight <= 2 * PART


# ---- hostile clients


def files_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder, without the slabs of the store."""
    return sorted(path.name for path in folder.rglob("*") if not path.name.startswith("slab-"))


def corrupt(good: bytes, at: int, form: str, *values: Any) -> bytes:
    """Return a message with other numbers at one offset."""
    found = bytearray(good)
    struct.pack_into(f"<{form}", found, at, *values)
    return bytes(found)


HEAD = wire.HEAD.size + len("store")  # bytes of a request before its first entry
KEY = HEAD + wire.OPERATION.size  # before the first key
TENSOR = KEY + 1  # before what an entry of the key "x" says of its tensor


MALFORMED = {1, 2, 4}  # kinds of requests that have no answer


def make_hostile(
    kind: int, numbers: random.Random, token: bytes, other: bytes, kept: int
) -> tuple[bytes, list[torch.Tensor]]:
    """Return a request that must be refused.

    Args:
        kind: 0 to 5.
        token: of the session that asks.
        other: token of another session.
        kept: number of a read of the other session, whose parts the service keeps.
    """
    entry, data = put_of("x", torch.zeros(64, dtype=torch.uint8))

    def request(
        *entries: Any, verb: int = wire.PUT, sent: float = 0.0, token: bytes = token, data: torch.Tensor = data
    ) -> tuple[bytes, list[torch.Tensor]]:
        return wire.pack_request(verb, token, sent, 0, "store", entries, data)

    none = data[:0]
    large, _ = put_of("x", torch.zeros(PART + 64, dtype=torch.uint8), part=1)
    good, _ = request(entry)
    get, _ = request(change_of("x"), verb=wire.GET, data=none)
    if kind == 0:  # of no session
        wrong = numbers.choice([b"", b"x" * 16, other[::-1], numbers.randbytes(16)])
        verb = numbers.choice([wire.GET, wire.DELETE, wire.ABANDON, wire.FETCH])
        return numbers.choice(
            [
                request(entry, token=wrong),
                request(
                    wire.Fetch(kept, 1) if verb == wire.FETCH else change_of("x"), verb=verb, token=wrong, data=none
                ),
            ]
        )
    if kind == 1:  # cut off, or with something behind it
        return numbers.choice([good[: numbers.randrange(HEAD, len(good))], get[:-1], get + b"x"]), []
    if kind == 2:  # other data
        big = torch.zeros(PART + 1, dtype=torch.uint8)
        tensors = numbers.choice(
            [[], [data.float()], [data.reshape(8, 8)], [big], [data, data], [data[:63]], [torch.tensor(1)]]
        )
        return good[: -data.numel()], tensors
    if kind == 3:  # of other sessions
        fetch = wire.Fetch(numbers.choice([kept, numbers.randrange(1 << 64)]), numbers.choice([0, 1, 2, 1 << 31]))
        return numbers.choice(
            [
                request(fetch, verb=wire.FETCH, data=none),
                request(change_of("secret"), verb=wire.GET, data=none),
                request(change_of("secret"), verb=wire.DELETE, data=none),
            ]
        )
    if kind == 4:  # numbers that are none
        bad = numbers.choice([math.nan, math.inf, -math.inf])
        length = LONGEST_KEY + 1 + numbers.randrange(60_000)
        bodies = [
            corrupt(good, 0, "B", numbers.choice([0, 1, 2, 4, 255])),  # version
            corrupt(good, 1, "B", numbers.choice([0, 6, 255])),  # verb
            corrupt(good, 18, "d", bad),  # time of sending
            corrupt(good, 34, "H", numbers.choice([0, 2, 1025, 65535])),  # entries
            corrupt(good, HEAD, "Q", 0),  # sequence
            corrupt(good, HEAD + 16, "d", bad),  # expiry
            corrupt(good, HEAD + 24, "H", numbers.choice([0, 2, length])),  # length of the key
            corrupt(good, KEY, "s", numbers.choice([b"\0", b"\xff"])),  # key
            corrupt(good, TENSOR, "B", numbers.randrange(20, 256)),  # dtype
            corrupt(good, TENSOR + 1, "B", numbers.choice([0, 2, 65, 255])),  # dimensions
            wire.pack_request(wire.GET, token, 0.0, 0, "store", [change_of(f"{i}") for i in range(1025)], none)[0],
        ]
        return numbers.choice(bodies), []
    wrong_entries = [
        [entry._replace(shape=(-64,))],
        [entry._replace(shape=(-8, -8))],
        [entry._replace(shape=(1,) * 65)],
        [entry._replace(nbytes=1 << 60, shape=(1 << 60,))],
        [entry._replace(nbytes=1 << 47, shape=(1 << 47,))],
        [entry._replace(dtype=torch.float32)],
        [entry._replace(length=numbers.randrange(65, 1 << 31))],
        [entry._replace(length=63)],
        [entry._replace(at=64 * numbers.randrange(1, 1 << 25))],
        [entry._replace(at=numbers.randrange(1, 64))],
        [entry._replace(part=numbers.randrange(1, 1 << 30))],
        [entry._replace(digest=numbers.randrange(1, 1 << 60))],
        [large._replace(part=2)],
        [large._replace(part=0)],
        [large._replace(length=63)],
        [large._replace(digest=large.digest ^ 1)],
        [large, put_of("y", torch.zeros(PART + 64, dtype=torch.uint8), part=1)[0]],
        [entry, entry],
        [entry, put_of("y", data)[0]],
    ]
    return request(*numbers.choice(wrong_entries))


def test_hostile_requests_change_nothing(service: StoreService, tmp_path: Path) -> None:
    numbers = random.Random(1)
    large = make_numbers(PART // 2)
    with RemoteStore(ME, namespace="mine") as mine, RemoteStore(ME, namespace="other") as other:
        other.writev({"secret": make_numbers(100), "large": large}).wait(timeout=PATIENCE)
        looked_up = change_of("large", expires=in_time(10 * PATIENCE))  # its parts are kept to the end of the test
        (found,) = send(other, wire.GET, [looked_up]).wait(timeout=PATIENCE).entries
        assert isinstance(found, wire.Found)
        assert (found.nbytes, found.length) == (2 * PART, PART)
        send(mine, wire.ABANDON, [change_of("large", sequence=looked_up.sequence)]).wait(timeout=PATIENCE)
        token, others = (remote._token for remote in (mine, other))
        refused = service.statistics().refused
        before = files_in(tmp_path)
        for _ in range(soak_count(500)):
            kind = numbers.randrange(6)
            body, tensors = make_hostile(kind, numbers, token, others, looked_up.sequence)
            try:
                answer = send_body(mine, body, tensors).wait(timeout=PATIENCE)
            except (ValueError, TypeError, AuthenticationError):
                continue
            assert kind not in MALFORMED, body
            assert wire.parse_answer(body[1], 1, answer, []).errors.keys() == {0}, body
        assert service.statistics().refused > refused + soak_count(500) // 2
        assert service.statistics().in_flight == 0
        assert mine.keys() == []
        (part,) = send(other, wire.FETCH, [wire.Fetch(looked_up.sequence, 1)]).wait(timeout=PATIENCE).entries
        assert isinstance(part, wire.Part)
        assert part.length == PART
        assert torch.equal(other.read("large").wait(timeout=PATIENCE), large)
        assert other.read("secret").wait(timeout=PATIENCE).tolist() == make_numbers(100).tolist()
        assert files_in(tmp_path) == before
    with RemoteStore(ME, namespace="mine") as mine:
        mine.write("x", make_numbers(3)).wait(timeout=PATIENCE)
        assert "x" in mine


def test_tensors_that_no_message_describes_are_refused(remote: RemoteStore) -> None:
    with pytest.raises(TensorError, match="cannot be sent"):
        remote.write("x", torch.zeros(3).to(torch.float8_e8m0fnu))
    with pytest.raises(ValueError, match="at most 64 dimensions, not 65"):
        remote.write("x", torch.ones([1] * 65))
    assert remote.keys() == []


def test_only_clients_find_keys_and_trim(remote: RemoteStore, service: StoreService) -> None:
    token = remote._token
    refused = service.statistics().refused
    for stranger in (b"x" * len(token), b"", None):
        with pytest.raises(AuthenticationError):
            rpc_sync(ME, services.find, ("store", stranger, ["x"]))
        with pytest.raises(AuthenticationError):
            rpc_sync(ME, services.trim, ("store", stranger))
    for wrong in ([""], ["x", "k" * (LONGEST_KEY + 1)], ["\0"], ["\ud800"], [b"x"], [None], "x", None):
        with pytest.raises((ValueError, TypeError), match=r"key|surrogates"):
            rpc_sync(ME, services.find, ("store", token, wrong))
    assert service.statistics().refused == refused + 14
    assert rpc_sync(ME, services.find, ("store", token, ["x"])) == [None]


def test_corrupted_bytes_are_refused(remote: RemoteStore, service: StoreService) -> None:
    entry, data = put_of("x", torch.zeros(64, dtype=torch.uint8))
    answer = send(remote, wire.PUT, [entry], data + 1).wait(timeout=PATIENCE)
    with pytest.raises(ChecksumError, match=r"key 'x': the 64 bytes .* are not those that were sent"):
        raise answer.errors[0]
    assert remote.keys() == []
    assert service.statistics().refused == 1
