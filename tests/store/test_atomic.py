"""Writes of many keys that take effect as a whole."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path

import pytest
import torch

from cudafuture.errors import ChecksumError
from cudafuture.io import Engine, digest
from cudafuture.store import DiskStore
from support.patience import PATIENCE
from support.storing import contents, error_number, expect

pytestmark = pytest.mark.usefixtures("on_the_host")

SIZES = {"tiny": 10, "small": 5000, "large": 700_000, "empty": 0}


def version(number: int) -> dict[str, torch.Tensor]:
    return {key: torch.full((size,), number, dtype=torch.uint8) for key, size in SIZES.items()}


def test_atomic_write_changes_all_keys_or_none(engine: Engine, durable: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        assert store.writev(version(1), atomic=True).wait(timeout=PATIENCE) == sum(SIZES.values())
        expect(store, version(1))
        for key in SIZES:
            others = {name: digest(tensor) for name, tensor in version(2).items() if name != key}
            written = torch.ones(len(SIZES), dtype=torch.bool)
            failed = store.writev(version(2), atomic=True, digests=others | {key: 1}, written=written)
            assert isinstance(failed.exception(timeout=PATIENCE), ChecksumError)
            assert not written.any()
            expect(store, version(1))
        s = store.statistics()
        assert (s.used, s.pending) == (sum(SIZES.values()), 0)
        written = torch.zeros(len(SIZES), dtype=torch.bool)
        store.writev(version(3) | {"new": contents(100)}, atomic=True).wait(timeout=PATIENCE)
        store.writev(version(3), atomic=True, written=written).wait(timeout=PATIENCE)
        assert written.all()
        expect(store, version(3) | {"new": contents(100)})
        assert store.writev({}, atomic=True).wait(timeout=PATIENCE) == 0
    if durable:
        with DiskStore(tmp_path, engine=engine, durable=True) as store:
            expect(store, version(3) | {"new": contents(100)})


def test_atomic_write_without_room_changes_nothing(engine: Engine, durable: bool, tmp_path: Path) -> None:
    """Each tensor alone would fit; all together do not."""
    with DiskStore(tmp_path, engine=engine, durable=durable, capacity=16 << 20) as store:
        for i in range(16):
            store.write(f"{i}", contents(1 << 20, i)).wait(timeout=PATIENCE)
        store.deletev([f"{i}" for i in range(0, 16, 2)]).wait(timeout=PATIENCE)
        kept = {f"{i}": contents(1 << 20, i) for i in range(1, 16, 2)}
        wanted = {"small": contents(1000), "1": contents(1000, 1), "large": contents(3 << 20)}
        assert error_number(store.writev(wanted, atomic=True)) == errno.EDQUOT
        expect(store, kept)
        assert error_number(store.writev(wanted)) == errno.EDQUOT
        expect(store, kept | {"small": contents(1000), "1": contents(1000, 1)})


def test_readers_see_whole_atomic_writes(engine: Engine, durable: bool, tmp_path: Path) -> None:
    keys = [f"{i}" for i in range(12)]
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        store.writev({key: torch.zeros(40_000) for key in keys}).wait(timeout=PATIENCE)
        over, seen = threading.Event(), []

        def look() -> None:
            while not over.is_set():
                seen.append({tensor[0].item() for tensor in store.readv(keys).wait(timeout=PATIENCE)})

        thread = threading.Thread(target=look)
        thread.start()
        for number in range(1, 40):
            versions = [{key: torch.full((40_000,), 2.0 * number + i) for key in keys} for i in (0, 1)]
            for write in [store.writev(tensors, atomic=True) for tensors in versions]:
                write.wait(timeout=PATIENCE)
        over.set()
        thread.join()
        assert all(len(numbers) == 1 for numbers in seen)


def test_later_atomic_write_wins_all_keys(engine: Engine, durable: bool, tmp_path: Path) -> None:
    keys = [f"{i}" for i in range(50)]
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        for _ in range(20):
            start = threading.Barrier(2)

            def write(number: float, names: list[str], start: threading.Barrier = start) -> None:
                start.wait(PATIENCE)
                store.writev({key: torch.tensor([number]) for key in names}, atomic=True).wait(timeout=PATIENCE)

            threads = [threading.Thread(target=write, args=args) for args in ((1.0, keys), (2.0, keys[::-1]))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len({tensor.item() for tensor in store.readv(keys).wait(timeout=PATIENCE)}) == 1


def test_torn_atomic_write_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path / "lives", engine=engine, durable=True) as store:
        store.writev(version(1), atomic=True).wait(timeout=PATIENCE)
        before = store.statistics().journal_bytes
        store.writev(version(2), atomic=True).wait(timeout=PATIENCE)
        shutil.copytree(tmp_path / "lives", tmp_path / "store")
    journal = tmp_path / "store" / "journal"
    content = journal.read_bytes()
    for size in range(before, len(content), 7):
        journal.write_bytes(content[:size])
        with DiskStore(tmp_path / "store", engine=engine, durable=True, read_only=True) as store:
            expect(store, version(1))
