"""Tensors of which pieces are coming: put together when all have come, given up as a whole when one does not."""

from __future__ import annotations

import collections
import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError
from rpc_ext import _minder
from rpc_ext._offload_order import Late, never
from rpc_ext._offload_space import Space
from rpc_ext._offload_thread import service_thread
from rpc_ext._offload_wire import Header

__all__ = ["Uploads"]


@dataclass(eq=False)
class _Upload:
    header: Header  # of any piece
    give_up: Callable[[], None]
    name: bytes  # of its pieces on the disk: nobody else can know it before it is there
    seen: set[int] = field(default_factory=set)  # pieces that have come
    written: int = 0
    is_over: bool = False

    def look(self, _: float) -> None:
        """Give it up: its time is over. Called by the minder."""
        self.give_up()


class Uploads:
    """Those of one client.

    Args:
        space: whose tensors they become.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._lock = threading.Lock()  # guards what follows; the space's is taken under it
        self._uploads: dict[bytes, _Upload] = {}
        self._over: collections.deque[bytes] = collections.deque(maxlen=4096)  # the last that were given up
        self._ended = False

    def put(self, header: Header, data: torch.Tensor, late: Late = never, left: float = math.inf) -> CUDAFuture[None]:
        """Write a piece. The future of the last one completes when the tensor is there.

        When `left` seconds are over, the upload is given up: the client cannot finish it any more, and its request to
        give it up may be lost.

        Raises:
            ValueError: it is no piece of what the others are of, or has come before.
            QuotaError: there is no room for the tensor.
            InvalidStateError: the client has gone.
        """
        upload = self._note(header, left)
        name, header = header.upload, header._replace(upload=upload.name)

        def written(done: CUDAFuture[int]) -> CUDAFuture[None]:
            error = done.exception()
            with self._lock:
                was_over = upload.is_over
                upload.written += 1
                is_whole = upload.written == header.pieces
                upload.is_over = was_over or error is not None or is_whole
                if upload.is_over:
                    self._uploads.pop(name, None)
                    _minder.forget(upload)
                    if not is_whole:
                        self._over.append(name)
            if was_over:
                self._space.drop_pieces(header, [header.piece])  # it came after the others went
                raise error or InvalidStateError(f"the write of key {header.key!r} was given up")
            if error is not None:
                self._drop(upload)
                raise error
            return self._space.put_together(header, late) if is_whole else CUDAFuture.completed(None)

        return self._space.write_piece(header, data).then_async(written, executor=service_thread)

    def _note(self, header: Header, left: float) -> _Upload:
        with self._lock:
            if self._ended:
                raise InvalidStateError("the session has ended")
            upload = self._uploads.get(header.upload)
            if upload is None:
                if header.upload in self._over:
                    raise InvalidStateError(f"the write of key {header.key!r} was given up")
                self._space.index.take(header.nbytes)
                give_up = partial(self.give_up, header.upload)
                upload = _Upload(header, give_up, secrets.token_bytes(len(header.upload)))
                try:
                    if left < math.inf:
                        _minder.mind(upload, time.perf_counter() + left)
                except RuntimeError:  # the system has no more threads
                    self._space.index.give_back(header.nbytes)
                    raise
                self._uploads[header.upload] = upload
            first = upload.header
            if (first.key, first.dtype, first.shape) != (header.key, header.dtype, header.shape):
                raise ValueError(f"key {header.key!r}: other pieces of that upload are of key {first.key!r}")
            if header.piece in upload.seen:
                raise ValueError(f"key {header.key!r}: piece {header.piece} has come twice")
            upload.seen.add(header.piece)
            return upload

    def give_up(self, name: bytes) -> None:
        """Give up one, if it is not over."""
        with self._lock:
            upload = self._uploads.pop(name, None)
            self._over.append(name)
            if upload is None or upload.is_over:
                return
            upload.is_over = True
            _minder.forget(upload)
        self._drop(upload)

    def end(self) -> None:
        """Give up all: the client is gone."""
        with self._lock:
            self._ended = True
            names = list(self._uploads)
        for name in names:
            self.give_up(name)

    def _drop(self, upload: _Upload) -> None:
        self._space.index.give_back(upload.header.nbytes)
        self._space.drop_pieces(upload.header._replace(upload=upload.name), sorted(upload.seen))
