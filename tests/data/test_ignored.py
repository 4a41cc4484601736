"""Members that no loader of images would take, and archives of other formats."""

from __future__ import annotations

import bz2
import contextlib
import io
import lzma
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.utils.data import DataLoader

from cudafuture.data import TgzImages, classes_of
from cudafuture.errors import ArchiveError
from data.archives import Entry, images, number_of, numbers, pixels_of, png, tar, write_archive


def make_link(name: str) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, "README"
    return name, info


def of_type(name: str, type: bytes) -> Entry:
    info = tarfile.TarInfo(name)
    info.type = type
    return name, info


OTHERS: list[Entry] = [
    (".DS_Store", b"\0\0\0\1Bud1" + bytes(99)),
    ("labels.csv", b"name,label\n" * 9),
    ("README", b"Pictures of three classes. " * 9),
    ("set/README.txt", b"words"),
    ("set/z/Thumbs.db", b"\xd0\xcf\x11\xe0" + bytes(99)),
    ("set/z/._0000.png", b"\0\5\x16\7" + bytes(99)),
    ("__MACOSX/set/z/0000.png", b"\0\5\x16\7" + bytes(99)),
    ("set/annotations/1.json", b"{}"),
    ("set/y/empty", b""),
    make_link("set/docs/LICENSE"),
]
WAYS = [(packing, index) for packing in ("tar", "tgz", "tar.zst") for index in ("auto", False)]


@pytest.mark.parametrize(("packing", "index"), WAYS)
def test_other_members_are_ignored_and_named_once(
    tmp_path: Path, packing: str, index: Any, caplog: pytest.LogCaptureFixture
) -> None:
    archive = write_archive(tmp_path, [*OTHERS[:5], *images(6), *OTHERS[5:], of_type("volume", b"V")], packing)
    dataset = TgzImages(archive, index=index)
    assert dataset.classes == classes_of(archive) == ["x", "y", "z"]
    for epoch in (1, 2):
        assert numbers(dataset) == list(range(6))
        assert dataset.skipped == {"ignored": epoch * len(OTHERS)}
    (record,) = (record for record in caplog.records if "are ignored" in record.message)
    assert f"({len(OTHERS)})" in record.message
    assert all(repr(name) in record.message for name, _ in OTHERS)
    given = TgzImages(archive, index=index, classes=["z", "y", "x"], batch=4, on_error="skip")
    assert [labels.tolist() for _, labels in given] == [[0, 1, 2, 0], [1, 2]]
    assert given.skipped == {"ignored": len(OTHERS)}


@pytest.mark.parametrize("index", ["auto", False])
def test_ranks_count_ignored_members_once(tmp_path: Path, index: Any) -> None:
    archive = write_archive(tmp_path, [*OTHERS, *images(7)])
    datasets = [TgzImages(archive, index=index, shard=(rank, 2), batch=2) for rank in range(2)]
    assert sorted(number for dataset in datasets for number in numbers(dataset)) == list(range(7))
    assert sum(dataset.skipped["ignored"] for dataset in datasets) == len(OTHERS)
    iterator: Any = iter(TgzImages(archive, index=index, batch=2))
    next(iterator)
    resumed = TgzImages(archive, index=index, batch=2)
    resumed.load_state_dict(iterator.state_dict())
    assert numbers(resumed) == [2, 3, 4, 5, 6]


def test_workers_count_ignored_members(tmp_path: Path) -> None:
    dataset = TgzImages(write_archive(tmp_path, [*OTHERS, *images(4)]), batch=2)
    assert numbers(DataLoader(dataset, batch_size=None, num_workers=1)) == list(range(4))
    assert dataset.skipped == {"ignored": len(OTHERS)}


def test_archive_without_index_names_ignored_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = TgzImages(write_archive(tmp_path, [*images(2), *OTHERS, *OTHERS]), index=False, classes=["z", "y"])
    assert "are ignored" not in caplog.text
    assert numbers(dataset) == numbers(dataset) == [0, 1]
    assert caplog.text.count(f"are ignored ({2 * len(OTHERS)}): '.DS_Store', 'labels.csv'") == 1
    assert caplog.text.count("'set/docs/LICENSE', ...") == 1


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("shuffle", [0, 3])
@pytest.mark.parametrize("packing", ["tgz", "tar.zst"])
def test_damaged_archive_names_ignored_members(
    tmp_path: Path, packing: str, shuffle: int, on_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    archive = write_archive(tmp_path, [*images(6), OTHERS[0]], packing)
    archive.write_bytes(archive.read_bytes() + b"garbage")
    dataset = TgzImages(archive, index=False, classes=["x", "y", "z"], shuffle=shuffle, on_error=on_error)
    with contextlib.suppress(ArchiveError):
        list(dataset)
    assert dataset.skipped["ignored"] == 1
    assert caplog.text.count("are ignored (1): '.DS_Store'") == 1


def test_stopped_read_names_no_members(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = TgzImages(write_archive(tmp_path, [OTHERS[0], *images(2)]), index=False, classes=["y", "z"])
    iterator = iter(dataset)
    next(iterator)
    del iterator
    assert "are ignored" not in caplog.text


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000"])
@pytest.mark.parametrize("packing", ["tar", "tgz"])
def test_images_are_recognized_by_extension_or_bytes(tmp_path: Path, format: str, packing: str) -> None:
    Image.init()
    names = [f"a/1{ending}" for ending, of in Image.EXTENSION.items() if of == format]
    file = io.BytesIO()
    Image.new("RGB", (9, 7)).save(file, format)
    entries: list[Entry] = [(name, file.getvalue()) for name in (*names, "a/2", "a/3.JPEG", "a/4.of-the-camera")]
    for index in ("auto", False):
        dataset = TgzImages(write_archive(tmp_path, entries, packing), index=index)
        assert [tuple(pixels.shape) for pixels, _ in dataset] == [(3, 7, 9)] * len(entries)
        assert not dataset.skipped


TEXTS: dict[str, bytes] = {
    "patients.csv": b"BMI,age,sex,image\n24,33,m,0.png\n",
    "meta/patients.csv": b"BMI,age,sex,image\n24,33,m,0.png\n",
    "LICENSE": b"P2 Public License, version 1\n" * 3,
    "notes/list": b"P1 is the first person, P2 the second\n",
    "notes/ratings": b"P3 5 of the persons agree\n",
    "notes/formats": b"GIF8 and BM and MM are first bytes of images\n",
    "notes/readme.txt": b"BM is a format of images\n",
    "meta/subjects.TSV": b"P2\tage\tsex\nP3\t33\tf\n",
    "meta/scores.tsv": b"P2\t33\t5\nP3\t34\t6\n",
    "meta/columns": b"BMI,age,height,(weight),sex,image\n",
    "meta/brands": b"the ftypmif1 and the ftypavif\n",
    "raw/1.NEF": b"II*\0\x08\0\0\0" + bytes(99),
}


@pytest.mark.parametrize(("packing", "index"), WAYS)
def test_text_like_image_is_ignored(tmp_path: Path, packing: str, index: Any) -> None:
    dataset = TgzImages(write_archive(tmp_path, [*TEXTS.items(), *images(3)], packing), index=index)
    assert dataset.classes == ["x", "y", "z"]
    assert numbers(dataset) == [0, 1, 2]
    assert dataset.skipped == {"ignored": len(TEXTS)}


def test_small_images_are_recognized_without_extension(tmp_path: Path) -> None:
    small = io.BytesIO()
    Image.new("RGB", (1, 1)).save(small, "BMP")
    reserved = bytearray(small.getvalue())
    reserved[6:10] = b"\1\2\3\4"  # some programs use these bytes
    core = b"BM" + struct.pack("<IIIIHHHH", 30, 0, 26, 12, 1, 1, 1, 24) + bytes(4)  # the header of OS/2
    files = [
        bytes(reserved),
        core,
        b"P1 1 1 1",
        b"P2\n# comment\n1 1 255 9",
        b"P6\n1 1\n255\n" + bytes(3),
        b"P5  1\n#\n1 255 " + bytes(1),
    ]
    entries: list[Entry] = [(f"a/{i}", file) for i, file in enumerate(files)]
    for index in ("auto", False):
        dataset = TgzImages(write_archive(tmp_path, entries), index=index)
        assert [tuple(pixels.shape) for pixels, _ in dataset] == [(3, 1, 1)] * len(files)
        assert not dataset.skipped


def test_image_without_extension_has_right_pixels(tmp_path: Path) -> None:
    for packing in ("tar", "tgz", "tar.zst"):
        for index in ("auto", False):
            dataset = TgzImages(write_archive(tmp_path, [("a/0", png(pixels_of(5))), *images(1)], packing), index=index)
            assert [number_of(pixels) for pixels, _ in dataset] == [5, 0]


def zip_bytes(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/1.png", data)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "format"),
    [
        (bz2.compress(tar(images(1))), "bzip2"),
        (lzma.compress(tar(images(1))), "xz"),
        (lzma.compress(tar(images(1)), lzma.FORMAT_ALONE), "LZMA"),
        (zip_bytes(b""), "zip"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(99), "7-Zip"),
        (b"Rar!\x1a\x07" + bytes(99), "RAR"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_archive_format_is_named(tmp_path: Path, data: bytes, format: str) -> None:
    archive = tmp_path / "images.tgz"
    archive.write_bytes(data)
    for index in ("auto", True, False):
        with pytest.raises(ArchiveError, match=rf"images\.tgz has the format {format} .*pack it") as raised:
            TgzImages(archive, index=index, classes=["a"])
        assert raised.value.path == str(archive)
    with pytest.raises(ArchiveError, match=format):
        classes_of(archive)


def test_tar_with_misleading_name_is_read(tmp_path: Path) -> None:
    assert numbers(TgzImages(write_archive(tmp_path, [("BZh/1.png", png(pixels_of(3)))], "tar"))) == [3]
