"""The speed of labelled images from an archive, beside the same images in loose files.

    cudafuture bench images [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

The images are 2,000 JPEG files of 224 x 224 pixels, made for the run, in the page cache. The peer is torch's idiom for
folders: a Dataset that opens each file with Pillow, in a DataLoader. Both use 2 workers and minibatches of 32, and a
round reads all images once from each. The time of an epoch includes the start of the workers.
"""

from __future__ import annotations

import io
import statistics
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from cudafuture.bench._rows import Row, Suite, by_turns, control, disk_folder
from cudafuture.data import TgzImages

__all__ = ["SUITE"]

IMAGES, SIDE, BATCH, WORKERS = 2_000, 224, 32, 2
ROUNDS = 9
now = time.perf_counter_ns


class LooseFiles(Dataset[tuple[torch.Tensor, int]]):
    """The files below a folder, whose folders are their labels."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(path.name for path in folder.iterdir())
        self.files = [(str(f), label) for label, name in enumerate(classes) for f in sorted((folder / name).iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[i]
        with open(path, "rb") as file:  # noqa: PTH123 (the idiom)
            pixels = np.array(Image.open(file).convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1), label


def encode(numbers: torch.Generator) -> bytes:
    """Return a JPEG file with large and small structure, as a photograph has."""
    coarse = torch.rand(1, 3, 14, 14, generator=numbers)
    pixels = torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic")[0]
    pixels = (pixels + 0.05 * torch.randn(3, SIDE, SIDE, generator=numbers)).clamp(0, 1)
    file = io.BytesIO()
    Image.fromarray((pixels * 255).byte().permute(1, 2, 0).numpy()).save(file, "JPEG", quality=85)
    return file.getvalue()


@contextmanager
def prepare() -> Iterator[Path]:
    """Give a folder with the images in loose files, in a .tgz and in a .tar."""
    numbers = torch.Generator().manual_seed(0)
    with disk_folder() as folder:
        for i in range(IMAGES):
            path = folder / "loose" / f"class{i % 10}" / f"{i:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(numbers))
        with tarfile.open(folder / "images.tgz", "w:gz") as packed, tarfile.open(folder / "images.tar", "w") as plain:
            packed.add(folder / "loose", "images")
            plain.add(folder / "loose", "images")
        yield folder


def epoch(make: Callable[[], DataLoader[Any]]) -> float:
    """Return the nanoseconds for all images."""
    loader = make()
    start = now()
    images = sum(len(batch) for batch, _ in loader)
    took = now() - start
    if images != IMAGES:
        raise AssertionError(f"{images} images came, not {IMAGES}")
    return took


def archive(path: Path, index: Literal["auto"] | bool, shuffle: int) -> Callable[[], DataLoader[Any]]:
    """Return a function that makes a loader of an archive, whose index is built already."""
    dataset = TgzImages(path, index=index, batch=BATCH, shuffle=shuffle)
    return lambda: DataLoader(dataset, batch_size=None, num_workers=WORKERS)


def beside_loose_files(
    name: str, file: str, index: Literal["auto"] | bool, shuffle: int, limit: float, rounds: int
) -> Row:
    """Compare the time of an epoch with that of loose files."""
    with prepare() as folder:
        loose = LooseFiles(folder / "loose")

        def files() -> DataLoader[Any]:
            return DataLoader(loose, batch_size=BATCH, num_workers=WORKERS, shuffle=bool(shuffle))

        each = [partial(epoch, make) for make in (archive(folder / file, index, shuffle), files, files)]
        ours, peer, again = by_turns(rounds, *each)
    taken, loose_files = map(statistics.median, (ours, peer))
    same = control("loose files / loose files", [a / b for a, b in zip(again, peer, strict=True)])
    what = f"{IMAGES:,} images, {file}, {'with' if index else 'no'} index{', shuffled' if shuffle else ''}"
    ratio = taken / loose_files
    return Row(name, what, "ms", taken / 1e6, loose_files / 1e6, "loose files", "x", ratio, limit, *same)


LIMITS: dict[str, Callable[[int], Row]] = {
    "index": partial(beside_loose_files, "index", "images.tgz", True, 0, 1.0),
    "no-index": partial(beside_loose_files, "no-index", "images.tgz", False, 0, 1 / 0.7),
    "index-shuffled": partial(beside_loose_files, "index-shuffled", "images.tgz", True, 1, 1.25),
    "tar": partial(beside_loose_files, "tar", "images.tar", True, 0, 1.0),
}
SUITE = Suite("images", "Labelled images from an archive", LIMITS, rounds=ROUNDS)
