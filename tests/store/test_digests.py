"""Digests of tensors: a store refuses bytes with another digest, and returns the digests of its reads."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from cudafuture.errors import ChecksumError, InvalidStateError, QuotaError
from cudafuture.io import Digest, Engine, digest, digests
from cudafuture.store import DiskStore
from support.child import Child
from support.patience import PATIENCE
from support.storing import LARGE, contents, get, make_numbered

pytestmark = pytest.mark.usefixtures("on_the_host")

LEAF = 1 << 16
SIZES = [0, 1, LEAF // 4 - 1, LEAF // 4, LEAF // 4 + 1, 40_000, LARGE]  # of elements of 4 bytes


def places(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint64)


# ---- what a digest is


@pytest.mark.parametrize("size", [0, 1, 64, LEAF - 1, LEAF, LEAF + 1, 5 * LEAF + 3])
def test_digest_combines_leaf_digests(size: int) -> None:
    data = make_numbered(size // 4 + 1).view(torch.uint8)[:size]
    content = bytes(data.tolist())
    leaves = [xxhash.xxh3_64_intdigest(content[at : at + LEAF]) for at in range(0, size, LEAF)]
    assert digest(data) == xxhash.xxh3_64_intdigest(b"".join(struct.pack("<Q", leaf) for leaf in leaves))


@pytest.mark.parametrize(
    "view",
    [lambda t: t.T, lambda t: t[:, 1:], lambda t: t[::2], lambda t: t.to(torch.complex64).conj(), lambda t: -t.imag],
    ids=["transposed", "columns", "every other", "conjugate", "negative"],
)
def test_digest_follows_element_order(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.randn(40, 30, dtype=torch.complex64))
    assert digest(tensor) == digest(tensor.resolve_conj().resolve_neg().contiguous())


def test_parts_have_own_digests() -> None:
    data = make_numbered(60_000).view(torch.uint8)
    parts = [(0, 0), (0, data.numel()), (5, 100), (7, LEAF + 1), (data.numel(), 0)]
    assert digests(data, parts) == [digest(data[at : at + length]) for at, length in parts]


def test_parts_have_own_seeds() -> None:
    data = make_numbered(60_000).view(torch.uint8)
    parts = Digest(data.numel())
    parts.add(0, data)
    whole, seeds = (0, data.numel()), [0, 7, 2**64 - 1]
    assert digests(data, [whole] * 3, seeds) == [parts.value(seed) for seed in seeds]
    with pytest.raises(ValueError, match="one seed for each part"):
        digests(data, [whole] * 2, [1])
    for seed in (-1, 2**64, None):
        with pytest.raises(TypeError):
            digests(data, [whole], [seed])  # type: ignore[list-item]


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 1_000_000])
def test_pieces_in_any_order_give_whole_digest(size: int) -> None:
    tensor = contents(size)
    begins = random.Random(size).sample(range(0, size, 3 * 65536), len(range(0, size, 3 * 65536)))
    total = Digest(size)
    for begin in begins:
        if size:
            with pytest.raises(InvalidStateError, match="were not added"):
                total.value()
        total.add(begin, tensor[begin : begin + 3 * 65536])
    assert total.value() == digest(tensor)


def test_pieces_need_whole_leaves() -> None:
    total = Digest(200_000)
    for at, size in ((1, 65536), (0, 65535), (65536, 134_465), (-65536, 65536), (131_072, 1000)):
        with pytest.raises(ValueError, match="not a multiple of 64 KiB"):
            total.add(at, contents(size))
    total.add(0, contents(200_000))
    assert total.value() == digest(contents(200_000))


@pytest.mark.parametrize(
    "part", [(0, 41), (40, 1), (41, 0), (1, 2**64 - 1), (2**63, 1), (-1, 2), (0, -1), (2**64, 0), (1.0, 2), (1,), None]
)
def test_parts_must_lie_in_tensor(part: Any) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"{part!r} is not an offset and a length within a tensor of 40 bytes")
    ):
        digests(make_numbered(10), [(0, 8), part])


def shrink(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Truncate the memory of a tensor, so that it does not hold all elements."""
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: torch.ones(4, 4).T[1:],
        lambda: torch.ones(4, dtype=torch.complex64).conj(),
        lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
        lambda: torch.ones(4, device="meta"),
        lambda: torch.ones(4).to_sparse(),
        lambda: torch._efficientzerotensor(4),
        lambda: shrink(torch.ones(1 << 20), 4),
        lambda: shrink(torch.ones(4), 0),
        lambda: [1],
    ],
    ids=["apart", "conjugate", "negative", "nowhere", "sparse", "zeros", "shrunk", "freed", "list"],
)
def test_parts_need_contiguous_bytes(tensor: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        digests(tensor(), [(0, 8)])


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (lambda: torch.empty(3, device="meta"), ValueError),
        (lambda: shrink(torch.ones(1 << 20), 4), ValueError),
        (lambda: torch._efficientzerotensor(4), TypeError),
        (lambda: torch.ones(4).to_sparse(), TypeError),
        (lambda: [1], TypeError),
    ],
    ids=["nowhere", "shrunk", "zeros", "sparse", "list"],
)
def test_digest_needs_host_memory(tensor: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        digest(tensor())


WITHOUT_XXHASH = """
import sys
sys.modules["xxhash"] = None
import torch, rpc_ext
from cudafuture.io import Engine, File, digest
with Engine("threads") as engine, File(sys.argv[1], "w", engine=engine) as file:
    say(file.write(torch.ones(3)).wait())
try: digest(torch.ones(3))
except ImportError as e: say("xxhash" in str(e))
"""


def test_digest_library_is_optional(tmp_path: Path) -> None:
    with Child(WITHOUT_XXHASH, str(tmp_path / "file")) as process:
        assert process.hear() == "12"
        assert process.hear() == "True"
        assert process.end() == 0


# ---- writing


@pytest.mark.parametrize("size", SIZES)
def test_store_refuses_wrong_digest(store: DiskStore, size: int) -> None:
    tensor = make_numbered(size)
    store.write("old", tensor).wait(timeout=PATIENCE)
    used = store.statistics().used
    for key in "old", "new":
        written = store.writev({key: make_numbered(size, 1)}, digests={key: digest(tensor) ^ (not size)})
        with pytest.raises(ChecksumError, match=f"'{key}'.*digest"):
            written.wait(timeout=PATIENCE)
        assert written.released is not None
        assert written.released.done()
    assert store.keys() == ["old"]
    assert torch.equal(get(store, "old"), tensor)
    assert store.statistics().used == used
    assert store.statistics().checksum_errors == 0  # of the disk


def test_refused_write_leaves_nothing_durable(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.write("old", make_numbered(1000)).wait(timeout=PATIENCE)
        for key in "old", "new":
            with pytest.raises(ChecksumError):
                store.writev({key: make_numbered(1000, 1)}, digests={key: 7}).wait(timeout=PATIENCE)
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        assert store.keys() == ["old"]
        assert torch.equal(get(store, "old"), make_numbered(1000))


def test_write_without_room_is_reported(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, capacity=1 << 20) as store:
        told = torch.ones(2, dtype=torch.bool)
        written = store.writev({"a": make_numbered(1000), "b": make_numbered(1 << 20)}, written=told)
        assert isinstance(written.exception(timeout=PATIENCE), QuotaError)
        assert told.tolist() == [key in store for key in ("a", "b")]


# ---- reading


WRONG: dict[str, Callable[[torch.dtype], Any]] = {
    "too many": lambda dtype: torch.zeros(3, dtype=dtype),
    "none": lambda dtype: torch.zeros(0, dtype=dtype),
    "of another dtype": lambda dtype: torch.zeros(2, dtype=torch.int64),
    "nowhere": lambda dtype: torch.zeros(2, dtype=dtype, device="meta"),
    "apart": lambda dtype: torch.zeros(4, dtype=dtype)[::2],
    "shrunk": lambda dtype: shrink(torch.zeros(2, dtype=dtype), 1),
    "freed": lambda dtype: shrink(torch.zeros(2, dtype=dtype), 0),
    "a list": lambda dtype: [0, 0],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_output_tensors_need_fitting_shape(store: DiskStore, wrong: Callable[[torch.dtype], Any]) -> None:
    tensors = {"x": make_numbered(3), "y": make_numbered(4)}
    with pytest.raises((TypeError, ValueError), match=r"tensor|Tensor"):
        store.writev(tensors, written=wrong(torch.bool))
    assert store.keys() == []
    store.writev(tensors).wait(timeout=PATIENCE)
    with pytest.raises((TypeError, ValueError), match=r"tensor|Tensor"):
        store.readv(["x", "y"], digests=wrong(torch.uint64))


def test_output_tensors_live_until_the_end(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine) as store:
        tensors = {f"{i}": make_numbered(100, i) for i in range(3000)}
        told = torch.zeros(len(tensors), dtype=torch.bool)
        written = store.writev(tensors, written=told)
        told.set_(torch.zeros(1, dtype=torch.bool))  # type: ignore[call-overload]
        written.wait(timeout=PATIENCE)
        found = places(len(tensors))
        read = store.readv(tensors, digests=found)
        found.set_(places(1))  # type: ignore[call-overload]
        assert len(read.wait(timeout=PATIENCE)) == len(tensors)


def test_digest_takes_each_byte_once() -> None:
    tensor = contents(3 << 16)
    parts = Digest(tensor.nbytes)
    parts.add(0, tensor[: 2 << 16])
    for begin, end in ((0, 1), (1, 2), (1, 3)):
        with pytest.raises(ValueError, match="added before"):
            parts.add(begin << 16, tensor[begin << 16 : end << 16])
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        parts.add(2 << 16, [1])  # type: ignore[arg-type]
    parts.add(2 << 16, tensor[2 << 16 :])
    assert parts.value() == digest(tensor)
