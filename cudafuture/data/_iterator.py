"""The iterator over one part of an archive in one epoch, with its position."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from cudafuture.data._candidates import Candidate, indexed, refused_members, shuffled, streamed
from cudafuture.data._decode import Decoder
from cudafuture.data._faults import Fault, SkipCounts
from cudafuture.data._index import Index
from cudafuture.data._partition import Part
from cudafuture.data._shared_memory import batch_memory

__all__ = ["ImageIterator", "Options"]

_BUFFER = 1024  # images, where shuffle=True and there is no index
_log = logging.getLogger("cudafuture.data")


@dataclass(frozen=True)
class Options:
    """The arguments of a dataset, checked, and what was found in the archive.

    Args:
        path: the archive.
        index: its index, or None.
        positions: the label of each class name.
        labels: the label of each image of the index, -1 where its class is not known.
        size, mode, transform, shuffle, seed, batch: as for ``TgzImages``.
        counts: the numbers of skipped members where on_error is "skip", else None.
    """

    path: str
    index: Index | None
    positions: dict[str, int]
    labels: torch.Tensor
    size: tuple[int, int] | None
    mode: str
    transform: Callable[[torch.Tensor], Any] | None
    shuffle: int
    seed: int
    batch: int | None
    counts: SkipCounts | None


class ImageIterator(Iterator[Any]):
    """The images or minibatches of one part of an archive.

    Args:
        options: of the dataset.
        part: the part.
        epoch: the epoch, for the order.
        position: how many images of the part's order are passed over.
        quiet: do not count skipped members: another iterator has counted them.
    """

    def __init__(self, options: Options, part: Part, epoch: int, position: int = 0, *, quiet: bool = False) -> None:
        self._options = options
        self._part = part
        self._quiet = quiet
        self._decode = Decoder(options.size, options.mode)
        self._begin(epoch, position)

    def _begin(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._candidates = self._from(position)

    @property
    def part(self) -> Part:
        """The part that it iterates over."""
        return self._part

    @property
    def position(self) -> int:
        """The number of images of the part's order that were returned, skipped or passed over."""
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next item."""
        part = [self._part.rank, self._part.ranks, self._part.worker, self._part.workers]
        return {"epoch": self._epoch, "position": self._position, "part": part}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the place of a state of `state_dict`.

        Raises:
            ValueError: the state is of another part: there were other numbers of ranks or workers.
        """
        part = self.state_dict()["part"]
        if list(state["part"]) != part:
            text = "rank {} of {}, worker {} of {}"
            raise ValueError(f"the state is of {text.format(*state['part'])}; this is {text.format(*part)}")
        self._begin(int(state["epoch"]), int(state["position"]))

    def __next__(self) -> Any:
        if self._options.batch is None:
            pixels, label = self._next_image()
            return self._transformed(pixels), torch.tensor(label)
        return self._next_batch(self._options.batch)

    def _next_image(self) -> tuple[torch.Tensor, int]:
        """Return the next image that can be decoded, as height, width and channels, and its label."""
        while True:
            try:
                candidate = next(self._candidates)
            except Fault as e:
                self._handle(e)
                raise StopIteration from None
            self._position += not candidate.refused
            try:
                if candidate.fault is not None:
                    raise candidate.fault
                return self._decode(candidate.data), candidate.label
            except Fault as e:
                self._handle(candidate.named(e))

    def _handle(self, fault: Fault) -> None:
        """Count a fault, or raise the error for it."""
        if self._options.counts is None:
            raise fault.error(self._options.path) from fault
        if fault.owned and not self._quiet:
            self._options.counts.add(fault.reason)
            _log.info("skipped: %s", fault.error(self._options.path))

    def _transformed(self, pixels: torch.Tensor) -> Any:
        image = pixels.permute(2, 0, 1).contiguous()
        return image if self._options.transform is None else self._options.transform(image)

    def _next_batch(self, most: int) -> tuple[Any, torch.Tensor]:
        pixels, label = self._next_image()
        labels = [label]
        if self._options.transform is not None:
            images = [self._transformed(pixels)]
            for pixels, label in self._images(most - 1):
                images.append(self._transformed(pixels))
                labels.append(label)
            return default_collate(images), torch.tensor(labels)
        height, width, channels = pixels.shape
        batch = batch_memory(most, channels, height, width)
        batch[0] = pixels.permute(2, 0, 1)
        for pixels, label in self._images(most - 1):
            if pixels.shape != (height, width, channels):
                found = f"{height} x {width} and {pixels.shape[0]} x {pixels.shape[1]}"
                raise ValueError(f"{self._options.path}: images of {found} pixels in one minibatch; pass size=")
            batch[len(labels)] = pixels.permute(2, 0, 1)
            labels.append(label)
        return batch if len(labels) == most else batch[: len(labels)].clone(), torch.tensor(labels)

    def _images(self, count: int) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield up to `count` images."""
        for _ in range(count):
            try:
                yield self._next_image()
            except StopIteration:
                return

    def _from(self, position: int) -> Iterator[Candidate]:
        """Yield the candidates of the epoch from a position on."""
        options, index = self._options, self._options.index
        if index is not None:
            if position == 0:
                yield from refused_members(index, self._part)
            order = None
            if options.shuffle:
                numbers = torch.Generator().manual_seed(options.seed + self._epoch)
                order = torch.randperm(len(index), generator=numbers)
            positions = self._part.slice_of(len(index))[position:]
            yield from indexed(options.path, index, options.labels, order, positions)
            return
        candidates = streamed(options.path, self._part, options.positions)
        if options.shuffle:
            size = _BUFFER if options.shuffle is True else options.shuffle
            numbers_of_part = random.Random(f"{options.seed + self._epoch} {self._part}")
            candidates = shuffled(candidates, size, numbers_of_part)
        for candidate in candidates:
            if position == 0:
                yield candidate
            position -= not candidate.refused and position > 0
