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
from cudafuture.storage import Engine, Offloader
from unit.storing import MIB, PATIENCE, contents, expect, flip, opened, slabs

PAGE = 4096

pytestmark = pytest.mark.usefixtures("on_the_host")

HEADERS = 2 * PAGE  # bytes of a journal before its batches
HEADER = 56  # bytes of one

Written = tuple[Path, dict[str, torch.Tensor], list[int]]


def write_to_journal(store: Offloader) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Write tensors one by one; return them, and where each batch of the journal ends."""
    tensors = {f"{i}": contents(1000 * i + 1, i) for i in range(12)}
    ends = [store.statistics().journal_bytes]
    for key, tensor in tensors.items():
        store.write(key, tensor).wait(timeout=PATIENCE)
        ends.append(store.statistics().journal_bytes)
    return tensors, ends


@pytest.fixture
def written(engine: Engine, tmp_path: Path) -> Written:
    """Give the folder of a durable store that was closed, what is in it, and where each batch of its journal ends."""
    with Offloader(tmp_path / "store", engine=engine, durable=True) as store:
        tensors, ends = write_to_journal(store)
    assert (tmp_path / "store" / "journal").stat().st_size == ends[-1]
    return tmp_path / "store", tensors, ends


@pytest.fixture
def killed(engine: Engine, tmp_path: Path) -> Written:
    """Give the same of a store whose process was killed."""
    with Offloader(tmp_path / "lives", engine=engine, durable=True) as store:
        tensors, ends = write_to_journal(store)
        shutil.copytree(tmp_path / "lives", tmp_path / "store")
    return tmp_path / "store", tensors, ends


def refused(folder: Path, engine: Engine) -> bool:
    """Return whether the store cannot be opened because its journal is damaged."""
    try:
        Offloader(folder, engine=engine, durable=True, read_only=True).close()
    except ChecksumError as e:
        assert e.path == str(folder / "journal")  # noqa: PT017 (it need not be refused)
        return True
    return False


@pytest.mark.parametrize("damage", ["a flipped bit", "a missing end"])
def test_damage_to_a_journal_that_was_closed_is_never_silent(damage: str, engine: Engine, written: Written) -> None:
    folder, tensors, ends = written
    journal = folder / "journal"
    content = journal.read_bytes()
    if damage == "a flipped bit":
        offsets = [*range(HEADERS, ends[-4], 97), *range(ends[-4], ends[-1])]
        changed = [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in offsets]
    else:
        offsets = [*(end + more for end in ends[:-1] for more in (-1, 0, 1, 40)), ends[-1] - 1]
        changed = [content[:size] for size in offsets]
    for offset, now in zip(offsets, changed, strict=True):
        journal.write_bytes(now)
        assert refused(folder, engine), offset
    journal.write_bytes(content)
    with Offloader(folder, engine=engine, durable=True) as store:
        expect(store, tensors)


def test_damage_to_the_journal_of_a_killed_process_is_an_error_or_a_logged_torn_batch(
    engine: Engine, killed: Written, caplog: pytest.LogCaptureFixture
) -> None:
    folder, tensors, ends = killed
    journal = folder / "journal"
    for offset in range(ends[-4], ends[-1]):
        flip(journal, offset, offset % 8)
        if offset < ends[-2]:
            assert refused(folder, engine), offset
        else:
            caplog.clear()
            with Offloader(folder, engine=engine, durable=True, read_only=True) as store:
                assert store.keys() == list(tensors)[:-1]
            (warning,) = caplog.messages
            assert f"its last {ends[-1] - ends[-2]} bytes are not whole" in warning
        flip(journal, offset, offset % 8)
    with Offloader(folder, engine=engine, durable=True) as store:
        expect(store, tensors)


def test_of_a_killed_process_more_than_one_damaged_batch_is_no_torn_batch(engine: Engine, killed: Written) -> None:
    folder, _, ends = killed
    for batches in 2, 3:
        shutil.copytree(folder, copy := folder.with_name(f"{batches}"))
        for begin in ends[-batches - 1 : -1]:
            flip(copy / "journal", begin + 50)
        assert refused(copy, engine)
        with Offloader.salvage(copy, engine=engine) as store:
            assert store.keys() == [f"{i}" for i in range(12 - batches)]
            assert store.damage == [(ends[-batches - 1], ends[-1] - ends[-batches - 1])]


def test_one_damaged_header_of_a_journal_loses_nothing_and_is_logged(
    engine: Engine, written: Written, caplog: pytest.LogCaptureFixture
) -> None:
    folder, tensors, _ = written
    journal = folder / "journal"
    for offset in (*range(0, HEADER, 5), HEADER - 1):
        for page in 0, PAGE:
            caplog.clear()
            flip(journal, page + offset)
            with Offloader(folder, engine=engine, durable=True, read_only=True) as store:
                assert store.keys() == list(tensors)
            assert "one of its two headers is damaged" in caplog.text
            flip(journal, page + offset)
        flip(journal, offset)
        flip(journal, PAGE + offset)
        assert refused(folder, engine)
        flip(journal, offset)
        flip(journal, PAGE + offset)
    with Offloader(folder, engine=engine, durable=True) as store:
        expect(store, tensors)


def test_of_a_journal_that_is_torn_at_its_end_the_last_batch_is_dropped(
    engine: Engine, killed: Written, caplog: pytest.LogCaptureFixture
) -> None:
    folder, tensors, ends = killed
    journal = folder / "journal"
    content = journal.read_bytes()
    last, before = ends[-1], ends[-2]
    torn = [content[:size] for size in (before, before + 1, before + 20, before + 40, last - 1)]
    torn += [content[:before] + bytes(last - before)]  # it has its length, and nothing is in it
    torn += [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in (before, before + 33, last - 1)]
    for number, left in enumerate(torn):
        copy = folder.with_name(f"torn {number}")
        shutil.copytree(folder, copy)
        (copy / "journal").write_bytes(left)
        caplog.clear()
        with Offloader(copy, engine=engine, durable=True) as store:
            expect(store, {key: tensors[key] for key in list(tensors)[:-1]})
            store.write("later", contents(1000)).wait(timeout=PATIENCE)
        assert ("not whole" in caplog.text) == (len(left) > before)
        is_kept = len(left) > before
        assert (copy / "set-aside").exists() == is_kept
        if is_kept:
            assert (copy / "set-aside" / "journal-end").read_bytes() == left[before:]
        with Offloader(copy, engine=engine, durable=True) as store:
            expect(store, {key: tensors[key] for key in list(tensors)[:-1]} | {"later": contents(1000)})
        shutil.rmtree(copy)


def test_slabs_of_a_dropped_batch_are_set_aside_with_what_names_them(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, tensor = tmp_path / "store", contents(20 * MIB, 1)
    with Offloader(tmp_path / "lives", engine=engine, durable=True) as store:
        store.write("small", contents(1000)).wait(timeout=PATIENCE)
        store.write("large", tensor).wait(timeout=PATIENCE)
        shutil.copytree(tmp_path / "lives", folder)
    (_, slab) = slabs(folder)
    flip(folder / "journal", (folder / "journal").stat().st_size - 1)
    for number in 1, 2:
        with Offloader(folder, engine=engine, durable=True) as store:
            assert store.keys() == ["small"]
        kept = folder / "set-aside" / slab.name
        assert torch.equal(torch.frombuffer(bytearray(kept.read_bytes()[: tensor.nbytes]), dtype=torch.uint8), tensor)
        assert len(caplog.records) == 1, number
    caplog.clear()
    with (folder / "journal").open("ab") as file:
        file.write(b"x" * 40)
    with Offloader(folder, engine=engine, durable=True) as store:
        assert store.keys() == ["small"]
    assert (folder / "set-aside-2" / "journal-end").read_bytes() == b"x" * 40
    assert "set-aside-2; keys in them: none" in caplog.text


def test_a_store_that_is_closed_has_no_file_open(engine: Engine, tmp_path: Path) -> None:
    store = Offloader(tmp_path, engine=engine, durable=True)
    store.write("key", contents(1000)).wait(timeout=PATIENCE)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"journal", "journal.new", "lock"} <= {path.name for path in files if opened(path)}
    store.close()
    assert [path.name for path in files if opened(path)] == []


@pytest.mark.parametrize(
    "garbage", [b"\0", bytes(5000), b"x" * 40, b"CDfBatch" * 10], ids=["nul", "nuls", "x", "magic"]
)
def test_what_has_come_after_the_end_of_a_journal_is_dropped(engine: Engine, written: Written, garbage: bytes) -> None:
    folder, tensors, _ = written
    with (folder / "journal").open("ab") as file:
        file.write(garbage)
    for _ in range(2):
        with Offloader(folder, engine=engine, durable=True) as store:
            expect(store, tensors)


def remove_it(journal: Path) -> None:
    journal.unlink()


def empty_it(journal: Path) -> None:
    os.truncate(journal, 0)


def cut_its_head(journal: Path) -> None:
    os.truncate(journal, 10)


@pytest.mark.parametrize("damage", [remove_it, empty_it, cut_its_head])
def test_a_store_whose_journal_is_lost_is_not_taken_for_a_new_one(
    engine: Engine, written: Written, damage: Callable[[Path], None]
) -> None:
    folder, _, _ = written
    before = slabs(folder)
    damage(folder / "journal")
    with pytest.raises(StorageError):
        Offloader(folder, engine=engine, durable=True)
    assert slabs(folder) == before


@pytest.mark.parametrize("kind", ["writes", "deletions"])
def test_a_journal_is_made_anew_while_the_store_works(engine: Engine, kind: str, tmp_path: Path) -> None:
    """Many records of few keys: it stays small, and says the same."""
    name = "x" * 1000
    expected = {f"{i} {name}": contents(10, i) for i in range(20)}
    with Offloader(tmp_path, engine=engine, durable=True) as store:
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
    with Offloader(tmp_path, engine=engine, durable=True) as store:
        expect(store, expected)
