"""Durable stores opened to read only: those without write permission, and those with a damaged journal."""

from __future__ import annotations

import ast
import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from cudafuture.errors import ChecksumError, NotFoundError, StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from store.shims import compile_shim
from support.child import Child
from support.patience import PATIENCE
from support.storing import MIB, contents, error_number, expect, flip, get, slabs

HEADERS = 8192  # bytes of a journal before its batches

pytestmark = pytest.mark.usefixtures("on_the_host")


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files in a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- read-only


def test_read_only_store_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    tensors = {f"{i}": contents(5000 * i, i) for i in range(8)} | {"large": contents(3 * MIB, 9)}
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.writev(tensors).wait(timeout=PATIENCE)
        store.delete("1").wait(timeout=PATIENCE)
        assert not store.read_only
    del tensors["1"]
    before = files_of(tmp_path)
    with DiskStore(tmp_path, engine=engine, durable=True, read_only=True) as store:
        assert store.read_only
        expect(store, tensors)
        for change in (store.write("new", contents(10)), store.writev(tensors), store.delete("2")):
            assert error_number(change) == errno.EROFS
        with pytest.raises(StorageError, match="read-only"):
            store.deletev(["2", "3"]).wait(timeout=PATIENCE)
        assert store.trim() == 0
        expect(store, tensors)
    assert files_of(tmp_path) == before


def test_read_only_stores_exclude_writer(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.write("key", contents(1000)).wait(timeout=PATIENCE)
        with pytest.raises(StorageError, match="has open") as caught:
            DiskStore(tmp_path, engine=engine, durable=True, read_only=True)
        assert caught.value.errno == errno.EBUSY
    with (
        DiskStore(tmp_path, engine=engine, durable=True, read_only=True) as first,
        DiskStore(tmp_path, engine=engine, durable=True, read_only=True) as second,
    ):
        expect(first, {"key": contents(1000)})
        expect(second, {"key": contents(1000)})
        with pytest.raises(StorageError) as caught:
            DiskStore(tmp_path, engine=engine, durable=True)
        assert caught.value.errno == errno.EBUSY
    (tmp_path / "lock").unlink()  # as in a copy of the journal and the slabs
    with DiskStore(tmp_path, engine=engine, durable=True, read_only=True) as store:
        expect(store, {"key": contents(1000)})
    assert not (tmp_path / "lock").exists()


def test_read_only_store_keeps_torn_journal(engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DiskStore(tmp_path / "lives", engine=engine, durable=True) as store:
        for key in "abc":
            store.write(key, contents(1000, ord(key))).wait(timeout=PATIENCE)
        shutil.copytree(tmp_path / "lives", tmp_path / "store")
    journal = tmp_path / "store" / "journal"
    os.truncate(journal, journal.stat().st_size - 1)
    before = files_of(tmp_path / "store")
    with DiskStore(tmp_path / "store", engine=engine, durable=True, read_only=True) as store:
        expect(store, {key: contents(1000, ord(key)) for key in "ab"})
    assert "not whole" in caplog.text
    assert files_of(tmp_path / "store") == before


def test_invalid_read_only_store_raises(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="durable"):
        DiskStore(tmp_path, engine=engine, read_only=True)
    with pytest.raises(StorageError) as caught:
        DiskStore(tmp_path / "nowhere", engine=engine, durable=True, read_only=True)
    assert caught.value.errno == errno.ENOENT
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(ChecksumError, match="is missing"):
        DiskStore(tmp_path, engine=engine, durable=True, read_only=True)


# ---- salvage


def test_damaged_bit_costs_one_record(engine: Engine, tmp_path: Path) -> None:
    """The bit may be in a record of the snapshot, in one of a later batch, or in the header of a batch."""
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.writev({f"{i}": contents(2000 + i, i) for i in range(5)}).wait(timeout=PATIENCE)
    with DiskStore(tmp_path, engine=engine, durable=True) as store:  # begins with a snapshot
        snapshot = store.statistics().journal_bytes
        expected = {f"{i}": contents(2000 + i, i) for i in range(5)}
        for key in ("0", "new"):
            expected[key] = contents(3000, ord(key[0]))
            store.write(key, expected[key]).wait(timeout=PATIENCE)
        store.delete("1").wait(timeout=PATIENCE)
        del expected["1"]
    journal = tmp_path / "journal"
    before = files_of(tmp_path)
    old = {"0": contents(2000, 0), "1": contents(2001, 1)}
    seen = set()
    for offset in range(HEADERS, journal.stat().st_size):
        flip(journal, offset, offset % 8)
        with pytest.raises(ChecksumError, match=r"DiskStore.salvage\(\) reads what is left"):
            DiskStore(tmp_path, engine=engine, durable=True)
        with DiskStore.salvage(tmp_path, engine=engine) as store:
            keys = store.keys()
            found = dict(zip(keys, store.readv(keys).wait(timeout=PATIENCE), strict=True))
            missing = expected.keys() - found.keys()
            wrong = {key for key, tensor in found.items() if not torch.equal(tensor, expected.get(key, tensor[:0]))}
            assert len(missing) + len(wrong) <= 1
            assert wrong <= store.uncertain, "an old tensor, or a deleted key, is given as if it were certain"
            assert all(torch.equal(found[key], old[key]) for key in wrong)
            assert missing <= {"2", "3", "4"} | {"new"} | store.lost.keys()
            if offset < snapshot:
                assert not store.uncertain
            if missing or wrong:
                ((begin, size),) = store.damage
                assert begin <= offset < begin + size
            seen |= {("missing", key) for key in missing} | {("wrong", key) for key in wrong}
        flip(journal, offset, offset % 8)
    assert {("missing", "2"), ("missing", "new"), ("wrong", "1")} <= seen
    assert files_of(tmp_path) == before


# A sync of a journal reads a FIFO to its end first, where there is one.
SLOW_SYNC = r"""
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int fdatasync(int fd) {
  char link[64], path[4096] = "", byte;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/journal")) {
    int fifo = open(getenv("FIFO"), O_RDONLY);
    while (fifo >= 0 && read(fifo, &byte, 1) > 0) continue;
    if (fifo >= 0) close(fifo);
  }
  return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
"""

WRITE_TWICE_IN_ONE_BATCH = """
import os, sys, torch
from cudafuture.io import Engine, File
from cudafuture.store import DiskStore
engine = Engine("threads", threads=1, queue_depth=1, _faults={"held": True})
store = DiskStore(sys.argv[1], engine=engine, durable=True)
os.mkfifo(os.environ["FIFO"])
first = store.write("first", torch.empty(0))  # a tensor without bytes does not wait for the engine
with open(os.environ["FIFO"], "w"):  # its batch is being synced
    os.unlink(os.environ["FIFO"])
    old = store.writev({"key": torch.ones(10), "on the same page": torch.ones(10)})
    new = store.write("key", torch.empty(0))
    with File(sys.argv[2], "w", engine=engine) as file:
        last = file.write(torch.ones(1))
        engine._native.release_held()
        last.wait()
for write in first, old, new: write.wait()
store.close()
say("written")
"""


@pytest.mark.slow
def test_damaged_batch_makes_old_records_uncertain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(compile_shim(SLOW_SYNC, tmp_path)))
        patch.setenv("FIFO", str(tmp_path / "fifo"))
        with Child(WRITE_TWICE_IN_ONE_BATCH, str(tmp_path / "store"), str(tmp_path / "file")) as child:
            assert child.hear() == "written"
    journal = tmp_path / "store" / "journal"
    seen = 0
    for offset in range(HEADERS, journal.stat().st_size):
        flip(journal, offset)
        with DiskStore.salvage(tmp_path / "store") as store:
            if "key" in store and "key" not in store.uncertain:
                assert get(store, "key").numel() == 0, offset
                seen += 1
        flip(journal, offset)
    assert seen > 0


def test_damage_across_snapshot_makes_keys_uncertain(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.writev({"a": contents(1000), "b": contents(1000)}).wait(timeout=PATIENCE)
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        snapshot = store.statistics().journal_bytes
        store.delete("a").wait(timeout=PATIENCE)
    journal = tmp_path / "journal"
    whole = journal.read_bytes()
    for last, deletion in ((snapshot - 1, snapshot + 50), (snapshot - 1, snapshot + 1)):
        flip(journal, last)
        flip(journal, deletion)
        with DiskStore.salvage(tmp_path, engine=engine) as store:
            assert set(store.keys()) - store.uncertain <= {"b"}
        journal.write_bytes(whole)


UNREADABLE = r"""
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

ssize_t pread64(int fd, void* bytes, size_t size, off_t at) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/journal") && at < 16384 && at + size > 12288) {
    errno = EIO;
    return -1;
  }
  return ((ssize_t (*)(int, void*, size_t, off_t))dlsym(RTLD_NEXT, "pread64"))(fd, bytes, size, at);
}
ssize_t pread(int fd, void* bytes, size_t size, off_t at) { return pread64(fd, bytes, size, at); }
"""

READ_WHAT_IS_LEFT = """
import sys
from cudafuture.errors import StorageError
from cudafuture.store import DiskStore
try:
    DiskStore(sys.argv[1], durable=True, read_only=True)
except StorageError as e:
    say(e.errno)
with DiskStore.salvage(sys.argv[1]) as store:
    for key in store.keys():
        say(f"{int(key[:2])} {store.read(key).wait().sum().item()} {key in store.uncertain}")
    say(store.damage)
"""


@pytest.mark.slow
def test_unreadable_journal_page_is_salvaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    with DiskStore(folder, durable=True) as store:
        store.writev({f"{i:2} {'x' * 1000}": torch.full((10,), float(i)) for i in range(12)}).wait(timeout=PATIENCE)
    (tmp_path / "shim").mkdir()
    monkeypatch.setenv("LD_PRELOAD", str(compile_shim(UNREADABLE, tmp_path / "shim")))
    with Child(READ_WHAT_IS_LEFT, str(folder)) as child:
        assert child.hear() == str(errno.EIO)
        left = []
        while not (said := child.hear()).startswith("["):
            left.append(said)
        assert child.errors() == ""
    assert left == [f"{i} {10.0 * i} {i < 3}" for i in range(12) if i not in (3, 4, 5, 6, 7)]
    ((begin, size),) = ast.literal_eval(said)
    assert begin <= 12288 < 16384 <= begin + size


def test_truncated_journal_makes_keys_uncertain(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.writev({"a": contents(1000), "b": contents(1000)}).wait(timeout=PATIENCE)
        end = store.statistics().journal_bytes
        store.delete("a").wait(timeout=PATIENCE)
    for size in (end, end + 32, end + 40):
        with (tmp_path / "journal").open("r+b") as journal:
            journal.truncate(size)
        with DiskStore.salvage(tmp_path, engine=engine) as store:
            assert (store.keys(), store.uncertain) == (["a", "b"], {"a", "b"})  # type: ignore[comparison-overlap]
            assert store.damage


def test_salvage_refuses_changed_tensors(engine: Engine, tmp_path: Path) -> None:
    tensors = {f"{i}": contents(70_000, i) for i in range(6)}
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.writev(tensors).wait(timeout=PATIENCE)
        store.write("empty", torch.zeros(0, 3)).wait(timeout=PATIENCE)
    (slab,) = slabs(tmp_path)
    flip(slab, slab.read_bytes().find(bytes(tensors["3"][1000:1064].tolist())))
    flip(tmp_path / "journal", 20)  # a header
    flip(tmp_path / "journal", 4096 + 20)  # the other one
    with DiskStore.salvage(tmp_path, engine=engine) as store:
        assert set(store.keys()) == store.uncertain == {"0", "1", "2", "4", "5", "empty"}  # its end may be missing
        assert "3" not in store
        assert isinstance(store.lost["3"], ChecksumError)
        with pytest.raises(NotFoundError):
            store.read("3").wait(timeout=PATIENCE)
        assert store.read("empty").wait(timeout=PATIENCE).shape == (0, 3)
        assert error_number(store.write("3", tensors["3"])) == errno.EROFS
        slab.unlink()
    with DiskStore.salvage(tmp_path, engine=engine) as store:
        assert store.keys() == ["empty"]
        assert store.lost.keys() == tensors.keys()
        assert {error.errno for error in store.lost.values()} == {errno.ENOENT}


def test_salvage_marks_unchecked_tensors_uncertain(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=True, checksum=False) as store:
        store.writev({"a": contents(1000), "empty": torch.zeros(0)}).wait(timeout=PATIENCE)
    with DiskStore.salvage(tmp_path, engine=engine) as store:
        assert (store.uncertain, store.lost, store.damage) == ({"a"}, {}, [])  # type: ignore[comparison-overlap]
        expect(store, {"a": contents(1000), "empty": torch.zeros(0)})
