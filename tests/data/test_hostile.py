"""Archives and sidecars that were made to do harm, and archives that end too early."""

from __future__ import annotations

import gzip
import os
import secrets
import struct
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
import zstandard

from cudafuture.data import TgzImages, _index_source, _sidecar, classes_of
from cudafuture.errors import ArchiveError
from data.archives import compress, images, numbers, pixels_of, png, tar, write_archive

COUNT = 4


def headers(kind: bytes, records: bytes) -> bytes:
    """Return an extended header."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, len(records)
    return info.tobuf() + records + bytes(-len(records) % 512)


def member(name: str, size: int) -> bytes:
    """Return the header of a member without its data."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [b"x", b"g"])
def test_many_extended_records_cost_no_time(tmp_path: Path, kind: bytes) -> None:
    many = b"4 =\n" * (1 << 18) if kind == b"x" else b"".join(b"15 key%06d=v\n" % i for i in range(60_000))
    archive = tmp_path / "images.tgz"
    members = b"".join(member(f"a/{i}.png", 0) for i in range(2000))
    archive.write_bytes(gzip.compress(headers(kind, many) + members + bytes(1024), 1))
    start = time.process_time()
    assert classes_of(archive) == ["a"]
    assert time.process_time() - start < 1  # it was 2 and 7: quadratic


FILES = [(f"a/{i}.png", png(pixels_of(i))) for i in range(2)]
LIES = {
    "over 64 bits": member("a/lie.png", 1 << 70),
    "over the file system's": member("a/lie.png", 1 << 59),
    "over 63 bits": member("a/lie.png", 1 << 63),
    "many digits": headers(b"x", b"5013 size=" + b"1" * 5002 + b"\n") + member("a/lie.png", 0),
    "digits over 64 bits": headers(b"x", b"30 size=" + b"9" * 21 + b"\n") + member("a/lie.png", 0),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("packing", ["tar", "tgz"])
def test_impossible_size_is_member_fault(tmp_path: Path, lie: str, packing: str) -> None:
    archive = tmp_path / f"images.{packing}"
    data = b"".join(member(name, len(file)) + file + bytes(-len(file) % 512) for name, file in FILES)
    archive.write_bytes(compress(data + LIES[lie] + bytes(1024), packing))
    for index in ("auto", False):
        with pytest.raises(ArchiveError, match=rf"images\.{packing}, member 'a/lie\.png'.*(damaged|truncated|bytes)"):
            list(TgzImages(archive, index=index))
        dataset = TgzImages(archive, index=index, on_error="skip")
        assert numbers(dataset) == [0, 1]
        assert set(dataset.skipped) <= {"damaged", "truncated", "too_large", "unknown_class"}


def test_cut_archive_has_images_without_index(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    noise = [torch.randint(256, (3, 16, 16), generator=generator, dtype=torch.uint8) for _ in range(40)]
    whole = gzip.compress(tar((f"a/{i}.png", png(pixels)) for i, pixels in enumerate(noise)))
    archive = tmp_path / "images.tgz"
    for cut in (1, 8, 9, 12, 16, 30):
        archive.write_bytes(whole[:-cut])
        dataset = TgzImages(archive, on_error="skip")
        streamed = TgzImages(archive, on_error="skip", index=False)
        assert numbers(dataset) == numbers(streamed) != []
        assert dataset.skipped == streamed.skipped == {"truncated": 1}
        assert not archive.with_name("images.tgz.index").exists()
        with pytest.raises(ArchiveError, match="truncated"):
            TgzImages(archive, index=True)
    archive.write_bytes(whole)
    assert len(TgzImages(archive, index=True)) == len(noise)


@pytest.mark.parametrize("checksum", [True, False])
def test_archive_cut_in_frame_is_truncated(tmp_path: Path, checksum: bool) -> None:
    archive = tmp_path / "images.tar.zst"
    whole = zstandard.ZstdCompressor(write_checksum=checksum).compress(tar(images(COUNT)))
    for cut in (1, 3, 4, 5, 20):
        archive.write_bytes(whole[:-cut])
        dataset = TgzImages(archive, on_error="skip")
        list(dataset)
        assert dataset.skipped == {"truncated": 1}
    archive.write_bytes(whole)
    assert numbers(TgzImages(archive)) == list(range(COUNT))


def test_skippable_zstandard_frames_are_skipped(tmp_path: Path) -> None:
    data, archive = tar(images(COUNT)), tmp_path / "images.tar.zst"
    skipped, empty = struct.pack("<II", 0x184D2A50, 4) + b"abcd", struct.pack("<II", 0x184D2A5F, 0)
    compress = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress
    archive.write_bytes(skipped + empty + compress(data[:999]) + skipped + zstandard.compress(data[999:]) + empty)
    assert numbers(TgzImages(archive)) == list(range(COUNT))
    archive.write_bytes(zstandard.compress(data) + skipped[:-1])
    with pytest.raises(ArchiveError, match="truncated"):
        list(TgzImages(archive))
    archive.write_bytes(zstandard.compress(data) + b"garbage")
    with pytest.raises(ArchiveError, match="damaged"):
        list(TgzImages(archive))


def column(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


CHANGES: dict[str, dict[str, Any]] = {
    "labels over the classes": {"labels": column(99, 0, 1, 2)},
    "negative labels": {"labels": column(0, 0, 1, -1)},
    "negative offsets": {"offsets": column(-1, 0, 0, 0)},
    "offsets behind the archive": {"offsets": column(1 << 40, 0, 0, 0)},
    "negative sizes": {"sizes": column(0, 0, 0, -1)},
    "sizes over the limit": {"sizes": column(1 << 45, 0, 0, 0)},
    "sizes over the archive": {"sizes": column(1 << 20, 0, 0, 0)},
    "ends that go back": {"ends": column(40, 30, 50, 60)},
    "ends behind the names": {"ends": column(1, 2, 3, 1 << 30)},
    "reason": {"refused": [("a", "nonsense", "b")]},
    "packing": {"packing": "gzip"},
    "unknown packing": {"packing": ["tar"]},
    "seek points": {"seek_points": torch.ones(8, dtype=torch.uint8)},
    "classes": {"classes": [1, 2, 3]},
    "order of the classes": {"classes": ["z", "y", "x"]},
    "size of the archive": {"identity": ("1", 2)},
    "columns": {"labels": column(0)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_impossible_sidecar_counts_as_absent(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write_archive(tmp_path, images(COUNT), "tar")
    TgzImages(archive)
    index = _sidecar.read_sidecar(str(archive))
    assert index is not None
    _sidecar.write_sidecar(str(archive), replace(index, **CHANGES[change]))
    monkeypatch.setattr(_index_source, "write_sidecar", lambda path, index: None)  # as if the folder were read-only
    for _ in range(2):
        assert numbers(TgzImages(archive, index=True)) == list(range(COUNT))
        assert classes_of(archive) == ["x", "y", "z"]
    assert caplog.text.count("is built again: its content is wrong") == 1


def test_deep_sidecar_header_counts_as_absent(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, images(COUNT), "tar")
    header = b"[" * 100_000
    data = _sidecar._MAGIC + len(header).to_bytes(8, "little") + header
    archive.with_name("images.tar.index").write_bytes(data + xxhash.xxh3_128_digest(data))
    assert numbers(TgzImages(archive)) == list(range(COUNT))


def test_temporary_files_of_killed_processes_vanish(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, images(COUNT))
    old, new = (tmp_path / f".images.tgz.index.{secrets.token_hex(8)}" for _ in range(2))
    other = tmp_path / f".images.tgz.index.{'g' * 16}"
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    TgzImages(archive)
    assert sorted(tmp_path.iterdir()) == sorted([archive, tmp_path / "images.tgz.index", new, other])
