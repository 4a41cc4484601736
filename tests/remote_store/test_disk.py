"""Stores on a worker whose disk is full, read-only or faulty: clients get the errors and keep their tensors."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc_ext
from cudafuture import CUDAFuture
from cudafuture.errors import ChecksumError, InvalidStateError, StorageError
from cudafuture.io import Engine
from remote_store.contents import KEYS, MIB, content_of, version_of
from rpc_ext.store.client import RemoteStore
from rpc_ext.store.service import StoreService, serve_store
from support import mounts
from support.patience import PATIENCE
from support.rpc_callees import ME, alone
from support.soak import soak_count
from support.storing import contents, flip, slabs

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("remote-store")]

LARGE = 20 * MIB  # two parts
DISK = 64 * MIB


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_ext.Session]:
    with alone(tmp_path_factory.mktemp("rpc") / "rendezvous", num_worker_threads=4) as session:
        yield session


def error_number(future: CUDAFuture[Any], what: str) -> int:
    """Return the errno of a failed future, or 0 if it has a result. Check that the error names the call."""
    error = future.exception(timeout=PATIENCE)
    if error is None:
        return 0
    assert isinstance(error, StorageError), repr(error)
    assert error.errno is not None
    if hasattr(error, "__notes__"):
        assert f"{what} on worker '{ME}'" in error.__notes__
    return error.errno


def expect_names(service: StoreService, names: int) -> None:
    """Wait until the store has this number of names, and no space without any: removed names have no future."""
    end = time.monotonic() + PATIENCE
    while True:
        found = service.store.statistics()
        if found.keys == names and not service.statistics().in_flight and (names or not found.used):
            return
        assert time.monotonic() < end, found
        service.store.flush().exception(timeout=PATIENCE)


# ---- through the engine's seam


FAULTS = {
    "full": ({"no_space": 0.1}, {errno.ENOSPC}),
    "failing": ({"io_error": 0.1}, {errno.EIO}),
    "both, and slow": ({"io_error": 0.05, "no_space": 0.05, "late": 0.5, "again": 0.2}, {errno.EIO, errno.ENOSPC}),
}


@pytest.mark.soak
@pytest.mark.parametrize("kind", FAULTS)
def test_disk_error_changes_nothing(tmp_path: Path, kind: str) -> None:
    faults, numbers_of_errors = FAULTS[kind]
    numbers = random.Random(kind)
    held: dict[str, int] = {}
    ended: list[int] = []
    with (
        Engine("threads", _faults={**faults, "seed": 1}) as engine,
        serve_store(tmp_path / "served", engine=engine) as service,
        RemoteStore(ME, namespace="kept") as remote,
    ):
        for version in range(1, soak_count(100) + 1000):
            if version > soak_count(100) + 1 and numbers_of_errors < {*ended}:
                break  # timing decides the requests that the engine joins, and so those that fail
            keys = numbers.sample(KEYS, 5)
            writes = {key: remote.write(key, content_of(key, version)) for key in keys}
            for key, write in writes.items():
                ended.append(error_number(write, f"write {key}"))
                held |= {key: version} if not ended[-1] else {}
            assert {*remote.keys()} == {*held}
            reads = {key: remote.read(key) for key in held}
            for key, read in reads.items():
                ended.append(error_number(read, f"read {key}"))
                assert ended[-1] or version_of(key, read.value()) == held[key]
            if held and version % 5 == 0:
                key = numbers.choice([*held])
                remote.delete(key).wait(timeout=PATIENCE)
                del held[key]
        assert numbers_of_errors | {0} == {*ended}  # and no others
        remote.deletev(held).wait(timeout=PATIENCE)
        expect_names(service, 0)
        assert service.statistics().refused == 0


@pytest.mark.parametrize("size", [1000, LARGE])
def test_damage_error_names_client_keys(tmp_path: Path, size: int) -> None:
    content, key = contents(size), "'it' \x01 \\1"
    with serve_store(tmp_path / "served", durable=True) as service, RemoteStore(ME) as remote:
        remote.write(key, content).wait(timeout=PATIENCE)
        found = {slab: slab.read_bytes().find(content[-500:].numpy().tobytes()) for slab in slabs(tmp_path / "served")}
        ((slab, offset),) = ((slab, offset) for slab, offset in found.items() if offset >= 0)
        flip(slab, offset)
        for read in (remote.read(key), remote.readv([key])):
            error = read.exception(timeout=PATIENCE)
            assert isinstance(error, ChecksumError)
            assert str(error).startswith((f"key '{key}': its {size} bytes ", f"key {key!r}: its {size} bytes "))
            said = [str(error), *getattr(error, "__notes__", [])]
            assert not any(name in text for name in service.store.keys() for text in said)  # noqa: SIM118
        error = remote.read(key).exception(timeout=PATIENCE)
        assert isinstance(error, ChecksumError)
        assert str(error).endswith(" are not those that were written")
        assert service.statistics().refused == 0
        assert remote.statistics().repeated == 2  # the first of the three reads was followed by the second
        if size < LARGE:  # the store verifies a tensor that it reads as a whole
            assert service.store.statistics().checksum_errors == 2


# ---- a disk that is full


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system, and return its root."""
    with mounts.small_disk(tmp_path / "disk", DISK) as disk:
        yield disk


@pytest.mark.root
@pytest.mark.parametrize("durable", [False, True], ids=["ephemeral", "durable"])
def test_full_disk_recovers_after_deletions(disk: Path, durable: bool) -> None:
    def content(i: int) -> torch.Tensor:
        return torch.full((LARGE if i % 5 == 0 else MIB,), i, dtype=torch.uint8)

    with serve_store(disk / "served", durable=durable) as service, RemoteStore(ME, namespace="kept") as remote:
        errors = {i: error_number(remote.write(f"{i}", content(i)), f"write {i}") for i in range(25)}
        assert {*errors.values()} == {0, errno.ENOSPC}
        kept = {f"{i}": i for i, error in errors.items() if error == 0}
        refused = [i for i, error in errors.items() if error]
        expect_kept(service, remote, kept)
        assert error_number(remote.write("1", torch.zeros(DISK, dtype=torch.uint8)), "write 1") == errno.ENOSPC
        expect_kept(service, remote, kept)
        remote.deletev(["0", "5"]).wait(timeout=PATIENCE)
        del kept["0"], kept["5"]
        for i in refused[:2]:
            remote.write(f"{i}", content(i)).wait(timeout=PATIENCE)
            kept[f"{i}"] = i
        expect_kept(service, remote, kept)
    if durable:
        with serve_store(disk / "served", durable=True) as service, RemoteStore(ME, namespace="kept") as remote:
            expect_kept(service, remote, kept)


def test_acknowledged_deletion_has_freed_room(tmp_path: Path) -> None:
    with serve_store(tmp_path, durable=True) as service, RemoteStore(ME, namespace="kept") as remote:
        for _ in range(20):
            remote.write("x", torch.zeros(LARGE, dtype=torch.uint8)).wait(timeout=PATIENCE)
            remote.delete("x").wait(timeout=PATIENCE)
            assert service.store.statistics().used == 0


def expect_kept(service: StoreService, remote: RemoteStore, kept: dict[str, int]) -> None:
    """Check that the store has exactly these keys, each with its number in all elements."""
    assert {*remote.keys()} == {*kept}
    for key, i in kept.items():
        found = remote.read(key).wait(timeout=PATIENCE)
        assert found.nbytes == (LARGE if i % 5 == 0 else MIB)
        assert bool((found == i).all())
    expect_names(service, len(kept))


# ---- a disk that may only be read


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Mount ``tmp_path / "there"`` read-only, and return the path of the mount."""
    (tmp_path / "there").mkdir()
    with mounts.read_only(tmp_path / "there", tmp_path / "read-only") as root:
        yield root


@pytest.mark.root
@pytest.mark.parametrize("durable", [False, True], ids=["ephemeral", "durable"])
def test_read_only_disk_is_not_served(read_only: Path, tmp_path: Path, durable: bool) -> None:
    content = content_of("large a", 1)
    with serve_store(tmp_path / "there", durable=True), RemoteStore(ME, namespace="kept") as remote:
        remote.write("large a", content).wait(timeout=PATIENCE)
    for folder in (read_only, read_only / "another"):
        with pytest.raises(StorageError) as caught:
            serve_store(folder, durable=durable)
        assert caught.value.errno == errno.EROFS
        assert str(read_only) in str(caught.value)
        with pytest.raises(InvalidStateError, match="serves no store"):
            RemoteStore(ME)
    with serve_store(tmp_path / "there", durable=True), RemoteStore(ME, namespace="kept") as remote:
        assert torch.equal(remote.read("large a").wait(timeout=PATIENCE), content)
