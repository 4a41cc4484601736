"""Offload among workers with a secret: whoever does not belong to them reads nothing, and changes nothing."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rpc_ext
from cudafuture.errors import AuthenticationError, ChecksumError
from cudafuture.storage import digest
from cudafuture.testing import World
from rpc_ext import _codec, _listeners
from rpc_ext import _offload_calls as calls
from rpc_ext._offload_wire import PIECE, Header, Wanted, pack, pack_wanted
from rpc_ext.offload_service import OffloadService, serve_offload
from rpc_ext.remote_offloader import RemoteOffloader
from world.attacker import SEAL_SIZE, Stranger, key_of
from world.middleman import FROM, TO, joined, relayed
from world.offload_clients import stamp
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
    return request(calls.put, token, stamp(), pack([header._replace(checksum=digest(content))]), content)


def requests(token: bytes) -> dict[str, tuple[bytes, tuple[torch.Tensor, ...]]]:
    """Return one of each kind, with the token of a session."""
    wanted = pack_wanted([Wanted(key) for key in KEYS])
    piece = torch.zeros(PIECE, dtype=torch.uint8)
    of_two = Header("large a", torch.uint8, (PIECE + 1,), PIECE + 1, b"u" * 16, pieces=2, length=PIECE)
    return {
        "begin": request(calls.begin, b"t" * 16, NAMESPACE, "w1", 0.0),
        "put": put(token, "small a", torch.zeros(8, dtype=torch.uint8)),
        "put a new one": put(token, "new", torch.zeros(8, dtype=torch.uint8)),
        "put a piece": request(calls.put, token, stamp(), pack([of_two]), piece),
        "get": request(calls.get, token, stamp(), wanted),
        "delete": request(calls.delete, token, stamp(), wanted),
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


def be_attacked(file: str, folder: str, attack: Callable[[dict[str, bytes], bytes, bytes], Any]) -> Any:
    """The first worker serves the second while a stranger attacks, who has connected before that was impossible."""
    rank = dist.get_rank()
    known: list[Any] = [None] * 3
    if rank == STRANGER:
        dist.barrier()
        dist.all_gather_object(known, None)
        addresses = {f"w{i}": known[i]["address"] for i in range(STRANGER)}
        dist.barrier()
        try:
            return attack(addresses, known[0]["key"], known[1]["token"])
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


@pytest.mark.world(3)
def test_requests_of_a_stranger_are_refused_though_it_knows_the_session(world: World, tmp_path: Path) -> None:
    """Unsigned, signed with another secret, and with the session's own key but by another connection."""

    def attack(addresses: dict[str, bytes], key: bytes, token: bytes) -> int:
        count = 0
        for imposter in ({}, {"rank": 1, "key": ANOTHER}, {"rank": 1, "key": key}):
            for what, (payload, tensors) in requests(token).items():
                with Stranger(addresses, **imposter) as stranger:  # type: ignore[arg-type]
                    said = stranger.send(0, payload, tensors)
                    assert "was refused" in said or what == "put a piece", (what, said)  # of which nothing is read
                    assert said
                count += 1
        return count

    arguments = (str(tmp_path / "file"), str(tmp_path / "served"), attack)
    (before, after, refused), found, count = world.run(be_attacked, *arguments)
    assert before == after
    assert count == sum(refused.values()) == 3 * 10
    assert refused == {"": 10, "w1": 20}
    assert found == {"small a": 1, "large a": 1}


# ---- one who stands between client and server


def flip(data: bytearray, begin: int) -> None:
    data[begin + SEAL_SIZE - 1] ^= 1


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
        x = torch.arange(0x4711, 0x4711 + 10)
        with relayed(seen) as relay, joined(0, tmp_path / "file", relay, seen):
            dist.barrier()
            with RemoteOffloader("w1", namespace=NAMESPACE) as remote:
                remote.write("x", x).wait(timeout=PATIENCE)
                relay.change_next(TO, flip)
                refusal_of(lambda: remote.delete("x"), "delete x")
                with relay.recorded(TO) as recorded:
                    remote.delete("x").wait(timeout=PATIENCE)
                remote.write("x", x).wait(timeout=PATIENCE)
                relay.inject(TO, bytes(recorded))
                assert torch.equal(remote.read("x").wait(timeout=PATIENCE), x)
                relay.change_next(TO, flip)
                refusal_of(lambda: remote.write("x", x + 1), "write x")
                # The seal does not cover what a tensor contains. The checksum in the request does.
                relay.replace_next(TO, struct.pack("<q", 0x4712), struct.pack("<q", 0))
                error = remote.write("x", torch.arange(0x4711, 0x4711 + (1 << 17))).exception(timeout=PATIENCE)
                assert isinstance(error, ChecksumError), repr(error)
                relay.change_next(TO, flip)
                refusal_of(lambda: remote.read("x"), "read x")
                relay.change_next(FROM, flip)
                refusal_of(lambda: remote.read("x"), "read x")
                assert torch.equal(remote.read("x").wait(timeout=PATIENCE), x)
                assert relay.changed == 5
            dist.barrier()
            return dict(rpc_ext.statistics().refused)

    at_client, (writes, at_server) = world.run(run)
    # The client drops the answer to the request that came twice, and refuses the one that was changed.
    assert (at_client, at_server) == ({"w1": 2}, {"w0": 4})
    assert writes == 3  # one of them began, and was taken back when its checksum was found to be wrong


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
