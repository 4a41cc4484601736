"""Images, a small CNN and its groups of layers for the examples on scikit-learn's handwritten digits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its default arguments would keep alive beyond the end
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn


def make_model() -> nn.Sequential:
    """Make a CNN for images of 8 x 8 pixels and ten classes."""
    layers = {
        "conv1": nn.Conv2d(1, 16, 3, padding=1),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(16, 32, 3, padding=1),
        "relu2": nn.ReLU(),
        "pool": nn.MaxPool2d(2),
        "conv3": nn.Conv2d(32, 64, 3, padding=1),
        "relu3": nn.ReLU(),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(64 * 4 * 4, 64),
        "relu4": nn.ReLU(),
        "fc2": nn.Linear(64, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def layer_groups(model: nn.Sequential, kib: int) -> list[dict[str, nn.Module]]:
    """Group the layers by at most ``kib`` of parameters, or singly, in the order in which backward ends with them."""
    groups: list[dict[str, nn.Module]] = []
    room = 0
    for name, layer in reversed(list(model.named_children())):
        size = sum(p.numel() * p.element_size() for p in layer.parameters())
        if size == 0:
            continue
        if size > room:
            groups.append({})
            room = kib * 1024
        groups[-1][name] = layer
        room -= size
    return groups


@dataclass
class Digits:
    """scikit-learn's 1,797 digits, shuffled: four fifths to train on, the rest to test with."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def load(cls, seed: int) -> Digits:
        """Read them out of the installed package; every rank gets the same split."""
        bunch = load_digits()
        images = torch.tensor(bunch.images, dtype=torch.get_default_dtype()).unsqueeze(1) / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        images, labels = images[order], torch.tensor(bunch.target)[order]
        cut = len(images) * 4 // 5
        return cls((images[:cut], labels[:cut]), (images[cut:], labels[cut:]))

    @property
    def device(self) -> torch.device:
        """The device of the images."""
        return self.train[0].device

    def to(self, device: torch.device) -> Digits:
        """Return the same images and labels on a device."""
        train, test = ((images.to(device), labels.to(device)) for images, labels in (self.train, self.test))
        return Digits(train, test)

    def batches(self, epochs: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of every batch of ``size`` images per rank; the last incomplete one is left out."""
        images, labels = self.train
        generator = torch.Generator().manual_seed(seed)
        rank, world = dist.get_rank(), dist.get_world_size()
        for _ in range(epochs):
            order = torch.randperm(len(images), generator=generator)
            for start in range(0, len(order) - size * world + 1, size * world):
                mine = order[start + rank * size : start + (rank + 1) * size]
                yield images[mine], labels[mine]

    def accuracy(self, model: nn.Module) -> float:
        """Return the share of the test images that the model classifies correctly."""
        with torch.no_grad():
            right = model(self.test[0]).argmax(1) == self.test[1]
        return int(right.sum()) / len(right)


def same_on_every_rank(model: nn.Module) -> bool:
    """Return True if every rank holds the same parameters, to the last bit."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(mine, theirs) for theirs in everyones)
