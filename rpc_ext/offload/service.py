"""A folder of this worker that other workers write to and read from."""

from __future__ import annotations

import errno
import os
from types import TracebackType
from typing import Literal

from cudafuture.errors import StorageError
from cudafuture.storage import Engine, Offloader
from rpc_ext.offload import _calls
from rpc_ext.offload import _wire as wire
from rpc_ext.offload._handler import RequestHandler
from rpc_ext.offload._statistics import OffloadServiceStatistics

__all__ = ["OffloadService", "serve_offload"]


class OffloadService:
    """A folder that this worker serves. ``serve_offload`` makes it; as a context manager it is closed at the end."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    @property
    def name(self) -> str:
        """By which clients ask for it."""
        return self._handler.name

    @property
    def store(self) -> Offloader:
        """The store behind it. Its keys are the service's own: leave them alone."""
        return self._handler.store

    def statistics(self) -> OffloadServiceStatistics:
        """Return what there is, and what has been done so far.

        >>> with serve_offload("served") as service:
        ...     service.statistics().clients
        0
        """
        return self._handler.statistics()

    def close(self) -> None:
        """Serve no more, and close the store: what is not durable is gone. Requests that come from now on fail.

        >>> serve_offload("served").close()
        """
        _calls.remove_service(self._handler)
        self._handler.close()

    def __enter__(self) -> OffloadService:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<OffloadService {self.name!r} of {self.store!r}>"


def serve_offload(
    dir: str | os.PathLike[str],
    *,
    name: str = "offload",
    capacity: int | None = None,
    namespace_capacity: int | None = None,
    durable: bool = False,
    memory: int = 1 << 30,
    clients: int = 16,
    patience: float = 60.0,
    engine: Engine | None = None,
    direct: Literal["auto"] | bool = "auto",
) -> OffloadService:
    """Let other workers write to a folder of this one, and read from it, with a ``RemoteOffloader``.

    That goes on until the service is closed, or RPC of this process ends.

    Args:
        dir: the folder, as for ``Offloader``; `durable`, `capacity` (bytes), `engine` and `direct` are, too.
        name: by which clients ask for it, where a worker serves several folders.
        namespace_capacity: bytes that the tensors of each namespace may have; by default there is no limit.
        memory: bytes of requests that may be under way at a time. Every client gets an equal share of it as its window:
            so none is held up by another, and a disk that is slow slows the clients, not this worker's memory down.
        clients: how many there may be at a time.
        patience: seconds of silence after which a worker counts as lost that neither answers nor asks; default: 60. The
            sessions of its clients end: private keys are deleted, and a client with a namespace gets its session back
            with its next request. A worker whose connection breaks is lost at once.

    Raises:
        ValueError: a service of that name is there already; the share of a client is less than 32 MiB; or `patience` is
            not positive.
        StorageError: the folder cannot be used, or not be written.

    >>> import torch
    >>> from rpc_ext import RemoteOffloader
    >>> with serve_offload("served"), RemoteOffloader("me") as remote:
    ...     remote.write("weight", torch.eye(3)).wait()
    36
    """
    if clients < 1 or memory // clients < 2 * wire.PIECE:
        raise ValueError(f"memory={memory} for {clients} clients: each has to have {2 * wire.PIECE} bytes at least")
    if not patience > 0:
        raise ValueError(f"patience={patience!r}: it is a positive number of seconds")
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r}: a text is wanted")
    if len(name.encode()) > wire.LONGEST_NAME:
        raise ValueError(f"name={name!r}: more than {wire.LONGEST_NAME} bytes of UTF-8")
    if _calls.has_service(name):
        raise ValueError(f"this worker serves an offload called {name!r} already")
    store = Offloader(dir, engine=engine, direct=direct, durable=durable, capacity=capacity)
    if store.read_only:
        store.close()
        raise StorageError(f"the offload of {store.dir} cannot be served read-only", errno=errno.EROFS, path=store.dir)
    try:
        handler = RequestHandler(name, store, memory, clients, namespace_capacity, patience)
    except BaseException:
        store.close()
        raise
    if not _calls.add_service(handler):
        handler.close()
        raise ValueError(f"this worker serves an offload called {name!r} already")
    return OffloadService(handler)
