"""Images of one part of an archive, still encoded, in the order of an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cudafuture.data._archive_index import ArchiveIndex, ArchiveReader
from cudafuture.data._archive_stream import ArchiveStream, open_stream
from cudafuture.data._faults import IGNORED, Fault
from cudafuture.data._index_source import log_ignored
from cudafuture.data._partition import WorkerPart
from cudafuture.data._tar import members_of

__all__ = ["Candidate", "indexed", "refused_members", "shuffled", "streamed"]

_FEW, _MANY = 32, 4096  # images that are read ahead, in the order of the archive
_MOST_BYTES = 32 << 20  # of the images that are read ahead
_SEEK_POINT = 32 << 10  # bytes of a seek point


@dataclass
class Candidate:
    """Member of an archive that may be an image.

    Args:
        name: the member's name, or its number in `index`.
        label: the position of its class, or -1.
        data: the bytes of the member.
        fault: the reason why it cannot be used, or None.
        index: the index that has the name.
        refused: the member is no candidate, by its header, and takes no position in the order.
    """

    name: str | int
    label: int = -1
    data: bytes = b""
    fault: Fault | None = None
    index: ArchiveIndex | None = None
    refused: bool = False

    @property
    def member(self) -> str:
        """The member's name."""
        if isinstance(self.name, str):
            return self.name
        return "" if self.index is None else self.index.name(self.name)

    def named(self, fault: Fault) -> Fault:
        """Return the fault with the name of this member."""
        fault.member = fault.member or self.member
        return fault


def refused_members(index: ArchiveIndex, part: WorkerPart) -> Iterator[Candidate]:
    """Yield the part's share of the members that, by the index, cannot be images."""
    mine = part.rank * part.workers + part.worker
    for name, reason, text in index.refused[mine :: part.ranks * part.workers]:
        yield Candidate(name, fault=Fault(reason, text, name), refused=True)


def indexed(
    path: str, index: ArchiveIndex, labels: torch.Tensor, order: torch.Tensor | None, positions: range
) -> Iterator[Candidate]:
    """Yield the images at the given positions of an order, or of the archive's order.

    Images in another order than the archive's are read ahead in groups, each in the archive's order, so that a piece
    of the archive is unpacked once for all images of the group in it. Groups are large only if several images of a
    group are in one piece.
    """
    reader = ArchiveReader(path, index)
    try:
        most = _MANY if 0 < index.seek_points.nbytes <= _SEEK_POINT * _MANY // 4 else _FEW
        while positions:
            images = _images(index, order, positions[:most])
            positions = positions[len(images) :]
            rows = [column[images].tolist() for column in (index.offsets, index.sizes, labels)]
            table = list(zip(images.tolist(), *rows, strict=True))
            ahead: dict[int, Candidate] = {}
            if order is not None:
                ahead = {row[0]: _read(reader, index, *row) for row in sorted(table)}
            for row in table:
                yield ahead.pop(row[0]) if row[0] in ahead else _read(reader, index, *row)
    finally:
        reader.close()


def _images(index: ArchiveIndex, order: torch.Tensor | None, positions: range) -> torch.Tensor:
    """Return the numbers of the images at the first positions, as many as may be read at once."""
    if order is None:
        return torch.arange(positions.start, positions.stop, device="cpu")
    images = order[positions.start : positions.stop]
    fit = int((index.sizes[images].cumsum(0) <= _MOST_BYTES).sum())
    return images[: max(fit, 1)]


def _read(reader: ArchiveReader, index: ArchiveIndex, image: int, offset: int, size: int, label: int) -> Candidate:
    if label < 0:
        return Candidate(image, label, fault=_unknown(), index=index)
    try:
        return Candidate(image, label, reader.read(offset, size), index=index)
    except Fault as e:
        return Candidate(image, label, fault=e, index=index)


def streamed(path: str, part: WorkerPart, labels: dict[str, int]) -> Iterator[Candidate]:
    """Yield the images of a part, by unpacking the whole archive.

    Raises:
        Fault: the archive is truncated, damaged or a bomb. Its `owned` is True in exactly one part.
    """
    image = 0
    ignored: list[str] = []
    try:
        with open_stream(path) as stream:
            for member in members_of(stream):
                if member.fault is not None and member.fault.reason == IGNORED:
                    ignored.append(member.name)
                mine = part.owns(image)
                image += member.fault is None  # before the data is read, so that all parts count a fault equally
                if mine:
                    candidate = Candidate(member.name, labels.get(member.label, -1), fault=member.fault)
                    candidate.refused = member.fault is not None
                    if candidate.fault is None and candidate.label < 0:
                        candidate.fault = _unknown()
                    if candidate.fault is None:
                        candidate.data = _data(stream, member.size, candidate)
                    yield candidate
    except Fault as e:
        e.owned = part.owns(image)
        raise
    except GeneratorExit:  # the rest of the archive is not read
        ignored.clear()
        raise
    finally:
        if part.rank == part.worker == 0:
            log_ignored(path, ignored)


def _data(stream: ArchiveStream, size: int, candidate: Candidate) -> bytes:
    try:
        return stream.read(size)
    except Fault as e:
        raise candidate.named(e) from None


def shuffled(candidates: Iterator[Candidate], size: int, numbers: random.Random) -> Iterator[Candidate]:
    """Yield candidates in random order, from a buffer of `size`; yield the buffered ones before raising a Fault."""
    buffer: list[Candidate] = []
    try:
        for candidate in candidates:
            if len(buffer) < size:
                buffer.append(candidate)
                continue
            chosen = numbers.randrange(size)
            candidate, buffer[chosen] = buffer[chosen], candidate
            yield candidate
    except Fault:
        numbers.shuffle(buffer)
        yield from buffer
        raise
    numbers.shuffle(buffer)
    yield from buffer


def _unknown() -> Fault:
    return Fault("unknown_class", "the member's folder is not one of the given classes")
