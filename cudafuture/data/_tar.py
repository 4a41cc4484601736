"""Members of a tar archive: their names, offsets and sizes."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from cudafuture.data._archive_stream import ArchiveStream, open_stream
from cudafuture.data._faults import IGNORED, Fault
from cudafuture.data._names import FIRST_BYTES, is_image_name, is_image_start, is_of_the_system, is_other_name
from cudafuture.errors import ArchiveError

__all__ = ["MOST_MEMBER", "Member", "members_of", "require_tar"]

MOST_MEMBER = 256 << 20  # bytes of one member, which is read as a whole
_MOST_EXTENSION = 1 << 20  # bytes of a header's extension: a long name and attributes
_MOST_SIZE = 1 << 60  # bytes that a header may declare, so that offsets fit in 64 bits
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(_BLOCK)
_MAGIC, _MAGIC_AT = b"ustar", 257
_LFS = b"version https://git-lfs."  # the start of the text that Git stores in place of a file
_SPARSE = "sparse"
_SPARSE_KEYS = b"GNU.sparse."
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_LINKS = (tarfile.LNKTYPE, tarfile.SYMTYPE)
_NO_FILES = (tarfile.DIRTYPE, b"D", b"V")  # folders, also of GNU's incremental archives, and the name of a volume
_WITHOUT_DATA = (*_LINKS, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)


@dataclass(frozen=True)
class Member:
    """Member of an archive that is not a folder.

    Args:
        name: the name in the archive.
        label: the base name of the parent folder.
        offset: the offset of the data in the unpacked archive.
        size: the bytes of the data.
        fault: the reason why the member cannot be an image, or None; IGNORED if that is no error.
    """

    name: str
    label: str
    offset: int
    size: int
    fault: Fault | None


def require_tar(path: str) -> None:
    """Raise ArchiveError if a file is no tar archive, by its first unpacked block. Other faults are found by a read.

    Raises:
        ArchiveError: the block is no header, or the archive has another format.
        ImportError: zstandard is not installed, and the archive needs it.
        OSError: the archive cannot be read.
    """
    try:
        with open_stream(path) as stream:
            block = stream.start(_BLOCK)
    except Fault:
        return
    if block == _END or block.startswith(_MAGIC, _MAGIC_AT):
        return
    try:
        _header(block, "")
    except Fault as e:
        begin = f"its unpacked data begin with {block[:24]!r}" if block else "it is empty"
        if block.startswith(_LFS):
            begin = "it is a pointer of Git LFS; run `git lfs pull`"
        raise ArchiveError(f"{path} is no tar archive: {begin}", path=path, reason="damaged") from e


def members_of(stream: ArchiveStream) -> Iterator[Member]:
    """Yield the members of an archive in order; the stream is then positioned at the member's data.

    The caller may read the data, or skip it.

    Raises:
        Fault: the archive is truncated, damaged or a bomb; it names the member where that was found.
    """
    name = ""
    extensions = _Extensions()
    try:
        while True:
            block = _block(stream, name)
            if block == _END:
                stream.finish()
                return
            header = _header(block, name)
            if extensions.take(header, stream):
                continue
            name, size = extensions.apply(header)
            if header.type == tarfile.GNUTYPE_SPARSE:
                _skip_sparse_map(block, stream)
            end = stream.offset + (0 if header.type in _WITHOUT_DATA else -(-size // _BLOCK) * _BLOCK)
            if header.type not in _NO_FILES:
                label = _label(name)
                fault = _fault(header, name, label, size, extensions.sparse)
                if not _may_be_image(header, name, size, stream, fault):
                    fault = Fault(IGNORED, "the member is not an image by its name or first bytes", name)
                yield Member(name, label, stream.offset, size, fault)
            stream.skip(end - stream.offset)
            extensions.forget()
    except Fault as e:
        e.member = e.member or name
        raise


def _block(stream: ArchiveStream, last: str) -> bytes:
    """Return the block of a header, or the block of zeros that ends every archive."""
    try:
        return stream.read(_BLOCK)
    except Fault as e:
        raise Fault(e.reason, f"{e}, after this member" if last else str(e), last) from e


def _header(block: bytes, last: str) -> tarfile.TarInfo:
    where = "after this member " if last else ""
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as e:
        raise Fault("damaged", f"there is no tar header {where}({e})") from e
    if header.size < 0:
        raise Fault("damaged", f"the header {where}is damaged: its size is {header.size}")
    return header


def _label(name: str) -> str:
    """Return the base name of the parent folder, or an empty string if there is none."""
    folders = [folder for folder in name.split("/")[:-1] if folder not in ("", ".")]
    return folders[-1] if folders and folders[-1] != ".." else ""


def _fault(header: tarfile.TarInfo, name: str, label: str, size: int, sparse: bool) -> Fault | None:
    """Return the fault of a member that, by its header, cannot be an image, or None."""
    if header.type in _LINKS:
        return Fault("link", "the member is a link, which is not followed", name)
    if header.type not in _FILES or sparse:
        return Fault("special_file", f"the member is not a regular file (type {header.type!r})", name)
    if not label:
        return Fault("no_label", "the member is in no folder, whose name would be its label", name)
    if size > MOST_MEMBER:
        return Fault("too_large", f"the member has {size} bytes, but only {MOST_MEMBER} are allowed", name)
    return None


def _may_be_image(header: tarfile.TarInfo, name: str, size: int, stream: ArchiveStream, fault: Fault | None) -> bool:
    """Return False for a member that no loader of images would take. First bytes decide where the name does not."""
    if fault is not None and fault.reason == "special_file":
        return True
    if is_of_the_system(name):
        return False
    if is_image_name(name):
        return True
    if header.type in _LINKS or is_other_name(name):
        return False
    return is_image_start(stream.peek(min(size, FIRST_BYTES)))


def _skip_sparse_map(block: bytes, stream: ArchiveStream) -> None:
    """Skip the blocks that continue the header of GNU's old sparse files."""
    goes_on = block[482]
    while goes_on:
        goes_on = stream.read(_BLOCK)[504]


class _Extensions:
    """Names and sizes from extended headers, of POSIX and of GNU, for the header that follows them."""

    def __init__(self) -> None:
        self._all: dict[str, str] = {}
        self._next: dict[str, str] = {}

    @property
    def sparse(self) -> bool:
        """True if the member is a sparse file in POSIX format."""
        return _SPARSE in self._next

    def take(self, header: tarfile.TarInfo, stream: ArchiveStream) -> bool:
        """Read an extended header; return False for any other header."""
        kind = header.type
        if kind not in (b"x", b"g", b"X", tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            return False
        if header.size > _MOST_EXTENSION:
            raise Fault("damaged", f"an extended header after this member has {header.size} bytes")
        data = stream.read(-(-header.size // _BLOCK) * _BLOCK)[: header.size]
        if kind == tarfile.GNUTYPE_LONGNAME:
            self._next["path"] = _text(data.partition(b"\0")[0])
        elif kind != tarfile.GNUTYPE_LONGLINK:
            (self._all if kind == b"g" else self._next).update(_records(data))
        return True

    def apply(self, header: tarfile.TarInfo) -> tuple[str, int]:
        """Return the name and the size of a member."""
        name = self._next.get("path", self._all.get("path", header.name))
        size = self._next.get("size", self._all.get("size", str(header.size)))
        if not (size.isascii() and size.isdigit() and len(size) < 20 and int(size) <= _MOST_SIZE):
            raise Fault("damaged", f"the member's header is damaged: its size is {size[:40]!r}", name)
        return name, int(size)

    def forget(self) -> None:
        """Clear the fields that apply to one member only."""
        self._next.clear()


def _records(data: bytes) -> dict[str, str]:
    """Return the used records of a POSIX extended header: path, size, and `_SPARSE` for any of a sparse file.

    Each record has its length, a space, the key, "=" and the value. Other records are skipped and not stored, as there
    can be many of them.
    """
    found = {}
    start = 0
    while start < len(data):
        space = data.find(b" ", start, start + 8)
        length = data[start:space] if space > start else b""
        end = start + int(length) if length.isdigit() else -1
        if not start < space < end <= len(data):
            raise Fault("damaged", "an extended header after this member is damaged")
        if data.startswith((b"path=", b"size="), space + 1, end):
            found[_text(data[space + 1 : space + 5])] = _text(data[space + 6 : end - 1])
        elif data.startswith(_SPARSE_KEYS, space + 1, end):
            found[_SPARSE] = ""
        start = end
    return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
