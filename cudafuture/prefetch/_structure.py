"""Structure of nested batches: their tensors, and a batch with the same structure and other tensors."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils import _pytree

from cudafuture._tensors import search_objects

__all__ = ["find_all_tensors", "find_leaves", "map_leaves"]

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


def find_leaves(batch: object) -> tuple[list[Any], list[Any]]:
    """Return the leaves of a batch in the order in which ``map_leaves`` calls its function, and the other objects."""
    leaves: list[Any] = []
    others: list[Any] = []

    def note(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    map_leaves(batch, note, others.append)
    return leaves, others


def find_all_tensors(objects: list[Any]) -> list[torch.Tensor]:
    """Return the plain tensors inside objects of any kind; for very large objects, the ones that the search reaches."""
    return search_objects(objects, objects, True)


def map_leaves(batch: Any, fn: Callable[[Any], Any], pass_on: Callable[[Any], object] | None = None) -> Any:
    """Return a batch of the same structure with ``fn(leaf)`` for each leaf. The given batch does not change.

    Leaves are tensors and objects with a method ``to``. Lists, tuples, named tuples, mappings, dataclasses, classes
    that derive from these, and classes registered with ``torch.utils._pytree`` are structure. Any other object is
    passed on unchanged, and ``pass_on`` is called with it, unless it is None, a number, a string or a class.
    """
    if isinstance(batch, torch.Tensor):
        return fn(batch)
    cls = type(batch)
    if cls in _PLAIN or isinstance(batch, type):
        return batch
    if cls is dict:
        return {key: map_leaves(value, fn, pass_on) for key, value in batch.items()}
    if cls is list:
        return [map_leaves(value, fn, pass_on) for value in batch]
    if cls is tuple:
        return tuple([map_leaves(value, fn, pass_on) for value in batch])
    if callable(getattr(batch, "to", None)):
        return fn(batch)
    recur = functools.partial(map_leaves, fn=fn, pass_on=pass_on)
    node = _pytree.SUPPORTED_NODES.get(cls)
    if node is not None:
        children, context = node.flatten_fn(batch)
        return node.unflatten_fn([recur(child) for child in children], context)
    if dataclasses.is_dataclass(batch):
        return _map_dataclass(batch, recur)
    if isinstance(batch, tuple):
        values = [recur(value) for value in batch]
        return cls(*values) if hasattr(cls, "_fields") else cls(values)
    if isinstance(batch, list):
        mapped = copy.copy(batch)
        mapped[:] = [recur(value) for value in batch]
        return mapped
    if isinstance(batch, Mapping):
        return _map_mapping(batch, recur)
    if pass_on is not None:
        pass_on(batch)
    return batch


def _map_dataclass(batch: Any, recur: Callable[[Any], Any]) -> Any:
    """Map the fields. A dataclass that is also a mapping has most of them twice, as keys and as attributes."""
    is_mapping = isinstance(batch, MutableMapping)
    mapped = _map_mapping(batch, recur) if is_mapping else copy.copy(batch)
    for field in dataclasses.fields(batch):
        name, value = field.name, getattr(batch, field.name, None)
        is_item = is_mapping and name in batch and batch[name] is value
        if hasattr(batch, name):
            object.__setattr__(mapped, name, mapped[name] if is_item else recur(value))
    return mapped


def _map_mapping(batch: Mapping[Any, Any], recur: Callable[[Any], Any]) -> Any:
    values = {key: recur(value) for key, value in batch.items()}
    if not isinstance(batch, MutableMapping):
        return type(batch)(values)  # type: ignore[call-arg]
    mapped = copy.copy(batch)
    for key, value in values.items():
        mapped[key] = value
    return mapped
