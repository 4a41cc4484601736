"""Index of an archive: the place and label of each image, and seek points for unpacking from the middle."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cudafuture.data._archive_stream import ArchiveStream, SeekableStream, limit_of, open_stream, packing_of
from cudafuture.data._faults import Fault
from cudafuture.data._rapidgzip import GzipFile
from cudafuture.data._tar import Member, members_of
from cudafuture.errors import ArchiveError

__all__ = ["ArchiveIndex", "ArchiveReader", "Identity", "build_index", "bytes_of", "identity_of", "tensor_of"]

_SPACING = 1 << 20  # bytes of the archive between two seek points, each of which takes 32 KiB
_MOST_SEEK_POINTS = 1 << 13
_PIECE = 1 << 20

Identity = tuple[int, int]  # the size of an archive in bytes, and the time of its last change in nanoseconds


def identity_of(path: str | int) -> Identity:
    """Return the size and the time of the last change of an archive, which distinguish it from a later version."""
    stat = os.stat(path)  # noqa: PTH116 (or a descriptor)
    return stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class ArchiveIndex:
    """Table of an archive's images, and the seek points of its compression.

    Args:
        identity: the size and the time of change of the indexed archive.
        packing: "tar" or "gzip".
        classes: the names of the labels, sorted.
        refused: name, reason and text of each member that cannot be an image.
        offsets, sizes: int64, of each image in the unpacked archive.
        labels: int64, positions in `classes`.
        ends: int64, the end of each image's name in `names`.
        names: uint8, the names of all images, one after the other.
        seek_points: uint8, rapidgzip's index of a compressed archive.
    """

    identity: Identity
    packing: str
    classes: list[str]
    refused: list[tuple[str, str, str]]
    offsets: torch.Tensor
    sizes: torch.Tensor
    labels: torch.Tensor
    ends: torch.Tensor
    names: torch.Tensor
    seek_points: torch.Tensor

    def __len__(self) -> int:
        return len(self.offsets)

    def name(self, image: int) -> str:
        """Return the name of an image's member."""
        start = int(self.ends[image - 1]) if image else 0
        return bytes_of(self.names[start : int(self.ends[image])]).decode("utf-8", "surrogateescape")


class ArchiveReader:
    """Reader of an indexed archive's bytes, in any order. It belongs to one process."""

    def __init__(self, path: str, index: ArchiveIndex) -> None:
        self._path = path
        self._file: GzipFile | None = None
        self._stream: ArchiveStream | None = None
        self._damage: tuple[int, str, str] | None = None  # place, reason, text: a traceback would refer to this
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            if identity_of(self._descriptor) != index.identity:
                text = f"{path}: the archive has changed since its index was read; create a new TgzImages"
                raise ArchiveError(text, path=path, reason="damaged")
            if index.packing == "gzip":
                self._open(path, index)
        except BaseException:
            self.close()
            raise

    def _open(self, path: str, index: ArchiveIndex) -> None:
        try:
            self._file = GzipFile(path, parallelization=1)
            self._file.import_index(bytes_of(index.seek_points))
        except (RuntimeError, ValueError) as e:
            text = f"{path}: rapidgzip cannot use the seek points of the index; remove {path}.index ({e})"
            raise ArchiveError(text, path=path, reason="damaged") from e

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the unpacked archive.

        Raises:
            Fault: the archive has fewer bytes, or cannot be unpacked.
        """
        if self._file is None:
            data = os.pread(self._descriptor, size, offset)
        else:
            try:
                data = self._file.read_at(offset, size)
            except (RuntimeError, ValueError):
                return self._read_in_order(offset, size)
        while 0 < len(data) < size:
            rest = self.read(offset + len(data), size - len(data))
            data += rest
        if len(data) < size:
            raise Fault("truncated", "the archive is truncated")
        return data

    def _read_in_order(self, offset: int, size: int) -> bytes:
        """Read bytes of a damaged archive from its beginning; rapidgzip unpacks no part of a piece that has damage."""
        if self._damage is not None and offset + size > self._damage[0]:
            raise Fault(*self._damage[1:])
        if self._stream is None or self._stream.offset > offset:
            self._close_stream()
            self._stream = open_stream(self._path)
        try:
            self._stream.skip(offset - self._stream.offset)
            return self._stream.read(size)
        except Fault as e:
            self._damage = self._stream.unpacked, e.reason, str(e)
            raise

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Close the archive. Closing it again does nothing."""
        self._close_stream()
        file, self._file = self._file, None
        descriptor, self._descriptor = self._descriptor, -1
        if file is not None:
            file.close()
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def build_index(path: str) -> ArchiveIndex:
    """Read an archive once, and return its index.

    Raises:
        Fault: the archive is truncated, damaged or a bomb.
        ImportError: rapidgzip is not installed, and the archive needs it.
        ArchiveError: this kind of archive cannot have an index, or the archive changes during the call.
    """
    packing = packing_of(path)
    if packing == "zstd":
        raise ArchiveError(f"{path}: a .tar.zst archive cannot have an index", path=path)
    before = identity_of(path)
    table = _IndexBuilder()
    if packing == "tar":
        with SeekableStream(Path(path).open("rb")) as stream:
            table.fill(stream)
        seek_points = b""
    else:
        seek_points = _scan_gzip(path, before[0], table.fill)
    if identity_of(path) != before:
        raise ArchiveError(f"{path}: the archive changed while its index was built", path=path)
    return table.index(before, packing, seek_points)


class _RapidgzipStream(ArchiveStream):
    """Unpacked bytes of an archive that rapidgzip unpacks while it collects seek points."""

    def __init__(self, file: GzipFile, limit: int) -> None:
        super().__init__(None, limit)
        self._gzip = file

    def close(self) -> None:
        """Close the archive."""
        self._gzip.close()

    def _unpack(self) -> memoryview:
        piece = bytearray(_PIECE)
        try:
            count = self._gzip.readinto(piece)
        except (RuntimeError, ValueError) as e:
            raise Fault("damaged", f"the archive is truncated or damaged: {e}") from e
        return memoryview(piece)[:count]


def _scan_gzip(path: str, size: int, scan: Callable[[ArchiveStream], None]) -> bytes:
    """Let `scan` read a compressed archive, and return the seek points."""
    spacing = max(_SPACING, size // _MOST_SEEK_POINTS)
    cores = len(os.sched_getaffinity(0))
    file = GzipFile(path, parallelization=cores, chunk_size=spacing)
    with _RapidgzipStream(file, limit_of(size)) as stream:
        scan(stream)
        unpacked = stream.offset
        seek_points = file.export_index()
    _check_end(path, seek_points, unpacked)
    return seek_points


def _check_end(path: str, seek_points: bytes, unpacked: int) -> None:
    """Read the last byte through the seek points: no such read succeeds if the end of the archive is missing.

    rapidgzip reports no error while it unpacks such an archive for the first time.

    Raises:
        Fault: the archive is truncated.
    """
    file = GzipFile(path, parallelization=1)
    try:
        file.import_index(seek_points)
        found = file.read_at(unpacked - 1, 1)
    except (RuntimeError, ValueError) as e:
        raise Fault("truncated", f"the archive is truncated: {e}") from e
    finally:
        file.close()
    if not found:
        raise Fault("truncated", "the archive is truncated")


class _IndexBuilder:
    """Table of an index while it is built."""

    def __init__(self) -> None:
        self._offsets, self._sizes, self._labels, self._ends = (array("q") for _ in range(4))
        self._names = bytearray()
        self._classes: dict[str, int] = {}
        self._refused: list[tuple[str, str, str]] = []

    def fill(self, stream: ArchiveStream) -> None:
        """Add all members of an archive."""
        for member in members_of(stream):
            if member.fault is not None:
                self._refused.append((member.name, member.fault.reason, str(member.fault)))
            else:
                self._add(member)

    def _add(self, member: Member) -> None:
        self._offsets.append(member.offset)
        self._sizes.append(member.size)
        self._labels.append(self._classes.setdefault(member.label, len(self._classes)))
        self._names += member.name.encode("utf-8", "surrogateescape")
        self._ends.append(len(self._names))

    def index(self, identity: Identity, packing: str, seek_points: bytes) -> ArchiveIndex:
        """Return the index."""
        classes = sorted(self._classes)
        positions = {name: position for position, name in enumerate(classes)}
        sorted_labels = torch.tensor([positions[name] for name in self._classes], dtype=torch.int64, device="cpu")
        offsets, sizes, labels, ends = (
            tensor_of(numbers, torch.int64) for numbers in (self._offsets, self._sizes, self._labels, self._ends)
        )
        names, points = (tensor_of(data, torch.uint8) for data in (self._names, bytearray(seek_points)))
        labels = sorted_labels[labels]
        return ArchiveIndex(identity, packing, classes, self._refused, offsets, sizes, labels, ends, names, points)


def tensor_of(data: bytearray | array[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a host tensor over a buffer."""
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous host tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
