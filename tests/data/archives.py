"""Small archives of images for the tests, and the ways to read them."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from PIL import Image
from torch.utils.data import get_worker_info

from cudafuture.data import TgzImages, tgz_images

PACKINGS = ("tar", "tgz", "tar.zst")
SIDE = 6
Entry = tuple[str, bytes | tarfile.TarInfo]


def pixels_of(number: int) -> torch.Tensor:
    """Return the pixels of an image, from which its number can be read back: see `number_of`."""
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(256, (3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    pixels[:, 0, 0] = torch.tensor([number // 256, number % 256, 0])
    return pixels


def number_of(pixels: torch.Tensor) -> int:
    return 256 * int(pixels[0, 0, 0]) + int(pixels[1, 0, 0])


def png(pixels: torch.Tensor) -> bytes:
    """Return a PNG file, which keeps every pixel."""
    file = io.BytesIO()
    size = pixels.shape[2], pixels.shape[1]
    Image.frombytes("RGB", size, bytes(pixels.permute(1, 2, 0).flatten().tolist())).save(file, "PNG")
    return file.getvalue()


def images(count: int, classes: int = 3) -> list[Entry]:
    """Return numbered images in folders, whose first comes last in the alphabet."""
    return [(f"set/{'zyxwv'[i % classes]}/{i:04}.png", png(pixels_of(i))) for i in range(count)]


def tar(entries: Iterable[Entry], format: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar archive of files with their content, and of other members."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for name, content in entries:
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def compress(data: bytes, packing: str) -> bytes:
    """Return a tar archive as it is, with gzip or with Zstandard."""
    if packing == "tgz":
        return gzip.compress(data, 1)
    return data if packing == "tar" else zstandard.compress(data)


def write_archive(path: Path, entries: Iterable[Entry], packing: str = "tgz") -> Path:
    """Write an archive, and return its path."""
    archive = path / f"images.{packing}"
    archive.write_bytes(compress(tar(entries), packing))
    return archive


def numbers(items: Iterable[Any]) -> list[int]:
    """Return the numbers of the images in items or in minibatches, in their order."""
    found: list[int] = []
    for pixels, _ in items:
        found += [number_of(one) for one in (pixels if pixels.dim() == 4 else [pixels])]
    return found


class InTurn:
    """A DataLoader's order without its processes: one item from each worker in turn, as long as it has more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __call__(self, dataset: TgzImages, workers: int, draws: int = 1) -> list[list[Any]]:
        """Return the batches of `draws` items each; 0 workers are the main process."""
        iterators = []
        for worker in range(max(workers, 1)):
            with self._patch.context() as patch:
                patch.setattr(tgz_images, "current_workers", lambda worker=worker: (worker, max(workers, 1)))
                patch.setattr(
                    "cudafuture.data._progress.get_worker_info", _info(worker) if workers else get_worker_info
                )
                iterators.append(iter(dataset))
        batches = []
        while iterators:
            for iterator in list(iterators):
                batch = [item for _, item in zip(range(draws), iterator, strict=False)]
                if batch:
                    batches.append(batch)
                if len(batch) < draws:
                    iterators.remove(iterator)
        return batches


def _info(worker: int) -> Callable[[], Any]:
    class Info:
        id = worker
        seed = 100 + worker

    return Info
