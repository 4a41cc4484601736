"""The sockets on which an agent listens. They are closed without notice to the agent.

TensorPipe parses received bytes before any seal can be checked, and a few wrong bytes end the process. Its agents
connect only once, so no worker needs these sockets when all agents are connected.
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
    """Return the address on which agents of this process listen.

    Raises:
        ValueError: TP_SOCKET_IFNAME names no network interface of this machine.
    """
    named = os.environ.get("TP_SOCKET_IFNAME")
    interfaces = [name for _, name in socket.if_nameindex()]
    if named and named not in interfaces:
        raise ValueError(
            f"TP_SOCKET_IFNAME={named!r}: this machine has no such network interface; it has {', '.join(interfaces)}"
        )
    return _C.listening_address().rpartition(":")[0].strip("[]")


def warn_unless_loopback() -> None:
    """Issue a warning, once, if RPC has no secret and listens on an address that other machines can reach."""
    global _warned
    address = host()
    if _warned or ipaddress.ip_address(_without_interface(address)).is_loopback:
        return
    _warned = True
    warnings.warn(
        f"RPC listens on {address} and has no secret: every process that reaches that address can run code in this "
        "one. Pass init_rpc(secret=...), or set CUDAFUTURE_RPC_SECRET_FILE",
        RuntimeWarning,
        stacklevel=3,
    )


def listening() -> set[int]:
    """Return the inodes of the sockets on which this process listens at ``host()``, or as Unix sockets.

    The set is empty if the system does not list them.
    """
    here = _without_interface(host())
    return {inode for _, inode, address in _listening() if address in (None, here)}


def watchers() -> set[int]:
    """Return the descriptors of the epoll instances of this process."""
    found = set()
    for fd in _descriptors():
        with contextlib.suppress(OSError):  # it has just been closed
            if str((_SELF / "fd" / str(fd)).readlink()) == "anon_inode:[eventpoll]":
                found.add(fd)
    return found


def of_an_engine(inodes: set[int], others: set[int]) -> set[int]:
    """Return the sockets among `inodes` that can belong to an engine that began after the epoll instances `others`.

    Another thread may have opened sockets at the same time. An engine's sockets never block, and only the engine
    watches them.
    """
    found = {fd: inode for fd, inode, _ in _listening() if inode in inodes}
    of_others = {fd for watcher, watched in _watched().items() if watcher in others for fd in watched}
    return {inode for fd, inode in found.items() if not os.get_blocking(fd) and fd not in of_others}


def close(inodes: set[int]) -> None:
    """Close sockets, so that no process can connect.

    The engine closes their descriptors at its end, and would fail without them. So each descriptor becomes that of an
    object without events.
    """
    nothing = os.eventfd(0)
    watched = _watched()
    try:
        for fd, inode, _ in list(_listening()):
            if inode in inodes:
                os.dup2(nothing, fd, inheritable=False)
                # The engine will unregister the descriptor, which fails unless it is registered.
                for watcher in (watcher for watcher, fds in watched.items() if fd in fds):
                    with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(watcher)) as epoll:
                        epoll.register(fd, 0)
    finally:
        os.close(nothing)


def _descriptors() -> list[int]:
    return [int(entry.name) for entry in (_SELF / "fd").iterdir()] if _SELF.is_dir() else []


def _listening() -> Iterator[tuple[int, int, str | None]]:
    """Yield descriptor, inode and address of each listening socket; the address of a Unix socket is None."""
    for fd in _descriptors():
        with contextlib.suppress(OSError):  # it has just been closed
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
