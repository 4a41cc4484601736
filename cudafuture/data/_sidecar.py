"""Sidecar of an archive: the file beside it that stores its index.

The layout, with numbers in little-endian order::

    magic and version, 16 bytes | length of the header, 8 bytes | header, JSON | tensors | XXH3 of all before, 16 bytes

A sidecar is untrusted input. It is used only if its checksum, its version and the identity of the archive are right.
All numbers in it are range-checked too, as the checksum does not authenticate its author. Nothing in it is executed or
unpickled. It is replaced by a whole new file, so ranks and workers may write it at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import xxhash

from cudafuture.data._archive_index import ArchiveIndex, bytes_of, identity_of, tensor_of
from cudafuture.data._archive_stream import limit_of
from cudafuture.data._faults import REASONS
from cudafuture.data._tar import MOST_MEMBER

__all__ = ["DamagedSidecarError", "read_sidecar", "sidecar_of", "write_sidecar"]

_MAGIC = b"cudafuture tgz 3"
_CHECKSUM = 16  # bytes
_TENSORS = {field.name: torch.int64 for field in fields(ArchiveIndex) if field.type == "torch.Tensor"}
_TENSORS.update(names=torch.uint8, seek_points=torch.uint8)
_TOKEN = 8  # random bytes in the name of a temporary file
_OLD = 3600  # seconds, after which no process still writes a temporary file
_VALUES = ("identity", "packing", "classes", "refused")


class DamagedSidecarError(Exception):
    """Error of a sidecar that is not an index, or not of this version. The index is built again."""


def sidecar_of(path: str) -> Path:
    """Return the path of an archive's sidecar."""
    return Path(f"{path}.index")


def read_sidecar(path: str) -> ArchiveIndex | None:
    """Return the index in an archive's sidecar, or None if there is no sidecar or the archive has changed since.

    Raises:
        DamagedSidecarError: the sidecar is damaged.
        OSError: the sidecar cannot be read.
    """
    sidecar = sidecar_of(path)
    try:
        if not stat.S_ISREG(sidecar.stat().st_mode):  # reading a pipe would block
            raise DamagedSidecarError("it is not a regular file")
        data = bytearray(sidecar.read_bytes())
    except FileNotFoundError:
        return None
    if data[: len(_MAGIC)] != _MAGIC:
        raise DamagedSidecarError("it is not an index of this version")
    if data[-_CHECKSUM:] != xxhash.xxh3_128_digest(memoryview(data)[:-_CHECKSUM]):
        raise DamagedSidecarError("its checksum is wrong")
    try:
        index = _parse(data)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as e:
        raise DamagedSidecarError(f"its content is wrong: {e}") from e
    return index if index.identity == identity_of(path) else None


def write_sidecar(path: str, index: ArchiveIndex) -> None:
    """Replace an archive's sidecar atomically, after the new one is on disk.

    Raises:
        OSError: the sidecar cannot be written.
    """
    sidecar = sidecar_of(path)
    _remove_old(sidecar)
    temporary = sidecar.with_name(f".{sidecar.name}.{secrets.token_hex(_TOKEN)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 (a descriptor)
            checksum = xxhash.xxh3_128()
            for part in _parts(index):
                checksum.update(part)
                file.write(part)
            file.write(checksum.digest())
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, sidecar)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def _parts(index: ArchiveIndex) -> list[bytes]:
    header: dict[str, Any] = {name: getattr(index, name) for name in _VALUES}
    tensors = {name: getattr(index, name) for name in _TENSORS}
    header["lengths"] = {name: tensor.nbytes for name, tensor in tensors.items()}
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return [_MAGIC, len(text).to_bytes(8, "little"), text, *map(bytes_of, tensors.values())]


def _remove_old(sidecar: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote the sidecar."""
    name = re.compile(re.escape(f".{sidecar.name}.") + f"[0-9a-f]{{{2 * _TOKEN}}}")
    with contextlib.suppress(OSError), os.scandir(sidecar.parent) as entries:
        for entry in entries:
            # Another process may remove it too.
            with contextlib.suppress(OSError):
                if name.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > _OLD:
                    os.unlink(entry.path)  # noqa: PTH108


def _parse(data: bytearray) -> ArchiveIndex:
    start = len(_MAGIC) + 8
    end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    header = json.loads(data[start:end])
    tensors = {}
    for name, dtype in _TENSORS.items():
        length = _count(header["lengths"][name])
        fits = length % dtype.itemsize == 0 and end + length <= len(data) - _CHECKSUM
        _require(fits, "the lengths of its parts do not match")
        tensors[name] = tensor_of(data[end : end + length], dtype)
        end += length
    _require(end == len(data) - _CHECKSUM, "the lengths of its parts do not match")
    size, changed = header["identity"]
    _require(type(changed) is int, "its time of change is not a number")
    refused = [(str(name), str(reason), str(text)) for name, reason, text in header["refused"]]
    index = ArchiveIndex((_count(size), changed), header["packing"], header["classes"], refused, **tensors)
    _check(index)
    return index


def _check(index: ArchiveIndex) -> None:
    """Raise ValueError unless the images are in the archive, and their names and labels in the index."""
    _require(index.packing in ("tar", "gzip"), f"its packing is {index.packing!r}")
    _require((index.packing == "gzip") == (len(index.seek_points) > 0), "it has seek points of another packing")
    _require(all(type(name) is str for name in index.classes), "its classes are not names")
    _require(index.classes == sorted(set(index.classes)), "its classes are not sorted")
    _require(all(reason in REASONS for _, reason, _ in index.refused), "it has an unknown reason")
    columns = (index.sizes, index.labels, index.ends)
    _require(all(len(column) == len(index) for column in columns), "its table has columns of several lengths")
    if not len(index):
        _require(len(index.names) == 0, "it has names without images")
        return
    size = index.identity[0]
    most = size if index.packing == "tar" else limit_of(size)
    _require(_within(index.sizes, MOST_MEMBER), "the size of an image is out of its range")
    _require(_within(index.offsets, most), "the place of an image is out of its range")
    _require(_within(index.offsets + index.sizes, most), "an image is not in the archive")
    _require(_within(index.labels, len(index.classes) - 1), "the label of an image is out of its range")
    _require(_within(index.ends, len(index.names)), "the name of an image is out of its range")
    _require(not bool((index.ends[1:] < index.ends[:-1]).any()), "the names of the images are not in order")


def _within(numbers: torch.Tensor, most: int) -> bool:
    return int(numbers.min()) >= 0 and int(numbers.max()) <= most


def _count(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a count")
    return number


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)
