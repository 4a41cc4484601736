"""The pixels of unusual images, and the errors of transforms."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cudafuture.data import TgzImages
from cudafuture.errors import ArchiveError
from data.archives import images, png, write_archive


def encode(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def grey(big: bool = False) -> Image.Image:
    """Return 16-bit values 0, 1000, 0x8000 and 0xFFFF."""
    values = (0, 1000, 0x8000, 0xFFFF)
    data = b"".join(value.to_bytes(2, "big" if big else "little") for value in values)
    return Image.frombytes("I;16B" if big else "I;16", (4, 1), data)


PGM = b"P5 4 1 65535 " + b"".join(value.to_bytes(2, "big") for value in (0, 1000, 0x8000, 0xFFFF))
SIXTEEN = {
    "png": encode(grey(), "PNG"),
    "tiff": encode(grey(), "TIFF"),
    "big": encode(grey(True), "TIFF"),
    "pgm": PGM,
}


@pytest.mark.parametrize("kind", SIXTEEN)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_grey_16_bit_images_keep_range(tmp_path: Path, kind: str, mode: str) -> None:
    ((pixels, _),) = TgzImages(write_archive(tmp_path, [("a/grey", SIXTEEN[kind])]), mode=mode)
    assert pixels.shape == (len(mode), 1, 4)
    assert all(channel.flatten().tolist() == [0, 3, 128, 255] for channel in pixels)


def test_orientation_is_not_applied(tmp_path: Path) -> None:
    orientation, file = Image.Exif(), io.BytesIO()
    orientation[0x0112] = 6
    Image.new("RGB", (4, 2)).save(file, "JPEG", exif=orientation)
    ((pixels, _),) = TgzImages(write_archive(tmp_path, [("a/turned.jpg", file.getvalue())]))
    assert pixels.shape == (3, 2, 4)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_images_of_32_bits_are_refused(tmp_path: Path, mode: str) -> None:
    archive = write_archive(tmp_path, [("a/deep.tif", encode(Image.new(mode, (2, 2), 1), "TIFF")), *images(1)])
    with pytest.raises(ArchiveError, match=rf"member 'a/deep\.tif': .*32 bits \(mode '{mode}'\)") as raised:
        list(TgzImages(archive))
    assert raised.value.reason == "pixel_format"
    dataset = TgzImages(archive, on_error="skip")
    assert len(list(dataset)) == 1
    assert dataset.skipped == {"pixel_format": 1}


@pytest.mark.parametrize("mode", ["La", "RGBa"])
def test_inconvertible_modes_are_refused(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ValueError, match=f"mode='{mode}'"):
        TgzImages(write_archive(tmp_path, images(1)), mode=mode)


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_transform_stop_iteration_is_error(tmp_path: Path, batch: int | None, failing: int) -> None:
    calls = iter(range(9))

    def transform(pixels: torch.Tensor) -> torch.Tensor:
        if next(calls) == failing:
            raise StopIteration
        return pixels

    with pytest.raises(RuntimeError, match=rf"member 'set/./000{failing}\.png': transform raised StopIteration"):
        list(TgzImages(write_archive(tmp_path, images(4)), transform=transform, batch=batch, on_error="skip"))


def test_different_sizes_in_minibatch_are_named(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, [*images(1), ("a/wide.png", png(torch.zeros(3, 2, 9, dtype=torch.uint8)))])
    with pytest.raises(ValueError, match=r"members 'set/z/0000\.png' and 'a/wide\.png'"):
        list(TgzImages(archive, batch=2))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_transform_errors_note_their_member(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, [*images(1), ("a/wide.png", png(torch.zeros(3, 2, 9, dtype=torch.uint8)))])

    def notes(error: type[Exception], **arguments: Any) -> list[str]:
        with pytest.raises(error) as raised:
            list(TgzImages(archive, **arguments))
        return list(getattr(raised.value, "__notes__", []))

    assert notes(ZeroDivisionError, transform=lambda pixels: 1 // 0) == [f"{archive}, member 'set/z/0000.png'"]
    text = f"{archive}, members from 'set/z/0000.png' to 'a/wide.png'"
    assert notes(RuntimeError, batch=2, transform=lambda pixels: pixels) == [text]
