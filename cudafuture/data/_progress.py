"""Epoch of a dataset, and the start of its next iteration."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch.utils.data import get_worker_info

from cudafuture.data._shared_memory import shared_zeros

__all__ = ["Progress", "StartPosition"]

_RESUMES, _LOADER, _START = range(3)
_NO_LOADER = -1  # in the field of the DataLoader: an iterator of the main process has taken the start
_ROWS = 1024


@dataclass(frozen=True)
class StartPosition:
    """Position at which an iteration begins.

    Args:
        epoch: the epoch.
        batches: the number of batches that the DataLoader of this rank has returned.
        batch_size: the images of each batch.
        workers: the workers of that DataLoader, or -1 if the state does not have the number.
        drop_last: 1 if that DataLoader did not return partial batches, else 0.
        position: the position of a single iterator, or -1 if the state is a DataLoader's.
        rank, ranks, worker, of: the part of that iterator.
    """

    epoch: int
    batches: int = 0
    batch_size: int = 1
    workers: int = -1
    drop_last: int = 0
    position: int = -1
    rank: int = 0
    ranks: int = 1
    worker: int = 0
    of: int = 1

    @property
    def is_first(self) -> bool:
        """True if it is the first image of the epoch."""
        return self.batches == 0 and self.position < 0

    @property
    def part(self) -> list[int]:
        """The part of a single iterator: rank, ranks, worker and workers."""
        return [self.rank, self.ranks, self.worker, self.of]


class Progress:
    """Epoch and start of the next iteration, in memory that DataLoader workers share.

    The main process sets it before it creates a DataLoader's iterator. Each worker takes the start of a resumed epoch
    once, and either the main process or the workers of one DataLoader take it; later iterations begin at the first
    image. Workers that outlive an epoch see the next one.
    """

    def __init__(self) -> None:
        self._fields = shared_zeros(_START + len(astuple(StartPosition(0))))
        self._fields[_START:] = _numbers(*astuple(StartPosition(0)))
        self._taken = shared_zeros(_ROWS + 1)  # by worker: the last resume that it took

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and drop a start in another epoch."""
        if epoch != int(self._fields[_START]):
            self._fields[_START:] = _numbers(*astuple(StartPosition(epoch)))

    def resume(self, start: StartPosition) -> None:
        """Set the start of the next iteration."""
        resumes = int(self._fields[_RESUMES]) + 1
        self._fields.copy_(_numbers(resumes, 0, *astuple(start)))

    def next_start(self) -> StartPosition:
        """Return the start of the next iteration of this process."""
        resumes, loader, *start = self._fields.tolist()
        found = StartPosition(*start)
        is_taken = int(self._taken[_row()]) == resumes or loader not in (0, _seed())
        return StartPosition(found.epoch) if is_taken else found

    def take(self) -> StartPosition:
        """Return the start of this worker's iteration, and make its next one begin at the first image."""
        start = self.next_start()
        if not start.is_first:
            self._fields[_LOADER] = _seed()
            self._taken[_row()] = self._fields[_RESUMES]
        return start


def _numbers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _row() -> int:
    worker = get_worker_info()
    return 0 if worker is None else 1 + worker.id % _ROWS


def _seed() -> int:
    """Return a number that is the same in all workers of one DataLoader: the seed without the worker's number."""
    worker = get_worker_info()
    return _NO_LOADER if worker is None else worker.seed - worker.id + 1
