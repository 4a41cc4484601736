"""Stream of the unpacked bytes of an archive, from its beginning to its end."""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from cudafuture.data._extra import extra
from cudafuture.data._faults import Fault
from cudafuture.errors import ArchiveError

__all__ = ["MOST_RATIO", "MOST_SMALL", "ArchiveStream", "SeekableStream", "limit_of", "open_stream", "packing_of"]

MOST_RATIO = 100  # unpacked bytes for each byte of the archive
MOST_SMALL = 64 << 20  # unpacked bytes that every archive may have
_PIECE = 1 << 18
_BLOCK = 512  # bytes of a header
_HEADERS = 1 << 12  # bytes that are read where a header is expected
_ZSTD_WINDOW = 1 << 27
_ZSTD = b"\x28\xb5\x2f\xfd"
_OTHERS = {
    b"BZh": "bzip2 (.bz2)",
    b"\xfd7zXZ\0": "xz (.xz)",
    b"]\0\0": "LZMA (.lzma)",
    b"LZIP": "lzip (.lz)",
    b"\x04\x22\x4d\x18": "LZ4 (.lz4)",
    b"\x1f\x9d": "compress (.Z)",
    b"PK\x03\x04": "zip (.zip)",
    b"PK\x05\x06": "zip (.zip)",
    b"7z\xbc\xaf\x27\x1c": "7-Zip (.7z)",
    b"Rar!\x1a\x07": "RAR (.rar)",
}


def packing_of(path: str) -> str:
    """Return "gzip", "zstd" or "tar", by the first bytes of the archive.

    Raises:
        ArchiveError: the archive has another known format.
        OSError: the archive cannot be read.
    """
    with Path(path).open("rb") as file:
        start = file.read(_BLOCK)
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    if start[:4] == _ZSTD or _is_skippable(start[:4]):
        return "zstd"
    found = [name for magic, name in _OTHERS.items() if start.startswith(magic)]
    if found and start[257:262] != b"ustar":  # a tar begins with the name of a member
        readable = ".tar, .tgz (.tar.gz) and .tar.zst can be read"
        text = f"{path} has the format {found[0]}, but only {readable}: unpack it, and pack it with `tar -czf`"
        raise ArchiveError(text, path=path)
    return "tar"


def limit_of(size: int) -> int:
    """Return the limit of the unpacked bytes of a compressed archive of `size` bytes."""
    return max(MOST_SMALL, MOST_RATIO * size)


class ArchiveStream:
    """Unpacked bytes of an archive, which are read once and in order.

    Args:
        file: the archive; None if a subclass reads it in another way.
        limit: the unpacked bytes after which the archive counts as a decompression bomb; None for no limit.
    """

    def __init__(self, file: BinaryIO | None, limit: int | None = None) -> None:
        self._file: Any = file
        self._limit = limit
        self._piece = memoryview(b"")
        self._unpacked = 0

    @property
    def offset(self) -> int:
        """The number of bytes that were read or skipped."""
        return self._unpacked - len(self._piece)

    @property
    def unpacked(self) -> int:
        """The number of bytes that were unpacked, including those that were not read yet."""
        return self._unpacked

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes.

        Raises:
            Fault: the archive ends before, is damaged, or unpacks to too many bytes.
        """
        if count <= len(self._piece):
            found, self._piece = self._piece[:count], self._piece[count:]
            return bytes(found)
        parts = [self._piece]
        count -= len(self._piece)
        while count > 0:
            self._next_piece()
            parts.append(self._piece[:count])
            self._piece = self._piece[count:]
            count -= len(parts[-1])
        return b"".join(parts)

    def peek(self, count: int) -> bytes:
        """Return the next `count` bytes, which are read or skipped later; raise as `read` does."""
        found = self.read(count)
        self._piece = memoryview(found + self._piece)
        return found

    def start(self, count: int) -> bytes:
        """Return the first `count` bytes, or all of a shorter archive. The stream cannot be read after that.

        Raises:
            Fault: the archive is damaged, unpacks to too many bytes, or is compressed and truncated.
        """
        found = b""
        while len(found) < count and self._take(self._unpack()):
            found += self._piece[:count]
        return found[:count]

    def skip(self, count: int) -> None:
        """Skip the next `count` bytes; raise as `read` does."""
        while count > len(self._piece):
            count -= len(self._piece)
            self._next_piece()
        self._piece = self._piece[count:]

    def finish(self) -> None:
        """Unpack the rest of the archive, so that its checksum is verified."""
        while self._take(self._unpack()):
            pass

    def close(self) -> None:
        """Close the archive."""
        self._file.close()

    def __enter__(self) -> ArchiveStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _unpack(self) -> bytes | bytearray | memoryview:
        """Return the next unpacked bytes, or none at the end of the archive."""
        piece: bytes = self._file.read(_PIECE)
        return piece

    def _next_piece(self) -> None:
        if not self._take(self._unpack()):
            raise self._fault("truncated")

    def _fault(self, reason: str, detail: object = "") -> Fault:
        """Return the fault "truncated" or "damaged" of the archive, after the unpacked bytes that were returned."""
        return Fault(reason, f"the archive is {reason} at byte {self._unpacked} of its unpacked data{detail}")

    def _take(self, piece: bytes | bytearray | memoryview) -> bool:
        self._piece = memoryview(piece)
        self._unpacked += len(piece)
        if self._limit is not None and self._unpacked > self._limit:
            text = f"the archive unpacks to more than {self._limit} bytes, {MOST_RATIO} times its size: a bomb"
            raise Fault("bomb", text)
        return len(piece) > 0


class SeekableStream(ArchiveStream):
    """Bytes of an archive that is not compressed: members that are not needed are not read."""

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes; those that are not buffered take one system call."""
        if count <= max(len(self._piece), _BLOCK):
            return super().read(count)
        rest = self._file.read(count - len(self._piece))
        found = b"".join((self._piece, rest))
        self._piece = memoryview(b"")
        self._unpacked += len(rest)
        if len(found) < count:
            raise self._fault("truncated")
        return found

    def skip(self, count: int) -> None:
        """Skip the next `count` bytes without reading them."""
        if count <= len(self._piece):
            self._piece = self._piece[count:]
            return
        target = self.offset + count
        try:
            self._file.seek(target)  # if that is beyond the end, the next read fails
        except OSError as e:  # no file of this file system can be that long
            raise self._fault("truncated") from e
        self._piece, self._unpacked = memoryview(b""), target

    def finish(self) -> None:
        """Do nothing: an archive that is not compressed has no checksum."""

    def _unpack(self) -> bytes:
        piece: bytes = self._file.read(_HEADERS)
        return piece


class _GzipStream(ArchiveStream):
    """Unpacked bytes of one or more members of gzip, which zlib unpacks and verifies."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        super().__init__(file, limit)
        self._inflate: Any = zlib.decompressobj(31)
        self._packed = b""
        self._damage = ""

    def _unpack(self) -> bytes:
        while True:
            if self._damage:
                raise self._fault("damaged", f": {self._damage}")
            packed = self._packed or self._file.read(_PIECE)
            if self._inflate.eof:  # zeros may follow, or another member
                packed = packed.lstrip(b"\0")
                if packed:
                    self._inflate = zlib.decompressobj(31)
                elif not self._file.peek(1):
                    return b""
                else:
                    self._packed = b""
                    continue
            before = self._inflate.copy()
            try:
                unpacked: bytes = self._inflate.decompress(packed, _PIECE)
            except zlib.error as e:
                self._damage = str(e)  # the exception refers to this object by its traceback
                unpacked = _before_damage(before, packed)
            self._packed = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
            if unpacked:
                return unpacked
            if not packed and not self._inflate.eof:
                raise self._fault("truncated")


def _before_damage(inflate: Any, packed: bytes) -> bytes:
    """Return the bytes that `packed` unpacks to before zlib finds damage in it.

    zlib.error drops the bytes that were unpacked in the same call.
    """
    found = []
    step = len(packed)
    while step:
        attempt = inflate.copy()
        try:
            found.append(attempt.decompress(packed[:step]))
        except zlib.error:
            step //= 2
        else:
            inflate, packed = attempt, packed[step:]
    packed = packed[:1]  # the byte in which the damage is found
    with contextlib.suppress(zlib.error):
        while piece := inflate.decompress(packed, 1):
            found.append(piece)
            packed = inflate.unconsumed_tail
    return b"".join(found)


class _ZstdStream(ArchiveStream):
    """Unpacked bytes of one or more frames of Zstandard (RFC 8878).

    The blocks of a frame are unpacked one by one. At most 128 KiB are therefore unpacked at once, and an archive that
    ends inside a frame is detected, which zstandard's own reader does not do.
    """

    def __init__(self, file: BinaryIO, limit: int) -> None:
        super().__init__(file, limit)
        self._zstandard: Any = extra("zstandard", "a .tar.zst archive")
        self._unpacker = self._zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._frame: Any = None
        self._checksum = 0  # bytes after the last block
        self._is_last = False  # only the checksum of the frame is left

    def _unpack(self) -> bytes:
        while True:
            if self._frame is not None:
                packed = self._exactly(self._checksum) if self._is_last else self._block()
            elif self._file.peek(1):
                packed = self._header()
            else:
                return b""
            try:
                unpacked: bytes = self._frame.decompress(packed) if packed else b""
            except self._zstandard.ZstdError as e:
                raise self._fault("damaged", f": {e}") from e
            if self._frame is not None and self._frame.eof:
                self._frame = None
            if unpacked:
                return unpacked

    def _header(self) -> bytes:
        """Return the header of the next frame and begin to unpack it, or skip a skippable frame."""
        magic = self._exactly(4)
        if _is_skippable(magic):
            size = int.from_bytes(self._exactly(4), "little")
            if size:
                self._file.seek(size - 1, os.SEEK_CUR)
                self._exactly(1)
            return b""
        if magic != _ZSTD:
            raise self._fault("damaged", ": there is no frame of Zstandard")
        descriptor = self._exactly(1)
        flags = descriptor[0]
        is_single = flags >> 5 & 1
        dictionary = (0, 1, 2, 4)[flags & 3]
        size = (is_single, 2, 4, 8)[flags >> 6]
        self._checksum = 4 if flags & 4 else 0
        self._is_last = False
        self._frame = self._unpacker.decompressobj()
        return magic + descriptor + self._exactly((not is_single) + dictionary + size)

    def _block(self) -> bytes:
        """Return the next block of the frame. The checksum is unpacked alone: an error drops bytes of the same call."""
        header = self._exactly(3)
        number = int.from_bytes(header, "little")
        size = 1 if number >> 1 & 3 == 1 else number >> 3  # a block of one repeated byte
        self._is_last = bool(number & 1 and self._checksum)
        return header + self._exactly(size)

    def _exactly(self, count: int) -> bytes:
        data: bytes = self._file.read(count)
        if len(data) < count:
            raise self._fault("truncated")
        return data


def _is_skippable(magic: bytes) -> bool:
    """Return True if a frame of Zstandard with this magic number has no data of the archive."""
    return len(magic) == 4 and 0x50 <= magic[0] <= 0x5F and magic[1:] == b"\x2a\x4d\x18"


def open_stream(path: str) -> ArchiveStream:
    """Open an archive, compressed or not, for reading from its beginning to its end.

    Raises:
        OSError: the archive cannot be opened.
        ImportError: zstandard is not installed.
    """
    packing = packing_of(path)
    file = Path(path).open("rb")  # noqa: SIM115
    try:
        if packing == "tar":
            return SeekableStream(file)
        limit = limit_of(os.fstat(file.fileno()).st_size)
        return _GzipStream(file, limit) if packing == "gzip" else _ZstdStream(file, limit)
    except BaseException:
        file.close()
        raise
