"""Iterator over one part of an archive in one epoch, with its position."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from cudafuture.data._archive_index import ArchiveIndex
from cudafuture.data._candidates import Candidate, indexed, refused_members, shuffled, streamed
from cudafuture.data._decode import Decoder
from cudafuture.data._faults import IGNORED, Fault, SkipCounts
from cudafuture.data._partition import WorkerPart
from cudafuture.data._shared_memory import batch_memory
from cudafuture.data._state import start_of

__all__ = ["DatasetOptions", "ImageIterator"]

_BUFFER = 1024  # images, for shuffle=True without an index
_log = logging.getLogger("cudafuture.data")


@dataclass(frozen=True)
class DatasetOptions:
    """Validated arguments of a dataset, and the contents of its archive.

    Args:
        path: the archive.
        index: its index, or None.
        positions: the label of each class name.
        labels: the label of each image of the index, -1 if its class is not known.
        size, mode, transform, shuffle, seed, batch: as for ``TgzImages``.
        skips: on_error is "skip".
        counts: the numbers of skipped members.
    """

    path: str
    index: ArchiveIndex | None
    positions: dict[str, int]
    labels: torch.Tensor
    size: tuple[int, int] | None
    mode: str
    transform: Callable[[torch.Tensor], Any] | None
    shuffle: int
    seed: int
    batch: int | None
    skips: bool
    counts: SkipCounts


@dataclass(frozen=True)
class _Image:
    """Decoded image.

    Args:
        pixels: uint8, in the order height, width, channels.
        candidate: the member that it was decoded from.
    """

    pixels: torch.Tensor
    candidate: Candidate

    @property
    def label(self) -> int:
        """The position of its class."""
        return self.candidate.label


class ImageIterator(Iterator[Any]):
    """Iterator over the images or minibatches of one part of an archive.

    Args:
        options: of the dataset.
        part: the part.
        epoch: the epoch, for the order.
        position: the number of images of the part's order to skip.
        quiet: do not count skipped members, because another iterator has counted them.
    """

    def __init__(
        self, options: DatasetOptions, part: WorkerPart, epoch: int, position: int = 0, *, quiet: bool = False
    ) -> None:
        self._options = options
        self._part = part
        self._quiet = quiet
        self._decode = Decoder(options.size, options.mode)
        self._begin(epoch, position)

    def _begin(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._refused = 0  # candidates without a position that were taken at this position
        self._candidates = self._from_here()

    @property
    def part(self) -> WorkerPart:
        """The part of this iterator."""
        return self._part

    @property
    def position(self) -> int:
        """The number of images of the part's order that were returned or skipped."""
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next item."""
        part = [self._part.rank, self._part.ranks, self._part.worker, self._part.workers]
        return {"epoch": self._epoch, "position": self._position, "part": part}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state of `state_dict`.

        Raises:
            KeyError, TypeError: a number is missing, or is not an integer.
            ValueError: the state is of another part, because the numbers of ranks or workers differ, or it is a
                DataLoader's.
        """
        start = start_of(state, self._options.batch)
        if start.position < 0:
            raise ValueError(f"{dict(state)!r} is not a state of an iterator")
        part = self.state_dict()["part"]
        if start.part != part:
            text = "rank {} of {}, worker {} of {}"
            raise ValueError(f"the state is of {text.format(*start.part)}; this is {text.format(*part)}")
        self._begin(start.epoch, start.position)

    def __next__(self) -> Any:
        try:
            if self._options.batch is None:
                image = self._next_image()
                return self._transformed(image), _label_tensor(image.label)
            return self._next_batch(self._options.batch)
        except StopIteration:
            raise
        except Exception:
            self._release()
            raise

    def _next_image(self, *, first: bool = True) -> _Image:
        """Return the next image that can be decoded; at a fault of the archive, end a batch that has images already."""
        while True:
            try:
                candidate = next(self._candidates)
            except Fault as e:
                if not first and not self._options.skips:
                    self._candidates = _failed(e.with_traceback(None))  # the next item raises it
                else:
                    self._candidates = _none()
                    self._handle(e)
                raise StopIteration from None
            self._refused = self._refused + 1 if candidate.refused else 0
            self._position += not candidate.refused
            try:
                if candidate.fault is not None:
                    raise candidate.fault
                return _Image(self._decode(candidate.data), candidate)
            except Fault as e:
                self._handle(candidate.named(e))

    def _handle(self, fault: Fault) -> None:
        """Count a fault, or raise the error for it."""
        if not self._options.skips and fault.reason != IGNORED:
            raise fault.error(self._options.path) from fault
        if fault.owned and not self._quiet:
            self._options.counts.add(fault.reason)
            if fault.reason != IGNORED:  # those are logged together
                _log.info("skipped: %s", fault.error(self._options.path))

    def _release(self) -> None:
        """Close the archive, which a kept exception would hold open; the next item opens it again."""
        self._candidates.close()
        self._candidates = self._from_here(self._refused)

    def _transformed(self, image: _Image) -> Any:
        pixels = image.pixels.permute(2, 0, 1).contiguous()
        if self._options.transform is None:
            return pixels
        try:
            return self._options.transform(pixels)
        except StopIteration as e:  # it would end the epoch without an error
            member = image.candidate.member
            raise RuntimeError(f"{self._options.path}, member {member!r}: transform raised StopIteration") from e
        except Exception as e:
            self._note(e, f"member {image.candidate.member!r}")
            raise

    def _note(self, error: Exception, members: str) -> None:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"{self._options.path}, {members}")

    def _next_batch(self, most: int) -> tuple[Any, torch.Tensor]:
        first = self._next_image()
        labels = [first.label]
        if self._options.transform is not None:
            results = [self._transformed(first)]
            last = first
            for last in self._images(most - 1):
                results.append(self._transformed(last))
                labels.append(last.label)
            try:
                with torch.device("cpu"):  # for the numbers among the results
                    return default_collate(results), _label_tensor(labels)
            except Exception as e:
                self._note(e, f"members from {first.candidate.member!r} to {last.candidate.member!r}")
                raise
        height, width, channels = first.pixels.shape
        batch = batch_memory(most, channels, height, width)
        batch[0] = first.pixels.permute(2, 0, 1)
        for image in self._images(most - 1):
            if image.pixels.shape != (height, width, channels):
                raise ValueError(self._sizes(first, image))
            batch[len(labels)] = image.pixels.permute(2, 0, 1)
            labels.append(image.label)
        return batch if len(labels) == most else batch[: len(labels)].clone(), _label_tensor(labels)

    def _sizes(self, *images: _Image) -> str:
        found = " and ".join(f"{image.pixels.shape[0]} x {image.pixels.shape[1]}" for image in images)
        members = " and ".join(repr(image.candidate.member) for image in images)
        return f"{self._options.path}: images of {found} pixels in one minibatch (members {members}); pass size="

    def _images(self, count: int) -> Iterator[_Image]:
        """Yield up to `count` images."""
        for _ in range(count):
            try:
                image = self._next_image(first=False)
            except StopIteration:
                return
            yield image

    def _from_here(self, refused: int = 0) -> Generator[Candidate, None, None]:
        return _candidates(self._options, self._part, self._epoch, self._position, refused)


# Functions, not methods: a generator that refers to its iterator would keep the archive open until garbage collection.
def _candidates(
    options: DatasetOptions, part: WorkerPart, epoch: int, position: int, refused: int
) -> Generator[Candidate, None, None]:
    """Yield the candidates of an epoch from a position on, without the first `refused` ones that have no position."""
    for candidate in _from(options, part, epoch, position):
        if candidate.refused and refused:
            refused -= 1
        else:
            yield candidate


def _from(options: DatasetOptions, part: WorkerPart, epoch: int, position: int) -> Iterator[Candidate]:
    index = options.index
    if index is not None:
        if position == 0:
            yield from refused_members(index, part)
        order = None
        if options.shuffle:
            numbers = torch.Generator(device="cpu").manual_seed((options.seed + epoch) % 2**64)
            order = torch.randperm(len(index), generator=numbers, device="cpu")
        positions = part.slice_of(len(index))[position:]
        yield from indexed(options.path, index, options.labels, order, positions)
        return
    candidates = streamed(options.path, part, options.positions)
    if options.shuffle:
        size = _BUFFER if options.shuffle is True else options.shuffle
        candidates = shuffled(candidates, size, random.Random(f"{options.seed + epoch} {part}"))
    for candidate in candidates:
        if position == 0:
            yield candidate
        position -= not candidate.refused and position > 0


def _label_tensor(labels: int | list[int]) -> torch.Tensor:
    return torch.tensor(labels, dtype=torch.int64, device="cpu")


def _failed(fault: Fault) -> Generator[Candidate, None, None]:
    try:
        raise fault
    finally:
        del fault  # its traceback refers to this frame
    yield  # a generator


def _none() -> Generator[Candidate, None, None]:
    yield from ()
