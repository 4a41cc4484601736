"""Digests of tensors: checksums of their bytes, independent of the path that the bytes take."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from cudafuture import _C, _xxhash
from cudafuture._arguments import expect_int, expect_tensor, listed
from cudafuture.errors import InvalidStateError

__all__ = ["Digest", "digest", "digests"]

_LEAF = 1 << 16  # bytes
_LARGEST = (1 << 64) - 1


def digest(tensor: torch.Tensor) -> int:
    """Return the digest of the bytes of a host tensor, in the order of its elements; see ``DiskStore.writev``.

    It is the XXH3 (64 bits) of the XXH3s of each 64 KiB, little-endian, so the parts may be hashed in any order. It
    detects damage; it does not protect against an attacker.

    Raises:
        TypeError: `tensor` is not a tensor, or has no memory.
        ValueError: it is on a device, or its elements are not all in its memory.
    >>> digest(torch.zeros(3)) == digest(torch.zeros(3, dtype=torch.int32))
    True
    """
    expect_tensor("tensor", tensor)
    is_contiguous = _C.has_contiguous_memory(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(f"a tensor of layout {tensor.layout} has no memory of its own")
    if not tensor.is_cpu:
        raise ValueError(f"the tensor is on {tensor.device}; copy it to the host first")
    data = tensor.detach()
    if not is_contiguous:
        data = data.resolve_conj().resolve_neg().contiguous()
    return digests(data, [(0, data.nbytes)])[0]


def digests(tensor: torch.Tensor, parts: Sequence[tuple[int, int]], seeds: Sequence[int] | None = None) -> list[int]:
    """Return the digests of parts of a contiguous host tensor.

    Args:
        tensor: the tensor.
        parts: the first byte and the size in bytes of each part.
        seeds: one for each part, as of ``Digest.value``; default: 0.

    Raises:
        TypeError, ValueError: the part does not exist, or the tensor does not fit; a seed is missing, or is not a
            number of 64 bits.

    >>> digests(torch.arange(4, dtype=torch.uint8), [(1, 2)]) == [digest(torch.tensor([1, 2], dtype=torch.uint8))]
    True
    """
    _xxhash.install()
    expect_tensor("tensor", tensor)
    pairs = listed("parts", parts, "pairs of an offset and a length")
    given = [0] * len(pairs) if seeds is None else listed("seeds", seeds, "numbers of 64 bits")
    return _C.digests_of(tensor, pairs, [_seed(seed) for seed in given])


def _seed(seed: int) -> int:
    """Raise TypeError unless a seed is a number of 64 bits, as the native module does."""
    if not 0 <= expect_int("each of seeds", seed) <= _LARGEST:
        raise TypeError(f"each of seeds is a number of 64 bits, not {seed!r}")
    return seed


class Digest:
    """Digest of a tensor whose bytes arrive in pieces, in any order; it equals ``digest()`` of the whole tensor.

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
        self._nbytes = nbytes = expect_int("nbytes", nbytes, 0)
        self._lock = threading.Lock()  # guards what follows, but for the native half
        self._added: set[int] = set()  # the multiples of 64 KiB at which added bytes begin
        self._left = nbytes
        self._native = _C.Checksum(nbytes)

    def add(self, at: int, piece: torch.Tensor) -> int:
        """Add a contiguous host tensor whose bytes begin at `at`; return the piece's own digest.

        Each byte is added once. Several threads may add pieces at a time. Both digests are of the same bytes, even if
        the piece changes during the call.

        Raises:
            TypeError: `piece` is not such a tensor.
            ValueError: it does not begin at a multiple of 64 KiB, or ends neither there nor with the tensor; or some of
                its bytes were added before.

        >>> zeros = torch.zeros(3, dtype=torch.uint8)
        >>> Digest(3).add(0, zeros) == digest(zeros)
        True
        """
        expect_tensor("piece", piece)
        at = expect_int("at", at)
        end = at + piece.nbytes
        if at % _LEAF or not 0 <= at <= end <= self._nbytes or (end % _LEAF and end < self._nbytes):
            raise ValueError(f"bytes {at} to {end} of {self._nbytes} are not a multiple of 64 KiB, nor the last ones")
        leaves = range(at, end, _LEAF)
        with self._lock:
            if not self._added.isdisjoint(leaves):
                raise ValueError(f"some of the bytes {at} to {end} were added before")
            self._added.update(leaves)
        try:
            own = self._native.take(at, piece)
        except BaseException:
            with self._lock:
                self._added.difference_update(leaves)
            raise
        with self._lock:
            self._left -= piece.nbytes
        return own

    def value(self, seed: int = 0) -> int:
        """Return the digest.

        Args:
            seed: of a digest that a store keeps: ``value(snapshot.seed) == snapshot.digest`` for the bytes of a
                ``Snapshot``. ``digest()`` has the seed 0.

        Raises:
            InvalidStateError: some bytes are missing.
            ValueError: the seed is not a number of 64 bits.

        >>> Digest(0).value() == digest(torch.empty(0))
        True
        """
        if self._left:
            raise InvalidStateError(f"{self._left} of {self._nbytes} bytes were not added")
        if not 0 <= expect_int("seed", seed) <= _LARGEST:
            raise ValueError(f"a seed is a number of 64 bits, not {seed!r}")
        return self._native.digest(seed)
