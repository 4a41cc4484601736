"""Digests that travel with tensors: a store refuses bytes that have another, and tells that of what it reads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from cudafuture.errors import ChecksumError, NotFoundError
from cudafuture.storage import Engine, Offloader, digest, digests
from unit.storing import LARGE, PATIENCE, get, numbered

pytestmark = pytest.mark.usefixtures("on_the_host")

LEAF = 1 << 16
SIZES = [0, 1, LEAF // 4 - 1, LEAF // 4, LEAF // 4 + 1, 40_000, LARGE]  # of elements of 4 bytes
KINDS: dict[str, dict[str, Any]] = {
    "ephemeral": {},
    "durable": {"durable": True},
    "cached": {"direct": False},
    "unchecked": {"checksum": False},
}


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def store(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Iterator[Offloader]:
    with Offloader(tmp_path / "store", engine=engine, **request.param) as store:
        yield store


def places(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint64)


# ---- what a digest is


@pytest.mark.parametrize("size", [0, 1, 64, LEAF - 1, LEAF, LEAF + 1, 5 * LEAF + 3])
def test_it_is_that_of_the_digests_of_the_leaves(size: int) -> None:
    data = numbered(size // 4 + 1).view(torch.uint8)[:size]
    content = bytes(data.tolist())
    leaves = [xxhash.xxh3_64_intdigest(content[at : at + LEAF]) for at in range(0, size, LEAF)]
    assert digest(data) == xxhash.xxh3_64_intdigest(b"".join(struct.pack("<Q", leaf) for leaf in leaves))


@pytest.mark.parametrize(
    "view",
    [lambda t: t.T, lambda t: t[:, 1:], lambda t: t[::2], lambda t: t.to(torch.complex64).conj(), lambda t: -t.imag],
    ids=["transposed", "columns", "every other", "conjugate", "negative"],
)
def test_it_is_that_of_the_elements_in_order(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.randn(40, 30, dtype=torch.complex64))
    assert digest(tensor) == digest(tensor.resolve_conj().resolve_neg().contiguous())


def test_parts_have_their_own() -> None:
    data = numbered(60_000).view(torch.uint8)
    parts = [(0, 0), (0, data.numel()), (5, 100), (7, LEAF + 1), (data.numel(), 0)]
    assert digests(data, parts) == [digest(data[at : at + length]) for at, length in parts]


@pytest.mark.parametrize("part", [(0, 41), (40, 1), (41, 0), (1, 2**64 - 1), (2**63, 1)])
def test_a_part_lies_in_its_tensor(part: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not in the tensor"):
        digests(numbered(10), [(0, 8), part])


def test_parts_are_of_bytes_that_lie_together() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        digests(torch.ones(4, 4).T[1:], [(0, 8)])


def test_the_bytes_of_a_device_are_not_at_hand() -> None:
    with pytest.raises(ValueError, match="on meta"):
        digest(torch.empty(3, device="meta"))


# ---- writing


@pytest.mark.parametrize("size", SIZES)
def test_what_has_the_digest_that_it_must_have_is_written(store: Offloader, size: int) -> None:
    tensor = numbered(size)
    assert store.writev({"x": tensor}, digests={"x": digest(tensor)}).wait(timeout=PATIENCE) == tensor.nbytes
    assert torch.equal(get(store, "x"), tensor)


@pytest.mark.parametrize("size", SIZES)
def test_what_has_another_is_not(store: Offloader, size: int) -> None:
    tensor = numbered(size)
    store.write("old", tensor).wait(timeout=PATIENCE)
    used = store.statistics().used
    for key in "old", "new":
        written = store.writev({key: numbered(size, 1)}, digests={key: digest(tensor) ^ (not size)})
        with pytest.raises(ChecksumError, match=f"'{key}'.*digest"):
            written.wait(timeout=PATIENCE)
        assert written.released.done()
    assert store.keys() == ["old"]
    assert torch.equal(get(store, "old"), tensor)
    assert store.statistics().used == used
    assert store.statistics().checksum_errors == 0  # of the disk


def test_the_others_of_a_call_are_written(store: Offloader) -> None:
    tensors = {f"{i}": numbered(size, i) for i, size in enumerate([*SIZES, 100, 200, 300])}
    expected = {key: digest(tensor) for key, tensor in tensors.items()}
    wrong = ["0", "3", "8"]
    store.writev(tensors, digests=expected).wait(timeout=PATIENCE)
    changed = {key: tensor.neg().sub(1) if tensor.numel() else tensor for key, tensor in tensors.items()}
    expected = {key: digest(tensor) ^ (key in wrong) for key, tensor in changed.items() if key != "1"}
    with pytest.raises(ChecksumError):
        store.writev(changed, digests=expected).wait(timeout=PATIENCE)
    for key in tensors:
        assert torch.equal(get(store, key), tensors[key] if key in wrong else changed[key]), key


def test_a_durable_store_has_nothing_of_what_it_has_refused(engine: Engine, tmp_path: Path) -> None:
    with Offloader(tmp_path, engine=engine, durable=True) as store:
        store.write("old", numbered(1000)).wait(timeout=PATIENCE)
        for key in "old", "new":
            with pytest.raises(ChecksumError):
                store.writev({key: numbered(1000, 1)}, digests={key: 7}).wait(timeout=PATIENCE)
    with Offloader(tmp_path, engine=engine, durable=True) as store:
        assert store.keys() == ["old"]
        assert torch.equal(get(store, "old"), numbered(1000))


@pytest.mark.parametrize("wrong", [-1, 1 << 64, "7", 1.5])
def test_a_digest_is_a_number_of_64_bits(store: Offloader, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        store.writev({"x": numbered(3)}, digests={"x": wrong})
    assert store.keys() == []


# ---- reading


def test_reads_tell_the_digests_of_what_they_have_read(store: Offloader) -> None:
    tensors = {f"{i}": numbered(size, i) for i, size in enumerate([*SIZES, 100, 200, 300])}
    store.writev(tensors).wait(timeout=PATIENCE)
    keys = [*tensors, "2"]
    told = places(len(keys))
    got = store.readv(keys, digests=told).wait(timeout=PATIENCE)
    assert told.tolist() == [digest(tensor) for tensor in got] == [digest(tensors[key]) for key in keys]


def test_they_are_those_of_the_elements_in_order(store: Offloader) -> None:
    tensor = numbered(6000).reshape(60, 100)
    store.write("x", tensor.T).wait(timeout=PATIENCE)
    told, out = places(1), torch.zeros(60, 100).T
    store.readv(["x"], [out], digests=told).wait(timeout=PATIENCE)
    assert told.tolist() == [digest(tensor.T)] == [digest(out)]


@pytest.mark.parametrize(
    "wrong",
    [places(2), places(0), torch.zeros(1, dtype=torch.int64), places(1).to("meta"), places(4)[::2], [0]],
    ids=["too many", "none", "signed", "nowhere", "apart", "list"],
)
def test_what_digests_go_into_is_checked_before_anything_is_read(store: Offloader, wrong: Any) -> None:
    store.writev({"x": numbered(3)}).wait(timeout=PATIENCE)
    keys = ["x", "x"] if isinstance(wrong, torch.Tensor) and wrong.stride() == (2,) else ["x"]
    with pytest.raises((TypeError, ValueError), match="digests go into"):
        store.readv(keys, digests=wrong)


def test_a_key_that_is_not_there_has_none(store: Offloader) -> None:
    told = places(1)
    with pytest.raises(NotFoundError):
        store.readv(["x"], digests=told).wait(timeout=PATIENCE)
    assert told.tolist() == [0]
