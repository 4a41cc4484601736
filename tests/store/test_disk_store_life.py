"""Opening and closing stores: the files that they leave, the operations that they wait for, and their folders."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture, InvalidStateError, gather
from cudafuture.errors import StorageError
from cudafuture.io import Engine, File
from cudafuture.store import DiskStore
from support.patience import PATIENCE
from support.storing import LARGE, SMALL, get, make_numbered, open_held_store

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.fixture
def plain(engine: Engine, tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path / "store", engine=engine) as store:
        yield store


def test_store_refuses_wrong_arguments(engine: Engine, tmp_path: Path) -> None:
    for wrong in ({"direct": "maybe"}, {"capacity": 0}, {"capacity": -1}):
        with pytest.raises(ValueError, match=r"is not at least|is not valid"):
            DiskStore(tmp_path, engine=engine, **wrong)
    for block_size in (4096, 1 << 17, (1 << 18) + 4096):
        with Engine("threads", block_size=block_size) as other, pytest.raises(ValueError, match="blocks"):
            DiskStore(tmp_path, engine=other)
    (tmp_path / "file").touch()
    for durable in (False, True):
        with pytest.raises(StorageError, match="no store can be opened in"):
            DiskStore(tmp_path / "file" / "inside", engine=engine, durable=durable)


def test_closed_or_dropped_ephemeral_store_disappears(engine: Engine, tmp_path: Path) -> None:
    def homes() -> list[str]:
        return [p.name for p in tmp_path.iterdir() if p.is_dir()]

    with DiskStore(tmp_path, engine=engine) as store:
        store.write("tensor", make_numbered(LARGE)).wait(timeout=PATIENCE)
        assert len(homes()) == 1
    assert homes() == []
    store = DiskStore(tmp_path, engine=engine)
    store.write("tensor", make_numbered(LARGE))
    del store
    assert homes() == []


def test_store_reports_direct_io(engine: Engine, tmp_path: Path) -> None:
    with File(tmp_path / "file", "w", engine=engine) as file, DiskStore(tmp_path, engine=engine) as store:
        assert store.is_direct == file.is_direct
    with DiskStore(tmp_path, engine=engine, direct=False) as store:
        assert not store.is_direct
    shared_memory = Path("/dev/shm")
    try:
        File(shared_memory / "cudafuture-probe", "w", engine=engine, direct=True).close()
    except StorageError:
        with pytest.raises(StorageError, match="no direct I/O"):
            DiskStore(shared_memory / "cudafuture-store", engine=engine, direct=True)
    finally:
        (shared_memory / "cudafuture-probe").unlink(missing_ok=True)
        shutil.rmtree(shared_memory / "cudafuture-store", ignore_errors=True)


def test_durable_store_reopens(engine: Engine, tmp_path: Path) -> None:
    tensors = {f"{i}": make_numbered(size, i) for i, size in enumerate([1, 1000, 0, LARGE, 2000, 40000])}
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.writev(tensors)
        store.write("deleted", make_numbered(SMALL))
        store.delete("deleted")
    for _ in range(2):
        with DiskStore(tmp_path, engine=engine, durable=True) as store:
            assert store.keys() == list(tensors)
            assert all(torch.equal(get(store, key), tensor) for key, tensor in tensors.items())
            used = store.statistics().used
            assert used == store.statistics().bytes == sum(t.nbytes for t in tensors.values())
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.deletev(store.keys()).wait(timeout=PATIENCE)
        assert store.statistics().used == 0
        store.trim()
        assert store.statistics().slab_bytes == 0


def test_long_journal_is_rewritten(engine: Engine, tmp_path: Path) -> None:
    key = "x" * 1000
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        longest = 0
        for number in range(40):
            store.writev({key[: i + 1]: make_numbered(4, number) for i in range(200)}).wait(timeout=PATIENCE)
            longest = max(longest, store.statistics().journal_bytes)
        assert longest < 2 << 20  # of 6 MiB
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        assert len(store) == 200
        assert all(torch.equal(t, make_numbered(4, 39)) for t in store.readv(store.keys()).wait(timeout=PATIENCE))


def test_close_waits_for_held_operations(tmp_path: Path) -> None:
    engine, store = open_held_store(tmp_path)
    with engine:
        futures: list[CUDAFuture[int]] = [store.write(f"{i}", make_numbered(SMALL)) for i in range(10)]
        flushed = store.flush()
        closing = threading.Thread(target=store.close)
        closing.start()
        assert not flushed.done()
        engine._native.release_held()
        closing.join(PATIENCE)
        assert all(f.done() for f in futures)
        assert flushed.done()
        gather(*futures).wait(timeout=0)


def test_flush_waits_for_earlier_operations(tmp_path: Path) -> None:
    engine, store = open_held_store(tmp_path)
    with engine, store:
        before = [store.write("a", make_numbered(LARGE)), store.write("b", make_numbered(SMALL))]
        first, second = store.flush(), store.flush()
        assert not first.done()
        engine._native.release_held()
        second.wait(timeout=PATIENCE)
        assert first.done()
        assert all(f.done() for f in before)
        store.flush().wait(timeout=0)


def test_flush_raises_error_of_pending_write(tmp_path: Path) -> None:
    with Engine("threads", block_size=1 << 18, _faults={"io_error": 1.0, "held": True}) as engine:
        store = DiskStore(tmp_path, engine=engine)
        write = store.write("a", make_numbered(SMALL))
        flushed = store.flush()
        engine._native.release_held()
        assert isinstance(write.exception(timeout=PATIENCE), StorageError)
        assert str(flushed.exception(timeout=PATIENCE)) == str(write.exception())
        store.flush().wait(timeout=PATIENCE)  # that was told
        store.close()


def test_read_callback_writes_to_full_queue(tmp_path: Path) -> None:
    engine = Engine("auto", queue_depth=1, block_size=1 << 18, max_pending=1)
    with engine, DiskStore(tmp_path, engine=engine) as store:
        tensors = {f"{i}": make_numbered(SMALL if i % 2 else LARGE, i) for i in range(20)}
        store.writev(tensors).wait(timeout=PATIENCE)

        def double(done: CUDAFuture[torch.Tensor], key: str) -> CUDAFuture[int]:
            return store.write(key, done.value().mul_(2))

        doubled = [store.read(key).then_async(lambda done, key=key: double(done, key)) for key in tensors]  # type: ignore[misc]
        gather(*doubled).wait(timeout=PATIENCE)
        assert all(torch.equal(get(store, key), tensor * 2) for key, tensor in tensors.items())


def test_statistics_count_operations(plain: DiskStore) -> None:
    plain.writev({"a": make_numbered(10), "b": make_numbered(LARGE)}).wait(timeout=PATIENCE)
    plain.read("a").wait(timeout=PATIENCE)
    s = plain.statistics()
    assert (s.keys, s.bytes, s.used, s.capacity) == (2, 40 + 4 * LARGE, 40 + 4 * LARGE, None)
    assert (s.reads, s.writes, s.transfers, s.checksum_errors, s.pending, s.journal_bytes) == (1, 2, 3, 0, 0, 0)
    assert s.slab_bytes >= s.used
    assert "2 keys" in repr(plain)


def test_store_keeps_its_folder_after_chdir(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        monkeypatch.chdir(folder)
        with DiskStore("states", engine=engine, durable=True) as store:
            store.write("tensor", make_numbered(SMALL, len(folder.name))).wait(timeout=PATIENCE)
    monkeypatch.chdir(here)
    with DiskStore("states", engine=engine, durable=True) as store, DiskStore("gone", engine=engine) as gone:
        monkeypatch.chdir(there)
        for kept in (store, gone):
            kept.write("large", make_numbered(8 * LARGE)).wait(timeout=PATIENCE)  # in a file that is made now
            assert torch.equal(get(kept, "large"), make_numbered(8 * LARGE))
        store.deletev(["tensor"]).wait(timeout=PATIENCE)
    assert [p.name for p in (here / "gone").iterdir()] == []
    with DiskStore("states", engine=engine, durable=True) as store:
        assert store.keys() == ["tensor"]
        assert torch.equal(get(store, "tensor"), make_numbered(SMALL, 5))


def test_callback_closes_store_of_closed_engine(tmp_path: Path) -> None:
    engine = Engine("threads", block_size=1 << 18)
    store = DiskStore(tmp_path, engine=engine)
    future: CUDAFuture[None] = CUDAFuture()

    def write_and_close(done: CUDAFuture[None]) -> BaseException | None:
        engine.close()
        write = store.write("tensor", make_numbered(SMALL))
        store.close()
        return write.exception(timeout=PATIENCE)

    closed = future.then(write_and_close)
    future.set_result(None)
    assert isinstance(closed.wait(timeout=PATIENCE), InvalidStateError)
