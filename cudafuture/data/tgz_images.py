"""Dataset of the labelled images in a tar archive."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from cudafuture.data._archive_index import ArchiveIndex
from cudafuture.data._decode import Decoder
from cudafuture.data._faults import IGNORED, SkipCounts
from cudafuture.data._index_source import index_of, log_ignored, log_once
from cudafuture.data._iterator import DatasetOptions, ImageIterator
from cudafuture.data._labels import scan_classes
from cudafuture.data._partition import Shard, WorkerPart, current_shard, current_workers
from cudafuture.data._progress import Progress, StartPosition
from cudafuture.data._state import integer, start_of, state_of
from cudafuture.data._tar import require_tar

__all__ = ["TgzImages"]


class TgzImages(IterableDataset[Any]):
    """Labelled images of a .tar, .tgz (.tar.gz) or .tar.zst archive, as a dataset for torch's DataLoader.

    The label of an image is the base name of its parent folder. Items are pairs of a uint8 tensor (C, H, W) and an
    int64 label, both in host memory. Ranks and DataLoader workers divide the images: each image appears once. The
    dataset and its iterators have ``state_dict()`` and ``load_state_dict()``, as ``prefetch`` and torchdata's
    StatefulDataLoader expect.

    With an index each rank and worker reads only its own part of the archive, and the dataset has a length: the images,
    or with `batch` the minibatches, of this rank; images that will be skipped count. The index is stored in a file
    beside the archive, ``<path>.index``. Without an index each worker unpacks the whole archive and decodes its share.
    A .tar.zst has no index. Members that are not images by name or first bytes are ignored. See docs/images.md.

    Args:
        path: the archive.
        classes: the names of the classes; the position is the label. By default ``classes_of(path)``.
        size: height and width, or one number for both, to which each image is resized (bilinear).
        mode: Pillow's name of the pixel format: "RGB", "L", "RGBA" or another with 8 bits per channel.
        transform: a function that is called with each uint8 tensor (C, H, W) in the worker; its result is the item.
        shuffle: 0 for the order of the archive. With an index, any other number shuffles the whole archive. Without
            one, it is the number of images in a shuffle buffer (1,024 for True). The order depends on seed + epoch.
        seed: of the order.
        batch: images of a minibatch (N, C, H, W) with labels (N,); the last one may be smaller, and with `on_error`
            "skip" the last one of each worker; then pass ``batch_size=None`` to the DataLoader. By default the items
            are single images.
        shard: "auto" for the rank and world size of torch.distributed, a pair of both, or None for one rank.
        on_error: "raise" raises ArchiveError at a member that is not an image; "skip" counts it in `skipped`.
        index: "auto" uses or builds an index if possible, True raises if it is not possible, False uses none.

    Raises:
        ArchiveError: `index` is True, but the archive cannot have an index; the file is no tar archive.
        ImportError: a package of the extra `tgz` is missing.
        OSError: the archive cannot be read.
        TypeError: `shuffle`, `seed` or `batch` is not an integer.
        ValueError: an argument is out of its range.

    >>> import io, tarfile
    >>> with tarfile.open("pets.tar", "w") as archive:
    ...     for name in ("cat/1.ppm", "dog/1.ppm"):
    ...         file = b"P6 4 2 255 " + bytes(24)
    ...         member = tarfile.TarInfo(name)
    ...         member.size = len(file)
    ...         archive.addfile(member, io.BytesIO(file))
    >>> images = TgzImages("pets.tar")
    >>> [(tuple(image.shape), images.classes[label]) for image, label in images]
    [((3, 2, 4), 'cat'), ((3, 2, 4), 'dog')]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        classes: Sequence[str] | None = None,
        size: int | tuple[int, int] | None = None,
        mode: str = "RGB",
        transform: Callable[[torch.Tensor], Any] | None = None,
        shuffle: int = 0,
        seed: int = 0,
        batch: int | None = None,
        shard: Literal["auto"] | Shard | None = "auto",
        on_error: Literal["raise", "skip"] = "raise",
        index: Literal["auto"] | bool = "auto",
    ) -> None:
        super().__init__()
        if index not in ("auto", True, False):
            raise ValueError(f"index={index!r}: pass 'auto', True or False")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r}: pass 'raise' or 'skip'")
        shuffle = shuffle if shuffle is True else integer("shuffle", shuffle)  # True has a separate meaning
        batch = None if batch is None else integer("batch", batch)
        if shuffle < 0 or (batch is not None and batch < 1):
            raise ValueError(f"shuffle={shuffle} must be at least 0, and batch={batch} at least 1")
        self._shard = _shard(shard)
        self._progress = Progress()
        self._counts = SkipCounts()
        pair = _size(size)
        Decoder(pair, mode)  # raises if Pillow is missing or the mode is wrong
        archive = str(Path(path).absolute())  # workers may have another current folder
        require_tar(archive)
        found = index_of(archive, index is True) if index else None
        if found is not None:
            ignored = [name for name, reason, _ in found.refused if reason == IGNORED]
            log_ignored(archive, ignored)
        if not index:
            log_once(f"{archive} is read without an index, so every worker unpacks all of it: index=False")
        self._classes = _classes(archive, classes, found)
        positions = {name: position for position, name in enumerate(self._classes)}
        self._options = DatasetOptions(
            path=archive,
            index=found,
            positions=positions,
            labels=torch.empty(0, dtype=torch.int64, device="cpu") if found is None else _labels(found, positions),
            size=pair,
            mode=mode,
            transform=transform,
            shuffle=shuffle,
            seed=integer("seed", seed),
            batch=batch,
            skips=on_error == "skip",
            counts=self._counts,
        )

    def __repr__(self) -> str:
        return f"<TgzImages of {len(self._classes)} classes in {self._options.path!r}>"

    @property
    def classes(self) -> list[str]:
        """The names of the classes; the position of a name is its label."""
        return list(self._classes)

    @property
    def skipped(self) -> Counter[str]:
        """The numbers of skipped members since the dataset was created, by reason, of all workers of this rank.

        The reasons are "truncated", "damaged" and "bomb" for the archive, and for members "corrupt", "not_an_image",
        "too_large", "pixel_format", "no_label", "unknown_class", "link" and "special_file". With either `on_error`,
        members that are not images by name or first bytes are counted as "ignored".
        """
        return self._counts.total()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order of shuffled images depends. Call it before each epoch.

        Raises:
            TypeError: the epoch is not an integer.
            ValueError: it does not fit in 64 bits.

        >>> TgzImages("pets.tgz", shuffle=True).set_epoch(1)  # doctest: +SKIP
        """
        self._progress.set_epoch(integer("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the start of the next iteration: the first image, or the state given to `load_state_dict`.

        The position within an iteration is in ``state_dict()`` of its iterator.

        >>> import tarfile
        >>> tarfile.open("none.tar", "w").close()
        >>> TgzImages("none.tar").state_dict()
        {'epoch': 0, 'batches': 0}
        """
        return state_of(self._progress.next_start())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration after the batches that a DataLoader has returned in an epoch.

        Ranks, workers and all arguments must be the same as in the earlier run. The iteration after that begins at
        the first image, and so does one in another epoch.

        Args:
            state: "epoch"; "batches", the number that this rank's DataLoader has returned in it; with a dataset that
                yields single images also "batch_size" (1) and "drop_last" (False) of the DataLoader; and optionally its
                number of "workers", which is compared. Or the state of an iterator of the dataset, which need not be
                a DataLoader's: "epoch", "position" and "part".

        Raises:
            KeyError: "epoch" is missing, or both "batches" and "position" are, or "part" is.
            TypeError: a number is not an integer.
            ValueError: a number is out of its range.

        >>> import tarfile
        >>> tarfile.open("none.tar", "w").close()
        >>> images = TgzImages("none.tar")
        >>> images.load_state_dict({"epoch": 3, "batches": 100})
        >>> images.state_dict()
        {'epoch': 3, 'batches': 100, 'batch_size': 1, 'drop_last': False}
        """
        self._progress.resume(start_of(state, self._options.batch))

    def __len__(self) -> int:
        index, batch = self._options.index, self._options.batch
        if index is None:
            raise TypeError(f"{self._options.path} has no index, so its length is not known before it is read")
        images = self._part(0, 1).images_of_rank(len(index))
        return images if batch is None else -(-images // batch)

    def __iter__(self) -> Iterator[Any]:
        start = self._progress.take()
        part = self._part(*current_workers())
        if start.is_first:
            return ImageIterator(self._options, part, start.epoch)
        if start.position >= 0:
            iterator = ImageIterator(self._options, part, start.epoch)
            iterator.load_state_dict({"epoch": start.epoch, "position": start.position, "part": start.part})
            return iterator
        # The main process reads like one worker.
        if start.workers >= 0 and max(start.workers, 1) != part.workers:
            raise ValueError(f"the state is of {start.workers} workers, but this DataLoader has {part.workers}")
        return self._resumed(part, start)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shard": self._current_shard()}  # a spawned worker has no process group

    def _current_shard(self) -> Shard:
        return current_shard() if self._shard is None else self._shard

    def _part(self, worker: int, workers: int) -> WorkerPart:
        rank, ranks = self._current_shard()
        return WorkerPart(rank, ranks, worker, workers, self._options.batch or 1)

    def _resumed(self, part: WorkerPart, start: StartPosition) -> ImageIterator:
        """Return the iterator of a worker that continues after the batches of an earlier DataLoader.

        A new DataLoader asks worker 0 first. So worker 0 continues with the part that was next in rotation, and so on.
        """
        if not self._options.skips:  # then each batch but the last one was full
            mine = replace(part, worker=(part.worker + start.batches) % part.workers)
            position = mine.batches_of_worker(start.batches) * start.batch_size
            return ImageIterator(self._options, mine, start.epoch, position)
        iterators = self._replayed(part, start)
        passed = iterators[part.worker]
        return ImageIterator(self._options, passed.part, start.epoch, passed.position)

    def _replayed(self, part: WorkerPart, start: StartPosition) -> list[ImageIterator]:
        """Return the iterators of all workers after the batches of an earlier DataLoader, in rotation order.

        Only decoding shows which images were skipped, and therefore which images were in the batches.
        """
        options = replace(self._options, transform=None)
        parts = [replace(part, worker=worker) for worker in range(part.workers)]
        iterators = deque(ImageIterator(options, one, start.epoch, quiet=True) for one in parts)
        draws = 1 if options.batch else start.batch_size
        ended: set[ImageIterator] = set()
        returned = 0
        while returned < start.batches and len(ended) < part.workers:
            iterator = iterators[0]
            iterators.rotate(-1)
            if iterator not in ended:
                drawn = sum(1 for _ in zip(range(draws), iterator, strict=False))
                returned += drawn == draws if start.drop_last else drawn > 0
                if drawn < draws:
                    ended.add(iterator)
        return list(iterators)


def _shard(shard: Literal["auto"] | Shard | None) -> Shard | None:
    """Return the given rank and number of ranks, or None for those of torch.distributed."""
    if shard == "auto":
        return None
    if shard is None:
        return 0, 1
    rank, ranks = shard
    if not 0 <= int(rank) < int(ranks):
        raise ValueError(f"shard={shard!r}: pass a rank and the number of ranks, 'auto' or None")
    return int(rank), int(ranks)


def _size(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise ValueError(f"size={size!r}: pass a height and a width of at least 1")
    return height, width


def _classes(path: str, given: Sequence[str] | None, index: ArchiveIndex | None) -> list[str]:
    if given is not None:
        if isinstance(given, str) or len(set(given)) != len(given):
            raise ValueError(f"classes={given!r}: pass a sequence of different names")
        return list(given)
    # An archive that cannot be read to its end fails during iteration, after the images that it has.
    return scan_classes(path)[0] if index is None else index.classes


def _labels(index: ArchiveIndex, positions: dict[str, int]) -> torch.Tensor:
    """Return the label of each image, -1 if its class is not among the given ones."""
    table = torch.tensor([positions.get(name, -1) for name in index.classes], dtype=torch.int64, device="cpu")
    return table[index.labels]
