"""Offload among workers with a secret: whoever does not belong to them reads nothing, and changes nothing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rpc_ext
from cudafuture.errors import AuthenticationError
from cudafuture.storage import digest
from cudafuture.testing import World
from rpc_ext import _codec, _listeners
from rpc_ext import _offload_calls as calls
from rpc_ext._offload_wire import PIECE, Header, Wanted, pack, pack_wanted
from rpc_ext.offload_service import OffloadService, serve_offload
from rpc_ext.remote_offloader import RemoteOffloader
from world.attacker import HEADER_SIZE, REPLY, REQUEST, Frame, Stranger, key_of
from world.middleman import joined, relayed
from world.offload_history import content_of, version_of
from world.rpc_callees import PATIENCE, working

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("remote-offloader-secrets")]

SECRET = "a secret that nobody else knows"
ANOTHER = b"a secret that somebody else knows"
STRANGER = 2  # the rank of one who is no worker
NAMESPACE = "kept"
KEYS = ["small a", "large a"]


# ---- requests that are not a client's


def request(fn: Callable[..., Any], *args: object) -> tuple[bytes, tuple[torch.Tensor, ...]]:
    """Return what a call of the second worker to the service of the first looks like, and its tensors."""
    encoded = _codec.encode(_codec.Kind.CALL, (1, fn, ("offload", *args), {}))
    return encoded.payload, tuple(encoded.tensors)


def put(token: bytes, key: str, content: torch.Tensor) -> tuple[bytes, tuple[torch.Tensor, ...]]:
    header = Header(key, torch.uint8, tuple(content.shape), content.nbytes, length=content.nbytes)
    return request(calls.put, token, pack([header._replace(checksum=digest(content))]), content)


def requests(token: bytes) -> dict[str, tuple[bytes, tuple[torch.Tensor, ...]]]:
    """Return one of each kind, with the token of a session."""
    wanted = pack_wanted([Wanted(key) for key in KEYS])
    piece = torch.zeros(PIECE, dtype=torch.uint8)
    of_two = Header("large a", torch.uint8, (PIECE + 1,), PIECE + 1, b"u" * 16, pieces=2, length=PIECE)
    return {
        "begin": request(calls.begin, NAMESPACE, "w1"),
        "put": put(token, "small a", torch.zeros(8, dtype=torch.uint8)),
        "put a new one": put(token, "new", torch.zeros(8, dtype=torch.uint8)),
        "put a piece": request(calls.put, token, pack([of_two]), piece),
        "get": request(calls.get, token, wanted),
        "delete": request(calls.delete, token, wanted),
        "give up": request(calls.give_up, token, b"u" * 16),
        "keys": request(calls.keys, token),
        "stat": request(calls.stat, token, "small a"),
        "end": request(calls.end, token),
    }


def everything_of(service: OffloadService) -> list[Any]:
    """Return all that changes when something is read or written."""
    store, done = service.store.statistics(), service.statistics()
    return [
        service.store.keys(),
        [store.bytes, store.used, store.reads, store.writes],
        [done.clients, done.bytes_read, done.bytes_written, done.requests, done.refused],
    ]


# ---- one who knows all that was ever sent, but not the secret


def be_attacked(file: str, folder: str, attack: Callable[[Stranger, bytes, bytes], Any]) -> Any:
    """The first worker serves the second while a stranger attacks, who has connected before that was impossible."""
    rank = dist.get_rank()
    known: list[Any] = [None] * 3
    if rank == STRANGER:
        dist.barrier()
        dist.all_gather_object(known, None)
        addresses = {f"w{i}": known[i]["address"] for i in range(STRANGER)}
        dist.barrier()
        try:
            with Stranger(STRANGER, addresses) as stranger:
                return attack(stranger, known[0]["key"], known[1]["token"])
        finally:
            for _ in range(3):
                dist.barrier()
    told: dict[str, Any] = {}
    with (
        mock.patch.object(_listeners, "close", return_value=None),
        working(f"w{rank}", rank, 2, file, secret=SECRET) as session,
    ):
        told |= {"address": session.agent.store.get(f"addrs/{session.name}"), "key": key_of(session)}
        return (be_server if rank == 0 else be_client)(told, folder)


def be_server(told: dict[str, Any], folder: str) -> Any:
    with serve_offload(folder) as service:
        dist.barrier()
        dist.all_gather_object([None] * 3, told)  # the client has written
        before = everything_of(service)
        dist.barrier()
        dist.barrier()  # the attack is over
        after = everything_of(service)
        dist.barrier()
        dist.barrier()  # the client has looked
        return before, after, dict(rpc_ext.statistics().refused)


def be_client(told: dict[str, Any], folder: str) -> Any:
    dist.barrier()
    with RemoteOffloader("w0", namespace=NAMESPACE) as remote:
        for key in KEYS:
            remote.write(key, content_of(key, 1)).wait(timeout=PATIENCE)
        dist.all_gather_object([None] * 3, told | {"token": remote._token})
        for _ in range(3):
            dist.barrier()
        found = {key: remote.read(key).wait(timeout=PATIENCE) for key in remote.keys()}  # noqa: SIM118
    dist.barrier()
    return {key: version_of(key, content) for key, content in found.items()}


def frames(token: bytes, key: bytes, numbers: Iterator[int]) -> Iterator[tuple[str, bytes, Sequence[torch.Tensor]]]:
    """Yield each request as none of the workers would send it, and what is wrong with it."""
    for what, (payload, tensors) in requests(token).items():
        frame = Frame(payload, sender=1, receiver=0, counter=next(numbers), tensors=tensors)
        signed = frame.signed(key)
        changed = bytearray(signed)
        changed[-1] ^= 1
        yield f"{what}: not signed", payload, tensors
        yield f"{what}: with another secret", frame.signed(ANOTHER), tensors
        yield f"{what}: with none", frame.signed(b""), tensors
        yield f"{what}: to another", replace(frame, receiver=1).signed(key), tensors
        yield f"{what}: of the server's own", replace(frame, sender=0).signed(ANOTHER), tensors
        yield f"{what}: of other bytes", bytes(changed), tensors
        yield f"{what}: with another tensor", signed, (*tensors, torch.zeros(1, dtype=torch.uint8))
        yield f"{what}: with another shape", signed, [t[:-1] for t in tensors] or [torch.zeros(1, dtype=torch.uint8)]


@pytest.mark.world(3)
def test_requests_of_a_stranger_are_refused_though_he_knows_the_session(world: World, tmp_path: Path) -> None:
    def attack(stranger: Stranger, key: bytes, token: bytes) -> int:
        count = 0
        for what, message, tensors in frames(token, key, itertools.count(1 << 40)):
            said = stranger.send(0, message, tensors)
            assert "was refused" in said, (what, said)
            count += 1
        return count

    arguments = (str(tmp_path / "file"), str(tmp_path / "served"), attack)
    (before, after, refused), found, count = world.run(be_attacked, *arguments)
    assert before == after
    assert count == sum(refused.values()) == 8 * 10
    assert refused.keys() == {"", "w0", "w1"}
    assert found == {"small a": 1, "large a": 1}


@pytest.mark.world(3)
def test_requests_that_were_recorded_are_done_once(world: World, tmp_path: Path) -> None:
    """Frames such as the client signs them: the first of each is done, and what comes of it is what it was to be."""

    def attack(stranger: Stranger, key: bytes, token: bytes) -> None:
        numbers = itertools.count(1 << 40)

        def recorded(request: tuple[bytes, tuple[torch.Tensor, ...]]) -> tuple[bytes, tuple[torch.Tensor, ...]]:
            return Frame(request[0], 1, 0, next(numbers), tensors=request[1]).signed(key), request[1]

        old, new = (recorded(put(token, "small b", content_of("small b", version))) for version in (1, 2))
        deletion = recorded(request(calls.delete, token, pack_wanted([Wanted("small b")])))
        again = recorded(put(token, "small b", content_of("small b", 3)))
        for sent in (old, new, deletion, again):
            assert stranger.send(0, *sent) == ""  # the control
        for _ in range(10):
            for sent in (deletion, old, new, again):
                assert "it was received before" in stranger.send(0, *sent)

    arguments = (str(tmp_path / "file"), str(tmp_path / "served"), attack)
    (before, after, refused), found, _ = world.run(be_attacked, *arguments)
    assert refused == {"w1": 40}
    assert found == {"small a": 1, "large a": 1, "small b": 3}
    assert after[1][-1] - before[1][-1] == 3  # writes
    assert after[2][-1] == before[2][-1] == 0  # the service itself has seen nothing that is wrong


@pytest.mark.world(3)
def test_bytes_that_were_changed_beside_a_signed_request_are_not_written(world: World, tmp_path: Path) -> None:
    """The signature does not cover what a tensor contains, and the checksum in the request does."""

    def attack(stranger: Stranger, key: bytes, token: bytes) -> int:
        numbers = itertools.count(1 << 40)
        content = content_of("page a", 1)
        for at in (0, 1, content.nbytes // 2, content.nbytes - 1):
            payload, tensors = put(token, "page a", content)
            changed = content.clone()
            changed[at] ^= 1
            frame = Frame(payload, 1, 0, next(numbers), tensors=tensors)
            assert stranger.send(0, frame.signed(key), [changed]) == ""  # an answer: that it was refused
        return 4

    arguments = (str(tmp_path / "file"), str(tmp_path / "served"), attack)
    (before, after, refused), found, count = world.run(be_attacked, *arguments)
    assert refused == {}
    assert after[0] == before[0]  # keys
    assert after[1][:3] == before[1][:3]  # what is stored, and what was read
    assert after[2][:3] == before[2][:3]  # bytes that have been read and written
    assert after[2][-1] - before[2][-1] == count
    assert found == {"small a": 1, "large a": 1}


# ---- one who stands between client and server


class Recorder:
    """Keeps the header of a frame, and puts it on another of the same payload: that is the first one once more."""

    def __init__(self) -> None:
        self._header = b""

    def keep(self, data: bytearray, begin: int) -> None:
        self._header = bytes(data[begin : begin + HEADER_SIZE])

    def put(self, data: bytearray, begin: int) -> None:
        data[begin : begin + HEADER_SIZE] = self._header


def flip(data: bytearray, begin: int) -> None:
    data[begin + HEADER_SIZE] ^= 1


def refusal_of(call: Callable[[], Any], what: str) -> None:
    """See that a call fails because its message was refused, and that the error says which call it was."""
    error = call().exception(timeout=PATIENCE)
    assert isinstance(error, AuthenticationError), repr(error)
    if hasattr(error, "__notes__"):
        assert f"{what} on worker 'w1'" in error.__notes__


@pytest.mark.world(2)
def test_requests_that_are_changed_or_exchanged_on_their_way_do_nothing(world: World, tmp_path: Path) -> None:
    def run() -> Any:
        rank, seen = dist.get_rank(), dict[str, Any]()
        if rank == 1:
            with joined(1, tmp_path / "file", None, seen), serve_offload(tmp_path / "served") as service:
                dist.barrier()
                dist.barrier()
                return service.store.statistics().writes, dict(rpc_ext.statistics().refused)
        recorder, x = Recorder(), torch.ones(10)
        with relayed(seen) as relay, joined(0, tmp_path / "file", relay, seen):
            dist.barrier()
            with RemoteOffloader("w1", namespace=NAMESPACE) as remote:
                remote.write("x", x).wait(timeout=PATIENCE)
                for change in (flip, recorder.keep, recorder.put):
                    relay.change_next(REQUEST, change, sender=0)
                    if change == recorder.keep:
                        remote.delete("x").wait(timeout=PATIENCE)
                        remote.write("x", x).wait(timeout=PATIENCE)
                    else:
                        refusal_of(lambda: remote.delete("x"), "delete x")
                assert torch.equal(remote.read("x").wait(timeout=PATIENCE), x)
                relay.change_next(REQUEST, flip, sender=0)
                refusal_of(lambda: remote.write("x", x + 1), "write x")
                relay.change_next(REQUEST, flip, sender=0)
                refusal_of(lambda: remote.read("x"), "read x")
                relay.change_next(REPLY, flip, sender=1)
                refusal_of(lambda: remote.read("x"), "read x")
                assert torch.equal(remote.read("x").wait(timeout=PATIENCE), x)
                assert relay.changed == 6
            dist.barrier()
            return dict(rpc_ext.statistics().refused)

    at_client, (writes, at_server) = world.run(run)
    assert (at_client, at_server, writes) == ({"w1": 1}, {"w0": 4}, 2)


@pytest.mark.world(2)
@pytest.mark.parametrize("other", ["a secret that somebody else knows", None])
def test_a_worker_with_another_secret_or_none_does_not_come_to_the_service(
    world: World, tmp_path: Path, other: str | None
) -> None:
    def run() -> str:
        rank = dist.get_rank()
        os.environ["TP_SOCKET_IFNAME"] = "lo"
        secret = SECRET if rank == 0 else other
        try:
            with working(f"w{rank}", rank, 2, tmp_path / "file", secret=secret, start_timeout=5):
                RemoteOffloader("w0")
        except (AuthenticationError, TimeoutError) as e:
            return type(e).__name__
        return "began"

    assert "began" not in world.run(run)
