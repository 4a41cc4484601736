"""The sockets on which an agent listens, and how they are closed behind its back.

TensorPipe takes what comes there apart before anything of it can be checked, and a few wrong bytes end the process. Its
agents connect once and never again; so when all are connected, nobody who may come needs these sockets any more.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import select
import socket
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

from rpc_ext import _C

__all__ = ["close", "host", "listening", "of_an_engine", "warn_unless_loopback", "watchers"]

_SELF = Path("/proc/self")
_warned = False


def host() -> str:
    """Return the address on which agents of this process listen."""
    return _C.listening_address().rpartition(":")[0].strip("[]")


def warn_unless_loopback() -> None:
    """Warn once that RPC without a secret listens on an address that other machines reach."""
    global _warned
    address = host()
    if _warned or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return
    _warned = True
    warnings.warn(
        f"RPC listens on {address} and has no secret: every process that reaches that address can run code in this "
        "one. Give init_rpc(secret=...), or set CUDAFUTURE_RPC_SECRET_FILE",
        RuntimeWarning,
        stacklevel=3,
    )


def listening() -> set[int]:
    """Return the sockets on which this process listens at that address, or for its own machine alone, by inode.

    None where the system does not say.
    """
    here = host()
    return {inode for fd, inode in _listening() if _is_at(fd, here)}


def watchers() -> set[int]:
    """Return the epoll instances of this process, by descriptor."""
    return {fd for fd in _descriptors() if _is_epoll(fd)}


def of_an_engine(inodes: set[int], others: set[int]) -> set[int]:
    """Return those of these sockets that can be an engine's which has begun since `others` were all that watched.

    Another thread may have opened some at the same time. An engine's never block, and only itself watches them.
    """
    found = {fd: inode for fd, inode in _listening() if inode in inodes}
    return {inode for fd, inode in found.items() if not os.get_blocking(fd) and others.isdisjoint(_watchers(fd))}


def close(inodes: set[int]) -> None:
    """Close these sockets for whoever would connect.

    Their descriptors stay: the engine closes them in the end, and would fail were they gone. Behind each of them comes
    something on which nothing ever happens.
    """
    nothing = os.eventfd(0)
    try:
        for fd, inode in list(_listening()):
            if inode in inodes:
                watchers = list(_watchers(fd))
                os.dup2(nothing, fd, inheritable=False)
                for watcher in watchers:  # who watched the socket will want to stop that
                    with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(watcher)) as epoll:
                        epoll.register(fd, 0)
    finally:
        os.close(nothing)


def _descriptors() -> Iterator[int]:
    if _SELF.is_dir():
        yield from [int(entry.name) for entry in (_SELF / "fd").iterdir()]


def _listening() -> Iterator[tuple[int, int]]:
    """Yield descriptors and inodes."""
    for fd in _descriptors():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode) and _accepts(fd):
                yield fd, status.st_ino


def _accepts(fd: int) -> bool:
    with _socket(fd) as this:
        return this.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def _is_at(fd: int, address: str) -> bool:
    with _socket(fd) as this:
        if this.family == socket.AF_UNIX:
            return True
        here: str = this.getsockname()[0]
        return here.partition("%")[0] == address.partition("%")[0]  # without an interface's name


@contextlib.contextmanager
def _socket(fd: int) -> Iterator[socket.socket]:
    this = socket.socket(fileno=fd)
    try:
        yield this
    finally:
        this.detach()


def _watchers(fd: int) -> Iterator[int]:
    """Yield the epoll instances that watch a descriptor."""
    for watcher in watchers():
        with contextlib.suppress(OSError):
            info = (_SELF / "fdinfo" / str(watcher)).read_text()
            if re.search(rf"^tfd:\s+{fd}\s", info, re.MULTILINE):
                yield watcher


def _is_epoll(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return str((_SELF / "fd" / str(fd)).readlink()) == "anon_inode:[eventpoll]"
    return False
