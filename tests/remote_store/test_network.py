"""Stores on another host whose network fails: every future completes, and all stored tensors are whole."""

from __future__ import annotations

import collections
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import rpc_ext
from cudafuture import CUDAFuture
from cudafuture.errors import WorkerLostError
from remote_store.contents import content_of, version_of
from rpc_ext import RemoteStore, StoreService, serve_store
from support.child import Child
from support.namespaces import BE_A_HOST, Cable, Relay, skip_unless_possible, skip_without_tun
from support.ranks import run_ranks
from support.rpc_workers import LONG, NAMES, SECRET, SHORT, begin
from support.soak import in_soak_alone

T = TypeVar("T")

pytestmark = [pytest.mark.root, pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("rpc-network")]

KEYS = ["large a", "small a", "large b", "page a", "small b"]
NAMESPACE = "kept"
AT_ONCE = 4  # operations in flight

WORKER = (
    BE_A_HOST
    + """
import sys
from remote_store.test_network import be_worker
be_worker(hear, say, *sys.argv[1:])
"""
)

Versions = dict[str, list[int]]
"""what may be under each key, in the order in which it was written; the first of them was done"""


# ---- the workers


def be_worker(hear: Callable[[], str], say: Callable[[object], None], rank: str, folder: str) -> None:
    """Run the commands of the test: as the client on the first host, as the server on the second."""
    rpc_ext.init_rpc(
        NAMES[int(rank)],
        rank=int(rank),
        world_size=2,
        init_method="tcp://10.231.77.1:29500",
        secret=SECRET,
        start_timeout=LONG,
    )
    worker: Any = Server(folder) if rank == "1" else Client(say)
    say("ready")
    while (line := hear()) != "over":
        name, *arguments = json.loads(line)
        say(json.dumps(getattr(worker, name)(*arguments)))
    rpc_ext.shutdown(graceful=False, timeout=SHORT)


class Server:
    """The process that serves the store."""

    def __init__(self, folder: str) -> None:
        self._service = serve_store(folder, durable=True)

    def expect(self, names: int) -> None:
        expect_names(self._service, names)


class Client:
    """A client that writes and reads until the network fails."""

    def __init__(self, say: Callable[[object], None]) -> None:
        self._say = say
        self._versions: Versions = {}
        self._waiting: list[CUDAFuture[Any]] = []

    def begin(self) -> None:
        self._hasty = RemoteStore("callee", namespace=NAMESPACE, timeout=SHORT)
        self._patient = RemoteStore("callee", namespace=NAMESPACE, timeout=LONG)
        for key in KEYS:
            self._patient.write(key, content_of(key, 1)).wait()
            self._versions[key] = [1]

    def write_until_it_fails(self) -> list[str]:
        """Write until a call fails; return its error. Keep the versions that each key may have."""

        def write(number: int) -> tuple[str, Callable[[], None], CUDAFuture[Any]]:
            key = KEYS[number % len(KEYS)]
            self._versions[key].append(number)

            def drop_older() -> None:
                versions = self._versions[key]
                del versions[: versions.index(number)]

            return f"write {key}", drop_older, self._hasty.write(key, content_of(key, number))

        return self._until_it_fails(write)

    def read_until_it_fails(self) -> list[str]:
        """Read until a call fails; return its error."""

        def read(number: int) -> tuple[str, Callable[[], None], CUDAFuture[Any]]:
            key = KEYS[number % len(KEYS)]
            future = self._hasty.read(key)
            return f"read {key}", lambda: self._expect(key, future.value()), future

        return self._until_it_fails(read)

    def _until_it_fails(self, begin: Callable[[int], tuple[str, Callable[[], None], CUDAFuture[Any]]]) -> list[str]:
        in_flight: collections.deque[tuple[str, Callable[[], None], CUDAFuture[Any]]] = collections.deque()
        failed: list[str] = []
        for number in itertools.count(2):
            if not failed:
                in_flight.append(begin(number))
            if len(in_flight) == AT_ONCE or failed:
                what, done, future = in_flight.popleft()
                error = future.exception(timeout=LONG)
                if error is None:
                    done()
                else:
                    assert isinstance(error, (WorkerLostError, TimeoutError)), repr(error)
                    assert what in str(error), error
                    assert "worker 'callee'" in str(error), error
                    failed.append(what)
            if number == 2 + 2 * AT_ONCE:
                self._say("in flight")
            if not in_flight:
                return failed
        raise AssertionError

    def begin_more(self) -> bool:
        """Start patient writes and reads; return True if any is done before the network is back."""
        self._waiting = [self._patient.write(f"{key} later", content_of(f"{key} later", 5)) for key in KEYS]
        self._waiting += [self._patient.read(key) for key in KEYS]
        return any(future.done() for future in self._waiting)

    def end_more(self) -> None:
        for future in self._waiting:
            future.wait(timeout=LONG)
        for key, future in zip(KEYS, self._waiting[len(KEYS) :], strict=True):
            self._expect(key, future.value())
        self._versions |= {f"{key} later": [5] for key in KEYS}

    def look(self) -> None:
        """Check that each tensor is whole, and one of the possible versions."""
        for key in self._versions:
            self._expect(key, self._patient.read(key).wait(timeout=LONG))

    def versions(self) -> Versions:
        return self._versions

    def close(self) -> None:
        self._hasty.close()
        self._patient.close()

    def _expect(self, key: str, content: torch.Tensor) -> None:
        assert version_of(key, content) in self._versions[key]


def expect_names(service: StoreService, names: int) -> None:
    """Wait until the store has one name for each key and nothing of unfinished writes."""
    end = time.monotonic() + LONG
    while len(service.store) != names or service.statistics().in_flight:
        assert time.monotonic() < end, service.store.keys()
        service.store.flush().exception(timeout=LONG)


# ---- the test's side of them


class Workers:
    """The client and the server process, and the commands to them."""

    def __init__(self, client: Child, server: Child) -> None:
        self.client, self.server = client, server

    def do(self, what: str, *arguments: object, by: Child | None = None) -> Any:
        self.begin(what, *arguments, by=by)
        return json.loads((by or self.client).hear(LONG))

    def begin(self, what: str, *arguments: object, by: Child | None = None) -> None:
        (by or self.client).say(json.dumps([what, *arguments]))


@contextmanager
def workers_with(between: Callable[[int, int], AbstractContextManager[T]], folder: Path) -> Iterator[tuple[T, Workers]]:
    """Start both processes with a link between them, and kill them at the end."""
    with Child(WORKER, "0", str(folder)) as client, Child(WORKER, "1", str(folder)) as server:
        for child in (client, server):
            assert child.hear(LONG) == "host"
        with between(client.process.pid, server.process.pid) as line:
            for child in (client, server):
                child.say("connected")
            for child in (client, server):
                assert child.hear(LONG) == "ready"
            yield line, Workers(client, server)


@pytest.fixture(autouse=True, scope="module")
def namespaces() -> None:
    skip_unless_possible()


VERBS = pytest.mark.parametrize("verb", ["write", pytest.param("read", marks=in_soak_alone)])


@VERBS
def test_operations_continue_after_network_returns(tmp_path: Path, verb: str) -> None:
    with workers_with(Cable, tmp_path / "served") as (cable, workers):
        workers.do("begin")
        workers.begin(f"{verb}_until_it_fails")
        assert workers.client.hear(LONG) == "in flight"
        cable.cut()
        assert json.loads(workers.client.hear(LONG))
        assert workers.do("begin_more") is False
        cable.mend()
        workers.do("end_more")
        workers.do("look")
        versions = workers.do("versions")
        workers.do("close")
        workers.do("expect", len(versions), by=workers.server)


def test_lost_network_keeps_acknowledged_writes(tmp_path: Path) -> None:
    with workers_with(Cable, tmp_path / "served") as (cable, workers):
        workers.do("begin")
        workers.begin("write_until_it_fails")
        assert workers.client.hear(LONG) == "in flight"
        cable.cut()
        assert json.loads(workers.client.hear(LONG))
        versions = workers.do("versions")
    run_ranks(1, look_again, str(tmp_path / "store"), str(tmp_path / "served"), versions)


def look_again(rank: int, store: str, folder: str, versions: Versions) -> None:
    begin(rank, 1, store)
    with serve_store(folder, durable=True) as service, RemoteStore("caller", namespace=NAMESPACE) as remote:
        assert sorted(remote.keys()) == sorted(versions)
        for key, those in versions.items():
            assert version_of(key, remote.read(key).wait(timeout=LONG)) in those
        expect_names(service, len(versions))
    rpc_ext.shutdown()


@VERBS
def test_connection_lost_within_piece_tears_nothing(tmp_path: Path, verb: str) -> None:
    skip_without_tun()
    with workers_with(partial(Relay, rate=64e6), tmp_path / "served") as (relay, workers):
        workers.do("begin")
        relay.limit = relay.came + (5 << 20)
        workers.begin(f"{verb}_until_it_fails")
        said = workers.client.hear(LONG)
        failed = json.loads(said if said != "in flight" else workers.client.hear(LONG))
        assert f"{verb} large a" in failed or f"{verb} large b" in failed
        assert relay.came >= relay.limit
        relay.limit = None
        workers.do("begin_more")
        workers.do("end_more")
        workers.do("look")
        versions = workers.do("versions")
        workers.do("close")
        workers.do("expect", len(versions), by=workers.server)
