"""The description of a tensor in a store, and the statistics of a store."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Entry", "OffloaderStatistics"]


@dataclass(frozen=True)
class Entry:
    """What a store knows of a key; see ``Offloader.stat()``."""

    key: str
    dtype: torch.dtype
    shape: torch.Size
    nbytes: int


@dataclass(frozen=True)
class OffloaderStatistics:
    """What a store has, and what it has done so far; see ``Offloader.statistics()``."""

    keys: int
    bytes: int
    """of the tensors of those"""
    used: int
    """bytes that tensors have on disk: those included that are being written, or still read after they were replaced.
    What is less than a page (4 KiB) has one to itself where it was written alone"""
    capacity: int | None
    slabs: int
    """files"""
    slab_bytes: int
    """of those files"""
    journal_bytes: int
    reads: int
    """tensors whose reading has ended, however it did"""
    writes: int
    transfers: int
    """reads and writes that the engine was asked for: fewer than of tensors where small ones went together"""
    checksum_errors: int
    pending: int
    """calls that have not ended"""
