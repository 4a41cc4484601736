"""Format of the messages between a client and an offload service.

::

    request  version, verb | token, time of sending, oldest sequence number | name of the service | entries | data
    entry    sequence, after, expiry, key                    of every verb but FETCH
             + dtype, sizes, part, place of the bytes, digest    PUT
             sequence, part                                      FETCH
    answer   version, entries, pickled errors | entries | data
    entry    dtype, sizes, place of the bytes, digests           GET
             place of the bytes, digest                          FETCH

The data of a message are the bytes of its tensors, one after the other: up to 16 KiB at the end of the message itself,
more as one tensor beside it. Of a request nothing is unpickled.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rpc_ext._C import memory

__all__ = [
    "ABANDON",
    "ANSWER",
    "DELETE",
    "DTYPES",
    "ENTRY",
    "FETCH",
    "FETCHED",
    "GET",
    "HEAD",
    "INLINE",
    "KEPT",
    "LARGE",
    "LINE",
    "LONGEST_KEY",
    "LONGEST_NAME",
    "MOST_BYTES",
    "MOST_DIMENSIONS",
    "MOST_ENTRIES",
    "NO_DATA",
    "PACK",
    "PIECE",
    "PLACE",
    "PUT",
    "TENSOR",
    "TOKEN",
    "VERSION",
    "Answer",
    "Entry",
    "Fetch",
    "Found",
    "Operation",
    "Part",
    "Put",
    "Request",
    "data_of",
    "expect_key",
    "expect_sendable",
    "pack_answer",
    "pack_request",
    "parts_of",
    "with_data",
]

PIECE = 16 << 20  # bytes of the data of one message at most. Larger tensors travel in parts of this size
PACK = 4 << 20  # bytes of small tensors that travel together
LARGE = 1 << 20  # bytes from which on a tensor travels alone
MOST_ENTRIES = 1024  # entries of one message
LONGEST_KEY = 1000  # bytes of UTF-8; with the prefix of its namespace it is a key of the store
LONGEST_NAME = 255  # bytes of the name of a service
TOKEN = 16  # bytes of the token by which a client names its session
LINE = 64  # bytes: tensors of one message begin at a multiple
INLINE = 1 << 14  # bytes of data up to which the message carries them: a tensor beside it takes a handshake

PUT, GET, DELETE, FETCH, ABANDON = 1, 2, 3, 4, 5

VERSION = 3
MOST_DIMENSIONS = 64
MOST_BYTES = 1 << 46
HEAD = struct.Struct("<BB16sdQHHB")  # version, verb, token, sent, oldest, entries, unused, length of the name
ENTRY = struct.Struct("<QQdH")  # sequence, after, expires, length of the key
TENSOR = struct.Struct("<BBQ")  # dtype, dimensions, bytes
PLACE = struct.Struct("<IIIQ")  # part, at, length, digest
FETCHED = struct.Struct("<QI")  # sequence, part
KEPT = struct.Struct("<BQQ")  # 1 for a digest or 0, digest, seed
ANSWER = struct.Struct("<BHI")  # version, entries, bytes of the pickled errors
# Codes are indices: append only.
DTYPES: tuple[torch.dtype, ...] = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
NO_DATA = torch.empty(0, dtype=torch.uint8)


class Operation(NamedTuple):
    """An operation on a key: an entry of GET, DELETE and ABANDON."""

    sequence: int  # number of the client's operation
    after: int  # number of the client's operation on the same key that takes effect before this one; 0: none
    expires: float  # on the client's monotonic clock; 0: never
    key: str


class Put(NamedTuple):
    """An entry of PUT: a tensor, or one part of it. A part of several travels alone. It begins as ``Operation``."""

    sequence: int
    after: int
    expires: float
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int  # of the whole tensor
    part: int
    at: int  # begin of the part's bytes in the data
    length: int
    digest: int  # of the part's bytes


class Fetch(NamedTuple):
    """An entry of FETCH: a part of a tensor that an earlier GET has found."""

    sequence: int
    part: int


class Found(NamedTuple):
    """An entry of the answer to GET."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    at: int
    length: int  # bytes of the first part in the data; 0 of a tensor with bytes: none was sent, FETCH sends it
    digest: int  # of those bytes
    kept: tuple[int, int] | None  # digest of the whole tensor as the store has it, and its seed


class Part(NamedTuple):
    """An entry of the answer to FETCH."""

    at: int
    length: int
    digest: int


Entry = Operation | Put | Fetch


class Request(NamedTuple):
    """A request as the service reads it."""

    verb: int
    token: bytes
    sent: float  # on the client's monotonic clock
    oldest: int  # the lowest sequence number of an operation that is not done at the client
    service: str
    entries: list[Entry]
    data: torch.Tensor


class Answer(NamedTuple):
    """An answer as the client reads it."""

    errors: dict[int, BaseException]  # by index of the entry
    entries: list[Found | Part]  # of the entries without an error; none where the verb has none
    data: torch.Tensor


def parts_of(nbytes: int) -> int:
    """Return the number of parts in which a tensor of so many bytes travels."""
    return max(1, math.ceil(nbytes / PIECE))


def expect_key(key: object) -> bytes:
    """Return a key as UTF-8.

    Raises:
        TypeError: not a str.
        ValueError: empty, too long, not UTF-8, or with a NUL.
    """
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {key!r}")
    encoded = key.encode()  # a UnicodeEncodeError is a ValueError
    if not 1 <= len(encoded) <= LONGEST_KEY:
        raise ValueError(f"a key has 1 to {LONGEST_KEY} bytes of UTF-8, not {len(encoded)}")
    if b"\0" in encoded:
        raise ValueError("a key has no NUL")
    return encoded


def expect_sendable(dtype: torch.dtype, dimensions: int) -> None:
    """Raise TypeError or ValueError unless a tensor of this dtype and with so many dimensions can be sent."""
    if dtype not in _CODES:
        raise TypeError(f"tensors of {dtype} cannot be sent")
    if dimensions > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has at most {MOST_DIMENSIONS} dimensions, not {dimensions}")


def with_data(body: bytes, data: torch.Tensor) -> tuple[bytes, list[torch.Tensor]]:
    """Return the body and the tensors of a message with data."""
    return (body + memory(data).tobytes(), []) if data.numel() <= INLINE else (body, [data])


def pack_request(
    verb: int, token: bytes, sent: float, oldest: int, service: str, entries: Sequence[Entry], data: torch.Tensor
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the body and the tensors of a request."""
    name = service.encode()
    parts = [HEAD.pack(VERSION, verb, token, sent, oldest, len(entries), 0, len(name)), name]
    for entry in entries:
        if isinstance(entry, Fetch):
            parts.append(FETCHED.pack(*entry))
            continue
        key = entry.key.encode()
        parts += ENTRY.pack(entry.sequence, entry.after, entry.expires, len(key)), key
        if isinstance(entry, Put):
            shape = entry.shape
            parts += (
                TENSOR.pack(_CODES[entry.dtype], len(shape), entry.nbytes),
                struct.pack(f"<{len(shape)}q", *shape),
                PLACE.pack(entry.part, entry.at, entry.length, entry.digest),
            )
    return with_data(b"".join(parts), data)


def data_of(data: torch.Tensor, entry: Put | Found | Part) -> torch.Tensor:
    """Return the bytes of an entry."""
    begin = entry.at if entry.length else 0  # an entry without bytes lies anywhere, and views want an aligned begin
    return data[begin : begin + entry.length]


def pack_answer(
    count: int, errors: Sequence[tuple[int, BaseException]], entries: Sequence[Found | Part], data: torch.Tensor | None
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the body and the tensors of the answer to a request of `count` entries."""
    pickled = pickle.dumps(errors) if errors else b""
    parts = [ANSWER.pack(VERSION, count, len(pickled)), pickled]
    for entry in entries:
        if isinstance(entry, Part):
            parts.append(PLACE.pack(0, *entry))
            continue
        shape = entry.shape
        parts += (
            TENSOR.pack(_CODES[entry.dtype], len(shape), entry.nbytes),
            struct.pack(f"<{len(shape)}q", *shape),
            PLACE.pack(0, entry.at, entry.length, entry.digest),
            KEPT.pack(entry.kept is not None, *(entry.kept or (0, 0))),
        )
    return with_data(b"".join(parts), NO_DATA if data is None else data)
