"""Digests of tensors: what their bytes must have, wherever they have travelled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cudafuture import _C
from cudafuture.errors import InvalidStateError
from cudafuture.storage import _xxhash

__all__ = ["Digest", "digest", "digests"]

_LEAF = 1 << 16  # bytes


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


class Digest:
    """The digest of a tensor whose bytes come in pieces, in any order; the same as ``digest()`` of all of them.

    >>> import torch
    >>> tensor = torch.arange(100_000).to(torch.uint8)
    >>> parts = Digest(100_000)
    >>> parts.add(65536, tensor[65536:]) == digest(tensor[65536:])
    True
    >>> _ = parts.add(0, tensor[:65536])
    >>> parts.value() == digest(tensor)
    True
    """

    def __init__(self, nbytes: int) -> None:
        _xxhash.install()
        self._nbytes, self._left = nbytes, nbytes
        self._added: set[int] = set()  # the multiples of 64 KiB at which added bytes begin
        self._native = _C.Checksum(nbytes)

    def add(self, at: int, piece: torch.Tensor) -> int:
        """Take a contiguous piece on the host into account, whose bytes begin at `at`; return the piece's own digest.

        Each byte is added once. Both digests are of the same bytes, also when the piece is changed meanwhile.

        Raises:
            TypeError: it is no such tensor.
            ValueError: it begins at no multiple of 64 KiB, or ends neither there nor with the tensor; or some of its
                bytes were added before.

        >>> zeros = torch.zeros(3, dtype=torch.uint8)
        >>> Digest(3).add(0, zeros) == digest(zeros)
        True
        """
        if not isinstance(piece, torch.Tensor):
            raise TypeError(f"{type(piece).__name__} is no tensor")
        end = at + piece.nbytes
        if at % _LEAF or not 0 <= at <= end <= self._nbytes or (end % _LEAF and end < self._nbytes):
            raise ValueError(f"bytes {at} to {end} of {self._nbytes} are no multiple of 64 KiB, nor the last ones")
        leaves = range(at, end, _LEAF)
        if not self._added.isdisjoint(leaves):
            raise ValueError(f"some of the bytes {at} to {end} were added before")
        own = self._native.take(at, piece)
        self._added.update(leaves)
        self._left -= piece.nbytes
        return own

    def value(self, seed: int = 0) -> int:
        """Return the digest.

        Args:
            seed: of a digest that a store keeps: ``value(snapshot.seed) == snapshot.digest`` for the bytes of a
                ``Snapshot``. That of ``digest()`` is 0.

        Raises:
            InvalidStateError: some bytes are missing.
            ValueError: the seed is not a number of 64 bits.

        >>> Digest(0).value() == digest(torch.empty(0))
        True
        """
        if self._left:
            raise InvalidStateError(f"{self._left} of {self._nbytes} bytes were not added")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"a seed is a number of 64 bits, not {seed!r}")
        return self._native.digest(seed)
