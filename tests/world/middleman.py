"""One who stands between two workers of a job with a secret, and changes what they send to each other."""

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
from rpc_ext import _engine
from world.attacker import HEADER_SIZE, MAGIC

SECRET = "a secret that nobody else knows"

Change = Callable[[bytearray, int], None]
"""what a relay does to bytes in which a frame begins at a place"""


class Relay:
    """Stands between a worker and another, and hands on what comes: with one frame changed where it is told to.

    What it changes keeps its length. Frames come this way; tensors do not.
    """

    def __init__(self, find: Callable[[], tuple[str, int]]) -> None:
        self._find = find  # where the other listens
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._lock = threading.Lock()  # guards what follows
        self._direction, self._change = 0, _leave
        self._sender: int | None = None
        self.changed = 0
        """frames that were changed"""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens, as TensorPipe writes it."""
        host, port = self._listener.getsockname()
        return f"uv://{host}:{port}"

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def change_next(self, direction: int, change: Change, sender: int | None = None) -> None:
        """Change the next frame of one direction, and of one sender if that is named."""
        with self._lock:
            self._direction, self._change, self._sender = direction, change, sender

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._find())
                self._sockets += here, there
                for source, target in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            data = bytearray()
            while got := source.recv(1 << 16):
                data += got
                target.sendall(self._take(data))
            target.shutdown(socket.SHUT_WR)

    def _take(self, data: bytearray) -> bytes:
        """Take the bytes that can go on: all, unless a frame's header is not there as a whole."""
        end = len(data)
        begin = data.rfind(MAGIC)
        if begin >= 0:
            if len(data) <= begin + HEADER_SIZE:
                end = begin
            else:
                self._maybe_change(data, begin)
        taken = bytes(data[:end])
        del data[:end]
        return taken

    def _maybe_change(self, data: bytearray, begin: int) -> None:
        with self._lock:
            sender = int.from_bytes(data[begin + 8 : begin + 12], "little")
            if data[begin + 5] == self._direction and self._sender in (None, sender):
                self._change(data, begin)
                self._direction, self._change = 0, _leave
                self.changed += 1


def _leave(data: bytearray, begin: int) -> None:
    pass


# ---- the two workers


@contextlib.contextmanager
def joined(rank: int, file: Path, relay: Relay | None, seen: Any) -> Iterator[rpc_ext.Session]:
    """Be a worker of two; the relay stands between the first and the second, which the store does not tell it."""
    make_options, make_store = TensorPipeRpcBackendOptions.__init__, _engine.PrefixStore

    def options(self: Any, **given: Any) -> None:  # messages over TCP, as between two machines
        make_options(self, **{**given, "_transports": ["uv"], "_channels": ["basic"]})

    def store(prefix: str, real: Any) -> Any:
        if prefix == "agent" and relay is not None:
            seen.update(real=make_store(prefix, real), told=dist.HashStore())
            seen["told"].set("names/1", "w1")
            seen["told"].set("addrs/w1", relay.address)
            seen["real"].set("names/0", "w0")
            return seen["told"]
        return make_store(prefix, real)

    with (
        mock.patch.dict(os.environ, TP_SOCKET_IFNAME="lo"),
        mock.patch.object(TensorPipeRpcBackendOptions, "__init__", options),
        mock.patch.object(_engine, "PrefixStore", store),
    ):
        session = rpc_ext.init_rpc(f"w{rank}", rank=rank, world_size=2, init_method=f"file://{file}", secret=SECRET)
        try:
            yield session
        finally:
            dist.barrier()
            rpc_ext.shutdown(graceful=False)


@contextlib.contextmanager
def relayed(seen: dict[str, Any]) -> Iterator[Relay]:
    """Stand between this worker and w1."""

    def find() -> tuple[str, int]:
        seen["real"].set("addrs/w0", seen["told"].get("addrs/w0"))
        host, _, port = seen["real"].get("addrs/w1").decode().removeprefix("uv://").rpartition(":")
        return host, int(port)

    with Relay(find) as relay:
        yield relay
