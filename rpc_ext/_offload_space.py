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

import hashlib
import re
import secrets
import threading
from collections.abc import Iterable, Sequence

import torch

from cudafuture import CUDAFuture, collect_all, gather
from cudafuture.errors import NotFoundError, QuotaError, StorageError
from cudafuture.storage import Offloader
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
        self.capacity = capacity
        self._store = store
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._used = 0
        self._listed: dict[str, Header] = {}  # what each l says, by key
        self._turns = Turns()
        self._is_gone = False
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
        self._listed = {header.key: header for name, header in headers.items() if there[header.key] == name}
        wanted = {*there.values()}
        for header in self._listed.values():
            wanted.update(self._piece_name(header.upload, piece) for piece in range(header.pieces))
        self._remove([name for name in names if name not in wanted])
        self._used = sum(self.stat(key).nbytes for key in there)

    @property
    def is_private(self) -> bool:
        """Whether it is of one client, and goes with it."""
        return self.prefix.endswith("~")

    @property
    def used(self) -> int:
        """Bytes of its tensors, those included that are being written."""
        return self._used

    # ---- names

    def keys(self) -> list[str]:
        """Return the keys, in the order in which they were written last."""
        plain = "k" + self.prefix
        before = list(self._listed)
        names = self._store.keys()
        # Before and after: what was replaced meanwhile had a list in the one, or has one in the other.
        listed = {self._listed_name(key): key for key in {*before, *list(self._listed)}}
        keys: dict[str, None] = {}
        for name in names:
            key = name[len(plain) :] if name.startswith(plain) else listed.get(name)
            if key is not None:
                keys.pop(key, None)  # for a moment it can have two names
                keys[key] = None
        return list(keys)

    def stat(self, key: str) -> Header:
        """Return what is known of a key.

        Raises:
            NotFoundError: there is no such key.
        """
        header = self._listed.get(key)
        if header is not None:
            return header
        try:
            entry = self._store.stat(self._plain_name(key))
        except (NotFoundError, ValueError):  # a ValueError: its name would be too long
            raise NotFoundError(f"there is no key {key!r}") from None
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

    # ---- quota

    def take(self, nbytes: int) -> None:
        """Count bytes that are to be written.

        Raises:
            QuotaError: there is no room for them.
        """
        with self._lock:
            if self.capacity is not None and self._used + nbytes > self.capacity:
                raise QuotaError(
                    f"no room for {nbytes} bytes in the namespace: {self._used} of {self.capacity} are in use"
                )
            self._used += nbytes

    def give_back(self, nbytes: int) -> None:
        """Count them no more."""
        with self._lock:
            self._used -= nbytes

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
            if error is None:
                with self._lock:
                    self._listed[header.key] = listed
            self._settle(listed, replaced, error)
            if error is not None:
                raise error

        record = torch.frombuffer(bytearray(pack([listed])), dtype=torch.uint8)
        return begun(self._store.write, name, record).then(settle, executor=service_thread)

    def _settle(self, header: Header, old: Header | None, failure: BaseException | None) -> None:
        """Do what is left to be done when a key was written, or was not."""
        if failure is None and self._is_gone:
            is_plain = header.upload == WHOLE
            self._remove([self._plain_name(header.key) if is_plain else self._forget_listed(header.key)])
        if failure is not None or self._is_gone:
            self.give_back(header.nbytes)
            if header.upload != WHOLE:
                self.drop_pieces(header)
        elif old is not None:
            self.give_back(old.nbytes)
            names = []
            if old.upload == WHOLE and header.upload != WHOLE:
                names.append(self._plain_name(old.key))
            if old.upload != WHOLE and header.upload == WHOLE:
                names.append(self._forget_listed(old.key))
            self._remove(names)
            if old.upload != WHOLE:
                self.drop_pieces(old)

    def drop_pieces(self, header: Header, pieces: Iterable[int] | None = None) -> CUDAFuture[None]:
        """Remove pieces of a tensor, by default all, as far as they are there. It does not fail."""
        numbers = range(header.pieces) if pieces is None else pieces
        return self._remove([self._piece_name(header.upload, piece) for piece in numbers])

    def _remove(self, names: list[str]) -> CUDAFuture[None]:
        """Remove what nobody looks for. Where the disk refuses, the next to open the store does."""
        if not names:
            return CUDAFuture.completed(None)
        return self._store.deletev(names).then(lambda done: (done.exception(), None)[1], executor=service_thread)

    def _forget_listed(self, key: str) -> str:
        name = self._listed_name(key)
        with self._lock:
            self._listed.pop(key, None)
        return name

    def clear(self) -> None:
        """Forget all keys for good, those included that are being written."""
        with self._lock:
            self._is_gone = True
            self._listed.clear()
        names = self._store.keys()
        self._remove([name for name in names if name[1:].startswith(self.prefix)])

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
        name = self._forget_listed(key) if is_listed else self._plain_name(key)
        names = [*self._other_names(key, name), name]

        def settle(done: CUDAFuture[None]) -> CUDAFuture[None]:
            if done.exception() is not None and is_listed:
                with self._lock:
                    self._listed[key] = header
            if isinstance(done.exception(), NotFoundError):
                raise NotFoundError(f"there is no key {key!r}")
            done.value()
            self.give_back(header.nbytes)
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
