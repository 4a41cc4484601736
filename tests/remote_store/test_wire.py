"""The format of store messages: parsing restores packed messages and refuses all others."""

from __future__ import annotations

import contextlib
import random
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cudafuture.errors import AuthenticationError, NotFoundError, StorageError, TensorError
from remote_store import messages as wire
from remote_store.messages import Fetch, Found, Get, Part, pack_request, parse_answer, parse_request
from rpc_ext import _C
from rpc_ext.store._errors import error_from, problem_of
from rpc_ext.store._wire import PIECE, KeyEntry, Put, pack_answer
from support.soak import soak_count

TOKEN = bytes(range(wire.TOKEN))
NONE = torch.empty(0, dtype=torch.uint8)
SMALL = Put(7, 3, 2.5, "layer 3/ü", torch.float32, (3, 2), 24, 0, 0, 24, 5)
LAST = Put(9, 0, 0.0, "k", torch.bfloat16, (20 << 20,), 40 << 20, 2, 0, 8 << 20, 7)


def data(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes, dtype=torch.uint8)


def request(verb: int, entries: list[Any], sent: torch.Tensor = NONE) -> wire.StoreRequest:
    body, tensors = pack_request(verb, TOKEN, 1.5, 4, "store", entries, sent)
    assert _C.service_of(body) == "store"
    return parse_request(body, tensors)


@pytest.mark.parametrize(
    ("verb", "entries", "sent"),
    [
        (wire.PUT, [SMALL], data(24)),
        (wire.PUT, [SMALL, SMALL._replace(key="b", at=64)], data(88)),
        (wire.PUT, [LAST], torch.zeros(8 << 20, dtype=torch.uint8)),
        (wire.GET, [Get(1, 0, 0.0, "a"), Get(2, 1, 3.0, "b" * 1000, True)], NONE),
        (wire.DELETE, [KeyEntry(1, 0, 0.0, "a")], NONE),
        (wire.ABANDON, [KeyEntry(1, 0, 0.0, "a")], NONE),
        (wire.FETCH, [Fetch(1, 2), Fetch(1, 3)], NONE),
    ],
    ids=["put", "puts", "part", "get", "delete", "abandon", "fetch"],
)
def test_parsing_restores_request(verb: int, entries: list[Any], sent: torch.Tensor) -> None:
    found = request(verb, entries, sent)
    assert found[:6] == (verb, TOKEN, 1.5, 4, "store", entries)
    assert torch.equal(found.data, sent)


def test_parsing_restores_answer() -> None:
    found = [
        Found(torch.float32, (6,), 24, 0, 24, None, (1, 2)),
        Found(torch.uint8, (40 << 20,), 40 << 20, 64, 0, 9, None),
        Found(torch.int8, (3,), 3, 64, 3, 1, None),
    ]
    error = NotFoundError("there is no key 'x'")
    answer = parse_answer(wire.GET, 4, *pack_answer(wire.GET, 4, [(1, problem_of(error))], found, data(67)))
    assert answer.entries == found
    assert [(i, type(found), str(found)) for i, found in answer.errors.items()] == [(1, NotFoundError, str(error))]
    assert torch.equal(wire.data_of(answer.data, found[2]), data(67)[64:])
    parts = [Part(0, 10, None), Part(64, 3, 2)]
    assert parse_answer(wire.FETCH, 2, *pack_answer(wire.FETCH, 2, [], parts, data(67))).entries == parts
    assert parse_answer(wire.PUT, 2, *pack_answer(wire.PUT, 2))[:2] == ({}, [])


def test_empty_entry_may_have_any_offset() -> None:
    empty = SMALL._replace(shape=(0, 3), nbytes=0, length=0, at=7)
    found = request(wire.PUT, [SMALL, empty._replace(key="b")], data(24))
    assert wire.data_of(found.data, found.entries[1]).view(torch.float32).reshape(0, 3).numel() == 0


def test_large_data_travels_as_tensor() -> None:
    for nbytes, count in ((wire.INLINE, 0), (wire.INLINE + 1, 1)):
        entry = SMALL._replace(dtype=torch.uint8, shape=(nbytes,), nbytes=nbytes, length=nbytes)
        body, tensors = pack_request(wire.PUT, TOKEN, 0.0, 0, "store", [entry], torch.zeros(nbytes, dtype=torch.uint8))
        assert len(tensors) == count
        assert parse_request(body, tensors).data.numel() == nbytes


@pytest.mark.parametrize("dtype", wire.DTYPES, ids=str)
def test_every_dtype_has_code(dtype: torch.dtype) -> None:
    entry = SMALL._replace(dtype=dtype, shape=(5,), nbytes=5 * dtype.itemsize, length=5 * dtype.itemsize)
    assert request(wire.PUT, [entry], data(5 * dtype.itemsize)).entries == [entry]


def test_dtype_without_code_is_refused() -> None:
    with pytest.raises(TensorError, match="cannot be sent"):
        wire.expect_sendable(torch.quint8, 1)
    with pytest.raises(ValueError, match="at most 64 dimensions"):
        wire.expect_sendable(torch.int8, 65)


@given(
    st.lists(
        st.text(min_size=1, max_size=30).filter(lambda key: "\0" not in key), min_size=1, max_size=20, unique=True
    ),
    st.lists(st.integers(0, 5), max_size=5),
)
def test_parsing_restores_keys_and_shapes(keys: set[str], shape: list[int]) -> None:
    nbytes = torch.Size(shape).numel() * 8
    step = -(-nbytes // wire.LINE) * wire.LINE
    entries = [
        Put(i + 1, 0, 0.0, key, torch.int64, tuple(shape), nbytes, 0, i * step, nbytes, 0) for i, key in enumerate(keys)
    ]
    sent = torch.zeros(step * len(keys), dtype=torch.uint8)
    assert request(wire.PUT, entries, sent).entries == entries


@pytest.mark.parametrize("key", ["", "a\0b", "ü" * 501, "\ud800"], ids=["empty", "NUL", "too long", "no UTF-8"])
def test_invalid_keys_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"key has|NUL|surrogates"):
        wire.expect_key(key)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": (-3, -2)}, "does not have 24 bytes"),
        ({"shape": (3, 3)}, "does not have 24 bytes"),
        ({"nbytes": 1 << 60}, "no such tensor"),
        ({"shape": (1 << 62, 1 << 62)}, "does not have"),
        ({"part": 1}, "part 1 of 24 bytes"),
        ({"length": 23}, "does not have 23"),
        ({"at": 8}, "are not in"),
        ({"at": 64}, "are not in"),
        ({"at": (1 << 32) - 64}, "are not in"),
        ({"sequence": 0}, "there is none"),
        ({"expires": float("nan")}, "there is none"),
        ({"expires": float("inf")}, "there is none"),
        ({"key": ""}, "a key has"),
        ({"key": "ü" * 501}, "a key has"),
    ],
    ids=str,
)
def test_invalid_entries_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        request(wire.PUT, [SMALL._replace(**changes)], data(24))


@pytest.mark.parametrize(
    ("entries", "nbytes", "says"),
    [
        ([SMALL, SMALL._replace(key="b")], 24, "or another's"),
        ([SMALL, SMALL._replace(at=64)], 88, "each key once"),
        ([SMALL, LAST._replace(at=64)], 64 + (8 << 20), "travels alone"),
        ([LAST, SMALL._replace(at=8 << 20)], 24 + (8 << 20), "travels alone"),
        ([], 0, "no such request"),
        ([SMALL._replace(key=f"{i}", at=64 * i) for i in range(wire.MOST_ENTRIES + 1)], 64 * 1025, "no such request"),
        ([LAST._replace(part=0, length=PIECE)], PIECE + 1, "up to 16777216 bytes"),
    ],
    ids=["shared bytes", "a key twice", "whole and part", "part and whole", "none", "too many", "too much"],
)
def test_inconsistent_entries_are_refused(entries: list[Any], nbytes: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        request(wire.PUT, entries, torch.zeros(nbytes, dtype=torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(24),
        torch.zeros(4, 6, dtype=torch.uint8),
        torch.zeros(24, dtype=torch.uint8).to_sparse(),
        torch.zeros(24, dtype=torch.uint8, device="meta"),
    ],
    ids=["floats", "two dimensions", "sparse", "no memory"],
)
def test_data_must_be_host_bytes(tensor: torch.Tensor) -> None:
    body, _ = pack_request(wire.PUT, TOKEN, 0.0, 0, "store", [SMALL], NONE)
    with pytest.raises(ValueError, match="the data of a message"):
        parse_request(body, [tensor])


def test_unexpected_data_is_refused() -> None:
    with pytest.raises(ValueError, match="24 bytes travel with"):
        request(wire.GET, [KeyEntry(1, 0, 0.0, "a")], data(24))


def test_corrupted_message_parses_or_is_refused() -> None:
    """Parsing raises only ValueError, and returns no entry beyond the data."""
    numbers = random.Random(1)
    sent = data(88)
    whole = [
        pack_request(wire.PUT, TOKEN, 1.0, 0, "store", [SMALL, SMALL._replace(key="b", at=64)], sent)[0],
        pack_request(wire.GET, TOKEN, 1.0, 0, "store", [KeyEntry(1, 0, 0.0, "a"), KeyEntry(2, 0, 0.0, "b" * 20)], NONE)[
            0
        ],
        pack_request(wire.FETCH, TOKEN, 1.0, 0, "store", [Fetch(1, 2)], NONE)[0],
    ]
    for _ in range(soak_count(20_000)):
        body = bytearray(numbers.choice(whole))
        for _ in range(numbers.randrange(1, 4)):
            at = numbers.randrange(len(body))
            kind = numbers.randrange(3)
            if kind == 0:
                body[at] = numbers.randrange(256)
            elif kind == 1:
                del body[at : at + numbers.randrange(1, 20)]
            else:
                body[at:at] = struct.pack("<Q", numbers.getrandbits(64))
            if not body:
                break
        with contextlib.suppress(ValueError):
            found = parse_request(bytes(body), [])
            for entry in found.entries:
                if isinstance(entry, Put):
                    assert 0 <= entry.at <= entry.at + entry.length <= found.data.numel()
                    assert torch.Size(entry.shape).numel() * entry.dtype.itemsize == entry.nbytes


def test_errors_keep_class_and_numbers() -> None:
    error = StorageError("the disk is full", errno=28, path="/a/slab", offset=4096, wanted=10, got=3)
    found = error_from(problem_of(error))
    assert type(found) is StorageError
    assert (str(found), vars(found)) == (str(error), vars(error))
    assert isinstance(found, StorageError)
    assert found.errno == 28
    for other in (
        AuthenticationError("no session"),
        TimeoutError("late"),
        BlockingIOError("full"),
        ValueError("bad"),
        MemoryError("none"),
    ):
        assert (type(error_from(problem_of(other))), str(other)) == (type(other), str(error_from(problem_of(other))))
    body, _ = pack_answer(wire.PUT, 1, [(0, problem_of(StorageError("no \udcff", path="/\udcff")))])
    assert str(parse_answer(wire.PUT, 1, body, []).errors[0]) == "no \\udcff"
    assert str(error_from(problem_of(ZeroDivisionError("1/0")))) == "ZeroDivisionError: 1/0"


def test_corrupted_answer_parses_or_is_refused() -> None:
    numbers = random.Random(2)
    found = [Found(torch.float32, (6,), 24, 0, 24, 9, (1, 2)), Found(torch.int8, (3,), 3, 64, 3, 1, None)]
    whole, _ = pack_answer(wire.GET, 3, [(1, problem_of(ValueError("no")))], found, data(67))
    for _ in range(soak_count(20_000)):
        body = bytearray(whole)
        for _ in range(numbers.randrange(1, 4)):
            body[numbers.randrange(len(body))] = numbers.randrange(256)
        with contextlib.suppress(ValueError):
            answer = parse_answer(wire.GET, 3, bytes(body), [])
            assert len(answer.errors) + len(answer.entries) == 3
            for entry in answer.entries:
                assert entry.length == 0 or entry.at + entry.length <= answer.data.numel()


def test_answer_to_another_request_is_refused() -> None:
    body, tensors = pack_answer(wire.FETCH, 2, [], [Part(0, 10, 1), Part(64, 3, 1)], data(67))
    for verb, count in ((wire.FETCH, 3), (wire.GET, 2), (wire.PUT, 2)):
        with pytest.raises(ValueError, match=r"no answer|cut off|no such tensor|does not have|has none"):
            parse_answer(verb, count, body, tensors)
