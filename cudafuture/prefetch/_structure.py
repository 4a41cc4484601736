"""Batches of any nesting: their tensors, and a batch like another with other tensors in it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["find_leaves", "map_leaves"]

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


def find_leaves(batch: object) -> list[Any]:
    """Return the leaves of a batch in the order in which ``map_leaves`` calls its function with them."""
    leaves: list[Any] = []

    def note(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    map_leaves(batch, note)
    return leaves


def map_leaves(batch: Any, fn: Callable[[Any], Any]) -> Any:
    """Return a batch of the same structure with ``fn(leaf)`` for each leaf. The given one is not changed.

    Leaves are tensors and objects with a method ``to``. Lists, tuples, named tuples, mappings, dataclasses, classes
    that derive from these, and classes registered with ``torch.utils._pytree`` are structure. Any other object is
    passed on.
    """
    if isinstance(batch, torch.Tensor):
        return fn(batch)
    cls = type(batch)
    if cls in _PLAIN or isinstance(batch, type):
        return batch
    if cls is dict:
        return {key: map_leaves(value, fn) for key, value in batch.items()}
    if cls is list:
        return [map_leaves(value, fn) for value in batch]
    if cls is tuple:
        return tuple([map_leaves(value, fn) for value in batch])
    if callable(getattr(batch, "to", None)):
        return fn(batch)
    if dataclasses.is_dataclass(batch):
        return _map_dataclass(batch, fn)
    if isinstance(batch, tuple):
        values = [map_leaves(value, fn) for value in batch]
        return cls(*values) if hasattr(cls, "_fields") else cls(values)
    if isinstance(batch, list):
        mapped = copy.copy(batch)
        mapped[:] = [map_leaves(value, fn) for value in batch]
        return mapped
    if isinstance(batch, Mapping):
        return _map_mapping(batch, fn)
    node = _pytree.SUPPORTED_NODES.get(cls)
    if node is None:
        return batch
    children, context = node.flatten_fn(batch)
    return node.unflatten_fn([map_leaves(child, fn) for child in children], context)


def _map_dataclass(batch: Any, fn: Callable[[Any], Any]) -> Any:
    mapped = copy.copy(batch)
    for field in dataclasses.fields(batch):
        if hasattr(batch, field.name):
            object.__setattr__(mapped, field.name, map_leaves(getattr(batch, field.name), fn))
    return mapped


def _map_mapping(batch: Mapping[Any, Any], fn: Callable[[Any], Any]) -> Any:
    values = {key: map_leaves(value, fn) for key, value in batch.items()}
    if not isinstance(batch, MutableMapping):
        return type(batch)(values)  # type: ignore[call-arg]
    mapped = copy.copy(batch)
    for key, value in values.items():
        mapped[key] = value
    return mapped
