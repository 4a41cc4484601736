"""Attacks on a job with a secret, from the network and from the store."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc as torch_rpc

import rpc_ext
from cudafuture.testing import World
from rpc_ext import _listeners, rpc_async, rpc_sync
from support import attacker
from support.attacker import Bomb, Stranger, collect_log, key_of
from support.rpc_callees import add, same, working
from support.soak import soak_count

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("rpc-authentication")]

SECRET = "a secret that nobody else knows"
ANOTHER = "a secret that somebody else knows"
WORKERS = ("w0", "w1")
STRANGER = 2  # the rank of one who is no worker
rpc: Any = torch_rpc


# ---- a job, and one who is not part of it


def work_until(store: Any, key: str) -> int:
    """Call the other worker until the store has a key; return how many rounds that were."""
    other = 1 - torch_rpc.get_worker_info().id
    for i in itertools.count(1):
        assert rpc_sync(other, add, (i, 1)) == i + 1
        assert torch.equal(
            rpc_sync(other, torch.add, (torch.full((64, 64), float(i)), 1)), torch.full((64, 64), i + 1.0)
        )
        with rpc_ext.batch(other):
            calls = [rpc_async(other, same, (j,)) for j in range(10)]
        assert [call.wait() for call in calls] == list(range(10))
        assert rpc_ext.remote(other, add, (i, 2)).to_here() == i + 2
        if store.check([key]):
            return i
    raise AssertionError


@dataclass
class Seen:
    """Traces of an attack in a worker."""

    rounds: int
    refused: dict[str, int]
    logged: list[str]


def be_attacked(file: str, attack: Callable[[list[Any]], Any], *, closed: bool = False, **options: Any) -> Any:
    """Work on ranks 0 and 1 while rank 2 attacks with the knowledge of a listener on the network.

    That the workers close their doors once they are connected is a matter for a test of its own: here the stranger has
    come before that, unless `closed`.
    """
    rank, store = dist.get_rank(), default_store()
    known: list[Any] = [None] * 3
    if rank == STRANGER:
        dist.all_gather_object(known, None)
        try:
            return attack(known[:STRANGER])
        finally:
            store.set("attacked", "1")
            dist.barrier()
    attacker.script_that_makes_a_file()
    doors: list[Any] = []
    with collect_log() as messages, watch_doors(doors, closed), warnings.catch_warnings():
        with working(WORKERS[rank], rank, 2, file, **options) as worker:
            address = worker.agent.store.get(f"addrs/{worker.name}")
            dist.all_gather_object(known, {"address": address, "key": key_of(worker), "doors": doors})
            rounds = work_until(store, "attacked")
            seen = Seen(rounds, dict(rpc_ext.statistics().refused), messages)
            dist.barrier()
        return seen


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


@contextlib.contextmanager
def watch_doors(doors: list[Any], closed: bool) -> Iterator[None]:
    """Record the listeners that an agent closes; close them only if `closed`."""
    close = _listeners.close
    with contextlib.ExitStack() as kept:

        def note(inodes: set[int]) -> None:
            for fd, inode, _ in _listeners._listening():
                if inode in inodes:
                    with socket.socket(fileno=os.dup(fd)) as door:
                        doors.append((int(door.family), door.getsockname()))
            if closed:
                close(inodes)
                for family, address in doors:  # no other process is to take the port, and what is thrown at it
                    kept.enter_context(take_address(family, address))

        with mock.patch.object(_listeners, "close", note):
            yield


@contextlib.contextmanager
def take_address(family: int, address: Any) -> Iterator[None]:
    """Keep an address without listening there."""
    with socket.socket(family) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
        yield


def addresses(known: list[Any]) -> dict[str, bytes]:
    return {name: worker["address"] for name, worker in zip(WORKERS, known, strict=True)}


# ---- forged messages


@dataclass
class Imposter:
    """A stranger as it shows itself, and what is wrong with its messages."""

    reason: str
    claims: str  # the worker that its messages are counted for
    rank: int | None = None
    key: bytes = b""


@pytest.mark.soak
@pytest.mark.world(3)
def test_forged_messages_execute_nothing(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    count = soak_count(200)

    def attack(known: list[Any]) -> dict[str, int]:
        key = known[0]["key"]
        imposters = [
            Imposter("it is not signed", ""),
            Imposter("its signature is wrong", "w1", 1, ANOTHER.encode()),
            # It knows even the session's key, and comes by a connection of its own.
            Imposter("its sender has another connection", "w1", 1, key),
        ]
        claims: dict[str, int] = {}
        for imposter in imposters:
            with Stranger(addresses(known), imposter.rank, imposter.key) as stranger:
                for i in range(count // len(imposters) + 1):
                    made = str(folder / f"{imposter.rank} {i}")
                    messages = attacker.our_call(made), attacker.torchs_call(made), b"", b"\0" * (i % 100)
                    tensors = [torch.zeros(2, 3)] * (i % 3)
                    said = stranger.send(0, messages[i % len(messages)], tensors)
                    assert "was refused: " in said, said
                    claims[imposter.claims] = claims.get(imposter.claims, 0) + 1
                for said in (
                    stranger.call(os.mkdir, str(folder / "python")),
                    stranger.call(attacker.script_that_makes_a_file(), str(folder / "script")),
                    stranger.builtin("aten::from_file", str(folder / "builtin"), True, 4),
                ):
                    assert "was refused: " in said, said
                claims[imposter.claims] += 3
                # Of more than a little nothing is read: the connection ends.
                assert stranger.send(0, b"", [torch.zeros(1 << 20)])
                claims[imposter.claims] += 1
        return claims

    w0, w1, claims = world.run(be_attacked, str(tmp_path / "file"), attack, secret=SECRET)
    assert not list(folder.iterdir())
    assert w0.refused == claims
    assert sum(claims.values()) >= count
    assert sorted(message.partition(" was refused")[0].rpartition("from ")[2] for message in w0.logged) == [
        "an unknown sender",
        "worker 'w1'",
    ]
    assert (w1.refused, w1.logged) == ({}, [])


@pytest.mark.world(3)
def test_references_and_gradients_of_stranger_are_refused(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()

    def attack(known: list[Any]) -> None:
        with Stranger(addresses(known)) as stranger:
            assert "was refused" in stranger.remote(os.mkdir, str(folder / "remote"))
            assert "was refused" in stranger.remote(attacker.script_that_makes_a_file(), str(folder / "script"))
            with dist_autograd.context():
                weight = torch.ones(2, requires_grad=True)
                assert "was refused" in stranger.call(attacker.make_folder, str(folder / "autograd"), weight)

    w0, w1, _ = world.run(be_attacked, str(tmp_path / "file"), attack, secret=SECRET)
    assert not list(folder.iterdir())
    assert w0.refused.keys() == {""}
    assert w0.refused[""] >= 3
    assert w1.refused == {} or w1.refused.keys() == {""}


@pytest.mark.world(3)
def test_workers_without_secret_execute_forged_messages(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()

    def attack(known: list[Any]) -> None:
        with Stranger(addresses(known)) as stranger:
            assert stranger.send(0, attacker.our_call(str(folder / "ours"))) == ""
            assert stranger.send(0, attacker.torchs_call(str(folder / "torch's"))) == ""
            assert stranger.call(os.mkdir, str(folder / "python")) == ""
            assert stranger.call(attacker.script_that_makes_a_file(), str(folder / "script")) == ""
            assert stranger.builtin("aten::from_file", str(folder / "builtin"), True, 4) == ""
            stranger.remote(os.mkdir, str(folder / "remote"))
            with dist_autograd.context():
                stranger.call(attacker.make_folder, str(folder / "autograd"), torch.ones(2, requires_grad=True))

    w0, w1, _ = world.run(be_attacked, str(tmp_path / "file"), attack)
    made = {path.name for path in folder.iterdir()}
    assert made >= {"ours", "torch's", "python", "script", "builtin", "remote", "autograd"}
    assert w0.refused == w1.refused == {}


# ---- those who come by the port


GARBAGE = (b"", b"\0", b"\0" * 1000, b"\xff" * 1000, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 16)


def throw(garbage: bytes, family: int, address: Any) -> None:
    with socket.socket(family) as knocking:
        knocking.connect(address)
        knocking.sendall(garbage)


@pytest.mark.world(3)
def test_listeners_close_after_last_worker(world: World, tmp_path: Path) -> None:
    # Read by TensorPipe, most of this would end the process.
    def attack(known: list[Any]) -> int:
        doors = [door for worker in known for door in worker["doors"]]
        for family, address in doors:
            for garbage in GARBAGE:
                with pytest.raises(ConnectionRefusedError):
                    throw(garbage, family, address)
        with Stranger(addresses(known)) as stranger:
            said = stranger.call(os.mkdir, str(tmp_path / "made"))
            assert "refused" in said, said
            assert "was refused" not in said, said  # not the message: the connection
        return len({family for family, _ in doors})

    w0, w1, families = world.run(be_attacked, str(tmp_path / "file"), attack, closed=True, secret=SECRET)
    assert families >= 1
    assert w0.refused == w1.refused == {}
    assert not (tmp_path / "made").exists()


@pytest.mark.world(2)
@pytest.mark.parametrize("channel", ["mpt_uv", "basic"])
def test_tensors_travel_with_closed_listeners(world: World, tmp_path: Path, channel: str) -> None:
    # Workers on one machine would read each other's memory. These do as if they were on two.
    def run() -> None:
        rank = dist.get_rank()
        make = rpc.TensorPipeRpcBackendOptions.__init__
        with mock.patch.object(
            rpc.TensorPipeRpcBackendOptions, "__init__", lambda self, **k: make(self, _channels=[channel], **k)
        ):
            started = working(WORKERS[rank], rank, 2, str(tmp_path / "file"), secret=SECRET)
            with started as worker:
                doors = _listeners.listening()
                assert worker.agent.store.get(f"addrs/{worker.name}")
                large = torch.arange(1 << 20)
                for to in (0, 1):
                    assert torch.equal(rpc_sync(to, add, (large, 1)), large + 1)
                assert _listeners.listening() == doors

    world.run(run)


# ---- those who write to the store


@pytest.mark.soak
@pytest.mark.world(3)
def test_garbage_in_store_executes_nothing(world: World, tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "made"
    folder.mkdir()
    times = soak_count(200)

    def poisons() -> Iterator[str]:
        for number in itertools.count():
            device_map = {"w0": {"cpu": Bomb(str(folder / str(number)))}}
            yield pickle.dumps(device_map, protocol=0).decode()
            yield f"unsigned {json.dumps({'value': 'proof'})}"
            yield f"{'0' * 64} {json.dumps({'value': {'nonce': '00', 'value': {}}})}"
            yield "[" * 100_000
            yield "\N{LATIN SMALL LETTER E WITH ACUTE} {}"

    def poison(store: Any, place: str) -> None:
        """Write over what is there again and again; each time its owner puts it back."""
        written = {garbage.encode() for garbage in itertools.islice(poisons(), 5)}
        for garbage in itertools.islice(poisons(), times):
            while store.get(place) in written:
                pass
            written.add(garbage.encode())
            store.set(place, garbage)
        while store.get(place) in written:
            pass

    def run() -> list[str]:
        rank, shared = dist.get_rank(), default_store()
        if rank == STRANGER:
            store = dist.FileStore(str(file), -1)
            poisoned = dist.PrefixStore("cudafuture_rpc/2/1/handshake", store)
            rendezvous = dist.PrefixStore("cudafuture_rpc/2/rendezvous", store)
            steps = ("hello", "proof", "ready", "shutdown")
            for place, garbage in zip([f"{s}/{r}" for r in (0, 1) for s in steps], poisons(), strict=False):
                poisoned.set(place, garbage)
            shared.set("w0 may come", "1")
            poison(rendezvous, "come/0")
            rendezvous.set("come/1", "1")  # as if the other worker were there, so that the first makes a session
            rendezvous.wait(["seen/1/0"])
            for place in ("session/0/1", "session/1/1", "seen/1/0"):
                poison(rendezvous, place)
            rendezvous.set("seen/1/1", "1")  # the first goes on to the handshake
            poisoned.wait(["hello/0"])
            poison(poisoned, "hello/0")
            shared.set("w1 may come", "1")
            return []
        shared.wait([f"w{rank} may come"])
        with collect_log() as messages, working(WORKERS[rank], rank, 2, str(file), secret=SECRET):
            assert rpc_sync(1 - rank, add, (1, 2)) == 3
        return messages

    w0, w1, _ = world.run(run)
    assert not list(folder.iterdir())
    assert any("worker 1 (hello)" in message and "is ignored" in message for message in w0)
    for messages in (w0, w1):
        assert len(messages) == len(set(messages))  # once for each step and worker
