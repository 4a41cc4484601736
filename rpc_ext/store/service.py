"""The store service: a folder of this worker that other workers write to and read from."""

from __future__ import annotations

import errno
import os
from types import TracebackType
from typing import Literal

from cudafuture import openmetrics
from cudafuture.errors import StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from rpc_ext._options import limit
from rpc_ext.store import _calls
from rpc_ext.store import _wire as wire
from rpc_ext.store._handler import RequestHandler
from rpc_ext.store._statistics import StoreServiceStatistics

__all__ = ["StoreService", "serve_store"]


class StoreService:
    """A folder that this worker serves, made by ``serve_store``; a context manager that closes it at the end."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        openmetrics.add(self, "store_service", service=self.name)

    @property
    def name(self) -> str:
        """The name that clients pass to ``RemoteStore``."""
        return self._handler.name

    @property
    def store(self) -> DiskStore:
        """The store of the service. Its keys belong to the service: do not change them."""
        return self._handler.store

    def statistics(self) -> StoreServiceStatistics:
        """Return the statistics of this service.

        >>> with serve_store("served") as service:
        ...     service.statistics().clients
        0
        """
        return self._handler.statistics()

    def close(self) -> None:
        """Close the service and its store, which deletes its keys unless it is durable. Later requests fail.

        >>> serve_store("served").close()
        """
        _calls.remove_service(self._handler)
        self._handler.close()

    def __enter__(self) -> StoreService:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StoreService {self.name!r} of {self.store!r}>"


def serve_store(
    dir: str | os.PathLike[str],
    *,
    name: str = "store",
    capacity: int | None = None,
    namespace_capacity: int | None = None,
    durable: bool = False,
    memory: int = 1 << 30,
    clients: int = 16,
    patience: float = 60.0,
    engine: Engine | None = None,
    direct: Literal["auto"] | bool = "auto",
) -> StoreService:
    """Let other workers write to and read from a folder of this worker with ``RemoteStore``.

    The service ends when it is closed, or when RPC of this process ends.

    Args:
        dir, durable, capacity, engine, direct: as for ``DiskStore``.
        name: name of the service on this worker.
        namespace_capacity: most bytes of tensors in each namespace; default: no limit.
        memory: most bytes of requests in flight; default: 1 GiB. Each client has an equal share as its window. So no
            client blocks another, and a slow disk slows the clients down but does not fill this worker's memory.
        clients: most clients at a time; default: 16.
        patience: seconds after which a worker that sends neither replies nor requests is lost; default: 60. The
            sessions of its clients end and their private keys are deleted; a client with a namespace resumes its
            session with its next request. A worker whose connection breaks is lost at once.

    Raises:
        ValueError: a service has that name, the share of a client is less than 32 MiB, or `patience` is not positive.
        StorageError: the folder cannot be used, or cannot be written.

    >>> import torch
    >>> from rpc_ext import RemoteStore
    >>> with serve_store("served"), RemoteStore("me") as remote:
    ...     remote.write("weight", torch.eye(3)).wait()
    36
    """
    given = {"memory": memory, "clients": clients}
    if namespace_capacity is not None:
        given["namespace_capacity"] = namespace_capacity
    for what, value in given.items():
        if not isinstance(value, int):
            raise TypeError(f"{what} is an int, not {value!r}")
    if namespace_capacity is not None and namespace_capacity < 1:
        raise ValueError(f"namespace_capacity={namespace_capacity} is less than 1; pass None for no limit")
    if clients < 1 or memory // clients < 2 * wire.PART:
        raise ValueError(f"memory={memory} for {clients} clients: each needs at least {2 * wire.PART} bytes")
    limit(patience, "patience")
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r}: pass a str that is not empty")
    if len(name.encode()) > wire.LONGEST_NAME:
        raise ValueError(f"name={name!r}: pass at most {wire.LONGEST_NAME} bytes of UTF-8")
    if _calls.has_service(name):
        raise ValueError(f"this worker serves a store called {name!r} already")
    store = DiskStore(dir, engine=engine, direct=direct, durable=durable, capacity=capacity)
    if store.read_only:
        store.close()
        raise StorageError(f"the store in {store.dir} cannot be served read-only", errno=errno.EROFS, path=store.dir)
    try:
        handler = RequestHandler(name, store, memory, clients, namespace_capacity, patience)
    except BaseException:
        store.close()
        raise
    if not _calls.add_service(handler):
        handler.close()
        raise ValueError(f"this worker serves a store called {name!r} already")
    return StoreService(handler)
