"""Stores of workers with a secret: a stranger reads nothing and changes nothing."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rpc_ext
from cudafuture.errors import AuthenticationError, ChecksumError
from cudafuture.testing import World
from remote_store import messages as wire
from remote_store.contents import content_of, version_of
from remote_store.seams import change_of, put_of
from rpc_ext import _C, RemoteStore, StoreService, _codec, _listeners, serve_store
from rpc_ext.store import _calls as services
from rpc_ext.store._wire import PART
from support.attacker import SEAL_SIZE, Stranger, key_of
from support.middleman import FROM, TO, be_worker, start_relay
from support.patience import PATIENCE
from support.rpc_callees import working

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("remote-store-secrets")]

SECRET = "the secret of the workers"
ANOTHER = b"the secret of a stranger"
STRANGER = 2  # the rank of the process that is no worker
NAMESPACE = "kept"
KEYS = ["small a", "large a"]


# ---- requests that are not a client's

Message = tuple[bytes, list[torch.Tensor]]


def call(fn: Callable[..., Any], *args: object) -> Message:
    """Return the payload and the tensors of a call that the second worker makes to the service of the first."""
    encoded = _codec.encode(_codec.PayloadKind.CALL, (1, fn, ("store", *args), {}))
    return encoded.payload, encoded.tensors


def message(token: bytes, verb: int, entries: Sequence[Any], data: torch.Tensor | None = None) -> Message:
    """Return the payload and the tensors of a message to the service."""
    data = torch.empty(0, dtype=torch.uint8) if data is None else data
    body, tensors = wire.pack_request(verb, token, time.perf_counter(), 0, "store", entries, data)
    return _C.channel_header(services.CHANNEL) + body, tensors


def put(token: bytes, key: str, content: torch.Tensor) -> Message:
    entry, data = put_of(key, content)
    return message(token, wire.PUT, [entry], data)


def make_requests(token: bytes) -> dict[str, Message]:
    """Return one request of each kind, with the token of a session."""
    changes = [change_of(key) for key in KEYS]
    return {
        "begin": call(services.begin, b"t" * 16, NAMESPACE, "w1", 0.0),
        "put": put(token, "small a", torch.zeros(8, dtype=torch.uint8)),
        "put a new one": put(token, "new", torch.zeros(8, dtype=torch.uint8)),
        "put a part": put(token, "large a", torch.zeros(PART + 1, dtype=torch.uint8)),
        "get": message(token, wire.GET, changes),
        "fetch": message(token, wire.FETCH, [wire.Fetch(1, 0)]),
        "delete": message(token, wire.DELETE, changes),
        "abandon": message(token, wire.ABANDON, changes),
        "keys": call(services.keys, token),
        "stat": call(services.stat, token, "small a"),
        "find": call(services.find, token, KEYS),
        "trim": call(services.trim, token),
        "end": call(services.end, token),
    }


REQUESTS = 13


def everything_of(service: StoreService) -> list[Any]:
    """Return all state that a read or a write changes."""
    store, done = service.store.statistics(), service.statistics()
    return [
        service.store.keys(),
        [store.bytes, store.used, store.reads, store.writes],
        [done.clients, done.bytes_read, done.bytes_written, done.requests, done.refused],
    ]


# ---- a stranger that knows all sent bytes, but not the secret


def serve_under_attack(file: str, folder: str, attack: Callable[[dict[str, bytes], bytes, bytes], Any]) -> Any:
    """Let the first worker serve the second while a stranger, who connected early, attacks them."""
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
    with serve_store(folder) as service:
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
    with RemoteStore("w0", namespace=NAMESPACE) as remote:
        for key in KEYS:
            remote.write(key, content_of(key, 1)).wait(timeout=PATIENCE)
        dist.all_gather_object([None] * 3, told | {"token": remote._token})
        for _ in range(3):
            dist.barrier()
        found = {key: remote.read(key).wait(timeout=PATIENCE) for key in remote.keys()}  # noqa: SIM118
    dist.barrier()
    return {key: version_of(key, content) for key, content in found.items()}


@pytest.mark.world(3)
def test_stranger_with_session_token_is_refused(world: World, tmp_path: Path) -> None:
    """Requests are unsigned, signed with another secret, or signed with the session's key on another connection."""

    def attack(addresses: dict[str, bytes], key: bytes, token: bytes) -> int:
        count = 0
        for imposter in ({}, {"rank": 1, "key": ANOTHER}, {"rank": 1, "key": key}):
            for what, (payload, tensors) in make_requests(token).items():
                with Stranger(addresses, **imposter) as stranger:  # type: ignore[arg-type]
                    said = stranger.send(0, payload, tensors)
                    assert "was refused" in said or what == "put a part", (what, said)  # a part gets no answer to parse
                    assert said
                count += 1
        return count

    arguments = (str(tmp_path / "file"), str(tmp_path / "served"), attack)
    (before, after, refused), found, count = world.run(serve_under_attack, *arguments)
    assert before == after
    assert count == sum(refused.values()) == 3 * REQUESTS
    assert refused == {"": REQUESTS, "w1": 2 * REQUESTS}
    assert found == {"small a": 1, "large a": 1}


# ---- a stranger between client and server


def flip(data: bytearray, begin: int) -> None:
    data[begin + SEAL_SIZE - 1] ^= 1


def expect_refusal(call: Callable[[], Any], what: str) -> None:
    """Check that the message of a call is refused, and that the error names the call."""
    error = call().exception(timeout=PATIENCE)
    assert isinstance(error, AuthenticationError), repr(error)
    if hasattr(error, "__notes__"):
        assert f"{what} on worker 'w1'" in error.__notes__


@pytest.mark.world(2)
def test_changed_or_exchanged_requests_do_nothing(world: World, tmp_path: Path) -> None:
    def run() -> Any:
        rank, seen = dist.get_rank(), dict[str, Any]()
        if rank == 1:
            with be_worker(1, tmp_path / "file", None, seen), serve_store(tmp_path / "served") as service:
                dist.barrier()
                dist.barrier()
                return service.store.statistics().writes, dict(rpc_ext.statistics().refused)
        x = torch.arange(0x4711, 0x4711 + 10)
        with start_relay(seen) as relay, be_worker(0, tmp_path / "file", relay, seen):
            dist.barrier()
            with RemoteStore("w1", namespace=NAMESPACE) as remote:
                remote.write("x", x).wait(timeout=PATIENCE)
                relay.change_next(TO, flip)
                expect_refusal(lambda: remote.delete("x"), "delete x")
                with relay.record(TO) as recorded:
                    remote.delete("x").wait(timeout=PATIENCE)
                remote.write("x", x).wait(timeout=PATIENCE)
                relay.inject(TO, bytes(recorded))
                assert torch.equal(remote.read("x").wait(timeout=PATIENCE), x)
                relay.change_next(TO, flip)
                expect_refusal(lambda: remote.write("x", x + 1), "write x")
                # The seal does not cover what a tensor contains. The checksum in the request does.
                relay.replace_next(TO, struct.pack("<q", 0x4712), struct.pack("<q", 0))
                error = remote.write("x", torch.arange(0x4711, 0x4711 + (1 << 17))).exception(timeout=PATIENCE)
                assert isinstance(error, ChecksumError), repr(error)
                relay.change_next(TO, flip)
                expect_refusal(lambda: remote.read("x"), "read x")
                relay.change_next(FROM, flip)
                expect_refusal(lambda: remote.read("x"), "read x")
                assert torch.equal(remote.read("x").wait(timeout=PATIENCE), x)
                assert relay.changed == 5
            dist.barrier()
            return dict(rpc_ext.statistics().refused)

    at_client, (writes, at_server) = world.run(run)
    # The client drops the answer to the request that came twice, and refuses the one that was changed.
    assert (at_client, at_server) == ({"w1": 2}, {"w0": 4})
    assert writes == 3  # one of them began, and was taken back when its checksum was found to be wrong


@pytest.mark.world(2)
@pytest.mark.parametrize("other", ["the secret of a stranger", None])
def test_worker_with_wrong_secret_is_refused(world: World, tmp_path: Path, other: str | None) -> None:
    def run() -> str:
        rank = dist.get_rank()
        os.environ["TP_SOCKET_IFNAME"] = "lo"
        secret = SECRET if rank == 0 else other
        try:
            with working(f"w{rank}", rank, 2, tmp_path / "file", secret=secret, start_timeout=5):
                RemoteStore("w0")
        except (AuthenticationError, TimeoutError) as e:
            return type(e).__name__
        return "began"

    assert "began" not in world.run(run)
