"""Fixtures of the store tests: a server process, a service of this worker, and a store of each kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cudafuture.store import DiskStore, ShardedStore, Store
from remote_store.server import SERVER, Server, server_process
from rpc_ext import RemoteStore
from support.own_store import make_own_store
from support.rpc_fixtures import gate, remote, service, worker
from support.storing import KINDS, engine_on

__all__ = ["any_store", "every_store", "gate", "kind", "remote", "server", "service", "store", "worker"]

# One pytest process runs all of these, so that one server process is started for the whole module.
WITH_SERVER = [pytest.mark.world, pytest.mark.xdist_group("remote-store-contract")]
REMOTE = pytest.param("remote", marks=WITH_SERVER)
LOCAL_AND_REMOTE = pytest.param("local and remote", marks=WITH_SERVER)
REMOTE_DURABLE = pytest.param("remote, durable", marks=WITH_SERVER)
LOCAL_VARIANTS = [
    "ephemeral, threads",
    "durable, threads",
    "durable, io_uring",
    "cached, io_uring",
    "unchecked, io_uring",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a second worker process for all tests of a module."""
    with server_process(tmp_path_factory.mktemp("rpc") / "rendezvous") as server:
        yield server


@pytest.fixture(params=["local", "sharded", REMOTE, LOCAL_AND_REMOTE])
def kind(request: pytest.FixtureRequest) -> str:
    """Return one of the four kinds of store."""
    return str(request.param)


@pytest.fixture
def store(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    """Open an empty store of each of the four kinds."""
    with open_kind(kind, tmp_path, request) as store:
        yield store


@pytest.fixture(params=["local", "sharded", "own", REMOTE, LOCAL_AND_REMOTE])
def every_store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    """Open an empty store of each of the four kinds, and the one of docs/own-store.md."""
    with open_kind(str(request.param), tmp_path, request) as store:
        yield store


@pytest.fixture(params=["local", "sharded", "own", REMOTE, LOCAL_AND_REMOTE, *LOCAL_VARIANTS, REMOTE_DURABLE])
def any_store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    """Open an empty store of each kind, also local ones with other options and I/O backends."""
    with open_kind(str(request.param), tmp_path, request) as store:
        yield store


@contextlib.contextmanager
def open_kind(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    """Open an empty store of the given kind. All its files are in `folder`."""
    with contextlib.ExitStack() as stack:

        def local(name: str, **options: Any) -> DiskStore:
            return stack.enter_context(DiskStore(folder / name, **options))

        def remote(**options: Any) -> RemoteStore:
            server: Server = request.getfixturevalue("server")
            name = f"service of {request.node.name}"
            stack.enter_context(server.serve(name, folder / "served", **options))
            return stack.enter_context(RemoteStore(SERVER, name=name))

        store: Store
        if kind == "local":
            store = local("store")
        elif kind == "own":
            store = stack.enter_context(make_own_store())
        elif kind == "sharded":
            store = ShardedStore([local("one"), local("two"), local("three")])
        elif kind == "local and remote":
            store = ShardedStore({"local": local("local"), "remote": remote()})
        elif kind.startswith("remote"):
            store = remote(durable="durable" in kind)
        else:
            options, backend = kind.split(", ")
            store = local("store", engine=stack.enter_context(engine_on(backend)), **KINDS[options])
        yield store
