"""What clients call on the worker that serves an offload, and the services that it has."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError
from rpc_ext._functions import async_execution
from rpc_ext._memory import Carried
from rpc_ext._offload_order import Stamp

__all__ = [
    "TOKEN",
    "Answer",
    "Found",
    "Service",
    "Terms",
    "begin",
    "close_all",
    "delete",
    "end",
    "find_keys",
    "get",
    "give_up",
    "keys",
    "lock",
    "put",
    "services",
    "stat",
    "trim",
]


class Terms(NamedTuple):
    """What a client gets when it begins."""

    window: int
    """bytes that it may have under way"""
    durable: bool


class Answer(NamedTuple):
    """What has come of the parts of a request, by their places in it."""

    failures: list[tuple[int, BaseException]]
    block: bytes = b""
    """of a get: the headers of what is in `data`"""
    data: Carried = b""
    left: Sequence[int] = ()
    """of a get: what there was no room for; to be asked for again"""

    def expect_success(self) -> None:
        """Raise the first failure, if there is one."""
        for _, error in self.failures:
            raise error


Found = tuple[torch.dtype, tuple[int, ...], int]
"""dtype, shape and bytes of a tensor"""


class Service(Protocol):
    """What an ``OffloadService`` does for its clients."""

    def begin(self, token: object, namespace: str | None, client: str, sent: object) -> Terms: ...
    def end(self, token: bytes) -> None: ...
    def put(
        self, token: object, stamp: object, block: object, data: object, expiries: object
    ) -> CUDAFuture[Answer]: ...
    def get(self, token: object, stamp: object, block: object) -> CUDAFuture[Answer]: ...
    def delete(self, token: object, stamp: object, block: object) -> CUDAFuture[Answer]: ...
    def give_up(self, token: object, upload: object) -> None: ...
    def keys(self, token: object) -> list[str]: ...
    def stat(self, token: object, key: object) -> Found: ...
    def find(self, token: object, block: object) -> list[Found | None]: ...
    def trim(self, token: object) -> int: ...
    def close(self) -> None: ...


TOKEN = 16
"""bytes of the token by which a client names its session"""

services: dict[str, Service] = {}
lock = threading.Lock()  # guards them; a leaf


def close_all() -> None:
    """Close all services: RPC of this process has ended."""
    with lock:
        ended = list(services.values())
        services.clear()
    for service in ended:
        service.close()


def find(service: object) -> Service:
    """Return the service of this process that has a name.

    Raises:
        InvalidStateError: there is none.
    """
    with lock:
        found = services.get(service) if isinstance(service, str) else None
    if found is None:
        raise InvalidStateError(f"this worker serves no offload called {service!r}")
    return found


def begin(service: str, token: bytes, namespace: str | None, client: str, sent: float) -> Terms:
    return find(service).begin(token, namespace, client, sent)


def end(service: str, token: bytes) -> None:
    find(service).end(token)


@async_execution
def put(
    service: str, token: bytes, stamp: Stamp, block: bytes, data: Carried, expiries: Sequence[float] = ()
) -> CUDAFuture[Answer]:
    return find(service).put(token, stamp, block, data, expiries)


@async_execution
def get(service: str, token: bytes, stamp: Stamp, block: bytes) -> CUDAFuture[Answer]:
    return find(service).get(token, stamp, block)


@async_execution
def delete(service: str, token: bytes, stamp: Stamp, block: bytes) -> CUDAFuture[Answer]:
    return find(service).delete(token, stamp, block)


def give_up(service: str, token: bytes, upload: bytes) -> None:
    find(service).give_up(token, upload)


def keys(service: str, token: bytes) -> list[str]:
    return find(service).keys(token)


def stat(service: str, token: bytes, key: str) -> Found:
    return find(service).stat(token, key)


def find_keys(service: str, token: bytes, block: bytes) -> list[Found | None]:
    return find(service).find(token, block)


def trim(service: str, token: bytes) -> int:
    return find(service).trim(token)
