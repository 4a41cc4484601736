"""Partitions of half precision, in memory, in a store or in files, from which parameters are assembled."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch

from cudafuture._arguments import expect_int
from cudafuture._C import CUDAFuture
from cudafuture.combine import wait_all
from cudafuture.io import File
from cudafuture.io.engine import PAGE
from cudafuture.store import Store
from cudafuture.swap._parameter_state import StoredTensor
from cudafuture.swap._unit import places

__all__ = ["Partition", "assemble", "partitions_of", "staged"]


@dataclass(frozen=True)
class Partition:
    """Adjacent elements of a parameter in half precision."""

    numel: int
    dtype: torch.dtype
    tensor: torch.Tensor | None
    """the elements; None: they are in the store or in a file"""
    key: str | None
    """in the store"""
    path: str | os.PathLike[str] | None
    """of a file that begins with the elements"""

    @property
    def elements(self) -> StoredTensor:
        """The dtype and shape of its elements, flat."""
        return StoredTensor(self.dtype, torch.Size([self.numel]))


def staged(partitions: Sequence[Partition]) -> list[StoredTensor]:
    """Return the elements that are read into a buffer."""
    return [partition.elements for partition in partitions if partition.tensor is None]


def partitions_of(
    infos: Sequence[tuple[torch.Tensor | None, int, Any]], numel: int, dtype: torch.dtype, store: Store
) -> list[Partition]:
    """Return the partitions of one parameter.

    Args:
        infos: of each partition: a tensor, the number of its elements, and None, a key of the store or a path.
        numel: of the parameter.
        dtype: of partitions without a tensor.
        store: of the keys.

    Raises:
        ValueError: the partitions have other than `numel` elements, or a tensor has too few.
    """
    found: list[Partition] = []
    for info in infos:
        if not isinstance(info, Sequence) or len(info) != 3 or not isinstance(info[0], (torch.Tensor, NoneType)):
            raise TypeError(
                f"a partition is a tuple of a tensor or None, its number of elements, and its place: {info!r}"
            )
        tensor, source = info[0], info[2]
        count = expect_int("the number of elements of a partition", info[1], 0)
        if source is not None and not isinstance(source, (str, os.PathLike)):
            raise TypeError(f"the place of a partition is None, a key or a path, not {source!r}")
        kind = dtype if tensor is None else tensor.dtype
        if source is None:
            if tensor is None or tensor.numel() < count:
                raise ValueError(f"a partition of {count} elements is in memory, but its tensor does not have them")
            found.append(Partition(count, kind, tensor.detach().reshape(-1)[:count], None, None))
        elif isinstance(source, str) and source in store:
            found.append(Partition(count, store.stat(source).dtype, None, source, None))
        else:
            found.append(Partition(count, kind, None, None, source))
    if sum(partition.numel for partition in found) != numel:
        raise ValueError(f"partitions of {[p.numel for p in found]} elements are not a parameter of {numel}")
    return found


def assemble(
    parameters: Sequence[Sequence[Partition]], store: Store, buffers: Sequence[torch.Tensor]
) -> Iterator[list[torch.Tensor]]:
    """Read and cast parameters, in as many rounds as the buffers need. Elements in memory need no buffer.

    Args:
        parameters: their partitions.
        store: of the keys.
        buffers: flat byte tensors that reads go into.

    Yields:
        new tensors with the float32 values of the next parameters.

    Raises:
        ValueError: no buffer has room for one of the parameters.
        StorageError: a partition cannot be read.
    """
    largest = max((buffer.numel() for buffer in buffers), default=0)
    for i, partitions in enumerate(parameters):
        if (needed := places(staged(partitions), largest)[-1]) > largest:
            raise ValueError(
                f"the partitions of parameter {i} have {needed} bytes to read, but the largest buffer has {largest}"
            )
    i = 0
    while i < len(parameters):
        free = list(buffers)
        left = sum(buffer.numel() for buffer in buffers)
        found: list[list[torch.Tensor]] = []
        while i < len(parameters):
            left -= sum(partition.elements.nbytes for partition in parameters[i])  # in memory too: it bounds a round
            parts = None if found and left < 0 else _place(parameters[i], free)
            if parts is None:
                break
            found.append(parts)
            i += 1
        _read(parameters[i - len(found) : i], found, store)
        yield [torch.cat([part.to("cpu", torch.float32) for part in parts]) for parts in found]


def _place(partitions: Sequence[Partition], free: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return a tensor for each partition, from the first buffer with room for all of them, or None."""
    needed = staged(partitions)
    if not needed:
        return [partition.tensor for partition in partitions if partition.tensor is not None]
    for i, buffer in enumerate(free):
        *begins, end = places(needed, buffer.numel())
        if end <= buffer.numel():
            free[i] = buffer[-(-end // PAGE) * PAGE :]
            reads = (
                buffer[begin : begin + elements.nbytes].view(elements.dtype)
                for begin, elements in zip(begins, needed, strict=True)
            )
            return [next(reads) if partition.tensor is None else partition.tensor for partition in partitions]
    return None


def _read(parameters: Sequence[Sequence[Partition]], found: Sequence[Sequence[torch.Tensor]], store: Store) -> None:
    keys: list[str] = []
    outs: list[torch.Tensor] = []
    reads: list[CUDAFuture[Any]] = []
    with ExitStack() as files:
        for partitions, parts in zip(parameters, found, strict=True):
            for partition, part in zip(partitions, parts, strict=True):
                if partition.key is not None:
                    keys.append(partition.key)
                    outs.append(part)
                elif partition.path is not None:
                    file = files.enter_context(File(partition.path, "r"))
                    reads.append(file.read(part))
        if keys:
            reads.append(store.readv(keys, outs))
        wait_all(reads)
