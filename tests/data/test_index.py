"""The index of an archive and its sidecar: reused, rebuilt, never trusted when it is wrong."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture.data import TgzImages, _archive_index, _candidates, _index_source, _sidecar, classes_of
from cudafuture.data._archive_index import ArchiveReader, build_index
from cudafuture.errors import ArchiveError
from data.archives import compress, images, numbers, tar, write_archive

COUNT = 9
PACKINGS = pytest.mark.parametrize("packing", ["tar", "tgz"])


def sidecar(archive: Path) -> Path:
    return archive.with_name(archive.name + ".index")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of archives whose indexes are built, as it grows."""
    built: list[str] = []
    monkeypatch.setattr(_index_source, "build_index", lambda path: built.append(path) or build_index(path))  # type: ignore[func-returns-value]
    return built


@PACKINGS
def test_index_is_stored_and_reused(tmp_path: Path, packing: str, builds: list[str]) -> None:
    archive = write_archive(tmp_path, images(COUNT), packing)
    for _ in range(3):
        dataset = TgzImages(archive, index=True)
        assert len(dataset) == COUNT
        assert numbers(dataset) == list(range(COUNT))
        assert dataset.classes == classes_of(archive)
    assert len(builds) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [archive.name, sidecar(archive).name]


@PACKINGS
def test_index_alone_locates_images(tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write_archive(tmp_path, images(COUNT), packing)
    dataset = TgzImages(archive, shard=(1, 3))
    monkeypatch.setattr(_candidates, "open_stream", lambda path: pytest.fail("the archive is read as a whole"))
    assert numbers(dataset) == [3, 4, 5]


def test_many_seek_points_allow_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_archive_index, "_SPACING", 1 << 16)
    generator = torch.Generator().manual_seed(0)
    files = [(f"a/{i}.png", bytes(torch.randint(256, (9000,), generator=generator).tolist())) for i in range(60)]
    archive = write_archive(tmp_path, files)
    index = build_index(str(archive))
    assert index.seek_points.nbytes > 5 * 32768
    order = torch.randperm(60, generator=generator)
    found = list(_candidates.indexed(str(archive), index, index.labels, order, range(60)))
    assert [candidate.data for candidate in found] == [files[i][1] for i in order.tolist()]
    assert [index.name(i) for i in range(60)] == [name for name, _ in files]
    again = _candidates.indexed(str(archive), index, index.labels, None, range(17, 60))
    assert [candidate.data for candidate in again] == [data for _, data in files[17:]]


@PACKINGS
def test_changed_archive_rebuilds_index(tmp_path: Path, packing: str, builds: list[str]) -> None:
    archive = write_archive(tmp_path, images(COUNT), packing)
    TgzImages(archive)
    stat = archive.stat()
    os.utime(archive, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert numbers(TgzImages(archive)) == list(range(COUNT))
    assert len(builds) == 2
    write_archive(tmp_path, images(COUNT + 1), packing)
    os.utime(archive, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # another size, the same time
    assert numbers(TgzImages(archive)) == list(range(COUNT + 1))
    assert len(builds) == 3
    assert numbers(TgzImages(archive)) == list(range(COUNT + 1))
    assert len(builds) == 3


@PACKINGS
def test_damaged_sidecar_is_rebuilt(
    tmp_path: Path, packing: str, builds: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    archive = write_archive(tmp_path, images(COUNT), packing)
    TgzImages(archive)
    whole = sidecar(archive).read_bytes()
    places = {0, 15, 16, 30, len(whole) // 2, len(whole) - 17, len(whole) - 1}
    changed = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in sorted(places)]
    for damaged in [b"", whole[:10], whole[:-1], whole + b"\0", b"{}", *changed]:
        sidecar(archive).write_bytes(damaged)
        del builds[:]
        caplog.clear()
        _index_source._logged.clear()
        assert numbers(TgzImages(archive)) == list(range(COUNT))
        assert len(builds) == 1
        assert "is built again" in caplog.text
        assert sidecar(archive).read_bytes() == whole


def test_wrong_sidecar_content_is_rejected(tmp_path: Path, builds: list[str]) -> None:
    archive = write_archive(tmp_path, images(COUNT))
    TgzImages(archive)
    whole = sidecar(archive).read_bytes()
    for old, new in (
        (b'"refused"', b'"refuse!"'),
        (b'"offsets": 72', b'"offsets": 64'),
        (b'"classes"', b'\xff"lasses"'),
    ):
        changed = whole[:-16].replace(old, new)
        assert changed != whole[:-16]
        sidecar(archive).write_bytes(changed + _sidecar.xxhash.xxh3_128_digest(changed))  # type: ignore[attr-defined]
        del builds[:]
        assert numbers(TgzImages(archive)) == list(range(COUNT))
        assert len(builds) == 1


def test_sidecar_pipe_is_not_read(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, images(COUNT))
    os.mkfifo(sidecar(archive))
    assert numbers(TgzImages(archive)) == list(range(COUNT))


def test_unwritable_index_stays_in_memory(tmp_path: Path, builds: list[str], caplog: pytest.LogCaptureFixture) -> None:
    archive = write_archive(tmp_path, images(COUNT))
    sidecar(archive).mkdir()  # also for root, who may write everywhere
    first = TgzImages(archive, index=True)
    second = TgzImages(archive, index=True)
    assert len(first) == len(second) == COUNT
    assert numbers(second) == list(range(COUNT))
    assert len(builds) == 1
    assert caplog.text.count("stays in the memory of this process") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [archive.name, sidecar(archive).name]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_keeps_old_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    archive = write_archive(tmp_path, images(COUNT))
    sidecar(archive).write_bytes(b"old")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    assert numbers(TgzImages(archive)) == list(range(COUNT))
    assert sidecar(archive).read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


def test_sidecar_is_synced_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write_archive(tmp_path, images(COUNT))
    steps: list[Any] = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: steps.append(os.fstat(fd).st_size) or fsync(fd))  # type: ignore[func-returns-value]
    monkeypatch.setattr(os, "replace", lambda a, b: steps.append((Path(a).parent, b)) or rename(a, b))  # type: ignore[func-returns-value]
    TgzImages(archive)
    assert steps == [sidecar(archive).stat().st_size, (tmp_path, sidecar(archive))]


def _read(path: str, start: Any) -> list[int]:
    start.wait()
    return numbers(TgzImages(path, index=True))


def test_concurrent_builders_all_get_index(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, images(COUNT))
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    results: Any = context.SimpleQueue()
    processes = [context.Process(target=lambda: results.put(_read(str(archive), start))) for _ in range(4)]
    for process in processes:
        process.start()
    assert [results.get() for _ in processes] == [list(range(COUNT))] * 4
    for process in processes:
        process.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == [archive.name, sidecar(archive).name]
    assert _sidecar.read_sidecar(str(archive)) is not None


@PACKINGS
def test_archive_changed_after_index_is_error(tmp_path: Path, packing: str) -> None:
    archive = write_archive(tmp_path, images(COUNT), packing)
    dataset = TgzImages(archive)
    write_archive(tmp_path, images(COUNT + 1), packing)
    with pytest.raises(ArchiveError, match="has changed since its index was read"):
        list(dataset)


def test_archive_changed_while_indexing_has_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = write_archive(tmp_path, images(COUNT))
    stats = iter([(1, 1), (1, 2)])
    monkeypatch.setattr(_archive_index, "identity_of", lambda path: next(stats))
    with pytest.raises(ArchiveError, match="changed while its index was built"):
        TgzImages(archive, index=True)


def test_refused_seek_points_are_error(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, images(COUNT))
    index = build_index(str(archive))
    _sidecar.write_sidecar(str(archive), replace(index, seek_points=index.seek_points.flip(0).contiguous()))
    with pytest.raises(ArchiveError, match=r"cannot use the seek points .* remove .*images\.tgz\.index"):
        list(TgzImages(archive))


def test_index_without_images_is_reused(tmp_path: Path, builds: list[str]) -> None:
    archive = write_archive(tmp_path, [])
    assert [len(TgzImages(archive)) for _ in range(2)] == [0, 0]
    assert len(builds) == 1


def test_zstandard_has_no_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = write_archive(tmp_path, images(COUNT), "tar.zst")
    with pytest.raises(ArchiveError, match=r"a \.tar\.zst archive cannot have an index"):
        TgzImages(archive, index=True)
    for _ in range(2):
        assert numbers(TgzImages(archive)) == list(range(COUNT))
    assert caplog.text.count("without an index, so every worker unpacks all of it") == 1
    assert not sidecar(archive).exists()


def test_archive_without_index_has_no_length(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="has no index, so its length is not known"):
        len(TgzImages(write_archive(tmp_path, images(COUNT)), index=False))


def test_missing_index_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = write_archive(tmp_path, images(COUNT))
    for _ in range(2):
        list(TgzImages(archive, index=False))
    assert caplog.text.count("every worker unpacks all of it") == 1
    assert not sidecar(archive).exists()


def test_without_rapidgzip_only_tar_has_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for packing in ("tar", "tgz"):
        TgzImages(write_archive(tmp_path, images(COUNT), packing))  # leaves a sidecar
    monkeypatch.setitem(sys.modules, "rapidgzip", None)
    assert len(TgzImages(tmp_path / "images.tar", index=True)) == COUNT
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        dataset = TgzImages(tmp_path / "images.tgz")
        assert numbers(dataset) == list(range(COUNT))
    assert caplog.text.count("pip install rapidgzip") == 1
    with pytest.raises(TypeError):
        len(dataset)


@pytest.mark.parametrize(("batch", "lengths"), [(None, [5, 4]), (2, [3, 2])])
def test_length_is_that_of_rank(tmp_path: Path, batch: int | None, lengths: list[int]) -> None:
    archive = write_archive(tmp_path, images(COUNT))
    assert [len(TgzImages(archive, batch=batch, shard=(rank, 2))) for rank in range(2)] == lengths


def test_reader_returns_exact_member_bytes(tmp_path: Path) -> None:
    data = tar(images(2))
    for packing in ("tar", "tgz"):
        archive = tmp_path / f"images.{packing}"
        archive.write_bytes(compress(data, packing))
        reader = ArchiveReader(str(archive), build_index(str(archive)))
        assert reader.read(0, len(data)) == data
        assert reader.read(700, 11) == data[700:711]
        with pytest.raises(Exception, match="truncated"):
            reader.read(len(data) - 5, 10)
        reader.close()
