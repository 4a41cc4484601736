"""Namespaces in a store, each of which belongs to one optimizer of this process."""

from __future__ import annotations

import os
import weakref
from typing import Any

from cudafuture._arguments import expect_str, shown
from cudafuture.store import DiskStore, Store

__all__ = ["OptimizerNamespace"]

_owners: weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[OptimizerNamespace]]] = weakref.WeakKeyDictionary()


class OptimizerNamespace:
    """Keys of one optimizer: they begin with a name, in a store that other optimizers may use too.

    Creation deletes keys of state that an earlier process has left.

    Args:
        store: a store, or a folder for an ephemeral one, which ``close()`` closes.
        name: must not be the name of another namespace of this process in the store.

    Raises:
        ValueError: the name is empty, has a "/", or is in use.
        TypeError: the store or the name has another type.
    """

    def __init__(self, store: Store | str | os.PathLike[str], name: str) -> None:
        expect_str("name", name)
        if not name or "/" in name:
            raise ValueError(f"name={name!r} is empty or has a '/'")
        if not isinstance(store, (str, os.PathLike)) and not hasattr(store, "readv"):
            raise TypeError(f"store is a store or the path of a folder, not {shown(store)}")
        self._own_store = DiskStore(store) if isinstance(store, (str, os.PathLike)) else None
        self.store: Store = store if self._own_store is None else self._own_store  # type: ignore[assignment]
        self.name, self.state_prefix = name, f"{name}/state/"
        owners = _owners.setdefault(self.store, {})
        if name in owners and owners[name]() is not None:
            raise ValueError(f"another optimizer uses the name {name!r} in this store: pass another name=")
        owners[name] = weakref.ref(self)
        try:
            left = [key for key in self.store.list_keys().wait() if key.startswith(self.state_prefix)]
            if left:
                self.store.deletev(left).wait()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the name, and close a store that the namespace created. Further calls do nothing."""
        owners = _owners.get(self.store, {})
        if self.name in owners and owners[self.name]() is self:
            del owners[self.name]
        if self._own_store is not None:
            self._own_store.close()
