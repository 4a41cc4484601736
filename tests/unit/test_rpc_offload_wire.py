"""Headers of offload requests: what is packed comes out again, and nothing else gets through."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpc_ext import _offload_wire as wire
from rpc_ext._offload_wire import PIECE, WHOLE, Header, Wanted, pack, pack_wanted, unpack, unpack_wanted
from soak import soak_count

pytestmark = pytest.mark.usefixtures("on_the_host")

SMALL = Header("layer 3/ü", torch.float32, (3, 2), 24, length=24)
LARGE = Header(
    "k", torch.bfloat16, (20 << 20,), 40 << 20, b"u" * 16, piece=2, pieces=3, at=64, length=8 << 20, checksum=7
)
ROOM = 64 + (8 << 20)


def test_headers_come_out_as_they_were() -> None:
    assert unpack(pack([SMALL, LARGE]), ROOM) == [SMALL, LARGE]
    wanted = [Wanted("a"), Wanted("b" * 1024, b"u" * 16, 5)]
    assert unpack_wanted(pack_wanted(wanted)) == wanted


@pytest.mark.parametrize("dtype", wire._DTYPES, ids=str)
def test_every_dtype_has_a_name(dtype: torch.dtype) -> None:
    header = Header("x", dtype, (5,), 5 * dtype.itemsize, length=5 * dtype.itemsize)
    assert unpack(pack([header]), 1000) == [header]


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        pack([Header("x", torch.quint8, (1,), 1, length=1)])


@given(
    st.lists(st.text(min_size=1, max_size=30).filter(lambda key: "\0" not in key), min_size=1, max_size=20),
    st.lists(st.integers(0, 50), max_size=5),
)
def test_any_keys_and_shapes(keys: list[str], shape: list[int]) -> None:
    nbytes = torch.Size(shape).numel() * 8
    headers = [Header(key, torch.int64, tuple(shape), nbytes, pieces=wire.pieces_of(nbytes)) for key in keys]
    headers = [h._replace(length=min(PIECE, nbytes), upload=WHOLE if h.pieces == 1 else b"u" * 16) for h in headers]
    step = -(-headers[0].length // 64) * 64
    headers = [h._replace(at=i * step) for i, h in enumerate(headers)]
    assert unpack(pack(headers), step * len(headers)) == headers


def test_tensors_that_share_bytes_are_refused() -> None:
    headers = [Header(key, torch.uint8, (100,), 100, length=100, at=at) for key, at in (("a", 0), ("b", 64))]
    with pytest.raises(ValueError, match="key 'b': its bytes at 64 are another tensor's, too"):
        unpack(pack(headers), 1000)


@pytest.mark.parametrize("key", ["", "a\0b", "ü" * 513, "\ud800"], ids=["empty", "NUL", "too long", "no UTF-8"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"key has|NUL|surrogates"):
        pack([SMALL._replace(key=key)])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": (-3, -2)}, "negative"),
        ({"shape": (3, 3)}, "does not have 24 bytes"),
        ({"nbytes": 1 << 60}, "more than a tensor may have"),
        ({"nbytes": 1 << 60, "shape": (1 << 58,)}, "more than a tensor may have"),
        ({"shape": (1 << 62, 1 << 62)}, "does not have"),
        ({"pieces": 2}, "no piece 0 of 2"),
        ({"piece": 1}, "no piece 1 of 1"),
        ({"length": 23}, "does not have 23"),
        ({"at": 8}, "are not in"),
        ({"at": 64}, "are not in"),
        ({"at": (1 << 64) - 64}, "are not in"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        unpack(pack([SMALL._replace(**changes)]), 24)


def test_pieces_need_an_upload() -> None:
    with pytest.raises(ValueError, match="no piece"):
        unpack(pack([LARGE._replace(upload=WHOLE)]), ROOM)


@pytest.mark.parametrize("block", [None, "text", b"", b"CFO1", b"\0" * 8, bytearray(100)], ids=repr)
def test_what_is_no_block_is_refused(block: object) -> None:
    for take in (lambda: unpack(block, 100), lambda: unpack_wanted(block)):
        with pytest.raises(ValueError, match="block"):
            take()


def test_a_block_has_few_headers_and_nothing_behind_them() -> None:
    with pytest.raises(ValueError, match="no block of 1 to"):
        unpack(pack([SMALL] * (wire.MOST_HEADERS + 1)), 24)
    with pytest.raises(ValueError, match="no block of 1 to"):
        unpack(pack([]), 24)
    with pytest.raises(ValueError, match="1 bytes follow"):
        unpack(pack([SMALL]) + b"x", 24)


def test_whatever_is_changed_on_the_way_is_refused_or_still_fits() -> None:
    """Nothing but a ValueError comes out, and no header that does not fit what has come."""
    numbers = random.Random(1)
    blocks = [pack([SMALL, LARGE]), pack_wanted([Wanted("a"), Wanted("b" * 20, b"u" * 16, 5)])]
    for _ in range(soak_count(20_000)):
        block = bytearray(numbers.choice(blocks))
        for _ in range(numbers.randrange(1, 4)):
            at = numbers.randrange(len(block))
            kind = numbers.randrange(3)
            if kind == 0:
                block[at] = numbers.randrange(256)
            elif kind == 1:
                del block[at : at + numbers.randrange(1, 20)]
            else:
                block[at:at] = struct.pack("<Q", numbers.getrandbits(64))
            if not block:
                break
        with contextlib.suppress(ValueError):
            for header in unpack(bytes(block), ROOM):
                assert 0 <= header.at <= header.at + header.length <= ROOM
                assert header.length <= PIECE
                assert torch.Size(header.shape).numel() * header.dtype.itemsize == header.nbytes
        with contextlib.suppress(ValueError):
            assert all(wanted.key for wanted in unpack_wanted(bytes(block)))
