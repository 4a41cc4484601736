"""The store of tensors by key: a read returns one written version of a tensor, never a mixture of two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, gather, wait
from cudafuture.errors import NotFoundError, QuotaError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from support.patience import PATIENCE
from support.storing import KINDS, LARGE, SMALL, get, make_numbered, open_held_store

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.fixture
def plain(engine: Engine, tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path / "store", engine=engine) as store:
        yield store


# ---- small and large


def test_small_tensors_share_transfers(plain: DiskStore) -> None:
    tensors = {f"{i}": make_numbered(1024, i) for i in range(640)}
    plain.writev(tensors).wait(timeout=PATIENCE)
    assert plain.statistics().transfers <= 11  # of 256 KiB each
    plain.readv(list(tensors)).wait(timeout=PATIENCE)
    assert plain.statistics().transfers <= 23


def test_busy_disk_batches_small_writes(tmp_path: Path) -> None:
    engine, store = open_held_store(tmp_path)
    with engine, store:
        tensors = [make_numbered(16, i) for i in range(1000)]
        writes = [store.write(f"{i}", tensor) for i, tensor in enumerate(tensors)]
        engine._native.release_held()
        assert gather(*writes).wait(timeout=PATIENCE) == [64] * 1000
        assert store.statistics().transfers == 2  # the first by itself, the others when it was done
        assert torch.equal(get(store, "789"), tensors[789])


def test_large_new_tensor_needs_no_staging(tmp_path: Path) -> None:
    with Engine("threads", block_size=1 << 18) as engine, DiskStore(tmp_path, engine=engine) as store:
        tensor = make_numbered(2 << 20)
        store.write("tensor", tensor).wait(timeout=PATIENCE)
        before = engine.statistics().staged
        got = get(store, "tensor")
        assert engine.statistics().staged == before
        assert torch.equal(got, tensor)
        got.untyped_storage().resize_(0)  # as of any other tensor
        got.untyped_storage().resize_(4)


# ---- versions


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_read_during_replacement_sees_old_or_new(tmp_path: Path, size: int) -> None:
    engine, store = open_held_store(tmp_path)
    with engine, store:
        first = store.write("tensor", make_numbered(size, 1))
        engine._native.release_held()
        first.wait(timeout=PATIENCE)
        old = [store.read("tensor") for _ in range(20)]
        store.write("tensor", make_numbered(size, 2))
        both = [store.read("tensor") for _ in range(20)]
        store.flush().wait(timeout=PATIENCE)
        new = [store.read("tensor") for _ in range(20)]
        assert all(torch.equal(f.wait(timeout=PATIENCE), make_numbered(size, 1)) for f in old)
        assert {float(f.wait(timeout=PATIENCE)[0]) for f in both} <= {1.0, 2.0}
        assert all(torch.equal(f.wait(timeout=PATIENCE), make_numbered(size, 2)) for f in new)
        store.flush().wait(timeout=PATIENCE)
        assert store.statistics().used == store.statistics().bytes == 4 * size


def test_deletion_during_write_is_final(tmp_path: Path) -> None:
    engine, store = open_held_store(tmp_path)
    with engine, store:
        written = [store.write("a", make_numbered(LARGE)), store.write("b", make_numbered(SMALL))]
        deleted = [store.delete("a"), store.delete("b")]
        missing = store.delete("b")
        engine._native.release_held()
        calls: list[CUDAFuture[Any]] = [*written, *deleted]
        wait(calls, timeout=PATIENCE)
        assert [f.exception() for f in calls] == [None] * 4
        assert isinstance(missing.exception(timeout=PATIENCE), NotFoundError)
        assert store.keys() == []
        assert store.statistics().used == 0
        store.write("a", make_numbered(3)).wait(timeout=PATIENCE)
        assert torch.equal(get(store, "a"), make_numbered(3))


# ---- keys


def test_tensor_has_at_most_1024_dimensions(tmp_path: Path) -> None:
    with DiskStore(tmp_path, durable=True) as store:
        store.write("most", make_numbered(3).view([1] * 1023 + [3])).wait(timeout=PATIENCE)
        with pytest.raises(ValueError, match="1024 dimensions"):
            store.write("more", make_numbered(3).view([1] * 1024 + [3]))
    with DiskStore(tmp_path, durable=True) as store:
        assert get(store, "most").shape == (1,) * 1023 + (3,)


# ---- what does not fit


@pytest.mark.parametrize("kind", ["ephemeral", "durable"])
def test_store_keeps_within_capacity(engine: Engine, tmp_path: Path, kind: str) -> None:
    with DiskStore(tmp_path, engine=engine, capacity=1 << 20, **KINDS[kind]) as store:
        tensors = {f"{i}": torch.full((1 << 15,), float(i)) for i in range(9)}  # 128 KiB each
        futures = [store.write(key, tensor) for key, tensor in tensors.items()]
        wait(futures, timeout=PATIENCE)
        assert [type(f.exception()) for f in futures] == [type(None)] * 8 + [QuotaError]
        assert store.keys() == list("01234567")  # nothing was evicted
        assert isinstance(store.write("0", tensors["8"]).exception(timeout=PATIENCE), QuotaError)
        assert torch.equal(get(store, "0"), tensors["0"])
        store.delete("3").wait(timeout=PATIENCE)
        store.write("0", tensors["8"]).wait(timeout=PATIENCE)  # both versions fit now
        assert torch.equal(get(store, "0"), tensors["8"])
        both = store.writev({"8": tensors["8"], "9": tensors["8"]})
        assert isinstance(both.exception(timeout=PATIENCE), QuotaError)
        assert (len(store), store.statistics().pending) == (7, 0)
        assert store.statistics().slab_bytes <= 1 << 20


def test_files_keep_within_capacity(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, capacity=1 << 20) as store:
        error = None
        for number in range(300):  # each by itself, which takes a page
            error = store.write(f"{number}", make_numbered(1)).exception(timeout=PATIENCE)
        assert isinstance(error, QuotaError)
        assert (len(store), store.statistics().slab_bytes, store.statistics().slabs) == (256, 1 << 20, 1)


def test_empty_files_make_room(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, capacity=40 << 20) as store:
        store.write("small", make_numbered(1)).wait(timeout=PATIENCE)
        store.delete("small").wait(timeout=PATIENCE)
        assert store.statistics().slab_bytes == 16 << 20  # too little for what comes now, and what is left, too
        large = make_numbered(9 << 20)
        store.write("large", large).wait(timeout=PATIENCE)
        assert torch.equal(get(store, "large"), large)
        assert store.statistics().slab_bytes <= 40 << 20


def test_free_extents_are_reused(store: DiskStore) -> None:
    def fill(seed: int) -> None:
        store.writev(
            {f"{i}": make_numbered(size, seed) for i, size in enumerate([1, 500, 3000, LARGE, 70000, 9])}
        ).wait(timeout=PATIENCE)

    fill(0)
    fill(1)
    size = store.statistics().slab_bytes
    for seed in range(2, 30):
        fill(seed)
    assert store.statistics().slab_bytes == size
    assert store.statistics().used == store.statistics().bytes
    store.deletev(store.keys()).wait(timeout=PATIENCE)
    assert store.statistics().used == 0
    assert store.trim() == size
    assert store.statistics().slab_bytes == 0


@pytest.mark.filterwarnings("ignore:.*quantized tensor")
def test_quantized_tensor_is_refused(plain: DiskStore) -> None:
    with pytest.raises(TypeError, match="quantized"):
        plain.write("tensor", torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8))


def test_ephemeral_store_beside_a_durable_one_warns(tmp_path: Path) -> None:
    with DiskStore(tmp_path, durable=True) as store:
        store.write("kept", torch.ones(2)).wait()
    with pytest.warns(RuntimeWarning, match=r"has a durable store, .*: pass durable=True") as caught:
        DiskStore(tmp_path).close()
    assert caught[0].filename == __file__
