"""Writes and deletions of an offload service, from their arrival to the answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from cudafuture.errors import ChecksumError
from rpc_ext.offload._errors import for_client
from rpc_ext.offload._wire import Operation, Put, Request, data_of, pack_answer

if TYPE_CHECKING:
    from rpc_ext._channel import Reply
    from rpc_ext.offload._handler import RequestHandler
    from rpc_ext.offload._session import ClientSession

__all__ = ["Deleting", "Writing", "write_part"]


class _Changing:
    """A request that changes keys: each when its turn has come."""

    def __init__(self, handler: RequestHandler, session: ClientSession, request: Request, reply: Reply) -> None:
        self._handler, self._session, self._data, self._reply = handler, session, request.data, reply
        self._entries: Sequence[Put | Operation] = request.entries  # type: ignore[assignment]
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._errors: list[tuple[int, BaseException]] = []
        self._left = len(self._entries)

    def begin(self) -> None:
        """Take the entries whose turn is now; the others come later."""
        self._room = self._handler.count_in(self._session, self._data.numel())
        self._enter(self._session.order.arrive(self._entries, self._enter))

    def _enter(self, indices: list[int]) -> None:
        order, queues = self._session.order, self._session.namespace.queues
        good = []
        for i in indices:
            if (superseded := order.note_change(self._entries[i])) is None:
                good.append(i)
            else:
                self._end([(i, superseded)])
        turns = queues.enter(self._entries, good, True, self._take_turn)
        order.pass_on([self._entries[i] for i in indices])
        if turns:
            self._take_turn(turns)

    def _take_turn(self, indices: list[int]) -> None:
        """Change the keys that have their turn, unless they are late."""
        late = self._session.order.late([self._entries[i] for i in indices])
        if late:
            self._leave([(indices[at], error) for at, error in late.items()])
            indices = [i for at, i in enumerate(indices) if at not in late]
        if not indices:
            return
        try:
            self._change(indices)
        except Exception as e:  # nothing was handed to the store
            self._leave([(i, e.with_traceback(None)) for i in indices])

    def _change(self, indices: list[int]) -> None:
        raise NotImplementedError

    def _leave(self, ended: list[tuple[int, BaseException | None]]) -> None:
        """End entries that had their turn: the next operations on their keys have it now."""
        try:
            self._end(ended)
        finally:
            self._session.namespace.queues.leave([self._entries[i].key for i, _ in ended])

    def _end(self, ended: list[tuple[int, BaseException | None]]) -> None:
        """End entries, each with its error. With the last one the answer is sent."""
        with self._lock:
            self._errors += [(i, error) for i, error in ended if error is not None]
            self._left -= len(ended)
            is_last = not self._left
        if is_last:
            self._handler.count_out(self._session, self._room)
            self._reply.send(*pack_answer(len(self._entries), self._errors, [], None))


class Writing(_Changing):
    """One PUT of whole tensors."""

    _entries: Sequence[Put]

    def _change(self, indices: list[int]) -> None:
        namespace = self._session.namespace
        tensors = {i: _tensor_of(self._data, self._entries[i]) for i in indices}
        taken = []
        for i in indices:
            try:
                namespace.take(self._entries[i].nbytes)
                taken.append(i)
            except Exception as e:
                self._leave([(i, e.with_traceback(None))])
        if not taken:
            return
        entries = [self._entries[i] for i in taken]
        namespace.write(entries, [tensors[i] for i in taken], partial(self._written, taken))

    def _written(self, indices: list[int], errors: list[BaseException | None]) -> None:
        good = [i for i, error in zip(indices, errors, strict=True) if error is None]
        self._handler.count(written=sum(self._entries[i].nbytes for i in good))
        self._leave(
            [
                (i, None if error is None else refusal(self._handler, self._entries[i], error))
                for i, error in zip(indices, errors, strict=True)
            ]
        )


def _tensor_of(data: torch.Tensor, entry: Put) -> torch.Tensor:
    return data_of(data, entry).view(entry.dtype).reshape(entry.shape)


class Deleting(_Changing):
    """One DELETE."""

    def _change(self, indices: list[int]) -> None:
        for i in indices:
            key = self._entries[i].key
            self._session.namespace.delete(key, partial(self._deleted, i, key))

    def _deleted(self, i: int, key: str, error: BaseException | None) -> None:
        self._leave([(i, None if error is None else for_client(key, error))])


def write_part(handler: RequestHandler, session: ClientSession, request: Request, reply: Reply) -> None:
    """Answer a PUT of one part of a tensor."""
    entry, data = request.entries[0], request.data
    assert isinstance(entry, Put)
    room = handler.count_in(session, data.numel())

    def end(error: BaseException | None) -> None:
        handler.count_out(session, room)
        errors = []
        if error is None:
            handler.count(written=entry.length)
        else:
            errors.append((0, refusal(handler, entry, error)))
        reply.send(*pack_answer(1, errors, [], None))

    try:
        session.uploads.put(entry, data, end)
    except BaseException as e:
        e.__traceback__ = e.__context__ = None  # the uploads keep it, and its frames have the data
        if isinstance(e, ValueError):
            handler.count(refused=1)
        handler.count_out(session, room)
        reply.send(*pack_answer(1, [(0, for_client(entry.key, e, entry.nbytes))], [], None))


def refusal(handler: RequestHandler, entry: Put, error: BaseException) -> BaseException:
    """Return the error of a failed write for the client."""
    if isinstance(error, ChecksumError):
        handler.count(refused=1)
        return ChecksumError(f"key {entry.key!r}: the {entry.length} bytes that have come are not those that were sent")
    return for_client(entry.key, error, entry.nbytes)
