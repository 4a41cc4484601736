"""Digests of tensors: what their bytes must have, wherever they have travelled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cudafuture import _C
from cudafuture.storage import _xxhash

__all__ = ["digest", "digests"]


def digest(tensor: torch.Tensor) -> int:
    """Return the digest of the bytes of a tensor on the host, in the order of its elements; see ``Offloader.writev``.

    It is the XXH3 (64 bits) of the XXH3s of each 64 KiB, little-endian: so many may be taken at a time, in any order.
    It tells damage from what was meant; it is no defence against who means harm.

    Raises:
        TypeError: it is no tensor, or one without memory.
        ValueError: it is on a device, or its elements are not all in its memory.

    >>> digest(torch.zeros(3)) == digest(torch.zeros(3, dtype=torch.int32))
    True
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a torch.Tensor is wanted, not {type(tensor).__qualname__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(f"a tensor of layout {tensor.layout} has no memory of its own")
    if not tensor.is_cpu:
        raise ValueError(f"the bytes of a tensor on the host are wanted, not on {tensor.device}")
    data = tensor.detach()
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        data = data.resolve_conj().resolve_neg().contiguous()
    return digests(data, [(0, data.nbytes)])[0]


def digests(tensor: torch.Tensor, parts: Sequence[tuple[int, int]]) -> list[int]:
    """Return the digests of parts of a contiguous tensor on the host: each begins at a byte, and has so many.

    Raises:
        TypeError, ValueError: there is no such part, or it is no such tensor.

    >>> digests(torch.arange(4, dtype=torch.uint8), [(1, 2)]) == [digest(torch.tensor([1, 2], dtype=torch.uint8))]
    True
    """
    _xxhash.install()
    return _C.digests_of(tensor, list(parts))
