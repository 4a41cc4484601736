"""Members that are no images and archives that cannot be read: raised with their names, or counted."""

from __future__ import annotations

import gzip
import struct
import tarfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from cudafuture.data import TgzImages, _archive_stream, _faults, _tar, classes_of
from cudafuture.errors import ArchiveError
from data.archives import PACKINGS, Entry, compress, images, numbers, pixels_of, png, tar, write_archive

COUNT = 4
GOOD = png(pixels_of(0))
WAYS = [(packing, index) for packing in PACKINGS for index in ("auto", False)]
several_ways = pytest.mark.parametrize(("packing", "index"), WAYS)


def member(name: str, type: bytes, **attributes: Any) -> Entry:
    info = tarfile.TarInfo(name)
    info.type = type
    for key, value in attributes.items():
        setattr(info, key, value)
    return name, info


def png_of(width: int, height: int) -> bytes:
    """Return a PNG file whose header promises more pixels than it has."""
    chunk = b"IHDR" + struct.pack(">II", width, height) + GOOD[24:29]
    return GOOD[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + GOOD[33:]


BAD: dict[str, list[Entry]] = {
    "corrupt": [("a/cut.png", GOOD[: len(GOOD) // 2]), ("a/flipped.png", GOOD[:60] + b"\xff\xff" + GOOD[62:])],
    "not_an_image": [
        ("a/notes.png", b"words"),
        ("a/empty.jpg", b""),
        ("a/program.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
    ],
    "too_large": [("a/huge.png", png_of(20_000, 20_000))],
    "no_label": [("rootless.png", GOOD), ("./dot.png", GOOD), ("../up.png", GOOD), ("/absolute.png", GOOD)],
    "link": [
        member("a/hard.png", tarfile.LNKTYPE, linkname="z/0000.png"),
        member("a/soft.png", tarfile.SYMTYPE, linkname="/etc/passwd"),
    ],
    "special_file": [
        member("a/device", tarfile.CHRTYPE, devmajor=1, devminor=5),
        member("a/disk", tarfile.BLKTYPE),
        member("a/pipe", tarfile.FIFOTYPE),
        member("a/holes", tarfile.REGTYPE, pax_headers={"GNU.sparse.major": "1"}),
    ],
}
EACH = [(reason, entry) for reason, entries in BAD.items() for entry in entries]


@several_ways
@pytest.mark.parametrize(("reason", "entry"), EACH, ids=[entry[0] for _, entry in EACH])
def test_bad_member_error_has_name(tmp_path: Path, packing: str, index: Any, reason: str, entry: Entry) -> None:
    archive = write_archive(tmp_path, [*images(2), entry, *images(COUNT)[2:]], packing)
    with pytest.raises(ArchiveError, match=r"images\.tar.*member|images\.tgz.*member") as raised:
        list(TgzImages(archive, index=index))
    assert repr(entry[0]) in str(raised.value)
    assert (raised.value.path, raised.value.member, raised.value.reason) == (str(archive), entry[0], reason)


@several_ways
@pytest.mark.parametrize("shuffle", [0, 3])
def test_bad_members_are_counted_and_skipped(tmp_path: Path, packing: str, index: Any, shuffle: int) -> None:
    entries = [entry for pair in zip(EACH, images(len(EACH)), strict=True) for entry in (pair[0][1], pair[1])]
    archive = write_archive(tmp_path, entries, packing)
    dataset = TgzImages(archive, index=index, on_error="skip", batch=4, shuffle=shuffle)
    batches = list(dataset)
    assert sorted(numbers(batches)) == list(range(len(EACH)))
    assert [len(labels) for _, labels in batches] == [4] * (len(EACH) // 4) + [len(EACH) % 4] * (len(EACH) % 4 > 0)
    assert dataset.skipped == {reason: len(entries) for reason, entries in BAD.items()}
    assert {path.name for path in tmp_path.iterdir()} <= {f"images.{packing}", f"images.{packing}.index"}


@several_ways
def test_ranks_count_bad_members_once(tmp_path: Path, packing: str, index: Any) -> None:
    archive = write_archive(tmp_path, [*images(COUNT), *(entry for _, entry in EACH)], packing)
    datasets = [TgzImages(archive, index=index, on_error="skip", shard=(rank, 3)) for rank in range(3)]
    assert sorted(number for dataset in datasets for number in numbers(dataset)) == list(range(COUNT))
    assert sum((dataset.skipped for dataset in datasets), start=type(datasets[0].skipped)()) == {
        reason: len(entries) for reason, entries in BAD.items()
    }


@several_ways
def test_unknown_class_is_error_or_counted(tmp_path: Path, packing: str, index: Any) -> None:
    archive = write_archive(tmp_path, images(COUNT), packing)
    with pytest.raises(ArchiveError, match=r"0001\.png.*not one of the given classes"):
        list(TgzImages(archive, index=index, classes=["x", "z"]))
    dataset = TgzImages(archive, index=index, classes=["x", "z"], on_error="skip")
    assert numbers(dataset) == [0, 2, 3]
    assert dataset.skipped == {"unknown_class": 1}


def test_worker_error_keeps_type_and_member(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, [*images(1), ("a/notes.png", b"words")])
    with pytest.raises(ArchiveError, match=r"member 'a/notes\.png': the member is not an image"):
        list(DataLoader(TgzImages(archive), batch_size=None, num_workers=1))


def test_transform_errors_are_raised_unchanged(tmp_path: Path) -> None:
    def fail(pixels: torch.Tensor) -> torch.Tensor:
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        list(TgzImages(write_archive(tmp_path, images(1)), transform=fail, on_error="skip"))


def before_the_error(dataset: TgzImages) -> list[int]:
    """Return the images that come before an error of the archive."""
    found: list[int] = []
    with pytest.raises(ArchiveError, match=r"truncated|damaged"):
        found.extend(number for item in dataset for number in numbers([item]))
    return found


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shuffle", [0, 3])
def test_truncated_archive_is_raised_or_counted(tmp_path: Path, packing: str, shuffle: int) -> None:
    data = tar(images(COUNT))
    end = len(data.rstrip(b"\0")) if packing == "tar" else None
    whole = compress(data, packing)
    archive = tmp_path / f"images.{packing}"
    most = end if end is not None else len(whole) - (12 if packing == "tar.zst" else 1)
    for length in sorted({*range(512, most, 331), most}):
        archive.write_bytes(whole[:length])
        for index in ("auto", False):
            found = before_the_error(TgzImages(archive, index=index, shuffle=shuffle))
            dataset = TgzImages(archive, index=index, on_error="skip", shuffle=shuffle)
            skipping = numbers(dataset)
            assert found == skipping == (list(range(len(found))) if not shuffle else skipping)
            assert dataset.skipped == {"truncated": 1}
        with pytest.raises(ArchiveError, match="truncated"):
            TgzImages(archive, index=True)
        with pytest.raises(ArchiveError, match="truncated"):
            classes_of(archive)


@pytest.mark.parametrize("packing", PACKINGS)
def test_ranks_count_truncation_once(tmp_path: Path, packing: str) -> None:
    whole = compress(tar(images(COUNT)), packing)
    archive = tmp_path / f"images.{packing}"
    for length in range(600, len(tar(images(COUNT)).rstrip(b"\0")) if packing == "tar" else len(whole) - 12, 97):
        archive.write_bytes(whole[:length])
        datasets = [TgzImages(archive, on_error="skip", shard=(rank, 3)) for rank in range(3)]
        found = [number for dataset in datasets for number in numbers(dataset)]
        assert sorted(found) == list(range(len(found)))
        assert sum(dataset.skipped["truncated"] for dataset in datasets) == 1


def test_each_process_counts_in_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = _faults.SkipCounts()
    counts.add("link")
    for worker in range(3):
        monkeypatch.setattr(_faults, "get_worker_info", lambda worker=worker: SimpleNamespace(id=worker))
        counts.add("link")
    assert counts.total() == {"link": 4}
    assert int(counts._rows.max()) == 1


def test_truncation_error_names_member(tmp_path: Path) -> None:
    archive = tmp_path / "images.tar"
    archive.write_bytes(tar(images(COUNT))[: 512 + 700])
    with pytest.raises(ArchiveError, match=r"member 'set/z/0000\.png'|member 'set/y/0001\.png'"):
        list(TgzImages(archive))


@pytest.mark.parametrize("packing", ["tgz", "tar.zst"])
def test_damaged_compression_is_raised_or_counted(tmp_path: Path, packing: str) -> None:
    whole = bytearray(compress(tar(images(40)), packing))
    whole[len(whole) // 2] ^= 0xFF
    whole[len(whole) // 2 + 1] ^= 0xFF
    archive = tmp_path / f"images.{packing}"
    archive.write_bytes(whole)
    with pytest.raises(ArchiveError):
        list(TgzImages(archive))
    dataset = TgzImages(archive, on_error="skip")
    assert len(list(dataset)) < 40
    assert dataset.skipped.total() >= 1


def test_wrong_gzip_checksum_is_found(tmp_path: Path) -> None:
    whole = bytearray(compress(tar(images(COUNT)), "tgz"))
    whole[-8] ^= 1
    archive = tmp_path / "images.tgz"
    archive.write_bytes(whole)
    for index in ("auto", False):
        with pytest.raises(ArchiveError, match="damaged"):
            list(TgzImages(archive, index=index))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
NO_ARCHIVES = {
    "empty": (b"", "it is empty"),
    "text": (b"no archive at all" * 99, r"b'no archive at all"),
    "html": (b"<!DOCTYPE html><title>Not Found</title>", r"b'<!DOCTYPE html>"),
    "image": (GOOD, r"b'\\x89PNG"),
    "zeros": (bytes(100), r"b'\\x00"),
    "pointer": (LFS, "it is a pointer of Git LFS; run `git lfs pull`"),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("content", NO_ARCHIVES)
def test_file_without_archive_fails_immediately(tmp_path: Path, packing: str, content: str) -> None:
    data, text = NO_ARCHIVES[content]
    archive = tmp_path / f"images.{packing}"
    archive.write_bytes(compress(data, packing))
    for index in ("auto", False):
        for classes in (None, ["a"]):
            with pytest.raises(ArchiveError, match=rf"images\.{packing} is no tar archive: .*{text}") as raised:
                TgzImages(archive, index=index, classes=classes, on_error="skip")
            assert raised.value.path == str(archive)
    with pytest.raises(ArchiveError, match="is no tar archive"):
        TgzImages(archive, index=True)
    with pytest.raises(ArchiveError, match="is no tar archive"):
        classes_of(archive)


@pytest.mark.parametrize("packing", PACKINGS)
def test_empty_and_magicless_archives_are_read(tmp_path: Path, packing: str) -> None:
    archive = tmp_path / f"images.{packing}"
    archive.write_bytes(compress(bytes(10240), packing))
    assert classes_of(archive) == list(TgzImages(archive)) == []
    old = bytearray(tar(images(1)))  # as before POSIX
    old[257:512] = bytes(255)
    old[148:156] = b" " * 8
    old[148:156] = b"%06o\0 " % sum(old[:512])
    archive.write_bytes(compress(bytes(old), packing))
    assert numbers(TgzImages(archive)) == [0]


@pytest.mark.parametrize("packing", PACKINGS)
def test_damaged_first_header_is_archive_fault(tmp_path: Path, packing: str) -> None:
    data = bytearray(tar(images(2)))
    data[0] ^= 1
    archive = tmp_path / f"images.{packing}"
    archive.write_bytes(compress(bytes(data), packing))
    dataset = TgzImages(archive, on_error="skip")
    assert list(dataset) == []
    assert dataset.skipped == {"damaged": 1}


@pytest.mark.parametrize("packing", ["tgz", "tar.zst"])
@pytest.mark.parametrize("index", ["auto", False])
def test_decompression_bomb_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, index: Any
) -> None:
    monkeypatch.setattr(_archive_stream, "MOST_SMALL", 1 << 20)
    entries = [*images(2), ("a/zeros.png", bytes(8 << 20)), *images(3)[2:]]
    archive = write_archive(tmp_path, entries, packing)
    for classes in (None, list("axyz")):
        with pytest.raises(ArchiveError, match=r"zeros\.png.*unpacks to more than \d+ bytes.*a bomb"):
            list(TgzImages(archive, index=index, classes=classes))
    dataset = TgzImages(archive, index=index, on_error="skip")
    assert numbers(dataset) == [0, 1]
    assert dataset.skipped == {"bomb": 1}


def test_bomb_after_archive_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_archive_stream, "MOST_SMALL", 1 << 20)
    archive = tmp_path / "images.tgz"
    archive.write_bytes(gzip.compress(tar(images(2)) + bytes(8 << 20)))
    for index in ("auto", False):
        with pytest.raises(ArchiveError, match="a bomb"):
            list(TgzImages(archive, index=index))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pillow_limit_is_error_without_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
    with pytest.raises(ArchiveError, match="6 x 6 pixels, but only 30 are allowed"):
        list(TgzImages(write_archive(tmp_path, images(1))))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert numbers(TgzImages(write_archive(tmp_path, images(1)))) == [0]


@several_ways
def test_pillow_limit_raises_without_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, index: Any
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)  # 36 pixels: Pillow itself only warns
    with pytest.raises(ArchiveError, match=r"member 'set/z/0000\.png'") as raised:
        list(TgzImages(write_archive(tmp_path, images(1), packing), index=index))
    assert raised.value.reason == "too_large"


@several_ways
def test_member_over_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, index: Any
) -> None:
    monkeypatch.setattr(_tar, "MOST_MEMBER", 10_000)
    archive = write_archive(tmp_path, [*images(1), ("a/long.png", bytes(10_001)), *images(2)[1:]], packing)
    dataset = TgzImages(archive, index=index, on_error="skip")
    assert numbers(dataset) == [0, 1]
    assert dataset.skipped == {"too_large": 1}


def header(size: bytes = b"00000000000\0", type: bytes = b"0", name: bytes = b"a/b.png") -> bytes:
    """Return a header with any size, and with its checksum."""
    block = bytearray(tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT))
    block[:100] = name.ljust(100, b"\0")
    block[124:136], block[156:157] = size, type
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    "data",
    [
        header(b"\xff" * 12),  # a size of -1
        header(b"\xff" * 12, b"x"),
        header(b"77777777777\0", b"x"),  # extensions of 8 GiB
        header(b"77777777777\0", b"L"),
        header(b"00000000012\0", b"x") + b"99 path=ab".ljust(512, b"\0"),
        header(b"00000000012\0", b"x") + b"nonsense!!".ljust(512, b"\0"),
        header(b"00000000014\0", b"x") + b"12 size=-99\n".ljust(512, b"\0") + header(),
    ],
)
def test_lying_header_allocates_nothing(tmp_path: Path, data: bytes) -> None:
    archive = tmp_path / "images.tar"
    archive.write_bytes(data + bytes(1024))
    for index in ("auto", False):
        with pytest.raises(ArchiveError, match="header"):
            list(TgzImages(archive, index=index))
    dataset = TgzImages(archive, on_error="skip")
    assert list(dataset) == []
    assert dataset.skipped == {"damaged": 1}


def test_old_gnu_sparse_file_is_refused(tmp_path: Path) -> None:
    sparse = bytearray(header(b"00000001000\0", b"S", b"a/holes"))
    sparse[482] = 1  # a block with more of the map follows
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse)
    archive = tmp_path / "images.tar"
    archive.write_bytes(bytes(sparse) + bytes(512) + b"x" * 512 + tar(images(1)))
    dataset = TgzImages(archive, on_error="skip")
    assert numbers(dataset) == [0]
    assert dataset.skipped == {"special_file": 1}
