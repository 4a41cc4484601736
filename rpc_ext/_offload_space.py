"""A namespace of an offload service: which keys of the store are its own, their turns, and its quota.

::

    k<namespace>/<key>             a tensor
    l<namespace>/<hash of key>     the header of one that is in pieces, or whose key is long
    p<namespace>/<upload>/<piece>  a piece

`<namespace>` is a hash of fixed length: no key of one namespace can look like another's. A header is written when all
of its pieces are there, and replaces the one before at once; the pieces of that go afterwards. So readers see the old
tensor or the new one, also after a crash.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence

import torch

from cudafuture import CUDAFuture, collect_all, gather
from cudafuture.errors import InvalidStateError, NotFoundError, StorageError
from cudafuture.storage import Offloader
from rpc_ext._offload_index import Index
from rpc_ext._offload_order import Late, never
from rpc_ext._offload_thread import service_thread
from rpc_ext._offload_wire import LONGEST_KEY, PIECE, WHOLE, Header, Wanted, listed_header, pack, piece_of, view_of
from rpc_ext._turns import Turns, begun

__all__ = ["Space", "by_prefix", "prefix_of"]

_LONGEST_PLAIN_KEY = 1000  # bytes of UTF-8: with what comes before it, it is a key of the store
_HASH = 16  # characters
_NAME = re.compile(rf"[klp][0-9a-f]{{{_HASH}}}[/~]")


def prefix_of(namespace: str, is_private: bool) -> str:
    """Return what the store's names of a namespace begin with, after their kind."""
    hashed = hashlib.blake2b(namespace.encode(), digest_size=_HASH // 2).hexdigest()
    return hashed + ("~" if is_private else "/")


def by_prefix(names: Iterable[str]) -> dict[str, list[str]]:
    """Sort the names in a store by their namespaces; each keeps the order.

    Raises:
        StorageError: some are no names of a service's.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        if not _NAME.match(name):
            raise StorageError(f"the folder is a store with keys of somebody else's, such as {name!r}: use another one")
        found.setdefault(name[1 : _HASH + 2], []).append(name)
    return found


class Space:
    """One namespace of a store.

    Args:
        store: of the service.
        prefix: see ``prefix_of``.
        capacity: bytes that its tensors may have, those included that are being written; None: no limit of its own.
        names: what the store has of it, from before, in the order in which it was written.
    """

    def __init__(self, store: Offloader, prefix: str, capacity: int | None, names: Sequence[str] = ()) -> None:
        self.prefix = prefix
        self.index = Index(capacity)
        self._store = store
        self._turns = Turns()
        self._left_over: collections.deque[str] = collections.deque()  # names that the disk failed to remove
        self._recover(names)

    def _recover(self, names: Sequence[str]) -> None:
        """Learn what is there, and remove what no tensor has: of several under a key the last one counts."""
        if self.is_private:
            self._remove(list(names))
            return
        lists = [name for name in names if name[0] == "l"]
        records = self._store.readv(lists).wait()
        headers = {name: listed_header(name, record) for name, record in zip(lists, records, strict=True)}
        there: dict[str, str] = {}  # the name that each key has
        for name in names:
            if name[0] in "kl":
                there[headers[name].key if name[0] == "l" else name[_HASH + 2 :]] = name
        wanted = {*there.values()}
        order = {name: i for i, name in enumerate(names)}
        for key in sorted(there, key=lambda key: order[there[key]]):
            header = headers.get(there[key])
            self.index.add(key, header)
            if header is not None:
                wanted.update(self._piece_name(header.upload, piece) for piece in range(header.pieces))
        self._remove([name for name in names if name not in wanted])
        self.index.restore([self.stat(key).nbytes for key in there])

    @property
    def is_private(self) -> bool:
        """Whether it is of one client, and goes with it."""
        return self.prefix.endswith("~")

    # ---- names

    def keys(self) -> list[str]:
        """Return the keys, in the order in which they were written last."""
        return self.index.keys()

    def stat(self, key: str) -> Header:
        """Return what is known of a key.

        Raises:
            NotFoundError: there is no such key.
        """
        header = self.index.header(key)
        if header is not None:
            return header
        try:
            entry = self._store.stat(self._plain_name(key))
        except (NotFoundError, ValueError):  # a ValueError: its name would be too long
            header = self.index.header(key)  # perhaps a tensor in pieces has just replaced it
            if header is None:
                raise NotFoundError(f"there is no key {key!r}") from None
            return header
        return Header(key, entry.dtype, tuple(entry.shape), entry.nbytes, length=min(PIECE, entry.nbytes))

    def _plain_name(self, key: str) -> str:
        return f"k{self.prefix}{key}"

    def _listed_name(self, key: str) -> str:
        return f"l{self.prefix}{hashlib.blake2b(key.encode(), digest_size=20).hexdigest()}"

    def _piece_name(self, upload: bytes, piece: int) -> str:
        return f"p{self.prefix}{upload.hex()}/{piece}"

    def _find(self, key: str) -> Header | None:
        try:
            return self.stat(key)
        except NotFoundError:
            return None

    # ---- writing

    def write(
        self, headers: Sequence[Header], data: torch.Tensor, late: Late = never
    ) -> CUDAFuture[list[BaseException | None]]:
        """Write tensors of one piece each, of different keys, whose bytes are where their headers say.

        Gives what each has failed with; then its key is as it was. The quota has been taken for all of them. `late` is
        asked about each key when its turn has come.
        """
        long = [i for i, h in enumerate(headers) if len(h.key.encode()) > _LONGEST_PLAIN_KEY]
        if not long:
            tensors = [view_of(data, h) for h in headers]
            return self._turns.take([h.key for h in headers], lambda: self._write(headers, tensors, late))
        parts = [
            self._write_long(h, data, late) if i in long else self.write([h], data, late) for i, h in enumerate(headers)
        ]
        return gather(*parts).then(
            lambda done: [failure for part in done.value() for failure in part], executor=service_thread
        )

    def _write_long(self, header: Header, data: torch.Tensor, late: Late) -> CUDAFuture[list[BaseException | None]]:
        """Write a tensor whose key is too long for a name: as one in pieces, of which there is one."""
        header = header._replace(upload=secrets.token_bytes(len(WHOLE)))

        def put_together(done: CUDAFuture[int]) -> CUDAFuture[None]:
            if (error := done.exception()) is not None:
                self._settle(header, None, error)
                raise error
            return self.put_together(header, late)

        together = self.write_piece(header, data).then_async(put_together, executor=service_thread)
        return together.then(lambda done: [done.exception()], executor=service_thread)

    def _write(
        self, headers: Sequence[Header], tensors: list[torch.Tensor], late: Late
    ) -> CUDAFuture[list[BaseException | None]]:
        errors: list[BaseException | None] = [late(header.key) for header in headers]
        if not any(errors):
            return self._write_now(headers, tensors)
        left = [i for i, error in enumerate(errors) if error is None]
        for header, error in zip(headers, errors, strict=True):
            if error is not None:
                self._settle(header, None, error)

        def joined(done: CUDAFuture[list[BaseException | None]]) -> list[BaseException | None]:
            for i, error in zip(left, done.value(), strict=True):
                errors[i] = error
            return errors

        if not left:
            return CUDAFuture.completed(errors)
        written = self._write_now([headers[i] for i in left], [tensors[i] for i in left])
        return written.then(joined, executor=service_thread)

    def _write_now(
        self, headers: Sequence[Header], tensors: list[torch.Tensor]
    ) -> CUDAFuture[list[BaseException | None]]:
        replaced = [self._find(h.key) for h in headers]
        names = [self._plain_name(h.key) for h in headers]

        def whose_fault(done: CUDAFuture[int]) -> CUDAFuture[list[BaseException | None]]:
            error = done.exception()
            if error is None or len(headers) == 1:
                return CUDAFuture.completed([error] * len(headers))
            # Those that were not written are written once more, each alone: of the others none can fail any more.
            left = [i for i, was_written in enumerate(written.tolist()) if not was_written]
            parts = [self._write_alone(names[i], tensors[i], headers[i]) for i in left]

            def all_ended(done: CUDAFuture[list[CUDAFuture[int]]]) -> list[BaseException | None]:
                errors = {i: part.exception() for i, part in zip(left, done.value(), strict=True)}
                return [errors.get(i) for i in range(len(headers))]

            return collect_all(parts).then(all_ended, executor=service_thread)

        def settle(done: CUDAFuture[list[BaseException | None]]) -> list[BaseException | None]:
            for header, old, failure in zip(headers, replaced, done.value(), strict=True):
                self._settle(header, old, failure)
            return done.value()

        digests = {name: h.checksum for name, h in zip(names, headers, strict=True) if h.checksum}
        written = torch.zeros(len(headers), dtype=torch.bool, device="cpu")
        tensors_of = dict(zip(names, tensors, strict=True))
        together = begun(self._store.writev, tensors_of, digests=digests, written=written)
        return together.then_async(whose_fault, executor=service_thread).then(settle, executor=service_thread)

    def write_piece(self, header: Header, data: torch.Tensor) -> CUDAFuture[int]:
        """Write a piece. Nobody sees it before ``put_together``."""
        return self._write_alone(self._piece_name(header.upload, header.piece), piece_of(data, header), header)

    def _write_alone(self, name: str, tensor: torch.Tensor, header: Header) -> CUDAFuture[int]:
        digests = {name: header.checksum} if header.checksum else None
        return begun(self._store.writev, {name: tensor}, digests=digests)

    def put_together(self, header: Header, late: Late = never) -> CUDAFuture[None]:
        """Put a tensor whose pieces are there under its key. The quota has been taken for it."""
        return self._turns.take([header.key], lambda: self._put_together(header, late))

    def _put_together(self, header: Header, late: Late) -> CUDAFuture[None]:
        if (error := late(header.key)) is not None:
            self._settle(header, None, error)
            return CUDAFuture.failed(error)
        replaced = self._find(header.key)
        name = self._listed_name(header.key)
        listed = header._replace(piece=0, at=0, length=min(PIECE, header.nbytes), checksum=0)

        def settle(done: CUDAFuture[int]) -> None:
            error = done.exception()
            self._settle(listed, replaced, error)
            if error is not None:
                raise error

        record = torch.frombuffer(bytearray(pack([listed])), dtype=torch.uint8)
        return begun(self._store.write, name, record).then(settle, executor=service_thread)

    def _settle(self, header: Header, old: Header | None, failure: BaseException | None) -> None:
        """Do what is left to be done when a key was written, or was not."""
        is_plain = header.upload == WHOLE
        is_there = failure is None and self.index.add(header.key, None if is_plain else header)
        if failure is None and not is_there:  # the namespace has gone meanwhile
            self._remove([self._plain_name(header.key) if is_plain else self._listed_name(header.key)])
        if not is_there:
            self.index.give_back(header.nbytes)
            if not is_plain:
                self.drop_pieces(header)
        elif old is not None:
            self.index.give_back(old.nbytes)
            was_plain = old.upload == WHOLE
            if was_plain != is_plain:
                self._remove([self._plain_name(old.key) if was_plain else self._listed_name(old.key)])
            if not was_plain:
                self.drop_pieces(old)

    def drop_pieces(self, header: Header, pieces: Iterable[int] | None = None) -> CUDAFuture[None]:
        """Remove pieces of a tensor, by default all, as far as they are there. It does not fail."""
        numbers = range(header.pieces) if pieces is None else pieces
        return self._remove([self._piece_name(header.upload, piece) for piece in numbers])

    def _remove(self, names: list[str]) -> CUDAFuture[None]:
        """Remove what nobody looks for. Where the disk refuses, ``clear`` does, or the next to open the store."""
        if not names:
            return CUDAFuture.completed(None)

        def removed(done: CUDAFuture[None]) -> None:
            if done.exception() is not None:
                with contextlib.suppress(InvalidStateError):  # the store was closed
                    self._left_over.extend(name for name in names if name in self._store)

        return self._store.deletev(names).then(removed, executor=service_thread)

    def clear(self) -> None:
        """Forget all keys for good, those included that are being written."""
        names = []
        for key, header in self.index.clear().items():
            if header is None:
                names.append(self._plain_name(key))
            else:
                names.append(self._listed_name(key))
                self.drop_pieces(header)
        while self._left_over:
            names.append(self._left_over.popleft())
        self._remove(names)

    def delete(self, key: str, late: Late = never) -> CUDAFuture[None]:
        """Delete a key. The future fails with NotFoundError where there is none."""
        return self._turns.take([key], lambda: self._delete(key, late))

    def _delete(self, key: str, late: Late) -> CUDAFuture[None]:
        if (error := late(key)) is not None:
            return CUDAFuture.failed(error)
        try:
            header = self.stat(key)
        except NotFoundError as e:
            return CUDAFuture.failed(e)
        is_listed = header.upload != WHOLE
        name = self._listed_name(key) if is_listed else self._plain_name(key)
        names = [*self._other_names(key, name), name]

        def settle(done: CUDAFuture[None]) -> CUDAFuture[None]:
            if isinstance(done.exception(), NotFoundError):
                raise NotFoundError(f"there is no key {key!r}")
            done.value()
            self.index.remove(key)
            self.index.give_back(header.nbytes)
            return self.drop_pieces(header) if is_listed else CUDAFuture.completed(None)  # its room is free then

        return begun(self._store.deletev, names).then_async(settle, executor=service_thread)

    def _other_names(self, key: str, name: str) -> list[str]:
        """Return what else there is of a key: what it had before, and the disk would not remove."""
        others = [self._plain_name(key), self._listed_name(key)]
        return [
            other for other in others if other != name and len(other.encode()) <= LONGEST_KEY and other in self._store
        ]

    # ---- reading

    def place_of(self, wanted: Wanted) -> tuple[str, Header]:
        """Return where a piece is, and what it looks like.

        Raises:
            NotFoundError: there is no such key; or what it had in that upload is gone.
            ValueError: it has no such piece.
        """
        header = self.stat(wanted.key)
        if wanted.upload not in (WHOLE, header.upload):
            raise NotFoundError(f"key {wanted.key!r} was written again while it was read")
        if wanted.piece >= header.pieces:
            raise ValueError(f"key {wanted.key!r} has {header.pieces} pieces, and none of number {wanted.piece}")
        if wanted.piece:
            header = header._replace(piece=wanted.piece, length=min(PIECE, header.nbytes - wanted.piece * PIECE))
        if header.upload == WHOLE:
            return self._plain_name(header.key), header
        return self._piece_name(header.upload, header.piece), header

    def has_changed(self, wanted: Wanted, name: str, header: Header) -> bool:
        """Say whether a piece is somewhere else by now than where it was, or another one, or gone."""
        try:
            name_now, now = self.place_of(wanted)
        except (NotFoundError, ValueError):
            return True
        return (name_now, now.dtype, now.shape) != (name, header.dtype, header.shape)
