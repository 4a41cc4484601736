"""Messages between a client and a store service in Python. ``_C/store/wire/message.h`` describes their format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cudafuture.errors import TensorError
from cudafuture.store.arguments import encoded_key
from rpc_ext import _C

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
    "PACK",
    "PIECE",
    "PUT",
    "TOKEN",
    "VERSION",
    "KeyEntry",
    "Put",
    "StoreRequest",
    "expect_key",
    "expect_sendable",
    "pack_answer",
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

VERSION = _C.STORE_VERSION
MOST_DIMENSIONS = _C.MOST_DIMENSIONS
DTYPES: tuple[torch.dtype, ...] = tuple(_C.store_dtypes())
"""dtypes that can be sent"""


class KeyEntry(NamedTuple):
    """An operation on a key: an entry of GET, DELETE and ABANDON."""

    sequence: int  # number of the client's operation
    after: int  # number of the client's previous operation on the same key; 0: none
    expires: float  # on the client's monotonic clock; 0: never
    key: str


class Put(NamedTuple):
    """An entry of PUT: a tensor, or one part of it, which is alone in its message. It begins like ``KeyEntry``."""

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


class StoreRequest(NamedTuple):
    """A request, parsed by the service."""

    verb: int
    token: bytes
    sent: float  # on the client's monotonic clock
    oldest: int  # the lowest sequence number of an operation that is not done at the client
    service: str
    entries: list[Any]
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
    encoded = encoded_key(key)
    if not 1 <= len(encoded) <= LONGEST_KEY:
        raise ValueError(f"a key has 1 to {LONGEST_KEY} bytes of UTF-8, not {len(encoded)}")
    if b"\0" in encoded:
        raise ValueError("a key has no NUL")
    return encoded


def expect_sendable(dtype: torch.dtype, dimensions: int) -> None:
    """Raise TensorError or ValueError unless a tensor of this dtype and number of dimensions can be sent."""
    if dtype not in DTYPES:
        raise TensorError(f"tensors of {dtype} cannot be sent")
    if dimensions > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has at most {MOST_DIMENSIONS} dimensions, not {dimensions}")


def pack_answer(
    verb: int,
    count: int,
    problems: Sequence[tuple[int, tuple[Any, ...]]] = (),
    entries: Sequence[tuple[Any, ...]] = (),
    data: torch.Tensor | None = None,
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the body and the tensors of the reply to a request with `count` entries."""
    return _C.pack_answer(verb, count, problems, entries, data)
