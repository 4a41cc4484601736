"""The names of offloaded optimizers in a store, each of which one optimizer of this process has."""

from __future__ import annotations

import weakref
from typing import Any

from cudafuture.storage import Store

__all__ = ["release", "reserve"]

_names: weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def reserve(store: Store, name: str, optimizer: Any) -> str:
    """Take a name in a store.

    Raises:
        ValueError: another optimizer of this process has it.
    """
    names = _names.setdefault(store, {})
    if name in names and names[name]() is not None:
        raise ValueError(f"another optimizer has the name {name!r} in this store: give name=")
    names[name] = weakref.ref(optimizer)
    return name


def release(store: Store, optimizer: Any) -> None:
    names = _names.get(store, {})
    for name in [name for name, owner in names.items() if owner() is optimizer]:
        del names[name]
