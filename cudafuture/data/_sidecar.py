"""The file beside an archive that keeps its index.

The layout, with numbers in little-endian order::

    magic and version, 16 bytes | length of the header, 8 bytes | header, JSON | tensors | XXH3 of all before, 16 bytes

A sidecar is input: it is used only if its checksum, its version and the identity of the archive are right. Nothing in
it is executed or unpickled. It is replaced by a whole new file, so ranks and workers may write it at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import xxhash

from cudafuture.data._index import Index, bytes_of, identity_of

__all__ = ["DamagedSidecarError", "read_sidecar", "sidecar_of", "write_sidecar"]

_MAGIC = b"cudafuture tgz 1"
_CHECKSUM = 16  # bytes
_TENSORS = {field.name: torch.int64 for field in fields(Index) if field.type == "torch.Tensor"}
_TENSORS.update(names=torch.uint8, seek_points=torch.uint8)
_VALUES = ("identity", "packing", "classes", "refused")


class DamagedSidecarError(Exception):
    """A sidecar is no index, or none of this version. The index is built again."""


def sidecar_of(path: str) -> Path:
    """Return the path of an archive's sidecar."""
    return Path(f"{path}.index")


def read_sidecar(path: str) -> Index | None:
    """Return the index in an archive's sidecar; None where there is no sidecar or the archive has changed since.

    Raises:
        DamagedSidecarError: the sidecar is damaged.
        OSError: the sidecar cannot be read.
    """
    sidecar = sidecar_of(path)
    try:
        if not stat.S_ISREG(sidecar.stat().st_mode):  # reading a pipe would block
            raise DamagedSidecarError("it is no plain file")
        data = bytearray(sidecar.read_bytes())
    except FileNotFoundError:
        return None
    if data[: len(_MAGIC)] != _MAGIC:
        raise DamagedSidecarError("it is no index of this version")
    if data[-_CHECKSUM:] != xxhash.xxh3_128_digest(memoryview(data)[:-_CHECKSUM]):
        raise DamagedSidecarError("its checksum is wrong")
    try:
        index = _parse(data)
    except (KeyError, TypeError, ValueError) as e:
        raise DamagedSidecarError(f"its content is wrong: {e}") from e
    return index if index.identity == identity_of(path) else None


def write_sidecar(path: str, index: Index) -> None:
    """Replace an archive's sidecar at once, after the new one is on the disk.

    Raises:
        OSError: the sidecar cannot be written.
    """
    sidecar = sidecar_of(path)
    temporary = sidecar.with_name(f".{sidecar.name}.{secrets.token_hex(8)}")
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


def _parts(index: Index) -> list[bytes]:
    header: dict[str, Any] = {name: getattr(index, name) for name in _VALUES}
    tensors = {name: getattr(index, name) for name in _TENSORS}
    header["lengths"] = {name: tensor.nbytes for name, tensor in tensors.items()}
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return [_MAGIC, len(text).to_bytes(8, "little"), text, *map(bytes_of, tensors.values())]


def _parse(data: bytearray) -> Index:
    start = len(_MAGIC) + 8
    end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
    header = json.loads(data[start:end])
    tensors = {}
    for name, dtype in _TENSORS.items():
        length = header["lengths"][name]
        count = length // dtype.itemsize
        tensors[name] = torch.frombuffer(data, dtype=dtype, count=count, offset=end).clone() if count else _none(dtype)
        end += length
    if end != len(data) - _CHECKSUM:
        raise ValueError("the lengths of its parts do not match")
    if not len(tensors["offsets"]) == len(tensors["sizes"]) == len(tensors["labels"]) == len(tensors["ends"]):
        raise ValueError("its table has columns of several lengths")
    size, changed = header["identity"]
    refused = [(str(name), str(reason), str(text)) for name, reason, text in header["refused"]]
    return Index((size, changed), str(header["packing"]), list(header["classes"]), refused, **tensors)


def _none(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype)
