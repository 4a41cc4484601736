"""What an offload request looks like on the wire: fixed headers, and one tensor of bytes that has what they tell of.

::

    block    magic, version, how many headers
    header   dtype, dimensions, length of the key | bytes of the whole tensor | upload, piece, pieces |
             place and bytes of what travels along | checksum of that || sizes, key

Nothing of it is unpickled. Whatever a header says is checked against what it may say before anything is done: lengths
against limits and against what has come, sizes against bytes. What does not fit is a ValueError.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from cudafuture.errors import ChecksumError
from rpc_ext._C import memory

__all__ = [
    "LONGEST_KEY",
    "MOST_HEADERS",
    "PACK",
    "PIECE",
    "WHOLE",
    "Header",
    "Wanted",
    "expect_key",
    "listed_header",
    "pack",
    "pack_wanted",
    "piece_of",
    "pieces_of",
    "unpack",
    "unpack_wanted",
    "view_of",
]

PIECE = 16 << 20  # bytes that one request carries at most: TensorPipe's best size on loopback
PACK = 4 << 20  # bytes of small tensors that travel together
LONGEST_KEY = 1024  # bytes of UTF-8
MOST_HEADERS = 4096  # in a block
WHOLE = bytes(16)  # the upload of what is in one piece
_MOST_DIMENSIONS = 64
_MOST_BYTES = 1 << 48  # of a tensor
_MAGIC = 0x31_4F_46_43  # "CFO1"

_BLOCK = struct.Struct("<II")
_HEADER = struct.Struct("<BBHQ16sIIQQQ")
_WANTED = struct.Struct("<H16sI")

# The place of a dtype in this list is its name on the wire, and on the disk of durable services: append only.
_DTYPES: tuple[torch.dtype, ...] = (
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
T = TypeVar("T")
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Header(NamedTuple):
    """One tensor, or one piece of it."""

    key: str
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    """of the whole tensor"""
    upload: bytes = WHOLE
    """what the pieces of one tensor have in common"""
    piece: int = 0
    pieces: int = 1
    at: int = 0
    """where its bytes begin in the tensor that travels along"""
    length: int = 0
    """of those bytes"""
    checksum: int = 0
    """the digest of those bytes, as a store takes it; 0: none was taken"""


class Wanted(NamedTuple):
    """A key, and which piece of it."""

    key: str
    upload: bytes = WHOLE
    """whose piece; WHOLE: of the tensor that is there now"""
    piece: int = 0


def pieces_of(nbytes: int) -> int:
    """Return how many requests a tensor takes."""
    return max(1, math.ceil(nbytes / PIECE))


def expect_key(key: object) -> bytes:
    """Return a key as UTF-8.

    Raises:
        TypeError: it is no str.
        ValueError: it is empty, too long, no UTF-8, or has a NUL.
    """
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {key!r}")
    encoded = key.encode()  # a UnicodeEncodeError is a ValueError
    if not 1 <= len(encoded) <= LONGEST_KEY:
        raise ValueError(f"a key has 1 to {LONGEST_KEY} bytes of UTF-8, not {len(encoded)}")
    if b"\0" in encoded:
        raise ValueError("a key has no NUL")
    return encoded


def code_of(dtype: torch.dtype) -> int:
    """Return what a dtype is called on the wire.

    Raises:
        TypeError: it cannot be sent.
    """
    code = _CODES.get(dtype)
    if code is None:
        raise TypeError(f"tensors of {dtype} cannot be sent")
    return code


def pack(headers: Sequence[Header]) -> bytes:
    """Return headers as a block."""
    parts = [_BLOCK.pack(_MAGIC, len(headers))]
    for h in headers:
        key = expect_key(h.key)
        parts += (
            _HEADER.pack(
                code_of(h.dtype),
                len(h.shape),
                len(key),
                h.nbytes,
                h.upload,
                h.piece,
                h.pieces,
                h.at,
                h.length,
                h.checksum,
            ),
            struct.pack(f"<{len(h.shape)}q", *h.shape),
            key,
        )
    return b"".join(parts)


def unpack(block: object, available: int) -> list[Header]:
    """Return the headers of a block that has come with so many bytes beside it.

    Raises:
        ValueError: it is no such block, or says what cannot be.
    """
    free = 0  # where the bytes of the next tensor may begin

    def header(block: bytes, at: int) -> tuple[Header, int]:
        nonlocal free
        header, end = _unpack_header(block, at)
        _expect_sense(header, available)
        if header.at < free:
            raise ValueError(f"key {header.key!r}: its bytes at {header.at} are another tensor's, too")
        free = header.at + header.length
        return header, end

    return _unpack_each(block, header)


def pack_wanted(wanted: Sequence[Wanted]) -> bytes:
    """Return what is wanted as a block."""
    parts = [_BLOCK.pack(_MAGIC, len(wanted))]
    for w in wanted:
        key = expect_key(w.key)
        parts += _WANTED.pack(len(key), w.upload, w.piece), key
    return b"".join(parts)


def unpack_wanted(block: object) -> list[Wanted]:
    """Return what such a block says.

    Raises:
        ValueError: it is no such block, or says what cannot be.
    """
    return _unpack_each(block, _unpack_wanted)


def _unpack_each(block: object, one: Callable[[bytes, int], tuple[T, int]]) -> list[T]:
    if not isinstance(block, bytes):
        raise ValueError(f"a block of headers is bytes, not {type(block).__name__}")
    if len(block) < _BLOCK.size:
        raise ValueError(f"a block of headers has at least {_BLOCK.size} bytes, not {len(block)}")
    magic, count = _BLOCK.unpack_from(block)
    if magic != _MAGIC or not 1 <= count <= MOST_HEADERS:
        raise ValueError(f"no block of 1 to {MOST_HEADERS} headers: it begins with {block[: _BLOCK.size].hex()}")
    found: list[T] = []
    end = _BLOCK.size
    for _ in range(count):
        each, end = one(block, end)
        found.append(each)
    if end != len(block):
        raise ValueError(f"{len(block) - end} bytes follow the headers")
    return found


def _unpack_key(block: bytes, at: int, length: int) -> str:
    if not 1 <= length <= LONGEST_KEY:
        raise ValueError(f"a key has 1 to {LONGEST_KEY} bytes of UTF-8, not {length}")
    if len(block) - at < length:
        raise ValueError("a header is cut off")
    key = block[at : at + length].decode()  # a UnicodeDecodeError is a ValueError
    if "\0" in key:
        raise ValueError("a key has no NUL")
    return key


def _unpack_wanted(block: bytes, at: int) -> tuple[Wanted, int]:
    if len(block) - at < _WANTED.size:
        raise ValueError("a header is cut off")
    key_length, upload, piece = _WANTED.unpack_from(block, at)
    at += _WANTED.size
    return Wanted(_unpack_key(block, at, key_length), upload, piece), at + key_length


def _unpack_header(block: bytes, at: int) -> tuple[Header, int]:
    if len(block) - at < _HEADER.size:
        raise ValueError("a header is cut off")
    code, dimensions, key_length, nbytes, upload, piece, pieces, place, length, checksum = _HEADER.unpack_from(
        block, at
    )
    at += _HEADER.size
    if code >= len(_DTYPES):
        raise ValueError(f"there is no dtype {code}")
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has at most {_MOST_DIMENSIONS} dimensions, not {dimensions}")
    if len(block) - at < 8 * dimensions:
        raise ValueError("a header is cut off")
    shape = struct.unpack_from(f"<{dimensions}q", block, at)
    at += 8 * dimensions
    key = _unpack_key(block, at, key_length)
    at += key_length
    return Header(key, _DTYPES[code], shape, nbytes, upload, piece, pieces, place, length, checksum), at


def _expect_sense(h: Header, available: int) -> None:
    if any(size < 0 for size in h.shape):
        raise ValueError(f"key {h.key!r}: the shape {h.shape} has a negative size")
    if h.nbytes > _MOST_BYTES:
        raise ValueError(f"key {h.key!r}: {h.nbytes} bytes are more than a tensor may have, {_MOST_BYTES}")
    if math.prod(h.shape) * h.dtype.itemsize != h.nbytes:
        raise ValueError(f"key {h.key!r}: a tensor of {h.dtype} of shape {h.shape} does not have {h.nbytes} bytes")
    if h.pieces != pieces_of(h.nbytes) or h.piece >= h.pieces or (h.upload == WHOLE and h.pieces > 1):
        raise ValueError(f"key {h.key!r}: {h.nbytes} bytes have no piece {h.piece} of {h.pieces}")
    if h.length != min(PIECE, h.nbytes - h.piece * PIECE):
        raise ValueError(f"key {h.key!r}: piece {h.piece} of {h.nbytes} bytes does not have {h.length}")
    if h.at % 64 or h.at > available or h.length > available - h.at:
        raise ValueError(f"key {h.key!r}: {h.length} bytes at {h.at} are not in the {available} that have come")


def piece_of(data: torch.Tensor, header: Header) -> torch.Tensor:
    """Return the bytes of the tensor that travels along that a header describes."""
    return data[header.at : header.at + header.length]


def view_of(data: torch.Tensor, header: Header) -> torch.Tensor:
    """Return the tensor of one piece that a header describes."""
    return piece_of(data, header).view(header.dtype).reshape(header.shape)


def listed_header(name: str, record: torch.Tensor) -> Header:
    """Return the header of a tensor in pieces, as the store has it under a name.

    Raises:
        ChecksumError: the record is damaged.
    """
    try:
        (header,) = unpack(memory(record).tobytes(), PIECE)
    except (ValueError, TypeError) as e:
        raise ChecksumError(f"what the store has under {name!r} is no list of a tensor's pieces: {e}") from e
    return header
