"""Messages between a client and an offload service in Python. ``_C/offload/wire.h`` describes their format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rpc_ext import _C
from rpc_ext.offload._errors import error_from

__all__ = [
    "ABANDON",
    "DELETE",
    "DTYPES",
    "FETCH",
    "GET",
    "INLINE",
    "LARGE",
    "LINE",
    "LONGEST_KEY",
    "LONGEST_NAME",
    "MOST_DIMENSIONS",
    "MOST_ENTRIES",
    "NO_DATA",
    "PACK",
    "PIECE",
    "PUT",
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
    "parse_answer",
    "parts_of",
]

PIECE = _C.PART  # most bytes of data in one message. Larger tensors are sent in parts of this size
PACK = _C.PACK  # most bytes of small tensors in one message
LARGE = _C.LARGE  # bytes from which on a tensor is sent alone
MOST_ENTRIES = _C.MOST_ENTRIES  # entries of one message
LONGEST_KEY = _C.LONGEST_KEY  # bytes of UTF-8; the store has the key with the prefix of its namespace
LONGEST_NAME = 255  # bytes of the name of a service
TOKEN = _C.TOKEN  # bytes of the token that identifies a session
LINE = _C.LINE  # alignment of the tensors of one message, in bytes
INLINE = _C.INLINE  # bytes of data up to which the body carries them: a separate tensor takes a handshake

PUT, GET, DELETE, FETCH, ABANDON = 1, 2, 3, 4, 5

VERSION = _C.OFFLOAD_VERSION
MOST_DIMENSIONS = _C.MOST_DIMENSIONS
DTYPES: tuple[torch.dtype, ...] = tuple(_C.offload_dtypes())
"""dtypes that can be sent"""
NO_DATA = torch.empty(0, dtype=torch.uint8)


class Operation(NamedTuple):
    """An operation on a key: an entry of GET, DELETE and ABANDON."""

    sequence: int  # number of the client's operation
    after: int  # number of the client's previous operation on the same key; 0: none
    expires: float  # on the client's monotonic clock; 0: never
    key: str


class Put(NamedTuple):
    """An entry of PUT: a tensor, or one part of it, which is alone in its message. It begins like ``Operation``."""

    sequence: int
    after: int
    expires: float
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int  # of the whole tensor
    part: int
    at: int  # offset of the part's bytes in the data
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
    length: int  # bytes of the first part in the data; 0 for a non-empty tensor: FETCH sends all parts
    digest: int  # of those bytes
    kept: tuple[int, int] | None  # digest of the whole tensor in the store, and its seed


class Part(NamedTuple):
    """An entry of the answer to FETCH."""

    at: int
    length: int
    digest: int


Entry = Operation | Put | Fetch


class Request(NamedTuple):
    """A request, parsed by the service."""

    verb: int
    token: bytes
    sent: float  # on the client's monotonic clock
    oldest: int  # the lowest sequence number of an operation that is not done at the client
    service: str
    entries: list[Entry]
    data: torch.Tensor


class Answer(NamedTuple):
    """A reply, parsed by the client."""

    errors: dict[int, BaseException]  # by index of the entry
    entries: list[Found | Part]  # of the entries without an error; empty for verbs without entries
    data: torch.Tensor


def parts_of(nbytes: int) -> int:
    """Return the number of parts of a tensor of `nbytes` bytes."""
    return max(1, math.ceil(nbytes / PIECE))


def expect_key(key: object) -> bytes:
    """Return a key as UTF-8.

    Raises:
        TypeError: it is not a str.
        ValueError: it is empty, too long, not UTF-8, or contains a NUL.
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
    """Raise TypeError or ValueError unless a tensor of this dtype and number of dimensions can be sent."""
    if dtype not in DTYPES:
        raise TypeError(f"tensors of {dtype} cannot be sent")
    if dimensions > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has at most {MOST_DIMENSIONS} dimensions, not {dimensions}")


def pack_request(
    verb: int, token: bytes, sent: float, oldest: int, service: str, entries: Sequence[Entry], data: torch.Tensor
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the body and the tensors of a request."""
    return _C.pack_request(verb, token, sent, oldest, service, entries, data)


def data_of(data: torch.Tensor, entry: Put | Found | Part) -> torch.Tensor:
    """Return the bytes of an entry."""
    begin = entry.at if entry.length else 0  # an empty entry has any offset, but views need an aligned one
    return data[begin : begin + entry.length]


def pack_answer(
    verb: int,
    count: int,
    problems: Sequence[tuple[int, tuple[Any, ...]]] = (),
    entries: Sequence[Found | Part] = (),
    data: torch.Tensor | None = None,
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the body and the tensors of the reply to a request with `count` entries."""
    return _C.pack_answer(verb, count, problems, entries, data)


def parse_answer(verb: int, count: int, body: bytes, tensors: list[torch.Tensor]) -> Answer:
    """Return the reply to a request with `count` entries.

    Raises:
        ValueError: the message is no such reply.
    """
    problems, entries, data = _C.parse_answer(verb, count, body, tensors)
    make = Found if verb == GET else Part
    return Answer({i: error_from(problem) for i, problem in problems}, [make(*entry) for entry in entries], data)
