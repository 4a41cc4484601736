"""Tensors by name on the disk of another worker."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy as copy_of
from types import TracebackType
from typing import Any

import torch

from cudafuture import CUDAFuture, collect_all, copy, executors, gather, wait
from cudafuture.errors import InvalidStateError, NotFoundError, WorkerLostError
from cudafuture.storage import Entry
from rpc_ext import _offload_calls as calls
from rpc_ext._offload_calls import Answer
from rpc_ext._offload_tensors import bytes_of, delivered, header_of
from rpc_ext._offload_transport import Transport, ignore
from rpc_ext._offload_wire import (
    MOST_HEADERS,
    PIECE,
    Header,
    Wanted,
    expect_key,
    pack_wanted,
)
from rpc_ext._turns import Turns, begun
from rpc_ext.calls import Worker, rpc_async, rpc_sync
from rpc_ext.session import current

__all__ = ["RemoteOffloader"]

_THREAD = executors.callback_thread


class RemoteOffloader:
    """A store of tensors by name that another worker serves (``serve_offload``), with the interface of ``Offloader``.

    Tensors travel in pieces of 16 MiB, several at a time, and small ones together. What a client has under way is
    bounded by the window that the service gives it; the rest waits here, without a thread.

    Args:
        to: the worker, by name, rank or WorkerInfo. It may be this one.
        namespace: whose keys these are. Clients that give the same one share them, and they stay when a client goes. By
            default they are this client's own, and go with it.
        name: of the service, where the worker has several.
        timeout: seconds that each request has; by default ``rpc_timeout`` of ``init_rpc``. 0: no limit.

    Raises:
        InvalidStateError: RPC has not begun; the worker serves no such offload.
        BlockingIOError: the service has as many clients as it takes.
        WorkerLostError, TimeoutError, AuthenticationError: as for any call.
    """

    def __init__(
        self, to: Worker, *, namespace: str | None = None, name: str = "offload", timeout: float | None = None
    ) -> None:
        session = current()
        self._worker = session.destination(to).name
        self._name, self._timeout = name, timeout
        terms = rpc_sync(self._worker, calls.begin, (name, namespace, session.name), timeout=timeout)
        self._token, self._durable = terms.token, terms.durable
        self._transport = Transport(self._worker, name, terms, timeout)
        self._turns = Turns()
        self._pending: dict[CUDAFuture[Any], tuple[CUDAFuture[Any], bool]] = {}  # what it waits for; whether to change
        self._closed = False
        self._end = weakref.finalize(self, _end, self._worker, name, self._token)

    @property
    def worker(self) -> str:
        """The name of the worker whose disk it is."""
        return self._worker

    @property
    def durable(self) -> bool:
        """Whether what is written outlives the service."""
        return self._durable

    # ---- writing

    def write(self, key: str, tensor: torch.Tensor, *, priority: int = 0) -> CUDAFuture[int]:
        """Put a tensor under a key, in place of what was there; see ``Offloader.write``.

        The future fails with what the service's store says, or with WorkerLostError or TimeoutError: then it is not
        known whether the key was written. The tensor must not be changed before it is done.

        Raises:
            ValueError: no such key can be.
            TypeError: no tensor on the host or a device with streams, or of a dtype that cannot be sent.
            InvalidStateError: the offloader is closed.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.write("weight", torch.eye(3)).wait()
        36
        """
        expect_key(key)
        header = header_of(key, tensor)
        return self._begun(
            f"write {key}", priority, lambda: self._turns.take([key], lambda: self._write(header, tensor))
        )

    def writev(self, tensors: Mapping[str, torch.Tensor], *, priority: int = 0) -> CUDAFuture[int]:
        """Put many tensors under their keys; see ``Offloader.writev``. Each is written as ``write`` does.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.writev({"weight": torch.eye(3), "bias": torch.zeros(3)}).wait()
        48
        """
        headers = [header_of(key, tensor) for key, tensor in tensors.items()]
        for header in headers:
            expect_key(header.key)
        parts = [self.write(key, tensor, priority=priority) for key, tensor in tensors.items()]
        return gather(*parts).then(lambda done: sum(done.value()), executor=_THREAD)

    def _write(self, header: Header, tensor: torch.Tensor) -> CUDAFuture[int]:
        if tensor.is_cpu:
            return self._transport.write(header, bytes_of(tensor))
        return copy(tensor, "cpu").then_async(
            lambda done: self._transport.write(header, bytes_of(done.value())),
            executor=executors.default_executor(),
            non_blocking=False,
        )

    # ---- reading

    def read(
        self,
        key: str,
        out: torch.Tensor | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
    ) -> CUDAFuture[torch.Tensor]:
        """Get the tensor that was written under a key; see ``Offloader.read``.

        That `out` has not the dtype and shape of what was written is known when that comes: the future fails with
        ValueError then.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     _ = remote.write("weight", torch.arange(3)).wait()
        ...     remote.read("weight").wait()
        tensor([0, 1, 2])
        """
        expect_key(key)
        if out is not None and device is not None:
            raise ValueError("a tensor to be filled is where it is: give it, or a device")
        return self._begun(f"read {key}", priority, lambda: self._read(key, out, device), changes=False)

    def readv(
        self,
        keys: Iterable[str],
        outs: Sequence[torch.Tensor] | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
    ) -> CUDAFuture[list[torch.Tensor]]:
        """Get many tensors, in the order of the keys; see ``Offloader.readv``.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     _ = remote.writev({"a": torch.ones(2), "b": torch.zeros(1)}).wait()
        ...     remote.readv(["b", "a"]).wait()
        [tensor([0.]), tensor([1., 1.])]
        """
        names = list(keys)
        if outs is not None and len(outs) != len(names):
            raise ValueError(f"{len(names)} keys, and {len(outs)} tensors to be filled")
        into: Sequence[torch.Tensor | None] = [None] * len(names) if outs is None else outs
        parts = [self.read(key, out, device, priority=priority) for key, out in zip(names, into, strict=True)]
        return gather(*parts)

    def _read(
        self, key: str, out: torch.Tensor | None, device: torch.device | str | int | None, gone: bytes | None = None
    ) -> CUDAFuture[torch.Tensor]:
        expected = None if out is None else out.nbytes

        def first(done: CUDAFuture[tuple[Header, torch.Tensor]]) -> CUDAFuture[torch.Tensor]:
            header, data = done.value()
            if header.upload == gone:
                raise NotFoundError(f"key {key!r}: one of its pieces is not there")
            if out is not None and (out.dtype, tuple(out.shape)) != (header.dtype, header.shape):
                raise ValueError(
                    f"key {key!r} is a tensor of {header.dtype} {list(header.shape)}, and the one to be filled of "
                    f"{out.dtype} {list(out.shape)}"
                )
            if header.pieces == 1:
                return delivered(data.view(header.dtype).reshape(header.shape), out, device)
            return self._read_on(header, data, out, device)

        return self._transport.fetch(Wanted(key), expected).then_async(first, executor=_THREAD)

    def _read_on(
        self, header: Header, data: torch.Tensor, out: torch.Tensor | None, device: torch.device | str | int | None
    ) -> CUDAFuture[torch.Tensor]:
        """Fetch the other pieces; from the first one on again where the key was written again meanwhile."""
        fills = out is not None and out.is_cpu and out.is_contiguous()
        whole = out if fills and out is not None else torch.empty(header.shape, dtype=header.dtype)
        into = whole.detach().reshape(-1).view(torch.uint8)
        into[: header.length].copy_(data)

        def fill(done: CUDAFuture[tuple[Header, torch.Tensor]]) -> None:
            piece, data = done.value()
            into[piece.piece * PIECE : piece.piece * PIECE + piece.length].copy_(data)

        def ended(done: CUDAFuture[list[CUDAFuture[None]]]) -> CUDAFuture[torch.Tensor]:
            errors = [error for part in done.value() if (error := part.exception()) is not None]
            if any(isinstance(error, NotFoundError) for error in errors):
                return self._read(header.key, out, device, header.upload)
            if errors:
                raise errors[0]
            return CUDAFuture.completed(whole) if fills else delivered(whole, out, device)

        parts = [
            self._transport.fetch(Wanted(header.key, header.upload, i), min(PIECE, header.nbytes - i * PIECE)).then(
                fill, executor=_THREAD
            )
            for i in range(1, header.pieces)
        ]
        return collect_all(parts).then_async(ended, executor=_THREAD)

    # ---- the rest

    def delete(self, key: str) -> CUDAFuture[None]:
        """Forget a key; see ``Offloader.delete``.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     _ = remote.write("weight", torch.eye(3)).wait()
        ...     remote.delete("weight").wait()
        ...     "weight" in remote
        False
        """
        expect_key(key)
        return self._begun(f"delete {key}", 0, lambda: self._turns.take([key], lambda: self._delete([key])))

    def deletev(self, keys: Iterable[str]) -> CUDAFuture[None]:
        """Forget many keys; see ``Offloader.deletev``.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.deletev([]).wait()
        """
        names = list(keys)
        for key in names:
            expect_key(key)
        if not names:
            return CUDAFuture.completed(None)
        what = f"{len(names)} keys"
        return self._begun(f"delete {what}", 0, lambda: self._turns.take(names, lambda: self._delete(names)))

    def _delete(self, keys: list[str]) -> CUDAFuture[None]:
        parts = [
            self._transport.call(calls.delete, pack_wanted([Wanted(key) for key in keys[i : i + MOST_HEADERS]]))
            for i in range(0, len(keys), MOST_HEADERS)
        ]
        return gather(*(part.then(_expect_success, executor=_THREAD) for part in parts)).then(
            _nothing, executor=_THREAD
        )

    def keys(self) -> list[str]:
        """Return all keys of the namespace, in the order in which they were written last. Waits for the service.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.keys()
        []
        """
        return rpc_sync(self._worker, calls.keys, (self._name, self._token), timeout=self._timeout)

    def __contains__(self, key: str) -> bool:
        try:
            self.stat(key)
        except NotFoundError:
            return False
        return True

    def __len__(self) -> int:
        return len(self.keys())

    def stat(self, key: str) -> Entry:
        """Return what is known of a key. Asks the service, and waits.

        Raises:
            NotFoundError: there is no such key.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     _ = remote.write("weight", torch.eye(3)).wait()
        ...     remote.stat("weight")
        Entry(key='weight', dtype=torch.float32, shape=torch.Size([3, 3]), nbytes=36)
        """
        expect_key(key)
        dtype, shape, nbytes = rpc_sync(self._worker, calls.stat, (self._name, self._token, key), timeout=self._timeout)
        return Entry(key, dtype, torch.Size(shape), nbytes)

    def flush(self) -> CUDAFuture[None]:
        """Return a future that completes when all writes and deletions so far are done; see ``Offloader.flush``.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.flush().wait()
        """
        self._expect_open()
        pending = [done for done, changes in self._pending.copy().values() if changes]
        if not pending:
            return CUDAFuture.completed(None)
        return gather(*pending).then(_nothing, executor=_THREAD)

    def close(self) -> None:
        """Wait until what was asked for has ended, and let go of the service. Private keys are gone then.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.close()
        """
        if self._closed:
            return
        self._closed = True
        for future, (done, _) in self._pending.copy().items():
            wait([future, done])
        self._end()

    def __enter__(self) -> RemoteOffloader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RemoteOffloader {self._name!r} of worker {self._worker!r}>"

    # ---- how

    def _expect_open(self) -> None:
        if self._closed:
            raise InvalidStateError("the offloader is closed")

    def _begun(
        self, what: str, priority: int, begin: Callable[[], CUDAFuture[Any]], *, changes: bool = True
    ) -> CUDAFuture[Any]:
        """Begin something, and return the future of the user's."""
        self._expect_open()
        future: CUDAFuture[Any] = CUDAFuture(name=what, priority=priority, executor=_THREAD)
        done = begun(begin)
        self._pending[future] = done, changes

        def ended(done: CUDAFuture[Any]) -> None:
            error = done.exception()
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                if error is None:
                    future.set_result(done.value())
                else:
                    future.set_exception(_named(error, what, self._worker))
            self._pending.pop(future, None)

        done.add_done_callback(ended, executor=_THREAD)
        return future


def _expect_success(done: CUDAFuture[Answer]) -> None:
    done.value().expect_success()


def _nothing(done: CUDAFuture[Any]) -> None:
    done.value()


def _named(error: BaseException, what: str, worker: str) -> BaseException:
    """Return an error that says of which key and worker it is."""
    if isinstance(error, WorkerLostError):
        return WorkerLostError(f"{what}: {error}", worker=worker)
    if type(error) is TimeoutError:
        return TimeoutError(f"{what}: {error}")
    with contextlib.suppress(Exception):  # others may have failed with the same one; but some cannot be copied
        error = copy_of(error).with_traceback(error.__traceback__)
    noted: Any = error  # Python 3.10 has no add_note
    noted.__notes__ = [*getattr(error, "__notes__", ()), f"{what} on worker {worker!r}"]
    return error


def _end(worker: str, name: str, token: bytes) -> None:
    """Let go of a service; it notices by itself when this fails."""
    try:
        ignore(rpc_async(worker, calls.end, (name, token), non_blocking=True))
    except Exception:
        return
