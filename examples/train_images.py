"""Train on the images of a .tgz: TgzImages, a DataLoader and prefetch, beside the same loop without prefetch.

    python examples/train_images.py [--short] [--device DEVICE] [--workers N]

The archive is built of real images: the handwritten digits of scikit-learn, and crops of its two photographs. They make
twelve classes: the ten digits, china and flower. The program trains a small network, checks it with images that it has
not seen, and prints how long the epochs took with and without prefetch, and what the program waited for. It exits with
an error unless the accuracy is above 0.9, and unless both loops end with the same parameters, bit for bit.
"""

from __future__ import annotations

import argparse
import io
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from cudafuture import prefetch
from cudafuture.data import TgzImages
from cudafuture.prefetch import Prefetcher

SIZE = 32  # pixels of an image, each way
WANTED_ACCURACY = 0.9


def images_of(short: bool) -> Iterator[tuple[str, Any]]:
    """Yield the class and the pixels of each image."""
    digits = load_digits()
    for i in range(600 if short else len(digits.images)):
        yield str(digits.target[i]), (digits.images[i] * 15.9).astype("uint8")
    step = 64 if short else 24
    for name, photograph in zip(("china", "flower"), load_sample_images().images, strict=True):
        for top in range(0, photograph.shape[0] - 96, step):
            for left in range(0, photograph.shape[1] - 96, step):
                yield name, photograph[top : top + 96, left : left + 96]


def build(folder: Path, short: bool) -> tuple[Path, Path]:
    """Write the archives: nine of ten images to train with, and the tenth to check with."""
    paths = folder / "train.tgz", folder / "check.tgz"
    with tarfile.open(paths[0], "w:gz") as train, tarfile.open(paths[1], "w:gz") as check:
        for i, (name, pixels) in enumerate(images_of(short)):
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            member = tarfile.TarInfo(f"images/{name}/{i}.png")
            member.size = file.tell()
            file.seek(0)
            (check if i % 10 == 9 else train).addfile(member, file)
    return paths


def normalise(batch: Any) -> tuple[Tensor, Tensor]:
    """Return float pixels from -1 to 1, and the labels; runs on the device, behind the copy."""
    pixels, labels = batch
    return pixels.float() / 127.5 - 1, labels


def network(classes: int) -> nn.Module:
    """Return a small convolutional network."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (SIZE // 4) ** 2, classes),
    )


def copy_each(loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the loader's batches as a loop without prefetch copies them."""
    for pixels, labels in loader:
        yield normalise((pixels.to(device), labels.to(device)))


class Training:
    """A network, and how it gets the batches of an epoch."""

    def __init__(self, classes: int, device: torch.device, batches: Callable[[], Iterable[Any]]) -> None:
        self.model = network(classes).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)
        self.batches = batches
        self.seconds = 0.0

    def epoch(self) -> None:
        """Train for one epoch."""
        start = time.perf_counter()
        for pixels, labels in self.batches():
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(pixels), labels).backward()
            self.optimizer.step()
        self.seconds += time.perf_counter() - start


def accuracy(model: nn.Module, images: TgzImages, device: torch.device) -> float:
    """Return the share of images whose class the model finds."""
    right = seen = 0
    with torch.no_grad():
        for pixels, labels in prefetch(images, device, transform=normalise):
            right += int((model(pixels).argmax(1) == labels).sum())
            seen += len(labels)
    return right / seen


def report(trainings: dict[str, Training], batches: Prefetcher, found: float) -> None:
    """Print the measured times."""
    counted = batches.statistics()
    for name, training in trainings.items():
        sys.stdout.write(f"{name}: {training.seconds:.2f} s\n")
    sys.stdout.write(
        f"with prefetch, the program waited {counted.waited:.2f} s: {counted.waited_for_loader:.2f} s for the loader, "
        f"{counted.waited_for_packing:.2f} s for packing and {counted.waited_for_device:.2f} s for the device\n"
        f"accuracy: {found:.3f}\n"
    )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train on the images of an archive.")
    parser.add_argument("--short", action="store_true", help="fewer images")
    parser.add_argument("--device", help="where to train; by default the current accelerator, or the host")
    parser.add_argument("--workers", type=int, default=1, help="of the DataLoader (1)")
    return parser.parse_args()


def main() -> int:
    """Run the example; return 1 if a check fails."""
    args = arguments()
    device = prefetch([], args.device).device
    torch.set_num_threads(max(1, torch.get_num_threads() - args.workers))  # the workers need cores, too
    with tempfile.TemporaryDirectory() as folder:
        train_path, check_path = build(Path(folder), args.short)
        images = TgzImages(train_path, size=SIZE, batch=64, shuffle=1000)
        unseen = TgzImages(check_path, size=SIZE, batch=64, classes=images.classes)
        loader = DataLoader(images, batch_size=None, num_workers=args.workers)
        batches = prefetch(loader, device, transform=normalise)
        trainings = {
            "without prefetch": Training(len(images.classes), device, lambda: copy_each(loader, device)),
            "with prefetch": Training(len(images.classes), device, lambda: batches),
        }
        for epoch in range(6 if args.short else 4):
            for training in trainings.values():  # by turns
                images.set_epoch(epoch)
                training.epoch()
        found = accuracy(trainings["with prefetch"].model, unseen, device)
    report(trainings, batches, found)
    pairs = zip(*(training.model.parameters() for training in trainings.values()), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    sys.stdout.write(f"both loops end with the same parameters: {same}\n")
    return 0 if same and found > WANTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
