"""Damaged compressed archives: each image that was unpacked before the damage arrives, then the error."""

from __future__ import annotations

import contextlib
import gc
import gzip
import os
import random
import tarfile
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import zstandard

from cudafuture.data import TgzImages
from cudafuture.data._archive_index import ArchiveReader
from cudafuture.data._archive_stream import ArchiveStream
from cudafuture.data._faults import Fault
from cudafuture.errors import ArchiveError
from data.archives import images, numbers, tar

COUNT = 12
DATA = tar(images(COUNT))
with tarfile.open(fileobj=BytesIO(DATA)) as _members:
    ENDS = [member.offset_data + member.size for member in _members]
WHOLE = gzip.compress(DATA)
HALF = gzip.compress(DATA[: ENDS[5]]), gzip.compress(DATA[ENDS[5] :])


def change_byte(archive: bytes, place: int) -> bytes:
    place %= len(archive)
    return archive[:place] + bytes([archive[place] ^ 0x55]) + archive[place + 1 :]


def cases() -> dict[str, bytes]:
    numbers = random.Random(1)
    cuts = [*numbers.sample(range(40, len(WHOLE)), 12), len(WHOLE) - 1, len(WHOLE) - 8]
    places = [*numbers.sample(range(40, len(WHOLE) - 8), 12), -8, -5, -4, -1]  # the last four: CRC and length
    return {
        **{f"cut at {cut}": WHOLE[:cut] for cut in cuts},
        **{f"changed at {place}": change_byte(WHOLE, place) for place in places},
        "garbage at the end": WHOLE + b"garbage",
        "checksum of the first member": change_byte(HALF[0], -8) + HALF[1],
        "between the members": HALF[0] + b"garbage" + HALF[1],
        "header of the second member": HALF[0] + change_byte(HALF[1], 2),
        "second member cut": HALF[0] + HALF[1][:-40],
        "only a header": WHOLE[:10],
    }


CASES = cases()


def intact(archive: bytes) -> list[int]:
    """Return the images that a reader unpacks which gives the archive to zlib byte by byte."""
    unpacked, inflate = bytearray(), zlib.decompressobj(31)
    with contextlib.suppress(zlib.error):
        for i in range(len(archive)):
            if inflate.eof:
                inflate = zlib.decompressobj(31)
            unpacked += inflate.decompress(archive[i : i + 1])
    return [image for image, end in enumerate(ENDS) if unpacked[:end] == DATA[:end]]


def read(dataset: TgzImages) -> tuple[list[int], ArchiveError | None]:
    """Return the images before an error, and the error."""
    found: list[int] = []
    try:
        for item in dataset:
            found += numbers([item])
    except ArchiveError as e:
        return found, e
    return found, None


@pytest.mark.parametrize("case", CASES)
def test_images_before_damage_precede_error(tmp_path: Path, case: str) -> None:
    archive = tmp_path / "images.tgz"
    archive.write_bytes(CASES[case])
    expected = intact(CASES[case])
    for index in ("auto", False):
        found, error = read(TgzImages(archive, index=index))
        assert found[: len(expected)] == expected
        assert error is not None
        assert error.path == str(archive)
        in_batches, last = read(TgzImages(archive, index=index, batch=5))
        assert last is not None
        if error.reason in ("truncated", "damaged"):
            assert in_batches == found
            assert " at byte " in str(error) or "header" in str(error)
        for skipping in (TgzImages(archive, index=index, on_error="skip", shuffle=shuffle) for shuffle in (0, 3)):
            assert set(expected) <= set(numbers(skipping))
            assert skipping.skipped
        parts = [read(TgzImages(archive, index=index, shard=(rank, 2)))[0] for rank in range(2)]
        assert set(expected) <= {image for part in parts for image in part}


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("changed")])
def test_older_index_keeps_images_before_damage(tmp_path: Path, case: str) -> None:
    archive = tmp_path / "images.tgz"
    archive.write_bytes(WHOLE)
    os.utime(archive, ns=(1, 1))
    TgzImages(archive, index=True)
    archive.write_bytes(CASES[case])
    os.utime(archive, ns=(1, 1))
    expected = intact(CASES[case])
    assert read(TgzImages(archive, index=True))[0][: len(expected)] == expected
    for shuffle in (0, 1):
        assert set(expected) <= set(numbers(TgzImages(archive, index=True, on_error="skip", shuffle=shuffle)))


def test_wrong_zstandard_checksum_loses_nothing(tmp_path: Path) -> None:
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(DATA)
    archive = tmp_path / "images.tar.zst"
    archive.write_bytes(change_byte(whole, -1))
    found, error = read(TgzImages(archive))
    assert found == list(range(COUNT))
    assert error is not None
    assert error.reason == "damaged"
    assert f"damaged at byte {len(DATA)}" in str(error)


def test_damaged_batch_keeps_images_and_raises_once(tmp_path: Path) -> None:
    archive = tmp_path / "images.tgz"
    archive.write_bytes(change_byte(WHOLE, -8))
    iterator: Any = iter(TgzImages(archive, batch=5))
    assert numbers(next(iterator) for _ in range(3)) == list(range(COUNT))
    state = iterator.state_dict()
    for _ in range(2):
        with pytest.raises(ArchiveError, match="incorrect data check"):
            next(iterator)
    assert state == iterator.state_dict() == {"epoch": 0, "position": COUNT, "part": [0, 1, 0, 1]}


ZSTD = zstandard.ZstdCompressor(write_checksum=True).compress(DATA)
DAMAGED = {
    "checksum": ("tgz", WHOLE, change_byte(WHOLE, -8)),
    "zeros": ("tgz", WHOLE, WHOLE[: len(WHOLE) // 2].ljust(len(WHOLE), b"\0")),
    "zstd": ("tar.zst", ZSTD, change_byte(ZSTD, -1)),
}


def find_leftovers() -> list[type]:
    """Return the kinds of the errors, streams and readers that exist."""
    kinds = Fault, ArchiveError, ArchiveStream, ArchiveReader
    return [type(one) for one in gc.get_objects() if issubclass(type(one), kinds)]


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("way", ["old index", "auto", "streamed"])
def test_error_keeps_no_archive_in_memory(tmp_path: Path, case: str, way: str) -> None:
    packing, whole, damaged = DAMAGED[case]
    archive = tmp_path / f"images.{packing}"
    index: Any = False if way == "streamed" else "auto"
    for content in (whole, damaged) if way == "old index" else (damaged,):
        archive.write_bytes(content)
        os.utime(archive, ns=(1, 1))
        TgzImages(archive, index=index)
    gc.collect()
    gc.disable()
    try:
        for on_error in ("raise", "skip"):
            for shuffle, batch in ((0, None), (0, 5), (3, None), (3, 5)):
                dataset = TgzImages(archive, index=index, on_error=on_error, shuffle=shuffle, batch=batch)
                read(dataset)
                with contextlib.suppress(ArchiveError):
                    next(iter(dataset))
                assert find_leftovers() == []
    finally:
        gc.enable()
