"""Requests for tokens, keys and uploads of other clients: refused and counted, and they change nothing."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rpc_ext
from cudafuture import wait_all
from cudafuture.errors import (
    AuthenticationError,
    ChecksumError,
    InvalidStateError,
    NotFoundError,
    QuotaError,
)
from cudafuture.io import digest
from cudafuture.store import DiskStore
from remote_store import messages as wire
from remote_store.contents import content_of
from remote_store.messages import Fetch, Found, Part, Put, data_of
from remote_store.seams import (
    HandledInPython,
    Kept,
    Lost,
    Redirected,
    change_last_byte,
    change_of,
    change_one_reply,
    put_of,
    redirect_replies,
    send,
    spoil,
)
from rpc_ext import RemoteStore, StoreService, rpc_sync, serve_store
from rpc_ext._channel import Reply
from rpc_ext.store import _calls as services
from rpc_ext.store._handler import RequestHandler
from rpc_ext.store._wire import LONGEST_KEY, PART, TOKEN
from support.child import run_script
from support.patience import PATIENCE
from support.ranks import run_ranks
from support.rpc_callees import ME, alone, wait_for
from support.rpc_workers import begin

pytestmark = [pytest.mark.world, pytest.mark.xdist_group("remote-store")]

CAPACITY = 100 << 20
LONG = "any " + "k" * (LONGEST_KEY - 4)
LARGE = torch.zeros(PART + 100, dtype=torch.uint8)  # in two parts
UPLOAD = 1 << 50  # sequence number of an upload of a test's own


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_ext.Session]:
    with alone(tmp_path_factory.mktemp("rpc") / "rendezvous", num_worker_threads=4) as session:
        yield session


@pytest.fixture
def service(tmp_path: Path) -> Iterator[StoreService]:
    with serve_store(tmp_path / "served", namespace_capacity=CAPACITY) as service:
        yield service


def call(fn: Callable[..., Any], remote: RemoteStore | bytes, *args: object) -> Any:
    """Call the service like a client that ignores all rules."""
    token = remote._token if isinstance(remote, RemoteStore) else remote
    return rpc_sync(ME, fn, ("store", token, *args), timeout=PATIENCE)


def ask(remote: RemoteStore, verb: int, entries: Sequence[Any], data: torch.Tensor | None = None) -> wire.Answer:
    """Send a request and return the answer."""
    answer: wire.Answer = send(remote, verb, entries, data).wait(timeout=PATIENCE)
    return answer


def put_part(remote: RemoteStore, part: int, sequence: int = UPLOAD, key: str = "large a") -> BaseException | None:
    """Put one part of ``LARGE``, and return the error."""
    entry, data = put_of(key, LARGE, part=part, sequence=sequence)
    return ask(remote, wire.PUT, [entry], data).errors.get(0)


def abandon(remote: RemoteStore, sequence: int, key: str = "large a") -> None:
    """Abandon an operation."""
    assert not ask(remote, wire.ABANDON, [change_of(key, sequence=sequence)]).errors


def everything_of(service: StoreService) -> list[Any]:
    service.store.flush().exception(timeout=PATIENCE)
    found = service.store.statistics()
    return [service.store.keys(), found.keys, found.bytes, found.used]


def expect_names(service: StoreService, names: int) -> None:
    """Wait until the store has this number of names: removed names have no future."""
    end = time.monotonic() + PATIENCE
    while len(service.store) != names:
        assert time.monotonic() < end, service.store.keys()
        service.store.flush().exception(timeout=PATIENCE)


def expect_unused_quota(remote: RemoteStore) -> None:
    """Raise AssertionError unless the client's namespace has no bytes in use."""
    error = remote.write("too much", torch.empty(CAPACITY + 1, dtype=torch.uint8)).exception(timeout=PATIENCE)
    assert isinstance(error, QuotaError)
    assert f": 0 of {CAPACITY} are in use" in str(error)


# ---- tokens


def test_ended_or_guessed_tokens_are_refused(service: StoreService) -> None:
    small, small_data = put_of("small a", torch.zeros(100, dtype=torch.uint8))
    part, part_data = put_of("large a", LARGE)
    messages: list[tuple[int, Any, torch.Tensor | None]] = [
        (wire.PUT, small, small_data),
        (wire.PUT, part, part_data),
        (wire.GET, change_of("small a"), None),
        (wire.DELETE, change_of("small a"), None),
        (wire.FETCH, Fetch(1, 0), None),
        (wire.ABANDON, change_of("large a"), None),
    ]
    calls: list[tuple[Callable[..., Any], tuple[object, ...]]] = [
        (services.keys, ()),
        (services.stat, ("small a",)),
        (services.find, (["small a"],)),
        (services.trim, ()),
    ]
    with RemoteStore(ME, namespace="kept") as remote:
        content = content_of("small a", 1)
        remote.write("small a", content).wait(timeout=PATIENCE)
        gone = RemoteStore(ME, namespace="kept")
        call(services.end, gone)
        whole = [gone._token, random.Random(1).randbytes(TOKEN), remote._token[::-1], bytes(TOKEN)]
        others = [b"", remote._token[:-1], remote._token + b"\0"]  # a message has no room for them
        before = everything_of(service)
        for token in whole:
            for verb, entry, data in messages:
                with pytest.raises(AuthenticationError, match="knows no such session"):
                    send(remote, verb, [entry], data, token=token).wait(timeout=PATIENCE)
        for token in (*whole, *others):
            for fn, args in calls:
                with pytest.raises(AuthenticationError, match="knows no such session"):
                    call(fn, token, *args)
        refused = len(messages) * len(whole) + len(calls) * len([*whole, *others])
        assert service.statistics().refused == refused
        call(services.end, whole[1])  # the token of no session
        assert everything_of(service) == before
        assert service.statistics().clients == 1
        assert torch.equal(remote.read("small a").wait(timeout=PATIENCE), content)


# ---- keys


def test_client_reaches_no_foreign_key(service: StoreService) -> None:
    tensors = {key: content_of(key, 1) for key in ("small a", "large a", LONG)}
    with (
        RemoteStore(ME, namespace="kept") as shared,
        RemoteStore(ME) as private,
        RemoteStore(ME, namespace="Kept") as other,
    ):
        for theirs in (shared, private):
            theirs.writev(tensors).wait(timeout=PATIENCE)
        names = service.store.keys()  # more than any client sees
        guesses = {*tensors, *names, *(name[1:] for name in names), *(f"../{name}" for name in names)}
        guesses |= {name.partition("/")[2] or "/" for name in names} | {"kept/small a", "../kept/small a"}
        guesses = {guess for guess in guesses if 1 <= len(guess.encode()) <= LONGEST_KEY}
        before = everything_of(service)
        for verb in (wire.GET, wire.DELETE):
            answer = ask(other, verb, [change_of(guess, expires=0.0) for guess in guesses])
            assert len(answer.errors) == len(guesses)
            assert all(isinstance(error, NotFoundError) for error in answer.errors.values())
            assert not answer.data.numel()
        for guess in guesses:
            with pytest.raises(NotFoundError):
                call(services.stat, other, guess)
        assert call(services.find, other, list(guesses)) == [None] * len(guesses)
        assert call(services.keys, other) == []
        other.writev({guess: torch.zeros(3) for guess in guesses}).wait(timeout=PATIENCE)
        assert {*other.keys()} == guesses
        for theirs in (shared, private):
            read = theirs.readv(tensors).wait(timeout=PATIENCE)
            assert all(map(torch.equal, read, tensors.values()))
            assert {*theirs.keys()} == {*tensors}
        other.deletev(guesses).wait(timeout=PATIENCE)
        expect_names(service, len(names))
        assert everything_of(service) == before


def test_client_reaches_no_foreign_upload_or_read(service: StoreService) -> None:
    """All clients count their operations from 1, so the numbers of others are no secret."""
    content = content_of("large a", 1)
    with (
        RemoteStore(ME, namespace="kept") as shared,
        RemoteStore(ME) as private,
        RemoteStore(ME, namespace="kept") as near,
        RemoteStore(ME, namespace="Kept") as far,
    ):
        for theirs in (shared, private):
            theirs.write("large a", content).wait(timeout=PATIENCE)
            ask(theirs, wire.GET, [change_of("large a", sequence=UPLOAD + 1)])
            assert put_part(theirs, 0) is None
        for other in (near, far):
            answer = ask(other, wire.FETCH, [Fetch(UPLOAD + 1, part) for part in (0, 1)])
            assert [type(error) for error in answer.errors.values()] == [InvalidStateError] * 2
            assert not answer.data.numel()
            for sequence in (UPLOAD, UPLOAD + 1):
                abandon(other, sequence)
            other_key = change_of("other", sequence=UPLOAD)
            assert isinstance(ask(other, wire.DELETE, [other_key]).errors[0], NotFoundError)
        for theirs in (shared, private):
            answer = ask(theirs, wire.FETCH, [Fetch(UPLOAD + 1, 1)])
            (found,) = answer.entries
            assert isinstance(found, Part)
            assert torch.equal(data_of(answer.data, found), content[PART:])
            assert put_part(theirs, 1) is None
            assert torch.equal(theirs.read("large a").wait(timeout=PATIENCE), LARGE)
        assert far.keys() == []


# ---- uploads


def test_stored_parts_cannot_be_replaced(service: StoreService) -> None:
    """Neither the client that wrote the tensor nor another one of its namespace can replace its parts."""
    content = torch.full_like(LARGE, 7)
    with RemoteStore(ME, namespace="kept") as one, RemoteStore(ME, namespace="kept") as other:
        one.write("large a", content).wait(timeout=PATIENCE)  # its first operation
        for remote in (one, other):
            for part in (0, 1):
                error = put_part(remote, part, sequence=1)
                assert error is None or isinstance(error, (ValueError, InvalidStateError, TimeoutError))
                abandon(remote, 1)
                service.store.flush().exception(timeout=PATIENCE)
                assert torch.equal(one.read("large a").wait(timeout=PATIENCE), content)


def test_parts_of_two_clients_stay_apart(service: StoreService) -> None:
    content = torch.full_like(LARGE, 7)
    with RemoteStore(ME, namespace="kept") as one, RemoteStore(ME, namespace="kept") as other:
        one.write("large a", content).wait(timeout=PATIENCE)
        for remote, part in ((one, 0), (other, 1)):
            assert put_part(remote, part) is None
            service.store.flush().exception(timeout=PATIENCE)
        for remote in (one, other):
            abandon(remote, UPLOAD)
        assert torch.equal(one.read("large a").wait(timeout=PATIENCE), content)
        expect_names(service, 1)


def test_late_part_of_abandoned_tensor_leaves_nothing(service: StoreService) -> None:
    """As when the requests of a client arrive after its timeout."""
    with RemoteStore(ME, namespace="kept") as remote:
        assert put_part(remote, 0) is None
        abandon(remote, UPLOAD)
        for part in (1, 0):
            error = put_part(remote, part)
            assert isinstance(error, TimeoutError)
            assert "abandoned" in str(error)
        abandon(remote, UPLOAD + 1)  # before any part of it arrives
        for part in (1, 0):
            assert isinstance(put_part(remote, part, sequence=UPLOAD + 1), TimeoutError)
        expect_names(service, 0)
        expect_unused_quota(remote)


def test_silent_upload_frees_quota_at_deadline(service: StoreService) -> None:
    """As when the message that abandons it is lost."""
    with RemoteStore(ME, namespace="kept") as remote:
        for i, seconds in enumerate((0.2, 2.0, 20.0)):  # a busy machine may deliver the request after the shorter ones
            sequence = UPLOAD + i  # the service remembers one that was late
            entry, data = put_of("large a", LARGE, sequence=sequence, expires=time.perf_counter() + seconds)
            if not ask(remote, wire.PUT, [entry], data).errors:
                break
        probe = torch.empty(CAPACITY + 1, dtype=torch.uint8)
        wait_for(lambda: f": 0 of {CAPACITY} are in use" in str(remote.write("x", probe).exception(timeout=PATIENCE)))
        expect_names(service, 0)
        error = put_part(remote, 1, sequence=sequence)
        assert isinstance(error, TimeoutError)
        assert "was not complete before its deadline" in str(error)


# ---- what a service keeps and looks through


def test_empty_namespaces_are_forgotten(service: StoreService) -> None:
    with RemoteStore(ME, namespace="kept") as remote:
        remote.write("empty", torch.empty(0)).wait(timeout=PATIENCE)
    for i in range(300):
        token = secrets.token_bytes(TOKEN)
        begin_session(token, f"{i}")
        end_session(token)
    assert service.statistics().namespaces < 200
    with RemoteStore(ME, namespace="kept") as remote:
        assert remote.keys() == ["empty"]


def begin_session(token: bytes, namespace: str | None = None) -> Any:
    return rpc_sync(ME, services.begin, ("store", token, namespace, ME, time.perf_counter()), timeout=PATIENCE)


def end_session(token: bytes) -> None:
    rpc_sync(ME, services.end, ("store", token), timeout=PATIENCE)


def test_service_scans_only_own_keys(service: StoreService) -> None:
    keys = ["b", "large", LONG, "a"]
    with RemoteStore(ME) as remote, mock.patch.object(DiskStore, "keys", side_effect=AssertionError):
        remote.writev({key: content_of("large a" if key == "large" else "small a", 1) for key in keys}).wait()
        remote.write("b", torch.zeros(1)).wait(timeout=PATIENCE)
        remote.delete("a").wait(timeout=PATIENCE)
        assert sorted(remote.keys()) == sorted(["large", LONG, "b"])
        assert remote.keys()[-1] == "b"
        remote.close()
    expect_names(service, 0)


# ---- answers


@pytest.mark.parametrize("bad", ["the only one", "the one in the middle"])
def test_unreadable_tensor_is_not_sent(service: StoreService, tmp_path: Path, bad: str) -> None:
    """The service sends neither the bytes nor zeros in their place."""
    keys = ["bad"] if bad == "the only one" else ["a", "bad", "b"]
    tensors = {key: torch.full((1 << 20 if key == "bad" else 1001,), i + 0.1) for i, key in enumerate(keys)}
    with RemoteStore(ME, namespace="kept") as remote:
        remote.writev(tensors).wait(timeout=PATIENCE)
        spoil(tmp_path / "served", tensors["bad"])
        answer = ask(remote, wire.GET, [wire.Get(*change_of(key), needs_digest=True) for key in keys])
        reads = {key: remote.read(key) for key in keys}
        assert [key for key, read in reads.items() if read.exception(timeout=PATIENCE)] == ["bad"]
        (place,) = answer.errors
        assert keys[place] == "bad"
        assert answer.data.numel() < 9000
        good = [tensors[key] for key in keys if key != "bad"]
        assert len(answer.entries) == len(good)
        for entry, tensor in zip(answer.entries, good, strict=True):
            assert isinstance(entry, Found)
            assert torch.equal(data_of(answer.data, entry).view(entry.dtype).reshape(entry.shape), tensor)


@pytest.mark.parametrize(
    ("key", "verb"),
    [("small a", wire.GET), ("meg", wire.GET), ("large a", wire.GET), ("large a", wire.FETCH)],
    ids=["small", "meg", "first part", "last part"],
)
def test_corrupted_reply_returns_no_tensor(service: StoreService, key: str, verb: int) -> None:
    content = content_of(key, 1)

    def change(message: Redirected, body: bytes, tensors: list[torch.Tensor]) -> None:
        message.answered(*(change_last_byte(body, tensors) if message.verb == verb else (body, tensors)))

    with RemoteStore(ME) as remote:
        remote.write(key, content).wait(timeout=PATIENCE)
        with redirect_replies(remote, change):
            for read in (remote.read(key), remote.read(key, torch.empty_like(content))):
                assert isinstance(read.exception(timeout=PATIENCE), ChecksumError)
        assert torch.equal(remote.read(key).wait(timeout=PATIENCE), content)


@pytest.mark.parametrize("checksum", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("needs_digest", [True, False], ids=["needed", "not needed"])
def test_service_hashes_only_when_needed(tmp_path: Path, checksum: bool, needs_digest: bool) -> None:
    """It sends no digest of bytes that the client can verify by that of the store."""
    content, served = content_of("large a", 1), tmp_path / "served"
    with serve_store(served, durable=True), RemoteStore(ME, namespace="kept") as remote:
        remote.writev({"large a": content, "small a": torch.ones(3)}).wait(timeout=PATIENCE)
    if not checksum:
        with DiskStore(served, durable=True, checksum=False) as store:
            store.writev(dict(zip(store.keys(), store.readv(store.keys()).wait(), strict=True))).wait()
    with serve_store(served, durable=True), RemoteStore(ME, namespace="kept") as remote:
        small, large = (wire.Get(*change_of(key), needs_digest=needs_digest) for key in ("small a", "large a"))
        answers = [ask(remote, wire.GET, [entry]) for entry in (small, large)]
        answers.append(ask(remote, wire.FETCH, [Fetch(large.sequence, 1)]))
        found = [(answer.entries[0], data_of(answer.data, answer.entries[0])) for answer in answers]
        assert [isinstance(entry, Found) and entry.kept is not None for entry, _ in found] == [checksum] * 2 + [False]
        is_hashed = needs_digest or not checksum
        assert [entry.digest for entry, _ in found] == [digest(data) if is_hashed else None for _, data in found]


@pytest.mark.parametrize(
    ("key", "verb"),
    [("small a", wire.GET), ("meg", wire.GET), ("large a", wire.GET), ("large a", wire.FETCH)],
    ids=["small", "meg", "first part", "last part"],
)
def test_corrupted_reply_is_read_again(service: StoreService, key: str, verb: int) -> None:
    content = content_of(key, 1)
    with RemoteStore(ME) as remote:
        remote.write(key, content).wait(timeout=PATIENCE)
        for out in (None, torch.empty_like(content)):
            with change_one_reply(remote, verb):
                assert torch.equal(remote.read(key, out).wait(timeout=PATIENCE), content)
        assert remote.statistics().repeated == 2
        assert service.statistics().in_flight == 0
    assert service.store.statistics().checksum_errors == 0


ENDED = """
import sys, threading, torch, rpc_ext
from cudafuture.errors import InvalidStateError
from support.rpc_callees import ME, alone

with alone(sys.argv[1] + "/0"), rpc_ext.serve_store(sys.argv[1] + "/served"):
    remote = rpc_ext.RemoteStore(ME)
    remote.write("x", torch.ones(3)).wait()
over = threading.Event()
refused = []

def write():
    while not over.is_set():
        refused.append(remote.write("x", torch.ones(3)).exception())

thread = threading.Thread(target=write)
thread.start()
for i in range(1, 4):
    with alone(sys.argv[1] + f"/{i}"):
        pass
over.set()
thread.join()
assert refused and all(isinstance(error, InvalidStateError) for error in refused), refused[-1]
"""


def test_client_of_ended_session_blocks_no_next(tmp_path: Path) -> None:
    """The ended session's agent joins its threads, which take the GIL, when its last user drops it."""
    done = run_script(ENDED, str(tmp_path), patience=2 * PATIENCE)
    assert done.returncode == 0, done.stderr


# ---- requests that come late, twice, or in another order


def test_session_begun_twice_is_one(service: StoreService) -> None:
    """The answer to the first request was lost, so the client asks again."""
    token = secrets.token_bytes(TOKEN)
    terms = [begin_session(token) for _ in range(2)]
    assert terms[0] == terms[1]
    assert service.statistics().clients == 1
    end_session(token)
    assert service.statistics().clients == 0


def test_session_ended_before_begin_takes_no_place(service: StoreService) -> None:
    token = secrets.token_bytes(TOKEN)
    end_session(token)
    with pytest.raises(InvalidStateError, match="has ended before: the client has ended it"):
        begin_session(token)
    assert service.statistics().clients == 0


def test_timed_out_session_begin_frees_place(tmp_path: Path) -> None:
    with serve_store(tmp_path / "served", clients=2) as service, Lost("begin") as begins:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                RemoteStore(ME, timeout=0.05)
        begins.release_held()
        wait_for(lambda: len(begins.made) == 3 and service.statistics().clients == 0)
        with RemoteStore(ME), RemoteStore(ME):
            assert service.statistics().clients == 2


@pytest.mark.parametrize("change", ["write", "large write", "delete"])
def test_superseded_change_is_dropped(service: StoreService, change: str) -> None:
    key, kept = "x", torch.arange(5)
    with RemoteStore(ME, namespace="kept") as remote:
        remote.write("y", kept).wait(timeout=PATIENCE)  # the number of this one is used below
        remote.write(key, kept).wait(timeout=PATIENCE)
        used = service.store.statistics()
        if change == "delete":
            answer = ask(remote, wire.DELETE, [change_of(key, sequence=1)])
        else:
            entry, data = put_of(key, LARGE if change == "large write" else LARGE[:8], sequence=1)
            answer = ask(remote, wire.PUT, [entry], data)
        (error,) = answer.errors.values()
        assert isinstance(error, TimeoutError)
        assert "after a later one" in str(error)
        assert service.statistics().late == 1
        assert torch.equal(remote.read(key).wait(timeout=PATIENCE), kept)
        now = service.store.statistics()
        assert (now.bytes, now.keys, now.writes) == (used.bytes, used.keys, used.writes)


def test_expired_requests_reach_no_disk(service: StoreService) -> None:
    with RemoteStore(ME, namespace="kept") as remote:
        remote.write("x", torch.zeros(8)).wait(timeout=PATIENCE)
        before = service.store.statistics()
        over = time.perf_counter() - 1.0
        requests: list[tuple[int, Callable[[], Any]]] = [
            (wire.GET, lambda: (change_of("x", expires=over), None)),
            (wire.DELETE, lambda: (change_of("x", expires=over), None)),
            (wire.PUT, lambda: put_of("x", torch.zeros(8), expires=over)),
            (wire.PUT, lambda: put_of("x", LARGE, expires=over)),
        ]
        for late, (verb, make) in enumerate(requests, start=1):
            entry, data = make()
            (error,) = ask(remote, verb, [entry], data).errors.values()
            assert isinstance(error, TimeoutError)
            assert "after its deadline" in str(error)
            assert service.statistics().late == late
        now = service.store.statistics()
        assert (now.reads, now.writes, now.keys) == (before.reads, before.writes, before.keys)


def test_each_change_has_own_deadline(service: StoreService) -> None:
    """Small writes travel together, and the request lives as long as the last of them."""
    data = torch.arange(72, dtype=torch.uint8)  # each begins at a line of 64 bytes

    def entries(expiries: Sequence[float]) -> list[Put]:
        pairs = zip("ab", expiries, strict=True)
        return [put_of(key, data[64 * i :][:8], at=64 * i, expires=at)[0] for i, (key, at) in enumerate(pairs)]

    with RemoteStore(ME, namespace="kept") as remote:
        remote.write("a", torch.zeros(3)).wait(timeout=PATIENCE)
        now = time.perf_counter()
        answer = ask(remote, wire.PUT, entries((now - 1, now + PATIENCE)), data)
        ((place, error),) = answer.errors.items()
        assert place == 0
        assert isinstance(error, TimeoutError)
        assert torch.equal(remote.read("a").wait(timeout=PATIENCE), torch.zeros(3))
        assert torch.equal(remote.read("b").wait(timeout=PATIENCE), data[64:])
        assert service.statistics().late == 1
        answer = ask(remote, wire.DELETE, [change_of("b", expires=now - 1), change_of("a")])
        assert [type(answer.errors[place]) for place in answer.errors] == [TimeoutError]
        assert remote.keys() == ["b"]
        for wrong in ((now, float("nan")), (float("inf"), now)):
            with pytest.raises(ValueError, match="that expires at"):
                ask(remote, wire.PUT, entries(wrong), data)
        assert service.statistics().refused == 2


def test_waiting_request_keeps_own_deadline(service: StoreService) -> None:
    """Two writes in one request, started at different times."""
    sent: dict[str, float] = {}
    handle = RequestHandler.handle

    def record(handler: RequestHandler, body: bytes, tensors: list[torch.Tensor], reply: Reply) -> None:
        request = wire.parse_request(body, tensors)
        if len(request.entries) == 2:
            sent.update({entry.key: entry.expires for entry in request.entries})
        handle(handler, body, tensors, reply)

    with RemoteStore(ME, timeout=PATIENCE) as remote, Kept("put") as puts:
        first = remote.write("x", torch.zeros(1))  # the next two go together when it has its answer
        go_on = puts.next()
        later, asked = [], [time.perf_counter()]
        for key in "ab":
            later.append(remote.write(key, torch.zeros(1)))
            asked.append(time.perf_counter())
        with HandledInPython(record):
            go_on.set_result(None)
            wait_all([first, *later], timeout=PATIENCE)
    assert asked[0] <= sent["a"] - PATIENCE <= asked[1] <= sent["b"] - PATIENCE <= asked[2]


_kept: list[RemoteStore] = []


def close_kept() -> int:
    """Close a client in a thread of the agent, which may be the only one."""
    _kept.pop().close()
    return len(_kept)


@pytest.mark.slow
def test_only_thread_can_close_client(tmp_path: Path) -> None:
    """The thread cannot receive an answer meanwhile, so the client ends its session later."""
    assert run_ranks(2, end_from_the_only_thread, str(tmp_path / "store"), str(tmp_path / "served")) == [0, 0]


def end_from_the_only_thread(rank: int, store: str, folder: str) -> int:
    with begin(rank, 2, store, num_worker_threads=1 if rank == 1 else 4):
        if rank == 0:
            with serve_store(folder) as service:
                rpc_ext.barrier().wait(timeout=PATIENCE)
                rpc_ext.barrier().wait(timeout=PATIENCE)
                assert service.statistics().clients == 1
                assert rpc_sync("callee", close_kept) == 0
                wait_for(lambda: service.statistics().clients == 0)
                rpc_ext.barrier().wait(timeout=PATIENCE)
                return service.statistics().clients
        rpc_ext.barrier().wait(timeout=PATIENCE)
        _kept.append(RemoteStore("caller"))
        rpc_ext.barrier().wait(timeout=PATIENCE)
        rpc_ext.barrier().wait(timeout=PATIENCE)
        return len(_kept)
