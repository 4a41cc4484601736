"""Messages of remote stores for tests: requests of a test's own, and parsed replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rpc_ext import _C
from rpc_ext.store._errors import error_from
from rpc_ext.store._wire import *  # noqa: F403
from rpc_ext.store._wire import FETCH, GET, PUT, KeyEntry, Put, StoreRequest


class Fetch(NamedTuple):
    """An entry of FETCH: a part of a tensor that an earlier GET has found."""

    sequence: int
    part: int


class Get(NamedTuple):
    """An entry of GET. It begins like ``KeyEntry``."""

    sequence: int
    after: int
    expires: float
    key: str
    needs_digest: bool = False  # of the bytes that are sent, also where the store keeps one


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

    errors: dict[int, BaseException]  # by index of the entry
    entries: list[Found | Part]  # of the entries without an error; empty for verbs without entries
    data: torch.Tensor


def parse_request(body: bytes, tensors: list[torch.Tensor]) -> StoreRequest:
    """Return a request with its entries as NamedTuples.

    Raises:
        ValueError: the message is no request.
    """
    found = StoreRequest(*_C.parse_request(body, tensors))
    make: Any = {GET: Get, PUT: Put, FETCH: Fetch}.get(found.verb, KeyEntry)
    return found._replace(entries=[make(*entry) for entry in found.entries])


def pack_request(
    verb: int, token: bytes, sent: float, oldest: int, service: str, entries: Sequence[Entry], data: torch.Tensor
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the body and the tensors of a request."""
    return _C.pack_request(verb, token, sent, oldest, service, entries, data)


def data_of(data: torch.Tensor, entry: Put | Found | Part) -> torch.Tensor:
    """Return the bytes of an entry."""
    begin = entry.at if entry.length else 0  # an empty entry has any offset, but views need an aligned one
    return data[begin : begin + entry.length]


def parse_answer(verb: int, count: int, body: bytes, tensors: list[torch.Tensor]) -> Answer:
    """Return the reply to a request with `count` entries.

    Raises:
        ValueError: the message is no such reply.
    """
    problems, entries, data = _C.parse_answer(verb, count, body, tensors)
    make = Found if verb == GET else Part
    return Answer({i: error_from(problem) for i, problem in problems}, [make(*entry) for entry in entries], data)
