"""Messages between a client and an offload service, as Python sees them; ``_C/offload/wire.h`` has their format."""

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

VERSION = 4
MOST_DIMENSIONS = 64
DTYPES: tuple[torch.dtype, ...] = tuple(_C.offload_dtypes())
"""dtypes that can be sent"""
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
    begin = entry.at if entry.length else 0  # an entry without bytes lies anywhere, and views want an aligned begin
    return data[begin : begin + entry.length]


def pack_answer(
    verb: int,
    count: int,
    problems: Sequence[tuple[int, tuple[Any, ...]]] = (),
    entries: Sequence[Found | Part] = (),
    data: torch.Tensor | None = None,
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the body and the tensors of the answer to a request of `count` entries."""
    return _C.pack_answer(verb, count, problems, entries, data)


def parse_answer(verb: int, count: int, body: bytes, tensors: list[torch.Tensor]) -> Answer:
    """Return the answer to a request of `count` entries.

    Raises:
        ValueError: the message is no such answer.
    """
    problems, entries, data = _C.parse_answer(verb, count, body, tensors)
    make = Found if verb == GET else Part
    return Answer({i: error_from(problem) for i, problem in problems}, [make(*entry) for entry in entries], data)
