"""Division of an archive's images between ranks and DataLoader workers."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.utils.data import get_worker_info

__all__ = ["Shard", "WorkerPart", "current_shard", "current_workers"]

Shard = tuple[int, int]  # a rank and the number of ranks, or a worker and the number of workers


def current_shard() -> Shard:
    """Return this process's rank and the world size of torch.distributed, or one rank without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def current_workers() -> Shard:
    """Return the number of this DataLoader worker and the number of workers; (0, 1) outside of workers."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


@dataclass(frozen=True)
class WorkerPart:
    """Images of one worker of one rank.

    With an index the part is a range of positions in the archive's order or in a permutation: `slice_of`. Without one,
    blocks of images are assigned to the ranks and workers in rotation: `owns`. In both cases, a DataLoader that takes
    one batch from each worker in rotation receives as many batches as a single worker would produce, and only the last
    can be partial.

    Args:
        rank, ranks: the rank and the number of ranks.
        worker, workers: the worker and the number of workers of this rank.
        block: images that stay together: the size of a batch, or 1.
    """

    rank: int
    ranks: int
    worker: int
    workers: int
    block: int

    def owns(self, image: int) -> bool:
        """Return True if the image with this number in the archive's order belongs to the part."""
        block = image // self.block
        return block % self.ranks == self.rank and block // self.ranks % self.workers == self.worker

    def slice_of(self, images: int) -> range:
        """Return the positions of the part among `images` positions."""
        start, stop = _share(images, self.rank, self.ranks)
        blocks = -(-(stop - start) // self.block)
        # A batch can be partial only at the end of the range. So the worker that delivers the last batch comes last.
        order = [(blocks + turn) % self.workers for turn in range(self.workers)]
        counts = [len(range(worker, blocks, self.workers)) for worker in order]
        turn = order.index(self.worker)
        first = start + sum(counts[:turn]) * self.block
        return range(first, min(stop, first + counts[turn] * self.block))

    def images_of_rank(self, images: int) -> int:
        """Return the number of positions, of `images`, that belong to the rank."""
        start, stop = _share(images, self.rank, self.ranks)
        return stop - start

    def batches_of_worker(self, batches: int) -> int:
        """Return the number of the first `batches` batches of a DataLoader that come from this worker."""
        return len(range(self.worker, batches, self.workers))


def _share(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return the ends of one of `parts` ranges of nearly equal length; the first ranges are the longer ones."""
    least, longer = divmod(count, parts)
    start = part * least + min(part, longer)
    return start, start + least + (part < longer)
