"""Failures of the system: limits of file size, full disks, no descriptors, no permission, and deleted folders."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture import wait_all
from cudafuture.errors import StorageError
from cudafuture.io import Engine, File
from cudafuture.store import DiskStore
from support import mounts
from support.child import Child
from support.patience import PATIENCE
from support.soak import soak_count
from support.storing import MIB, contents, error_number, expect, open_held_store

DISK = 64 * MIB
LONG = "x" * 1000  # goes into names, so that few of them fill a page of the journal

pytestmark = pytest.mark.usefixtures("on_the_host")


# ---- no file may be larger


@contextlib.contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Limit the size of all files of this process. Python ignores the signal SIGXFSZ."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_at_size_limit_keeps_content(engine: Engine, tmp_path: Path) -> None:
    first, second = contents(MIB, 1), contents(2 * MIB, 2)
    with File(tmp_path / "file", "w+", engine=engine) as file:
        with limit_file_size(2 * MIB):
            file.write(first).wait(timeout=PATIENCE)
            error = file.write(second, MIB).exception(timeout=PATIENCE)
            assert isinstance(error, StorageError)
            assert (error.errno, error.wanted, error.got <= MIB) == (errno.EFBIG, 2 * MIB, True)
            assert file.size <= 2 * MIB
        file.write(second, MIB).wait(timeout=PATIENCE)
        got = torch.zeros(3 * MIB, dtype=torch.uint8)
        file.read(got).wait(timeout=PATIENCE)
        assert torch.equal(got, torch.cat([first, second]))


def test_store_respects_file_size_limit(engine: Engine, durable: bool, tmp_path: Path) -> None:
    tensors = {f"{i}": contents(700_000, i) for i in range(10)}
    large = contents(3 * MIB)
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        with limit_file_size(2 * MIB):
            for key, tensor in tensors.items():
                store.write(key, tensor).wait(timeout=PATIENCE)
            assert error_number(store.write("large", large)) == errno.EFBIG
            assert error_number(store.writev({"large": large, "0": contents(9)})) == errno.EFBIG
            expect(store, tensors | {"0": contents(9)})
        store.write("large", large).wait(timeout=PATIENCE)
        expect(store, tensors | {"0": contents(9), "large": large})


def test_journal_at_size_limit_fails_changes(engine: Engine, tmp_path: Path) -> None:
    tensors = {f"{i}": contents(100_000, i) for i in range(6)}
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.writev(tensors).wait(timeout=PATIENCE)
        with limit_file_size(store.statistics().journal_bytes):
            assert error_number(store.write("more", contents(0))) == errno.EFBIG
            assert error_number(store.write("0", contents(0))) == errno.EFBIG
            assert error_number(store.delete("1")) == errno.EFBIG
        assert torch.equal(store.read("0").wait(timeout=PATIENCE), tensors["0"])
        later = {f"later {i}": contents(100_000, 10 + i) for i in range(3)}  # would take what was freed too early
        store.writev(later).wait(timeout=PATIENCE)
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        if "1" not in store:  # the deletion failed: both would be in order
            del tensors["1"]
        expect(store, tensors | later)


# ---- the disk is full


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system, and return its root."""
    root, image = tmp_path / "disk", tmp_path / "image"
    if request.param == "tmpfs":
        made = mounts.small_disk(root, DISK)
    else:
        image.touch()
        os.truncate(image, DISK)
        commands = [
            ["mkfs.ext4", "-q", "-F", "-m0", "-b4096", str(image)],
            ["mount", "-o", "loop", str(image), str(root)],
        ]
        made = mounts.mount(root, "ext4", commands)
    with made as disk:
        yield disk


def fill(path: Path) -> None:
    """Write to a file until the disk has no free block."""
    with path.open("wb", buffering=0) as file:
        for size in (MIB, 4096, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
            os.fsync(file.fileno())


@pytest.mark.root
def test_file_recovers_from_full_disk(engine: Engine, disk: Path) -> None:
    pieces = [contents(MIB, i) for i in range(70)]
    with File(disk / "file", "w+", engine=engine) as file:
        errors = [error_number(write) for write in [file.write(p, i * MIB) for i, p in enumerate(pieces)]]
        assert set(errors) == {0, errno.ENOSPC}
        got = torch.zeros(MIB, dtype=torch.uint8)
        for i, piece in enumerate(pieces):
            if errors[i] == 0:
                file.read(got, i * MIB).wait(timeout=PATIENCE)
                assert torch.equal(got, piece)
        there = errors.index(0)  # the engine may issue the writes in another order than that of the calls
        assert error_number(file.write(pieces[there], there * MIB)) == 0  # it has these blocks
        file.truncate(0)
        failed = [piece for piece, error in zip(pieces, errors, strict=True) if error][:10]
        wait_all([file.write(piece, i * MIB) for i, piece in enumerate(failed)], timeout=PATIENCE)
        for i, piece in enumerate(failed):
            file.read(got, i * MIB).wait(timeout=PATIENCE)
            assert torch.equal(got, piece)


@pytest.mark.root
def test_store_on_full_disk_reuses_deleted_room(engine: Engine, durable: bool, disk: Path) -> None:
    tensors = {f"large {i}": contents(3 * MIB, i) for i in range(25)}
    tensors |= {f"small {i}": contents(20_000, 100 + i) for i in range(50)}
    with DiskStore(disk / "store", engine=engine, durable=durable) as store:
        errors = {key: error_number(f) for key, f in [(k, store.write(k, t)) for k, t in tensors.items()]}
        assert set(errors.values()) == {0, errno.ENOSPC}
        kept = {key: tensors[key] for key, error in errors.items() if error == 0}
        expect(store, kept)
        assert error_number(store.write("large 0", contents(4 * MIB))) == errno.ENOSPC
        expect(store, kept)
        half = [key for key in kept if key.startswith("large")][::2]
        store.deletev(half).wait(timeout=PATIENCE)
        expect(store, {key: tensor for key, tensor in kept.items() if key not in half})
        kept |= {key: contents(3 * MIB, 200 + i) for i, key in enumerate(half)}
        store.writev({key: kept[key] for key in half}).wait(timeout=PATIENCE)
        expect(store, kept)
    if durable:
        with DiskStore(disk / "store", engine=engine, durable=True) as store:
            expect(store, kept)


@pytest.mark.root
def test_closed_store_frees_disk(engine: Engine, disk: Path) -> None:
    before = os.statvfs(disk).f_bavail
    store = DiskStore(disk, engine=engine)
    store.write("large", contents(30 * MIB)).wait(timeout=PATIENCE)
    assert os.statvfs(disk).f_bavail <= before - 30 * MIB // 4096
    store.close()
    deadline = time.monotonic() + PATIENCE
    while os.statvfs(disk).f_bavail < before - 10:  # the kernel may close a file a little later
        assert time.monotonic() < deadline, "the closed store still has its room"
        os.sched_yield()
    del store


@pytest.mark.root
def test_full_disk_allows_durable_deletions(engine: Engine, disk: Path) -> None:
    tensors = {f"{i} {LONG}": contents(100_000, i) for i in range(40)}
    with DiskStore(disk / "store", engine=engine, durable=True) as store:
        store.writev(tensors).wait(timeout=PATIENCE)
        fill(disk / "ballast")
        for key in list(tensors)[:20]:
            store.delete(key).wait(timeout=PATIENCE)
            del tensors[key]
        expect(store, tensors)
    with DiskStore(disk / "store", engine=engine, durable=True) as store:  # the disk is still full
        expect(store, tensors)
        store.deletev(list(tensors)[:10]).wait(timeout=PATIENCE)
        for key in list(tensors)[10:]:
            store.delete(key).wait(timeout=PATIENCE)
    with DiskStore(disk / "store", engine=engine, durable=True) as store:
        assert store.keys() == []


@pytest.mark.root
def test_pending_deletions_keep_room_for_others(disk: Path, tmp_path: Path) -> None:
    tensors = {f"{i} {LONG}": contents(100_000, i) for i in range(40)}
    with DiskStore(disk / "store", durable=True) as store:
        store.writev(tensors).wait(timeout=PATIENCE)
    engine, store = open_held_store(disk / "store", durable=True)
    with engine, store:
        in_flight = [f"in flight {i} {LONG}" for i in range(400)]
        writes = [store.write(key, contents(1000)) for key in in_flight]
        fill(disk / "ballast")
        deletions = [store.delete(key) for key in in_flight]
        engine._native.release_held()
        assert {error_number(write) for write in writes} <= {0, errno.ENOSPC}
        wait_all(deletions, timeout=PATIENCE)
        for key in tensors:
            store.delete(key).wait(timeout=PATIENCE)
        assert store.keys() == []
    with DiskStore(disk / "store", durable=True) as store:
        assert store.keys() == []


@pytest.mark.root
def test_full_disk_keeps_slabs_of_torn_batch(
    engine: Engine, disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DiskStore(tmp_path / "lives", engine=engine, durable=True) as store:
        store.write("key", contents(1000)).wait(timeout=PATIENCE)
        store.write(LONG, contents(20 * MIB)).wait(timeout=PATIENCE)
        shutil.copytree(tmp_path / "lives", disk / "store")
    journal = disk / "store" / "journal"
    os.truncate(journal, journal.stat().st_size - 1)
    fill(disk / "ballast")
    with DiskStore(disk / "store", engine=engine, durable=True) as store:
        expect(store, {"key": contents(1000)})
        store.delete("key").wait(timeout=PATIENCE)
    assert "and were dropped; the disk had no room for a copy of them; keys in them: none" in caplog.text
    for _ in range(2):
        (kept,) = (disk / "store").glob("set-aside.*")
        assert kept.name.endswith("slab-00000001")
        got = torch.frombuffer(bytearray(kept.read_bytes()[: 20 * MIB]), dtype=torch.uint8)
        assert torch.equal(got, contents(20 * MIB))
        with DiskStore(disk / "store", engine=engine, durable=True) as store:
            assert store.keys() == []


@pytest.mark.root
def test_disk_can_be_refilled(engine: Engine, disk: Path) -> None:
    """The store accepts nearly the same bytes again, and all deletions, though a ballast fills the rest of the disk."""
    taken = []
    for number in range(soak_count(20)):
        with DiskStore(disk / "store", engine=engine, durable=True) as store:
            keys = [f"{number} {i} {LONG}" for i in range(500)]
            errors = {key: error_number(store.write(key, contents(150_000, i))) for i, key in enumerate(keys)}
            assert set(errors.values()) == {0, errno.ENOSPC}
            if number == 0:
                fill(disk / "ballast")
            kept = [key for key in keys if errors[key] == 0]
            taken.append(len(kept))
            assert sorted(store.keys()) == sorted(kept)
            if number % 2:
                store.deletev(kept).wait(timeout=PATIENCE)
                continue
        with DiskStore(disk / "store", engine=engine, durable=True) as store:
            expect(store, {key: contents(150_000, keys.index(key)) for key in kept})
            for key in kept:
                store.delete(key).wait(timeout=PATIENCE)
    assert min(taken) > 0.8 * max(taken), taken


@pytest.mark.root
def test_durable_store_opens_on_full_disk(engine: Engine, disk: Path) -> None:
    tensors = {f"{i} {LONG}": contents(100_000, i) for i in range(40)}
    with DiskStore(disk / "store", engine=engine, durable=True) as store:
        store.writev(tensors).wait(timeout=PATIENCE)
    fill(disk / "ballast")
    with DiskStore(disk / "store", engine=engine, durable=True) as store:
        expect(store, tensors)
    (disk / "ballast").unlink()
    with DiskStore(disk / "store", engine=engine, durable=True) as store:
        store.write("later", contents(100_000)).wait(timeout=PATIENCE)
        expect(store, tensors | {"later": contents(100_000)})


@pytest.mark.root
def test_store_creation_can_be_retried(engine: Engine, durable: bool, disk: Path) -> None:
    fill(disk / "ballast")
    for _ in range(2):  # the first try must not stand in the way of the second
        try:
            DiskStore(disk / "store", engine=engine, durable=durable).close()
        except StorageError as e:
            assert e.errno == errno.ENOSPC  # noqa: PT017 (it may work, too)
    (disk / "ballast").unlink()
    with DiskStore(disk / "store", engine=engine, durable=durable) as store:
        store.write("key", contents(1000)).wait(timeout=PATIENCE)
        expect(store, {"key": contents(1000)})


# ---- no rights


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Mount ``tmp_path / "there"`` read-only, and return the path of the mount."""
    (tmp_path / "there").mkdir()
    with mounts.read_only(tmp_path / "there", tmp_path / "read-only") as root:
        yield root


@pytest.mark.root
def test_durable_store_reads_from_read_only_disk(
    engine: Engine, durable: bool, read_only: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DiskStore(tmp_path / "there", engine=engine, durable=True) as store:
        store.write("key", contents(1000)).wait(timeout=PATIENCE)
    with File(tmp_path / "there" / "file", "w", engine=engine) as file:
        file.write(contents(1000)).wait(timeout=PATIENCE)
    for folder in (read_only / "another", read_only) if not durable else (read_only / "another",):
        with pytest.raises(StorageError) as caught:
            DiskStore(folder, engine=engine, durable=durable)
        assert caught.value.errno == errno.EROFS
    if durable:
        with DiskStore(read_only, engine=engine, durable=True) as store:
            assert store.read_only
            assert "opened read-only" in caplog.text
            expect(store, {"key": contents(1000)})
            assert error_number(store.write("key", contents(1000))) == errno.EROFS
    with pytest.raises(StorageError) as caught:
        File(read_only / "file", "w", engine=engine)
    assert caught.value.errno == errno.EROFS
    with File(read_only / "file", "r", engine=engine) as file:
        file.read(got := torch.zeros(1000, dtype=torch.uint8)).wait(timeout=PATIENCE)
        assert torch.equal(got, contents(1000))
    with DiskStore(tmp_path / "there", engine=engine, durable=True) as store:
        expect(store, {"key": contents(1000)})


WITHOUT_RIGHTS = """
import os, sys
from cudafuture.errors import StorageError
from cudafuture.io import File
from cudafuture.store import DiskStore
os.chdir(sys.argv[1])
if os.getuid() == 0: os.setuid(65534)
makers = {
    "ephemeral": lambda: DiskStore("."),
    "durable": lambda: DiskStore(".", durable=True),
    "below": lambda: DiskStore("below/that", durable=True),
    "file": lambda: File("file", "w"),
}
for name, make in makers.items():
    try:
        make()
        say(f"{name}: made")
    except StorageError as e:
        say(f"{name}: {e.errno}")
"""


@pytest.mark.slow
def test_unwritable_folder_raises(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with Child(WITHOUT_RIGHTS, str(tmp_path)) as child:
        said = [child.hear() for _ in range(4)]
        assert said == [f"{name}: {errno.EACCES}" for name in ("ephemeral", "durable", "below", "file")]
        assert (child.end(), child.errors()) == (0, "")
    tmp_path.chmod(0o755)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Return a folder that other users can reach, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("protected", ["the folder", "the journal", "a slab", "the folder above"])
def test_unwritable_durable_store_opens_read_only(protected: str, public_folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    folder = public_folder / "above" / "store"
    with DiskStore(folder, durable=True) as store:
        store.write("key", contents(1000)).wait(timeout=PATIENCE)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o777)
    if protected == "the folder":
        folder.chmod(0o555)
    elif protected == "the journal":
        (folder / "journal").chmod(0o444)
    elif protected == "a slab":
        next(folder.glob("slab-*")).chmod(0o444)
    else:
        folder.parent.chmod(0o111)  # it cannot be opened, nor synced
    with Child(OPEN_AS_NOBODY, str(folder)) as child:
        assert child.hear() == f"{protected != 'the folder above'} ['key']"
        assert child.end() == 0


OPEN_AS_NOBODY = """
import os, sys
from cudafuture.store import DiskStore
os.setuid(65534)
with DiskStore(sys.argv[1], durable=True) as store:
    say(f"{store.read_only} {store.keys()}")
"""


# ---- no descriptors

WITHOUT_DESCRIPTORS = """
import contextlib, os, resource, sys, torch
from cudafuture.errors import StorageError
from cudafuture.io import Engine, File
from cudafuture.store import DiskStore
backend, durable, folder = sys.argv[1], sys.argv[2] == "True", sys.argv[3]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

def number(call):
    try:
        result = call()
        error = result.exception() if hasattr(result, "exception") else None
    except StorageError as e:
        error = e
    return 0 if error is None else error.errno

with Engine(backend, block_size=1 << 18) as engine:
    store = DiskStore(folder, engine=engine, durable=durable)
    store.write("before", torch.arange(1000)).wait()
    for spare in 0, 1:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, hard))  # all numbers below are taken
        say(number(lambda: store.write("large", torch.ones(5_000_000))))
        say(number(lambda: DiskStore(folder + "/other", engine=engine)))
        say(number(lambda: DiskStore(folder + "/another", engine=engine, durable=True)))
        say(number(lambda: File(folder + "/file", "w+", engine=engine, direct=True)))
        say(number(lambda: store.write("small", torch.ones(10))))  # goes into a file that there is
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    say(number(lambda: store.write("large", torch.ones(5_000_000))))
    say(number(lambda: DiskStore(folder + "/another", engine=engine, durable=True)))
    store.close()
    if durable: store = DiskStore(folder, engine=engine, durable=True)
    else:
        store = DiskStore(folder, engine=engine)
        store.writev({"before": torch.arange(1000), "large": torch.ones(5_000_000), "small": torch.ones(10)}).wait()
    say([store.keys().sort(), store.read("large").wait().sum().item(), store.read("before").wait().sum().item()])
"""


@pytest.mark.slow
def test_store_recovers_from_descriptor_shortage(engine: Engine, durable: bool, tmp_path: Path) -> None:
    with Child(WITHOUT_DESCRIPTORS, engine.backend, str(durable), str(tmp_path)) as child:
        assert [child.hear() for _ in range(5)] == [str(errno.EMFILE)] * 4 + ["0"]
        with_one = [child.hear() for _ in range(5)]
        assert set(with_one) <= {str(errno.EMFILE), "0"}
        assert with_one[4] == "0"
        assert [child.hear() for _ in range(3)] == ["0", "0", "[None, 5000000.0, 499500]"]
        assert (child.end(), child.errors()) == (0, "")


# ---- no folder


def test_store_reports_deleted_folder(engine: Engine, durable: bool, tmp_path: Path) -> None:
    tensors = {"large": contents(3 * MIB, 1)} | {f"small {i}": contents(2000, i) for i in range(10)}
    store = DiskStore(tmp_path / "store", engine=engine, durable=durable)
    store.writev(tensors).wait(timeout=PATIENCE)
    shutil.rmtree(tmp_path / "store")
    for key, tensor in tensors.items():  # its files are open
        assert torch.equal(store.read(key).wait(timeout=PATIENCE), tensor)
    error_number(store.write("small 0", contents(2000)))
    assert torch.equal(store.read("small 1").wait(timeout=PATIENCE), tensors["small 1"])
    assert error_number(store.write("huge", contents(30 * MIB))) == errno.ENOENT  # wants another file
    error_number(store.delete("large"))
    error_number(store.flush())
    store.close()
    with DiskStore(tmp_path / "store", engine=engine, durable=durable) as store:
        assert store.keys() == []
        store.writev(tensors).wait(timeout=PATIENCE)
        expect(store, tensors)
