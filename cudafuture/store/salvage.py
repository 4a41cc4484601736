"""Salvage of a durable store whose journal is damaged."""

from __future__ import annotations

import os

from cudafuture.errors import StorageError
from cudafuture.io.engine import Engine
from cudafuture.store.disk_store import DiskStore

__all__ = ["SalvagedStore"]


class SalvagedStore(DiskStore):
    """Keys of a damaged durable store that can be verified, read-only; see ``DiskStore.salvage()``.

    It has the keys whose records are valid and whose bytes match their checksums.

    >>> DiskStore("states", durable=True).close()
    >>> with DiskStore.salvage("states") as found, DiskStore("mended", durable=True) as mended:
    ...     for key in found.keys():
    ...         if key not in found.uncertain:
    ...             mended.write(key, found.read(key).wait()).wait()
    """

    _opened_to_read = "salvage"

    def __init__(self, dir: str | os.PathLike[str], *, engine: Engine | None = None) -> None:
        super().__init__(dir, engine=engine, durable=True, read_only=True)
        recovery = self._native.recovery()
        self._damage: list[tuple[int, int]] = recovery["gaps"]
        try:
            self._lost = self.verify()
        except BaseException:
            self.close()
            raise
        self._native.forget(list(self._lost))
        self._uncertain = frozenset(recovery["uncertain"]) - self._lost.keys()

    @property
    def lost(self) -> dict[str, StorageError]:
        """The keys whose bytes cannot be read, or do not match their checksums, with the errors."""
        return dict(self._lost)

    @property
    def uncertain(self) -> frozenset[str]:
        """The keys without checksums, or whose tensors may be old or deleted because later records are damaged."""
        return self._uncertain

    @property
    def damage(self) -> list[tuple[int, int]]:
        """The ranges of the journal that are damaged or torn: their offsets and sizes, in bytes."""
        return list(self._damage)
