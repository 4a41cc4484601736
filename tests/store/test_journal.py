"""Damage to the journal of a durable store, and torn batches."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cudafuture.errors import ChecksumError, StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from support.patience import PATIENCE
from support.storing import MIB, contents, count_descriptors, expect, flip, slabs

PAGE = 4096

pytestmark = pytest.mark.usefixtures("on_the_host")

HEADERS = 2 * PAGE  # bytes of a journal before its batches
HEADER = 56  # bytes of one
SECTOR = 512  # bytes that a disk writes at once
COUNT = 10  # of keys; the batch of the last one lies in two sectors

StoreFiles = tuple[Path, dict[str, torch.Tensor], list[int]]


def write_to_journal(store: DiskStore) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Write tensors one by one; return them, and the offset at which each batch of the journal ends."""
    tensors = {f"{i}": contents(1000 * i + 1, i) for i in range(COUNT)}
    ends = [store.statistics().journal_bytes]
    for key, tensor in tensors.items():
        store.write(key, tensor).wait(timeout=PATIENCE)
        ends.append(store.statistics().journal_bytes)
    return tensors, ends


@pytest.fixture
def closed_store(engine: Engine, tmp_path: Path) -> StoreFiles:
    """Return the folder of a closed durable store, its tensors, and the end of each batch of its journal."""
    with DiskStore(tmp_path / "store", engine=engine, durable=True) as store:
        tensors, ends = write_to_journal(store)
    assert (tmp_path / "store" / "journal").stat().st_size == ends[-1]
    return tmp_path / "store", tensors, ends


@pytest.fixture
def crashed_store(engine: Engine, tmp_path: Path) -> StoreFiles:
    """Return the same for a store whose process was killed."""
    with DiskStore(tmp_path / "lives", engine=engine, durable=True) as store:
        tensors, ends = write_to_journal(store)
        shutil.copytree(tmp_path / "lives", tmp_path / "store")
    return tmp_path / "store", tensors, ends


def is_refused(folder: Path, engine: Engine) -> bool:
    """Return True if the store cannot be opened because its journal is damaged."""
    try:
        DiskStore(folder, engine=engine, durable=True, read_only=True).close()
    except ChecksumError as e:
        assert e.path == str(folder / "journal")  # noqa: PT017 (it need not be refused)
        return True
    return False


def test_truncated_closed_journal_is_refused(engine: Engine, closed_store: StoreFiles) -> None:
    folder, tensors, ends = closed_store
    journal = folder / "journal"
    content = journal.read_bytes()
    for size in (*(end + more for end in ends[:-1] for more in (-1, 0, 1, 40)), ends[-1] - 1):
        journal.write_bytes(content[:size])
        assert is_refused(folder, engine), size
    journal.write_bytes(content)
    with DiskStore(folder, engine=engine, durable=True) as store:
        expect(store, tensors)


@pytest.mark.parametrize("end", ["closed_store", "crashed_store"])
def test_flipped_bit_is_no_torn_batch(end: str, engine: Engine, request: pytest.FixtureRequest) -> None:
    folder, tensors, ends = request.getfixturevalue(end)
    journal = folder / "journal"
    for offset in (*range(HEADERS, ends[-4], 97), *range(ends[-4], ends[-1])):
        flip(journal, offset, offset % 8)
        assert is_refused(folder, engine), offset
        flip(journal, offset, offset % 8)
    with DiskStore(folder, engine=engine, durable=True) as store:
        expect(store, tensors)


@pytest.mark.parametrize("damage", ["flipped bits", "zeros", "a missing end"])
def test_two_damaged_batches_are_refused(damage: str, engine: Engine, crashed_store: StoreFiles) -> None:
    folder, _, ends = crashed_store
    for batches in 2, 3:
        shutil.copytree(folder, copy := folder.with_name(f"{batches}"))
        first = ends[-batches - 1]
        if damage == "flipped bits":
            for begin in ends[-batches - 1 : -1]:
                flip(copy / "journal", begin + 50)
        else:
            os.truncate(copy / "journal", first)
            if damage == "zeros":
                os.truncate(copy / "journal", ends[-1])
        assert is_refused(copy, engine)
        with DiskStore.salvage(copy, engine=engine) as store:
            assert store.keys() == [f"{i}" for i in range(COUNT - batches)]
            end = ends[-2] if damage == "a missing end" else ends[-1]  # the last one was never marked as whole
            assert store.damage == [(first, end - first)]


def test_damaged_header_is_logged_without_loss(
    engine: Engine, closed_store: StoreFiles, caplog: pytest.LogCaptureFixture
) -> None:
    folder, tensors, _ = closed_store
    journal = folder / "journal"
    for offset in (*range(0, HEADER, 5), HEADER - 1):
        for page in 0, PAGE:
            caplog.clear()
            flip(journal, page + offset)
            with DiskStore(folder, engine=engine, durable=True, read_only=True) as store:
                assert store.keys() == list(tensors)
            assert "one of its two headers is damaged" in caplog.text
            flip(journal, page + offset)
        flip(journal, offset)
        flip(journal, PAGE + offset)
        assert is_refused(folder, engine)
        flip(journal, offset)
        flip(journal, PAGE + offset)
    with DiskStore(folder, engine=engine, durable=True) as store:
        expect(store, tensors)


def test_torn_last_batch_is_dropped(
    engine: Engine, crashed_store: StoreFiles, caplog: pytest.LogCaptureFixture
) -> None:
    folder, tensors, ends = crashed_store
    journal = folder / "journal"
    content = journal.read_bytes()
    last, before = ends[-1], ends[-2]
    torn = [content[:size] for size in (before, before + 1, before + 20, before + 40, last - 1)]
    torn += [content[:before] + bytes(last - before)]  # it has its length, and nothing is in it
    sector = before // SECTOR * SECTOR + SECTOR  # within the batch
    torn += [content[:before] + bytes(sector - before) + content[sector:], content[:sector] + bytes(last - sector)]
    for number, left in enumerate(torn):
        copy = folder.with_name(f"torn {number}")
        shutil.copytree(folder, copy)
        (copy / "journal").write_bytes(left)
        caplog.clear()
        with DiskStore(copy, engine=engine, durable=True) as store:
            expect(store, {key: tensors[key] for key in list(tensors)[:-1]})
            store.write("later", contents(1000)).wait(timeout=PATIENCE)
        assert ("not whole" in caplog.text) == (len(left) > before)
        kept = [left[before:]] if len(left) > before else []
        assert [path.read_bytes() for path in copy.glob("set-aside.*")] == kept
        with DiskStore(copy, engine=engine, durable=True) as store:
            expect(store, {key: tensors[key] for key in list(tensors)[:-1]} | {"later": contents(1000)})
        shutil.rmtree(copy)


def test_torn_batch_can_be_restored_until_next_batch(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As docs/stores.md says."""
    folder, tensor = tmp_path / "store", contents(20 * MIB, 1)
    with DiskStore(tmp_path / "lives", engine=engine, durable=True) as store:
        store.write("small", contents(1000)).wait(timeout=PATIENCE)
        begin = store.statistics().journal_bytes
        store.write("large", tensor).wait(timeout=PATIENCE)
        shutil.copytree(tmp_path / "lives", folder)
    (_, slab) = slabs(folder)
    os.truncate(folder / "journal", (folder / "journal").stat().st_size - 1)
    for number in 1, 2:
        with DiskStore(folder, engine=engine, durable=True) as store:
            assert store.keys() == ["small"]
        assert len(caplog.records) == 1, number
    kept = [folder / f"set-aside.{begin}.{name}" for name in ("journal-end", slab.name)]
    assert sorted(folder.glob("set-aside.*")) == kept
    assert f"they are in {kept[0]}" in caplog.text

    shutil.copytree(folder, mended := tmp_path / "mended")
    with (mended / "journal").open("r+b") as journal:
        os.truncate(journal.fileno(), begin)
        journal.seek(begin)
        journal.write((mended / kept[0].name).read_bytes())
    (mended / kept[1].name).rename(mended / slab.name)
    with DiskStore.salvage(mended, engine=engine) as found:
        assert found.keys() == ["small"]  # its last byte is missing
    with (mended / "journal").open("ab") as journal:
        journal.write((tmp_path / "lives" / "journal").read_bytes()[-1:])
    with DiskStore.salvage(mended, engine=engine) as found:
        expect(found, {"small": contents(1000), "large": tensor})

    with DiskStore(folder, engine=engine, durable=True) as store:
        store.write("later", contents(1000)).wait(timeout=PATIENCE)
        begin = store.statistics().journal_bytes
    with (folder / "journal").open("ab") as file:
        file.write(bytes(40))
    with DiskStore(folder, engine=engine, durable=True) as store:
        assert store.keys() == ["small", "later"]
    assert list(folder.glob("set-aside.*")) == [folder / f"set-aside.{begin}.journal-end"]


def test_closed_store_keeps_no_file_open(engine: Engine, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, engine=engine, durable=True)
    store.write("key", contents(1000)).wait(timeout=PATIENCE)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"journal", "journal.new", "lock"} <= {path.name for path in files if count_descriptors(path)}
    store.close()
    assert [path.name for path in files if count_descriptors(path)] == []


@pytest.mark.parametrize("garbage", [b"\0", bytes(5000), b"CDfBa"], ids=["nul", "nuls", "a part of a batch"])
def test_crash_remains_after_journal_are_dropped(engine: Engine, closed_store: StoreFiles, garbage: bytes) -> None:
    folder, tensors, _ = closed_store
    with (folder / "journal").open("ab") as file:
        file.write(garbage)
    for _ in range(2):
        with DiskStore(folder, engine=engine, durable=True) as store:
            expect(store, tensors)


@pytest.mark.parametrize("garbage", [b"x", b"x" * 40, b"CDfBatch" * 10], ids=["x", "40 x", "magic"])
def test_other_bytes_after_journal_are_damage(engine: Engine, closed_store: StoreFiles, garbage: bytes) -> None:
    folder, tensors, _ = closed_store
    with (folder / "journal").open("ab") as file:
        file.write(garbage)
    assert is_refused(folder, engine)
    with DiskStore.salvage(folder, engine=engine) as store:
        expect(store, tensors)


def remove_it(journal: Path) -> None:
    journal.unlink()


def empty_it(journal: Path) -> None:
    os.truncate(journal, 0)


def cut_its_head(journal: Path) -> None:
    os.truncate(journal, 10)


@pytest.mark.parametrize("damage", [remove_it, empty_it, cut_its_head])
def test_lost_journal_is_refused(engine: Engine, closed_store: StoreFiles, damage: Callable[[Path], None]) -> None:
    folder, _, _ = closed_store
    before = slabs(folder)
    damage(folder / "journal")
    with pytest.raises(StorageError):
        DiskStore(folder, engine=engine, durable=True)
    assert slabs(folder) == before


@pytest.mark.parametrize("kind", ["writes", "deletions"])
def test_journal_is_rewritten_during_operation(engine: Engine, kind: str, tmp_path: Path) -> None:
    """Many records of few keys: the journal stays small and keeps its content."""
    name = "x" * 1000
    expected = {f"{i} {name}": contents(10, i) for i in range(20)}
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        sizes = []
        for number in range(80):
            store.writev({key: contents(10, number) for key in expected}).wait(timeout=PATIENCE)
            if kind == "deletions" and number % 3 == 0:
                store.deletev(list(expected)).wait(timeout=PATIENCE)
            sizes.append(store.statistics().journal_bytes)
        store.writev(expected).wait(timeout=PATIENCE)
        assert max(sizes) < 3 * MIB
        assert any(later < before for before, later in itertools.pairwise(sizes))
        expect(store, expected)
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        expect(store, expected)
