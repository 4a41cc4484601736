"""Parser of the messages between a client and an offload service; see ``wire`` for their format.

It checks each number against its limits before it uses it, and raises ValueError where a message makes no sense.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rpc_ext.offload import _wire as wire

__all__ = ["service_of", "unpack_answer", "unpack_request"]


class Reader:
    """Reads a message from its beginning to its end."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def take(self, form: struct.Struct) -> tuple[Any, ...]:
        """Return the next numbers."""
        if len(self._body) - self._at < form.size:
            raise ValueError(f"the message of {len(self._body)} bytes is cut off at {self._at}")
        found = form.unpack_from(self._body, self._at)
        self._at += form.size
        return found

    def text(self, length: int) -> bytes:
        """Return the next bytes."""
        end = self._at + length
        if end > len(self._body):
            raise ValueError(f"the message of {len(self._body)} bytes is cut off at {self._at}")
        found = self._body[self._at : end]
        self._at = end
        return found

    def key(self, length: int) -> str:
        """Return the next bytes as a key."""
        key = self.text(length).decode()  # a UnicodeDecodeError is a ValueError
        wire.expect_key(key)
        return key

    def tensor(self) -> tuple[torch.dtype, tuple[int, ...], int]:
        """Return dtype, shape and bytes of a tensor."""
        code, dimensions, nbytes = self.take(wire.TENSOR)
        if code >= len(wire.DTYPES) or dimensions > wire.MOST_DIMENSIONS or nbytes > wire.MOST_BYTES:
            raise ValueError(f"dtype {code}, {dimensions} dimensions, {nbytes} bytes: there is no such tensor")
        shape = struct.unpack(f"<{dimensions}q", self.text(8 * dimensions))
        if any(size < 0 for size in shape) or math.prod(shape) * wire.DTYPES[code].itemsize != nbytes:
            raise ValueError(f"a tensor of {wire.DTYPES[code]} of shape {shape} does not have {nbytes} bytes")
        return wire.DTYPES[code], shape, nbytes

    def data(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the data of the message: the rest of it, or the tensor beside it."""
        rest = self._body[self._at :]
        if not tensors:
            if len(rest) > wire.INLINE:
                raise ValueError(f"{len(rest)} bytes follow the entries")
            return torch.frombuffer(bytearray(rest), dtype=torch.uint8) if rest else wire.NO_DATA
        data = tensors[0]
        if rest or len(tensors) != 1 or data.layout is not torch.strided or not data.is_cpu:
            raise ValueError("the data of a message are bytes at its end, or one dense tensor on the host")
        if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() > wire.PIECE:
            raise ValueError(f"the data of a message are up to {wire.PIECE} bytes, not {data.dtype} {list(data.shape)}")
        data = data.detach()
        return data.clone() if data.storage_offset() or not data.is_contiguous() else data


def service_of(body: bytes) -> str:
    """Return the name of the service that a request is for.

    Raises:
        ValueError: it is cut off, or the name is not UTF-8.
    """
    reader = Reader(body)
    length = reader.take(wire.HEAD)[-1]
    return reader.text(length).decode()


def unpack_request(body: bytes, tensors: list[torch.Tensor]) -> wire.Request:
    """Return the request of a message.

    Raises:
        ValueError: the message is not one.
    """
    reader = Reader(body)
    version, verb, token, sent, oldest, count, _, length = reader.take(wire.HEAD)
    if version != wire.VERSION or verb not in _READ or not 1 <= count <= wire.MOST_ENTRIES:
        raise ValueError(f"version {version}, verb {verb}, {count} entries: there is no such request")
    service = reader.text(length).decode()
    read = _READ[verb]
    entries: list[Any] = [read(reader) for _ in range(count)]
    data = reader.data(tensors)
    if not math.isfinite(sent):
        raise ValueError(f"{sent!r} is not a time")
    if verb == wire.PUT:
        _expect_places(entries, data.numel())
    elif data.numel():
        raise ValueError(f"{data.numel()} bytes travel with a request that has none")
    if verb != wire.FETCH and len({entry.key for entry in entries}) != count:
        raise ValueError("a request has each key once")
    return wire.Request(verb, token, sent, oldest, service, entries, data)


def _read_operation(reader: Reader) -> wire.Operation:
    sequence, after, expires, length = reader.take(wire.ENTRY)
    if not sequence or not math.isfinite(expires):
        raise ValueError(f"operation {sequence} that expires at {expires}: there is none")
    return wire.Operation(sequence, after, expires, reader.key(length))


def _read_put(reader: Reader) -> wire.Put:
    operation = _read_operation(reader)
    dtype, shape, nbytes = reader.tensor()
    part, at, length, digest = reader.take(wire.PLACE)
    if part >= wire.parts_of(nbytes) or length != min(wire.PIECE, nbytes - part * wire.PIECE):
        raise ValueError(f"key {operation.key!r}: part {part} of {nbytes} bytes does not have {length}")
    return wire.Put(*operation, dtype, shape, nbytes, part, at, length, digest)


_READ: dict[int, Callable[[Reader], wire.Entry]] = dict.fromkeys((wire.GET, wire.DELETE, wire.ABANDON), _read_operation)
_READ.update({wire.PUT: _read_put, wire.FETCH: lambda reader: wire.Fetch(*reader.take(wire.FETCHED))})


def _expect_places(entries: Sequence[wire.Put | wire.Found | wire.Part], available: int) -> None:
    """Raise ValueError unless the bytes of the entries lie one after the other in the data."""
    free = 0
    for entry in entries:
        if not entry.length:
            continue
        if entry.at < free or entry.at % wire.LINE or entry.length > available - entry.at:
            raise ValueError(f"{entry.length} bytes at {entry.at} are not in the {available} that came, or another's")
        if isinstance(entry, wire.Put) and entry.nbytes > wire.PIECE and len(entries) > 1:
            raise ValueError("a part of a tensor travels alone")
        free = entry.at + entry.length


def unpack_answer(verb: int, count: int, body: bytes, tensors: list[torch.Tensor]) -> wire.Answer:
    """Return the answer to a request of `count` entries. Its errors are unpickled: it comes from the service.

    Raises:
        ValueError: the message is no such answer.
    """
    reader = Reader(body)
    version, found, length = reader.take(wire.ANSWER)
    if version != wire.VERSION or found != count:
        raise ValueError(f"version {version}, {found} entries: this is no answer to a request of {count}")
    errors = dict(pickle.loads(reader.text(length))) if length else {}
    entries: list[wire.Found | wire.Part] = []
    if verb in (wire.GET, wire.FETCH):
        read = _read_found if verb == wire.GET else _read_part
        entries = [read(reader) for _ in range(count - len(errors))]
    data = reader.data(tensors)
    if not entries and data.numel():
        raise ValueError(f"{data.numel()} bytes travel with an answer that has none")
    _expect_places(entries, data.numel())
    return wire.Answer(errors, entries, data)


def _read_found(reader: Reader) -> wire.Found:
    dtype, shape, nbytes = reader.tensor()
    _, at, length, digest = reader.take(wire.PLACE)
    has_digest, kept, seed = reader.take(wire.KEPT)
    if length not in (0, min(wire.PIECE, nbytes)):
        raise ValueError(f"the first part of {nbytes} bytes does not have {length}")
    return wire.Found(dtype, shape, nbytes, at, length, digest, (kept, seed) if has_digest else None)


def _read_part(reader: Reader) -> wire.Part:
    return wire.Part(*reader.take(wire.PLACE)[1:])
