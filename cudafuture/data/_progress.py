"""The epoch of a dataset, and the start of its next iteration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.data import get_worker_info

from cudafuture.data._shared_memory import shared_zeros

__all__ = ["Progress", "Start"]

_EPOCH, _RESUMES, _BATCHES, _BATCH_SIZE, _WORKERS, _LOADER, _FIELDS = range(7)
_ROWS = 1024


@dataclass(frozen=True)
class Start:
    """The place where an iteration begins.

    Args:
        epoch: the epoch.
        batches: the number of batches that the DataLoader of this rank has returned.
        batch_size: the images of each.
        workers: the workers of that DataLoader, or -1 where the state does not say.
    """

    epoch: int
    batches: int = 0
    batch_size: int = 1
    workers: int = -1


class Progress:
    """The epoch, and the start of the next iteration, in memory that DataLoader workers share.

    The main process sets it before it makes a DataLoader's iterator. Each worker takes the start of a resumed epoch
    once; later iterations begin at the first image. Workers that outlive an epoch see the next one.
    """

    def __init__(self) -> None:
        self._fields = shared_zeros(_FIELDS)
        self._taken = shared_zeros(_ROWS + 1)  # by worker: the last resume that it took

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. A start in another epoch is forgotten."""
        if epoch != int(self._fields[_EPOCH]):
            self._fields[_BATCHES] = 0
        self._fields[_EPOCH] = epoch

    def resume(self, start: Start) -> None:
        """Set the start of the next iteration."""
        resumes = int(self._fields[_RESUMES]) + 1
        values = [start.epoch, resumes, start.batches, start.batch_size, start.workers, 0]
        self._fields.copy_(torch.tensor(values))

    def take(self) -> Start:
        """Return where the iteration of this worker begins, and make its next one begin at the first image."""
        epoch, resumes, batches, batch_size, workers, loader = self._fields.tolist()
        worker = get_worker_info()
        row = 0 if worker is None else 1 + worker.id % _ROWS
        if batches == 0 or int(self._taken[row]) == resumes:
            return Start(epoch)
        if worker is not None:  # the seed without the worker's number is the same in all workers of one DataLoader
            seed = worker.seed - worker.id + 1
            if loader not in (0, seed):
                return Start(epoch)
            self._fields[_LOADER] = seed
        self._taken[row] = resumes
        return Start(epoch, batches, batch_size, workers)
