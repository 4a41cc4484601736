"""Attacker between two workers of a job with a secret, which changes their messages."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.rpc import TensorPipeRpcBackendOptions

import rpc_ext
from rpc_ext import _agent
from support.attacker import MAGIC

TO, FROM = 1, 2
SECRET = "a secret that nobody else knows"

Change = Callable[[bytearray, int], None]
"""a change that a relay makes to bytes, given the place where a seal begins in them"""


class Relay:
    """A process between two workers: it forwards messages, and changes, records, drops or repeats some of them.

    The first worker connects to the relay, so `TO` is the way of its requests and `FROM` that of the replies. Changes
    keep the length. The connections on which tensors travel pass through the relay as well.
    """

    def __init__(self, find: Callable[[], tuple[str, int]]) -> None:
        self._find = find  # where the other listens
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._lock = threading.Lock()  # guards what follows
        self._first: tuple[socket.socket, socket.socket] | None = None  # the connection of messages: both ends
        self._changes: dict[int, Change] = {}
        self._replacements: dict[int, tuple[bytes, bytes]] = {}
        self._records: dict[int, bytearray] = {}
        self._dropped: set[int] = set()
        self.changed = 0
        """changes that were made"""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """The address at which the relay listens, in the form of TensorPipe."""
        host, port = self._listener.getsockname()
        return f"uv://{host}:{port}"

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def change_next(self, way: int, change: Change) -> None:
        """Change the next seal of one way."""
        with self._lock:
            self._changes[way] = change

    def replace_next(self, way: int, old: bytes, new: bytes) -> None:
        """Replace the next bytes of one way that are `old`, in a message or in a tensor."""
        assert len(old) == len(new)
        with self._lock:
            self._replacements[way] = old, new

    @contextlib.contextmanager
    def record(self, way: int) -> Iterator[bytearray]:
        """Record the messages of one way, without their tensors."""
        with self._lock:
            record = self._records[way] = bytearray()
        yield record
        with self._lock:
            del self._records[way]

    @contextlib.contextmanager
    def drop(self, way: int) -> Iterator[None]:
        """Drop the messages of one way."""
        with self._lock:
            self._dropped.add(way)
        yield
        with self._lock:
            self._dropped.remove(way)

    def inject(self, way: int, data: bytes) -> None:
        """Send bytes to the end of one way, on the connection of messages."""
        with self._lock:
            assert self._first is not None
            self._first[1 if way == TO else 0].sendall(data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._find())
                self._sockets += here, there
                for one in (here, there):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._first = self._first or (here, there)
                for way, source, target in ((TO, here, there), (FROM, there, here)):
                    threading.Thread(target=self._pump, args=(way, source, target), daemon=True).start()

    def _pump(self, way: int, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while got := source.recv(1 << 20):
                data = bytearray(got)
                with self._lock:
                    self._edit(way, data)
                    if self._first is not None and source in self._first:
                        if way in self._records:
                            self._records[way] += data
                        if way in self._dropped:
                            continue
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _edit(self, way: int, data: bytearray) -> None:
        if way == FROM:  # the address of the other worker, for further connections
            host, port = self._find()
            real, mine = f"{host}:{port}".encode(), self.address.removeprefix("uv://").encode()
            assert len(real) == len(mine)
            data[:] = data.replace(real, mine)
        begin = data.rfind(MAGIC)
        if begin >= 0 and way in self._changes:
            self._changes.pop(way)(data, begin)
            self.changed += 1
        if way in self._replacements and self._replacements[way][0] in data:
            data[:] = data.replace(*self._replacements.pop(way), 1)
            self.changed += 1


# ---- the two workers


@contextlib.contextmanager
def tcp_only() -> Iterator[None]:
    """Make agents send messages and tensors over TCP, as between two machines."""
    make = TensorPipeRpcBackendOptions.__init__

    def options(self: Any, **given: Any) -> None:
        make(self, **{**given, "_transports": ["uv"], "_channels": ["basic"]})

    with mock.patch.object(TensorPipeRpcBackendOptions, "__init__", options):
        yield


@contextlib.contextmanager
def be_worker(rank: int, file: Path | str, relay: Relay | None, seen: Any, **options: Any) -> Iterator[rpc_ext.Session]:
    """Run one of two workers. The relay poses as the second worker to the first one.

    Addresses are signed, so it is the first worker that is made to believe it here. On a network a relay can stand
    between two workers without that.
    """
    addresses = _agent._addresses

    def replace_address(handshake: Any, own: str) -> list[str]:
        found = addresses(handshake, own)
        if relay is None:
            return found
        seen["real"] = found[1]
        return [found[0], relay.address]

    with (
        mock.patch.dict(os.environ, TP_SOCKET_IFNAME="lo"),
        tcp_only(),
        mock.patch.object(_agent, "_addresses", replace_address),
    ):
        options = {"secret": SECRET, **options}
        session = rpc_ext.init_rpc(f"w{rank}", rank=rank, world_size=2, init_method=f"file://{file}", **options)
        try:
            yield session
        finally:
            dist.barrier()
            if session is rpc_ext.session._session:  # not where the test has shut it down
                rpc_ext.shutdown(graceful=False)


@contextlib.contextmanager
def start_relay(seen: dict[str, Any]) -> Iterator[Relay]:
    """Start a relay between this worker and w1."""

    def find() -> tuple[str, int]:
        host, _, port = seen["real"].removeprefix("uv://").rpartition(":")
        return host, int(port)

    with Relay(find) as relay:
        yield relay
