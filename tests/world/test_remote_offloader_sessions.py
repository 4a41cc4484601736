"""Requests by tokens, keys and uploads that are not one's own: refused and counted, and all stays as it was."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rpc_ext
from cudafuture import CUDAFuture, wait_all
from cudafuture.errors import (
    AuthenticationError,
    ChecksumError,
    InvalidStateError,
    NotFoundError,
    QuotaError,
    StorageError,
)
from cudafuture.storage import Offloader
from rpc_ext import _offload_calls as calls
from rpc_ext import rpc_sync
from rpc_ext._memory import arrived
from rpc_ext._offload_calls import Answer
from rpc_ext._offload_desk import Desk
from rpc_ext._offload_order import Stamp
from rpc_ext._offload_wire import PIECE, WHOLE, Header, Wanted, pack, pack_wanted, pieces_of, unpack, view_of
from rpc_ext.offload_service import OffloadService, serve_offload
from rpc_ext.remote_offloader import RemoteOffloader
from world.offload_clients import stamp
from world.offload_history import content_of
from world.offload_seams import Kept, Lost
from world.ranks import run_ranks
from world.rpc_callees import ME, PATIENCE, alone, wait_for
from world.rpc_workers import begin

pytestmark = pytest.mark.xdist_group("remote-offloader")

CAPACITY = 100 << 20
LONG = "any " + "k" * 1016
LARGE = Header("large a", torch.uint8, (PIECE + 100,), PIECE + 100, b"u" * 16, pieces=2, length=PIECE)
FIRST, LAST = (torch.zeros(size, dtype=torch.uint8) for size in (PIECE, 100))


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_ext.Session]:
    with alone(tmp_path_factory.mktemp("rpc") / "rendezvous", num_worker_threads=4) as session:
        yield session


@pytest.fixture
def service(tmp_path: Path) -> Iterator[OffloadService]:
    with serve_offload(tmp_path / "served", namespace_capacity=CAPACITY) as service:
        yield service


def call(fn: Callable[..., Any], remote: RemoteOffloader | bytes, *args: object) -> Any:
    """Call the service as a client could that minds no rules."""
    token = remote._token if isinstance(remote, RemoteOffloader) else remote
    return rpc_sync(ME, fn, ("offload", token, *args), timeout=PATIENCE)


def everything_of(service: OffloadService) -> list[Any]:
    service.store.flush().exception(timeout=PATIENCE)
    found = service.store.statistics()
    return [service.store.keys(), found.keys, found.bytes, found.used]


def expect_names(service: OffloadService, names: int) -> None:
    """See that the store has so many; what is removed, nobody waits for."""
    end = time.monotonic() + PATIENCE
    while len(service.store) != names:
        assert time.monotonic() < end, service.store.keys()
        service.store.flush().exception(timeout=PATIENCE)


# ---- tokens


def test_tokens_that_are_over_or_guessed_are_refused_and_counted(service: OffloadService) -> None:
    wanted = pack_wanted([Wanted("small a")])
    block = pack([Header("small a", torch.uint8, (100,), 100, length=100)])
    requests: list[tuple[Callable[..., Any], tuple[object, ...]]] = [
        (calls.put, (stamp(), block, LAST)),
        (calls.put, (stamp(), pack([LARGE]), FIRST)),
        (calls.get, (stamp(), wanted)),
        (calls.delete, (stamp(), wanted)),
        (calls.give_up, (LARGE.upload,)),
        (calls.keys, ()),
        (calls.stat, ("small a",)),
    ]
    with RemoteOffloader(ME, namespace="kept") as remote:
        content = content_of("small a", 1)
        remote.write("small a", content).wait(timeout=PATIENCE)
        gone = RemoteOffloader(ME, namespace="kept")
        call(calls.end, gone)
        numbers = random.Random(1)
        guessed = [numbers.randbytes(16), b"", remote._token[:-1], remote._token + b"\0", remote._token[::-1]]
        before = everything_of(service)
        for token in (gone._token, *guessed):
            for fn, args in requests:
                with pytest.raises(AuthenticationError, match="knows no such session"):
                    call(fn, token, *args)
        assert service.statistics().refused == len(requests) * 6
        call(calls.end, guessed[0])  # nobody's
        assert everything_of(service) == before
        assert service.statistics().clients == 1
        assert torch.equal(remote.read("small a").wait(timeout=PATIENCE), content)


# ---- keys


def test_a_client_reaches_no_key_of_another_namespace(service: OffloadService) -> None:
    tensors = {key: content_of(key, 1) for key in ("small a", "large a", LONG)}
    with (
        RemoteOffloader(ME, namespace="kept") as shared,
        RemoteOffloader(ME) as private,
        RemoteOffloader(ME, namespace="Kept") as other,
    ):
        for theirs in (shared, private):
            theirs.writev(tensors).wait(timeout=PATIENCE)
        uploads = {uploads_of(theirs, "large a") for theirs in (shared, private)}
        names = service.store.keys()  # more than anybody sees
        guesses = {*tensors, *names, *(name[1:] for name in names), *(f"../{name}" for name in names)}
        guesses |= {name.partition("/")[2] or "/" for name in names} | {"kept/small a", "../kept/small a"}
        guesses = {guess for guess in guesses if 1 <= len(guess.encode()) <= 1024}
        before = everything_of(service)
        for upload in (bytes(16), *uploads):
            wanted = [Wanted(guess, upload, piece) for guess in guesses for piece in (0, 1)]
            answer = call(calls.get, other, stamp(other), pack_wanted(wanted))
            assert len(answer.failures) == len(wanted)
            assert all(isinstance(error, NotFoundError) for _, error in answer.failures)
            assert not answer.block
        answer = call(calls.delete, other, stamp(other), pack_wanted([Wanted(guess) for guess in guesses]))
        assert len(answer.failures) == len(guesses)
        for upload in uploads:
            for piece, data in enumerate((FIRST, LAST)):
                header = LARGE._replace(upload=upload, piece=piece, length=data.nbytes)
                call(calls.put, other, stamp(other), pack([header]), data)
        other.writev({guess: torch.zeros(3) for guess in guesses}).wait(timeout=PATIENCE)
        assert {*other.keys()} == guesses
        for theirs in (shared, private):
            read = theirs.readv(tensors).wait(timeout=PATIENCE)
            assert all(map(torch.equal, read, tensors.values()))
            assert {*theirs.keys()} == {*tensors}
        other.deletev(guesses).wait(timeout=PATIENCE)
        expect_names(service, len(names))
        assert everything_of(service) == before


def uploads_of(remote: RemoteOffloader, key: str) -> bytes:
    """Return how the pieces of a tensor are called."""
    answer = call(calls.get, remote, stamp(remote), pack_wanted([Wanted(key)]))
    (header,) = unpack(answer.block, arrived(answer.data).numel())
    return header.upload


# ---- uploads


def test_pieces_of_a_tensor_that_is_there_are_not_written_over(service: OffloadService) -> None:
    """Neither by who has written it nor by another one of its namespace: its bytes would be those of two."""
    content = torch.full((LARGE.nbytes,), 7, dtype=torch.uint8)
    with RemoteOffloader(ME, namespace="kept") as one, RemoteOffloader(ME, namespace="kept") as other:
        one.write("large a", content).wait(timeout=PATIENCE)
        upload = uploads_of(one, "large a")
        for remote in (one, other):
            for piece, data in enumerate((FIRST, LAST)):
                header = LARGE._replace(upload=upload, piece=piece, length=data.nbytes)
                with contextlib.suppress(
                    ValueError, InvalidStateError
                ):  # it may be refused, or become another tensor's
                    call(calls.put, remote, stamp(remote), pack([header]), data)
                call(calls.give_up, remote, upload)
                service.store.flush().exception(timeout=PATIENCE)
                assert torch.equal(one.read("large a").wait(timeout=PATIENCE), content)


def test_a_piece_that_comes_after_its_tensor_was_given_up_leaves_nothing(service: OffloadService) -> None:
    """As when a client gives up after a timeout, and what it has sent arrives all the same."""
    with RemoteOffloader(ME, namespace="kept") as remote:
        call(calls.put, remote, stamp(remote), pack([LARGE]), FIRST)
        call(calls.give_up, remote, LARGE.upload)
        late = pack([LARGE._replace(piece=1, length=100)])
        with contextlib.suppress(ValueError, InvalidStateError):
            call(calls.put, remote, stamp(remote), late, LAST)
        expect_names(service, 0)
        error = remote.write("too much", torch.empty(CAPACITY + 1, dtype=torch.uint8)).exception(timeout=PATIENCE)
        assert isinstance(error, QuotaError)
        assert f": 0 of {CAPACITY} are in use" in str(error)


def test_an_upload_whose_client_says_no_more_gives_its_quota_back_at_its_deadline(service: OffloadService) -> None:
    """As when the request to give it up is lost."""
    with RemoteOffloader(ME, namespace="kept") as remote:
        for seconds in (0.2, 2.0, 20.0):  # a busy machine may deliver the request after the shorter ones
            large = LARGE._replace(upload=secrets.token_bytes(16))  # the service remembers one that was late
            with contextlib.suppress(TimeoutError):
                call(calls.put, remote, stamp(remote, seconds), pack([large]), FIRST)
                break
        probe = torch.empty(CAPACITY + 1, dtype=torch.uint8)
        wait_for(lambda: f": 0 of {CAPACITY} are in use" in str(remote.write("x", probe).exception(timeout=PATIENCE)))
        expect_names(service, 0)
        late = pack([large._replace(piece=1, length=100)])
        with pytest.raises(InvalidStateError, match="was given up"):
            call(calls.put, remote, stamp(remote), late, LAST)


# ---- what a service keeps and looks through


def test_namespaces_without_tensors_are_forgotten(service: OffloadService) -> None:
    with RemoteOffloader(ME, namespace="kept") as remote:
        remote.write("empty", torch.empty(0)).wait(timeout=PATIENCE)
    for i in range(300):
        token = secrets.token_bytes(calls.TOKEN)
        rpc_sync(ME, calls.begin, ("offload", token, f"{i}", ME, time.monotonic()), timeout=PATIENCE)
        rpc_sync(ME, calls.end, ("offload", token), timeout=PATIENCE)
    assert service.statistics().namespaces < 200
    with RemoteOffloader(ME, namespace="kept") as remote:
        assert remote.keys() == ["empty"]


def test_a_client_makes_the_service_look_through_its_own_keys_only(service: OffloadService) -> None:
    keys = ["b", "large", LONG, "a"]
    with RemoteOffloader(ME) as remote, mock.patch.object(Offloader, "keys", side_effect=AssertionError):
        remote.writev({key: content_of("large a" if key == "large" else "small a", 1) for key in keys}).wait()
        remote.write("b", torch.zeros(1)).wait(timeout=PATIENCE)
        remote.delete("a").wait(timeout=PATIENCE)
        assert sorted(remote.keys()) == sorted(["large", LONG, "b"])
        assert remote.keys()[-1] == "b"
        remote.close()
    expect_names(service, 0)


# ---- answers


@pytest.mark.parametrize("bad", ["the only one", "the one in the middle"])
def test_what_cannot_be_read_is_not_sent(service: OffloadService, bad: str) -> None:
    """Neither its bytes nor zeros in their place."""
    keys = ["bad"] if bad == "the only one" else ["a", "bad", "b"]
    tensors = {key: torch.full((1 << 20 if key == "bad" else 1001,), float(i)) for i, key in enumerate(keys)}
    readv = Offloader.readv

    def failing(store: Offloader, names: list[str], *args: Any, **kwargs: Any) -> CUDAFuture[Any]:
        if any(name.endswith("/bad") for name in names):
            return CUDAFuture.failed(StorageError("of the test"))
        return readv(store, names, *args, **kwargs)

    with RemoteOffloader(ME, namespace="kept") as remote:
        remote.writev(tensors).wait(timeout=PATIENCE)
        with mock.patch.object(Offloader, "readv", failing):
            answer = call(calls.get, remote, stamp(remote), pack_wanted([Wanted(key) for key in keys]))
            reads = {key: remote.read(key) for key in keys}
            assert [key for key, read in reads.items() if read.exception(timeout=PATIENCE)] == ["bad"]
        (place,) = [place for place, _ in answer.failures]
        assert keys[place] == "bad"
        sent = arrived(answer.data)
        assert sent.numel() < 9000
        headers = unpack(answer.block, sent.numel()) if answer.block else []
        assert [header.key for header in headers] == [key for key in keys if key != "bad"]
        assert all(torch.equal(view_of(sent, header), tensors[header.key]) for header in headers)


@rpc_ext.async_execution
def get_and_change(service: str, token: bytes, stamp: Stamp, block: bytes) -> CUDAFuture[Answer]:
    """Answer as the service does, and change the last byte on the way."""

    def change(done: CUDAFuture[Answer]) -> Answer:
        data = arrived(done.value().data).clone()
        data[-1] ^= 1
        return done.value()._replace(data=data)

    return calls.find(service).get(token, stamp, block).then(change)


@pytest.mark.parametrize("key", ["small a", "meg", "large a"])
def test_bytes_that_were_changed_on_their_way_back_are_no_tensor(service: OffloadService, key: str) -> None:
    content = content_of(key, 1)
    with RemoteOffloader(ME) as remote:
        remote.write(key, content).wait(timeout=PATIENCE)
        with mock.patch.object(calls, "get", get_and_change):
            for read in (remote.read(key), remote.read(key, torch.empty_like(content))):
                assert isinstance(read.exception(timeout=PATIENCE), ChecksumError)
        assert torch.equal(remote.read(key).wait(timeout=PATIENCE), content)


# ---- requests that come late, twice, or in another order


def test_a_session_that_is_begun_twice_is_one(service: OffloadService) -> None:
    """The answer to the first request was lost, so the client asks again."""
    token = secrets.token_bytes(calls.TOKEN)
    terms = [
        rpc_sync(ME, calls.begin, ("offload", token, None, ME, time.monotonic()), timeout=PATIENCE) for _ in range(2)
    ]
    assert terms[0] == terms[1]
    assert service.statistics().clients == 1
    rpc_sync(ME, calls.end, ("offload", token), timeout=PATIENCE)
    assert service.statistics().clients == 0


def test_a_session_that_was_ended_before_it_is_begun_takes_no_place(service: OffloadService) -> None:
    token = secrets.token_bytes(calls.TOKEN)
    rpc_sync(ME, calls.end, ("offload", token), timeout=PATIENCE)
    with pytest.raises(InvalidStateError, match="has ended before: the client has ended it"):
        rpc_sync(ME, calls.begin, ("offload", token, None, ME, time.monotonic()), timeout=PATIENCE)
    assert service.statistics().clients == 0


def test_sessions_whose_begin_has_timed_out_are_given_back(tmp_path: Path) -> None:
    with serve_offload(tmp_path / "served", clients=2) as service, Lost("begin") as begins:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                RemoteOffloader(ME, timeout=0.05)
        begins.let_go()
        wait_for(lambda: len(begins.made) == 3 and service.statistics().clients == 0)
        with RemoteOffloader(ME), RemoteOffloader(ME):
            assert service.statistics().clients == 2


@pytest.mark.parametrize("change", ["write", "large write", "delete"])
def test_a_change_that_comes_after_a_later_one_is_dropped(service: OffloadService, change: str) -> None:
    key, kept = "x", torch.arange(5)
    with RemoteOffloader(ME, namespace="kept") as remote:
        late = stamp(remote)
        remote.write(key, kept).wait(timeout=PATIENCE)
        used = service.store.statistics()
        if change == "delete":
            answer = call(calls.delete, remote, late, pack_wanted([Wanted(key)]))
        else:
            nbytes = PIECE + 8 if change == "large write" else 8
            data = torch.zeros(min(PIECE, nbytes), dtype=torch.uint8)
            upload = bytes(range(16)) if change == "large write" else WHOLE
            header = Header(key, torch.uint8, (nbytes,), nbytes, upload, 0, pieces_of(nbytes), 0, len(data))
            answer = call(calls.put, remote, late, pack([header]), data)
        ((_, error),) = answer.failures
        assert isinstance(error, TimeoutError)
        assert torch.equal(remote.read(key).wait(timeout=PATIENCE), kept)
        now = service.store.statistics()
        assert (now.bytes, now.keys, now.writes) == (used.bytes, used.keys, used.writes)


def test_requests_after_their_deadline_cost_the_disk_nothing(service: OffloadService) -> None:
    with RemoteOffloader(ME, namespace="kept") as remote:
        remote.write("x", torch.zeros(8)).wait(timeout=PATIENCE)
        before = service.store.statistics()
        expired = stamp(remote, -1.0)
        data = torch.zeros(8, dtype=torch.uint8)
        for fn, args in (
            (calls.get, (pack_wanted([Wanted("x")]),)),
            (calls.delete, (pack_wanted([Wanted("x")]),)),
            (calls.put, (pack([Header("x", torch.uint8, (8,), 8, length=8)]), data)),
        ):
            with pytest.raises(TimeoutError, match="after its deadline"):
                call(fn, remote, expired, *args)
        now = service.store.statistics()
        assert (now.reads, now.writes, now.keys) == (before.reads, before.writes, before.keys)


def test_each_change_of_a_request_has_its_own_deadline(service: OffloadService) -> None:
    """Small writes travel together, and the request lives as long as the last of them."""
    data = torch.arange(72, dtype=torch.uint8)  # each begins at a line of 64 bytes
    headers = [Header(key, torch.uint8, (8,), 8, at=64 * i, length=8) for i, key in enumerate("ab")]
    with RemoteOffloader(ME, namespace="kept") as remote:
        remote.write("a", torch.zeros(3)).wait(timeout=PATIENCE)
        now = time.monotonic()
        answer = call(calls.put, remote, stamp(remote), pack(headers), data, (now - 1, now + PATIENCE))
        ((place, error),) = answer.failures
        assert place == 0
        assert isinstance(error, TimeoutError)
        assert torch.equal(remote.read("a").wait(timeout=PATIENCE), torch.zeros(3))
        assert torch.equal(remote.read("b").wait(timeout=PATIENCE), data[64:])
        assert service.statistics().late == 1
        for wrong in ((now,), (now, "soon"), [now, now], (now, float("nan"))):
            with pytest.raises(ValueError, match=r"are not the expiries of 2 changes|is not a time"):
                call(calls.put, remote, stamp(remote), pack(headers), data, wrong)


def test_what_waited_for_room_keeps_its_own_deadline(service: OffloadService) -> None:
    """Two writes of one request, which were called for at different times."""
    sent: list[Any] = []
    put = Desk.put

    def seen(desk: Desk, *args: Any) -> Any:
        sent.append(args[-1])
        return put(desk, *args)

    with RemoteOffloader(ME) as remote, Kept("put") as puts:
        first = remote.write("x", torch.zeros(1))  # the next two go together when it has its answer
        go_on = puts.next()
        later = [remote.write("a", torch.zeros(1))]
        remote._timeout += PATIENCE
        later.append(remote.write("b", torch.zeros(1)))
        with mock.patch.object(Desk, "put", seen):
            go_on.set_result(None)
            wait_all([first, *later], timeout=PATIENCE)
    ((one, other),) = (expiries for expiries in sent if expiries)
    assert PATIENCE - 1 < other - one < PATIENCE + 1


_kept: list[RemoteOffloader] = []


def close_kept() -> int:
    """Close a client in a thread of the agent, which may be the only one."""
    _kept.pop().close()
    return len(_kept)


@pytest.mark.slow
def test_a_client_that_is_closed_by_the_only_thread_ends_its_session_all_the_same(tmp_path: Path) -> None:
    """The thread cannot receive an answer meanwhile, so the client ends its session later."""
    assert run_ranks(2, end_from_the_only_thread, str(tmp_path / "store"), str(tmp_path / "served")) == [0, 0]


def end_from_the_only_thread(rank: int, store: str, folder: str) -> int:
    with begin(rank, 2, store, num_worker_threads=1 if rank == 1 else 4):
        if rank == 0:
            with serve_offload(folder) as service:
                rpc_ext.barrier().wait(timeout=PATIENCE)
                rpc_ext.barrier().wait(timeout=PATIENCE)
                assert service.statistics().clients == 1
                assert rpc_sync("callee", close_kept) == 0
                wait_for(lambda: service.statistics().clients == 0)
                rpc_ext.barrier().wait(timeout=PATIENCE)
                return service.statistics().clients
        rpc_ext.barrier().wait(timeout=PATIENCE)
        _kept.append(RemoteOffloader("caller"))
        rpc_ext.barrier().wait(timeout=PATIENCE)
        rpc_ext.barrier().wait(timeout=PATIENCE)
        return len(_kept)
