"""The sockets on which an agent listens, which are closed without its knowing.

TensorPipe parses the bytes that arrive there before any seal can be checked, and a few wrong bytes end the process. Its
agents connect once and never again; so when all are connected, no worker needs these sockets any more.
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
    if _warned or ipaddress.ip_address(_without_interface(address)).is_loopback:
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

    None where the system does not list them.
    """
    here = _without_interface(host())
    return {inode for _, inode, address in _listening() if address in (None, here)}


def watchers() -> set[int]:
    """Return the epoll instances of this process, by descriptor."""
    found = set()
    for fd in _descriptors():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if str((_SELF / "fd" / str(fd)).readlink()) == "anon_inode:[eventpoll]":
                found.add(fd)
    return found


def of_an_engine(inodes: set[int], others: set[int]) -> set[int]:
    """Return those of these sockets that can be an engine's which has begun since `others` were all that watched.

    Another thread may have opened some at the same time. An engine's never block, and only itself watches them.
    """
    found = {fd: inode for fd, inode, _ in _listening() if inode in inodes}
    of_others = {fd for watcher, watched in _watched().items() if watcher in others for fd in watched}
    return {inode for fd, inode in found.items() if not os.get_blocking(fd) and fd not in of_others}


def close(inodes: set[int]) -> None:
    """Close these sockets for processes that would connect.

    The engine closes their descriptors in the end, and would fail if they were gone. So each becomes the descriptor of
    an object on which nothing ever happens.
    """
    nothing = os.eventfd(0)
    watched = _watched()
    try:
        for fd, inode, _ in list(_listening()):
            if inode in inodes:
                os.dup2(nothing, fd, inheritable=False)
                # An engine that watched the socket will want to stop that, which fails for what it does not watch.
                for watcher in (watcher for watcher, fds in watched.items() if fd in fds):
                    with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(watcher)) as epoll:
                        epoll.register(fd, 0)
    finally:
        os.close(nothing)


def _descriptors() -> list[int]:
    return [int(entry.name) for entry in (_SELF / "fd").iterdir()] if _SELF.is_dir() else []


def _listening() -> Iterator[tuple[int, int, str | None]]:
    """Yield descriptor, inode and address of each socket that listens; the address of a Unix socket is None."""
    for fd in _descriptors():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            this = socket.socket(fileno=fd)
            try:
                if not this.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                is_unix = this.family == socket.AF_UNIX
                address = None if is_unix else _without_interface(this.getsockname()[0])
            finally:
                this.detach()
            yield fd, status.st_ino, address


def _without_interface(address: str) -> str:
    return address.partition("%")[0]


def _watched() -> dict[int, set[int]]:
    """Return the descriptors that each epoll instance of this process watches."""
    found = {}
    for watcher in watchers():
        with contextlib.suppress(OSError):
            info = (_SELF / "fdinfo" / str(watcher)).read_text()
            found[watcher] = {int(fd) for fd in re.findall(r"^tfd:\s+(\d+)\s", info, re.MULTILINE)}
    return found
