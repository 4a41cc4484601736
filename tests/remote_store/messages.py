"""Messages of remote stores for tests: a second implementation of the format, to check the native one.

``rpc_ext/_C/store/wire/message.h`` describes the format. Packing checks nothing, so that a test can pack any message.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cudafuture import errors

VERSION = 5
PUT, GET, DELETE, FETCH, ABANDON = 1, 2, 3, 4, 5
TOKEN = 16  # bytes of the token that identifies a session
PART = 16 << 20  # most bytes of data in one message; larger tensors are sent in parts of this size
PACK = 4 << 20  # most bytes of small tensors in one message
INLINE = 16 << 10  # most bytes of data at the end of the body; more are a tensor beside it
LINE = 64  # alignment of the tensors of one message, in bytes
MOST_ENTRIES = 1024

DTYPES = (  # by code
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

ERRORS: tuple[type[Exception], ...] = (  # by kind, from 1 on
    errors.StorageError,
    errors.ChecksumError,
    errors.QuotaError,
    errors.NotFoundError,
    errors.InvalidStateError,
    TimeoutError,
    BlockingIOError,
    ValueError,
    MemoryError,
    errors.AuthenticationError,
    RuntimeError,
)

HEAD = struct.Struct(f"<BB{TOKEN}sdQHB")  # version, verb, token, sent, oldest, entries, bytes of the service's name
OPERATION = struct.Struct("<QQdH")  # sequence, after, expiry, bytes of the key
TENSOR = struct.Struct("<BBQ")  # dtype, dimensions, bytes
PLACE = struct.Struct("<IIIQ")  # part, offset, length, digest
FETCHED = struct.Struct("<QI")  # sequence, part
ANSWER = struct.Struct("<BHH")  # version, entries, errors
ERROR = struct.Struct("<HBiQQQ")  # index, kind, errno, offset, wanted, got
KEPT = struct.Struct("<BQQ")  # 1 if the store has a digest, the digest, its seed

Packed = tuple[bytes, list[torch.Tensor]]


class KeyEntry(NamedTuple):
    """An operation on a key: an entry of DELETE and ABANDON, or of GET without ``needs_digest``."""

    sequence: int  # number of the client's operation
    after: int  # number of the client's previous operation on the same key; 0: none
    expires: float  # on the client's monotonic clock; 0: never
    key: str


class Get(NamedTuple):
    """An entry of GET. It begins like ``KeyEntry``."""

    sequence: int
    after: int
    expires: float
    key: str
    needs_digest: bool = False  # of the bytes that are sent, also where the store keeps one


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


class Fetch(NamedTuple):
    """An entry of FETCH: a part of a tensor that an earlier GET has found."""

    sequence: int
    part: int


class StoreRequest(NamedTuple):
    """A request, parsed by the service."""

    verb: int
    token: bytes
    sent: float  # on the client's monotonic clock
    oldest: int  # the lowest sequence number of an operation that is not done at the client
    service: str
    entries: list[Any]
    data: torch.Tensor


class Found(NamedTuple):
    """An entry of the answer to GET."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    at: int
    length: int  # bytes of the first part in the data; 0 for a non-empty tensor: FETCH sends all parts
    digest: int | None  # of those bytes; None: the store keeps that of the tensor
    kept: tuple[int, int] | None  # digest of the whole tensor in the store, and its seed


class Part(NamedTuple):
    """An entry of the answer to FETCH."""

    at: int
    length: int
    digest: int | None


Entry = KeyEntry | Get | Put | Fetch


class Answer(NamedTuple):
    """A reply, parsed by the client."""

    errors: dict[int, Exception]  # by index of the entry
    entries: list[Found | Part]  # of the entries without an error; empty for verbs without entries
    data: torch.Tensor


def data_of(data: torch.Tensor, entry: Put | Found | Part) -> torch.Tensor:
    """Return the bytes of an entry."""
    begin = entry.at if entry.length else 0  # an empty entry has any offset, but views need an aligned one
    return data[begin : begin + entry.length]


# ---- packing


def pack_request(
    verb: int, token: bytes, sent: float, oldest: int, service: str, entries: Sequence[Entry], data: torch.Tensor
) -> Packed:
    """Return the body and the tensors of a request. A wrong token is cut off, or filled with zeros."""
    name = service.encode()
    body = HEAD.pack(VERSION, verb, token, sent, oldest, len(entries), len(name)) + name
    return _with_data(body + b"".join(_packed_entry(verb, entry) for entry in entries), data)


def pack_answer(
    verb: int,
    count: int,
    errors: Mapping[int, BaseException] | None = None,
    entries: Sequence[Found | Part] = (),
    data: torch.Tensor | None = None,
) -> Packed:
    """Return the body and the tensors of the reply to a request with `count` entries."""
    errors = errors or {}
    body = ANSWER.pack(VERSION, count, len(errors))
    body += b"".join(_packed_error(index, error) for index, error in errors.items())
    for entry in entries:
        if isinstance(entry, Found):
            body += _packed_tensor(entry.dtype, entry.shape, entry.nbytes)
        body += PLACE.pack(0, entry.at, entry.length, entry.digest or 0) + bytes([entry.digest is not None])
        if isinstance(entry, Found):
            body += KEPT.pack(entry.kept is not None, *(entry.kept or (0, 0)))
    return _with_data(body, torch.empty(0, dtype=torch.uint8) if data is None else data)


def _packed_entry(verb: int, entry: Entry) -> bytes:
    if isinstance(entry, Fetch):
        return FETCHED.pack(*entry)
    key = entry.key.encode()
    packed = OPERATION.pack(*entry[:3], len(key)) + key
    if verb == GET:
        packed += bytes([isinstance(entry, Get) and entry.needs_digest])
    if isinstance(entry, Put):
        packed += _packed_tensor(entry.dtype, entry.shape, entry.nbytes)
        packed += PLACE.pack(entry.part, entry.at, entry.length, entry.digest)
    return packed


def _packed_tensor(dtype: torch.dtype, shape: tuple[int, ...], nbytes: int) -> bytes:
    return TENSOR.pack(DTYPES.index(dtype), len(shape), nbytes) + struct.pack(f"<{len(shape)}q", *shape)


def _packed_error(index: int, error: BaseException) -> bytes:
    found = next((each for each in type(error).__mro__ if each in ERRORS), RuntimeError)
    numbers, path = (0, 0, 0, 0), ""
    if isinstance(error, errors.StorageError):
        numbers, path = (error.errno or 0, error.offset, error.wanted, error.got), error.path
    texts = [text.encode() for text in (str(error), path)]
    packed = [struct.pack("<H", len(text)) + text for text in texts]
    return ERROR.pack(index, 1 + ERRORS.index(found), *numbers) + b"".join(packed)


def _with_data(body: bytes, data: torch.Tensor) -> Packed:
    return (body, [data]) if data.nbytes > INLINE else (body + data.numpy().tobytes(), [])


# ---- parsing


def parse_request(body: bytes, tensors: list[torch.Tensor]) -> StoreRequest:
    """Return a request.

    Raises:
        ValueError: the message is no request.
    """
    reader = _Reader(body)
    version, verb, token, sent, oldest, count, length = reader.numbers(HEAD)
    if version != VERSION or verb not in (PUT, GET, DELETE, FETCH, ABANDON):
        raise ValueError(f"version {version}, verb {verb}: there is no such request")
    service = reader.take(length).decode()
    entries = [reader.entry(verb) for _ in range(count)]
    return StoreRequest(verb, token, sent, oldest, service, entries, reader.data(tensors))


def parse_answer(verb: int, count: int, body: bytes, tensors: list[torch.Tensor]) -> Answer:
    """Return the reply to a request with `count` entries.

    Raises:
        ValueError: the message is no such reply.
    """
    reader = _Reader(body)
    version, found, failed = reader.numbers(ANSWER)
    if (version, found) != (VERSION, count):
        raise ValueError(f"version {version}, {found} entries: this is no answer to a request of {count}")
    by_index = dict(reader.error() for _ in range(failed))
    make: Any = {GET: reader.found, FETCH: reader.part}.get(verb)
    entries = [make() for _ in range(count - failed)] if make else []
    return Answer(by_index, entries, reader.data(tensors))


class _Reader:
    """A reader of one message, from its begin to its end."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def take(self, length: int) -> bytes:
        found = self._body[self._at : self._at + length]
        if len(found) != length:
            raise ValueError(f"the message of {len(self._body)} bytes is cut off at {self._at}")
        self._at += length
        return found

    def numbers(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))

    def text(self) -> str:
        (length,) = struct.unpack("<H", self.take(2))
        return self.take(length).decode()

    def tensor(self) -> tuple[torch.dtype, tuple[int, ...], int]:
        code, dimensions, nbytes = self.numbers(TENSOR)
        return DTYPES[code], struct.unpack(f"<{dimensions}q", self.take(8 * dimensions)), nbytes

    def entry(self, verb: int) -> Entry:
        if verb == FETCH:
            return Fetch(*self.numbers(FETCHED))
        sequence, after, expires, length = self.numbers(OPERATION)
        operation = KeyEntry(sequence, after, expires, self.take(length).decode())
        if verb == GET:
            return Get(*operation, needs_digest=self.take(1) != b"\0")
        return Put(*operation, *self.tensor(), *self.numbers(PLACE)) if verb == PUT else operation

    def part(self) -> Part:
        _, at, length, digest = self.numbers(PLACE)
        return Part(at, length, None if self.take(1) == b"\0" else digest)

    def found(self) -> Found:
        tensor, part = self.tensor(), self.part()
        has_kept, kept, seed = self.numbers(KEPT)
        return Found(*tensor, *part, (kept, seed) if has_kept else None)

    def error(self) -> tuple[int, Exception]:
        index, kind, code, offset, wanted, got = self.numbers(ERROR)
        message, path, found = self.text(), self.text(), ERRORS[kind - 1]
        if issubclass(found, errors.StorageError):
            return index, found(message, errno=code or None, path=path, offset=offset, wanted=wanted, got=got)
        return index, found(message)

    def data(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        rest = self.take(len(self._body) - self._at)
        if rest and tensors:
            raise ValueError(f"{len(rest)} bytes follow the entries, and a tensor travels beside them")
        if tensors:
            return tensors[0]
        found = torch.empty(len(rest), dtype=torch.uint8)
        found.numpy()[:] = bytearray(rest)
        return found
