"""RendezvousHash hashing: a key belongs to the store that draws the highest number for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from cudafuture._arguments import expect_number
from cudafuture.store.arguments import encoded_key

__all__ = ["RendezvousHash"]

_LONGEST_KEY = 1024  # bytes of UTF-8


class RendezvousHash:
    """Stores by name, each of which draws a number for every key: a hash (XXH3) of both names.

    Args:
        names: of the stores; their order does not matter.
        weights: relative shares of the keys; the default is 1.

    Raises:
        ValueError: a weight is not positive and finite, or names no store.
    """

    def __init__(self, names: Iterable[str], weights: Mapping[str, float]) -> None:
        from xxhash import xxh3_64_intdigest  # the rest of the package can be imported without xxhash

        self._digest = xxh3_64_intdigest
        self._places = [(name, self._digest(name.encode()), weights.get(name, 1.0)) for name in names]
        if unknown := weights.keys() - {name for name, _, _ in self._places}:
            raise ValueError(
                f"weights for {sorted(unknown)}, which are not among {[name for name, _, _ in self._places]}"
            )
        for name, _, weight in self._places:
            expect_number(f"the weight of {name!r}", weight)
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of {name!r} is {weight!r}; it must be positive and finite")

    def where(self, key: str) -> str:
        """Return the name of the store of a key.

        Raises:
            TypeError, ValueError: the key is not valid.
        """
        encoded = _encoded(key)
        digest, log = self._digest, math.log
        # 52 bits of the hash plus a half: as a float neither 0 nor 1, whose logarithms are useless.
        return max(
            (-weight / log(((digest(encoded, seed) >> 12) + 0.5) / (1 << 52)), name)
            for name, seed, weight in self._places
        )[1]


def _encoded(key: str) -> bytes:
    """Return a key as UTF-8; reject an invalid key before any store begins an operation."""
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {key!r}")
    encoded = encoded_key(key)
    if not 1 <= len(encoded) <= _LONGEST_KEY:
        raise ValueError(f"a key has 1 to {_LONGEST_KEY} bytes of UTF-8, not {len(encoded)}")
    if b"\0" in encoded:
        raise ValueError("a key has no NUL")
    return encoded
