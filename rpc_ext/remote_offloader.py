"""Tensors by name on the disk of another worker."""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from cudafuture import CUDAFuture, collect_all, executors, gather
from cudafuture.errors import InvalidStateError
from cudafuture.storage.store import expect_one_for_each, expected_digests
from rpc_ext import _offload_calls as calls
from rpc_ext import _offload_ends as _ends
from rpc_ext._offload_calls import Answer
from rpc_ext._offload_errors import named
from rpc_ext._offload_keys import RemoteKeys
from rpc_ext._offload_operations import Operations
from rpc_ext._offload_pack import Deadline
from rpc_ext._offload_source import header_of, source_of
from rpc_ext._offload_statistics import RemoteOffloaderStatistics
from rpc_ext._offload_target import Target, filled, target_of
from rpc_ext._offload_transport import Transport
from rpc_ext._offload_wire import MOST_HEADERS, Wanted, expect_key, pack_wanted
from rpc_ext._turns import Turns, outcome
from rpc_ext.calls import Worker, rpc_sync
from rpc_ext.session import current

__all__ = ["RemoteOffloader", "RemoteOffloaderStatistics"]

T = TypeVar("T")


class RemoteOffloader(RemoteKeys):
    """A store of tensors by name that another worker serves (``serve_offload``), with the interface of ``Offloader``.

    Tensors travel in pieces of 16 MiB, several at a time, and small ones together. What a client has under way is
    bounded by the window that the service gives it; the rest waits here, without a thread.

    Args:
        to: the worker, by name, rank or WorkerInfo. It may be this one.
        namespace: whose keys these are. Clients that give the same one share them, and they stay when a client goes. By
            default they are this client's own, and go with it.
        name: of the service, where the worker has several.
        timeout: seconds that each operation has, the time included that it waits for its turn; by default
            ``rpc_timeout`` of ``init_rpc``. inf: no limit.

    Raises:
        InvalidStateError: RPC has not begun; the worker serves no such offload.
        BlockingIOError: the service has as many clients as it takes.
        WorkerLostError, TimeoutError, AuthenticationError: as for any call.
    """

    def __init__(
        self, to: Worker, *, namespace: str | None = None, name: str = "offload", timeout: float | None = None
    ) -> None:
        session = current()
        self._worker, self._begun = session.destination(to).name, weakref.ref(session)
        self._name, self._timeout = name, session.timeout(timeout)
        self._token = secrets.token_bytes(calls.TOKEN)
        _ends.begin()
        try:
            arguments = name, self._token, namespace, session.name, time.monotonic()
            terms = rpc_sync(self._worker, calls.begin, arguments, timeout=timeout)
        except BaseException:  # the service may have begun a session all the same
            _ends.note(self._begun, self._worker, name, self._token)
            raise
        self._durable = terms.durable
        self._transport = Transport(self._worker, name, self._token, terms)
        self._turns = Turns()
        self._operations = Operations()
        self._closed = False
        self._asked = set()
        self._end = weakref.finalize(self, _ends.note, self._begun, self._worker, name, self._token)
        self._end.atexit = False

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
        known whether the key was written. The tensor must not be changed before ``future.released`` is done: a device's
        has been copied to the host by then, a small one been put into a request, any other been written.

        Raises:
            ValueError: no such key can be; the tensor's device has no streams.
            TypeError: no tensor, one without memory, or of a dtype that cannot be sent.
            InvalidStateError: the offloader is closed.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.write("weight", torch.eye(3)).wait()
        36
        """
        return self.writev({key: tensor}, priority=priority)

    def writev(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        priority: int = 0,
        digests: Mapping[str, int] | None = None,
        written: torch.Tensor | None = None,
    ) -> CUDAFuture[int]:
        """Put many tensors under their keys; see ``Offloader.writev``. Each is written as ``write`` does it.

        The future is done when all have ended, and has the error of the first that failed, with its key. A digest is
        compared with the checksums under which the bytes are sent, and the service refuses bytes that do not have
        these: a tensor that is changed meanwhile is not written. It costs no other pass over the bytes. `written` is
        False also where it is not known whether a key was written.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.writev({"weight": torch.eye(3), "bias": torch.zeros(3)}).wait()
        48
        """
        expected = expected_digests(tensors, digests)
        expect_one_for_each(written, torch.bool, len(tensors), "outcomes")
        if not tensors:
            return CUDAFuture.completed(0)
        for key in tensors:
            expect_key(key)
        headers = [header_of(key, tensor) for key, tensor in tensors.items()]
        made = [source_of(tensor, priority) for tensor in tensors.values()]
        sources, parts = zip(*made, strict=True)
        released = parts[0] if len(parts) == 1 else collect_all(parts).then(_nothing, executor=executors.inline)
        if written is not None:
            with torch.inference_mode(written.is_inference()), torch.no_grad():
                written.fill_(False)

        def succeeded(i: int) -> None:
            if written is not None:
                with torch.inference_mode(written.is_inference()), torch.no_grad():
                    written[i] = True

        def send(deadline: Deadline) -> CUDAFuture[int]:
            return self._transport.writev(headers, sources, expected, deadline, succeeded)

        def write(deadline: Deadline) -> CUDAFuture[int]:
            done = self._turns.take(list(tensors), lambda: send(deadline))
            done.add_done_callback(lambda _: [source.release() for source in sources], executor=executors.inline)
            return done

        return self._begin("write", _told(list(tensors)), write, priority, released)

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
        target = target_of(out, device, priority)

        def read(deadline: Deadline) -> CUDAFuture[torch.Tensor]:
            return self._readv([key], [target], deadline).then(_only, executor=executors.inline)

        return self._begin("read", key, read, priority)

    def readv(
        self,
        keys: Iterable[str],
        outs: Sequence[torch.Tensor] | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
        digests: torch.Tensor | None = None,
    ) -> CUDAFuture[list[torch.Tensor]]:
        """Get many tensors, in the order of the keys; see ``Offloader.readv``.

        The future is done when all have ended, and has the error of the first that failed, with its key.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     _ = remote.writev({"a": torch.ones(2), "b": torch.zeros(1)}).wait()
        ...     remote.readv(["b", "a"]).wait()
        [tensor([0.]), tensor([1., 1.])]
        """
        names = list(keys)
        if outs is not None and len(outs) != len(names):
            raise ValueError(f"{len(names)} keys, and {len(outs)} tensors to be filled")
        for key in names:
            expect_key(key)
        targets = [target_of(out, device, priority) for out in ([None] * len(names) if outs is None else outs)]
        expect_one_for_each(digests, torch.uint64, len(names), "digests")
        for target in targets:
            target.wants_digest = digests is not None

        def told(done: CUDAFuture[list[torch.Tensor]]) -> list[torch.Tensor]:
            tensors = done.value()
            if digests is not None:
                filled(digests, torch.tensor([t.digest for t in targets], dtype=torch.uint64, device="cpu"))
            return tensors

        def read(deadline: Deadline) -> CUDAFuture[list[torch.Tensor]]:
            return self._readv(names, targets, deadline).then(told, executor=executors.inline)

        return self._begin("read", _told(names), read, priority)

    def _readv(
        self, keys: Sequence[str], targets: Sequence[Target], deadline: Deadline
    ) -> CUDAFuture[list[torch.Tensor]]:
        return self._turns.share(keys, lambda: self._transport.readv(keys, targets, deadline))

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
        return self._begin(
            "delete", key, lambda deadline: self._turns.take([key], lambda: self._delete([key], deadline))
        )

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
        return self._begin(
            "delete", _told(names), lambda deadline: self._turns.take(names, lambda: self._delete(names, deadline))
        )

    def _delete(self, keys: list[str], deadline: Deadline) -> CUDAFuture[None]:
        some = [keys[i : i + MOST_HEADERS] for i in range(0, len(keys), MOST_HEADERS)]
        parts = [self._delete_some(each, deadline) for each in some]
        return collect_all(parts).then(_first_failure, executor=executors.inline)

    def _delete_some(self, keys: list[str], deadline: Deadline) -> CUDAFuture[None]:
        def deleted(done: CUDAFuture[Answer]) -> None:
            if (error := done.exception()) is not None:
                raise named(error, f"delete {_told(keys)}", self._worker)
            for i, error in done.value().failures:
                raise named(error, f"delete {keys[i]}", self._worker)

        block = pack_wanted([Wanted(key) for key in keys])
        asked = self._transport.flow.send(0, lambda: self._transport.call(deadline, calls.delete, block))
        return asked.then(deleted, executor=executors.inline)

    def flush(self) -> CUDAFuture[None]:
        """Return a future that completes when all writes and deletions so far are done; see ``Offloader.flush``.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.flush().wait()
        """
        if self._closed:
            raise InvalidStateError("the offloader is closed")
        pending = self._operations.changes()
        if not pending:
            return CUDAFuture.completed(None)
        return gather(*pending).then(_first_of, executor=executors.inline)

    def close(self) -> None:
        """Wait until what was asked for has ended, and let go of the service, which forgets private keys then.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     remote.close()
        """
        if self._closed:
            return
        self._closed = True
        self._operations.wait()
        for future in list(self._asked):
            future.exception()
        if self._end.detach() is not None:
            _ends.end(self._begun, self._worker, self._name, self._token, self._timeout)

    def statistics(self) -> RemoteOffloaderStatistics:
        """Return what is under way, and what has been done so far.

        >>> from rpc_ext import serve_offload
        >>> with serve_offload("served"), RemoteOffloader("me") as remote:
        ...     _ = remote.write("weight", torch.eye(3)).wait()
        ...     remote.statistics().bytes_written
        36
        """
        return self._operations.statistics(self._transport.flow)

    def __enter__(self) -> RemoteOffloader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RemoteOffloader {self._name!r} of worker {self._worker!r}>"

    # ---- how

    def _begin(
        self,
        kind: Literal["write", "read", "delete"],
        what: str,
        begin: Callable[[Deadline], CUDAFuture[T]],
        priority: int = 0,
        released: CUDAFuture[None] | None = None,
    ) -> CUDAFuture[T]:
        """Begin something that has so much time from now on."""
        if self._closed:
            raise InvalidStateError("the offloader is closed")
        deadline = Deadline.after(self._timeout)
        future = self._operations.begin(kind, what, lambda: begin(deadline), priority, released)
        if future.done() and (error := outcome(future)[1]) is not None and not isinstance(error, Exception):
            raise error  # Ctrl-C
        return future


def _only(done: CUDAFuture[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]


def _nothing(done: CUDAFuture[Any]) -> None:
    done.value()


def _first_failure(done: CUDAFuture[list[CUDAFuture[Any]]]) -> None:
    for part in done.value():
        part.value()


def _first_of(done: CUDAFuture[list[BaseException | None]]) -> None:
    for error in done.value():
        if error is not None:
            raise error


def _told(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{len(keys)} keys"
