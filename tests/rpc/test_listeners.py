"""Closed listeners: the sockets of the engine, closed without its knowledge."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rpc_ext import _listeners

pytestmark = pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="the system does not list what is open")


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    with mock.patch.object(_listeners, "host", return_value="127.0.0.1"):
        yield


@contextlib.contextmanager
def listener(family: int = socket.AF_INET, address: object = ("127.0.0.1", 0)) -> Iterator[socket.socket]:
    with socket.socket(family) as one:
        one.bind(address)  # type: ignore[arg-type]
        one.listen()
        yield one


def can_connect(to: socket.socket, address: Any = None) -> bool:
    with socket.socket(to.family) as one:
        try:
            one.connect(address or to.getsockname())
        except ConnectionRefusedError:
            return False
        return True


def test_only_listening_sockets_are_found() -> None:
    before = _listeners.listening()
    abstract = f"\0cudafuture-{os.getpid()}"
    with listener() as tcp, listener(socket.AF_UNIX, abstract) as unix, socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        with socket.create_connection(tcp.getsockname()):
            found = _listeners.listening() - before
        assert found == {os.fstat(one.fileno()).st_ino for one in (tcp, unix)}
    assert _listeners.listening() == before


def test_sockets_at_other_addresses_are_foreign() -> None:
    before = _listeners.listening()
    with listener(address=("127.0.0.2", 0)), listener(address=("0.0.0.0", 0)):
        assert _listeners.listening() == before


def test_closed_listener_refuses_but_keeps_descriptor() -> None:
    before = _listeners.listening()
    with listener() as door, listener(socket.AF_UNIX, f"\0cudafuture-{os.getpid()}") as unix:
        addresses = {one: one.getsockname() for one in (door, unix)}
        opened = os.fstat(door.fileno()).st_ino
        _listeners.close(_listeners.listening() - before)
        for one, address in addresses.items():
            assert not can_connect(one, address)
            assert os.fstat(one.fileno()).st_ino != opened  # it is of something else now
            assert not os.get_inheritable(one.fileno())


def test_other_listeners_stay_open() -> None:
    with listener() as mine:
        before = _listeners.listening()
        with listener():
            _listeners.close(_listeners.listening() - before)
        assert can_connect(mine)


def test_open_connections_continue() -> None:
    before = _listeners.listening()
    with listener() as door, socket.create_connection(door.getsockname()) as client, door.accept()[0] as server:
        _listeners.close(_listeners.listening() - before)
        client.sendall(b"ping")
        assert server.recv(4) == b"ping"


def test_closed_listener_leaves_epoll_usable() -> None:
    before = _listeners.listening()
    with listener() as door, select.epoll() as epoll, select.epoll() as bystander:
        epoll.register(door.fileno(), select.EPOLLIN)
        address = door.getsockname()
        _listeners.close(_listeners.listening() - before)
        assert not can_connect(door, address)
        assert epoll.poll(0) == []
        epoll.unregister(door.fileno())
        with pytest.raises(FileNotFoundError):
            bystander.unregister(door.fileno())


def test_closing_leaves_no_descriptors_behind() -> None:
    before = _listeners.listening()
    with listener() as door, select.epoll() as epoll:
        epoll.register(door.fileno(), select.EPOLLIN)
        count = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        _listeners.close(_listeners.listening() - before)
        assert len(os.listdir("/proc/self/fd")) == count  # noqa: PTH208


def test_unknown_system_finds_no_sockets(tmp_path: Path) -> None:
    with listener(), mock.patch.object(_listeners, "_SELF", tmp_path / "none"):
        assert _listeners.listening() == set()
        _listeners.close({1})
