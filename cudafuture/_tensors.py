"""Finds the tensors in any Python value. Called by the native core for values that it cannot take apart by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["find_tensors"]

# Objects are searched this many attributes deep. Deeper than any sane message, shallow enough to stay bounded.
_MAX_DEPTH = 32
_MAX_OBJECTS = 100_000

_LEAVES = (str, bytes, bytearray, memoryview, int, float, complex, bool, type(None), torch.dtype, torch.device, type)


def find_tensors(value: object) -> list[torch.Tensor]:
    """Return the plain tensors whose storages `value` uses, each once, in the order in which they are found.

    Lists, tuples, dicts and classes registered with ``torch.utils._pytree`` are taken apart by it, dataclasses and all
    other objects by their ``__dict__`` and ``__slots__``. Sparse tensors and tensor subclasses yield all their parts.
    Cycles are harmless. Nothing is pickled.
    """
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    kept: list[object] = []  # attributes made on the fly must outlive `seen`, which knows them by address
    stack: list[tuple[object, int]] = [(value, 0)]
    while stack and len(seen) < _MAX_OBJECTS:
        item, depth = stack.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        kept.append(item)
        if isinstance(item, torch.Tensor):
            for tensor in _plain_parts(item):
                found.setdefault(id(tensor), tensor)
                kept.append(tensor)
        elif depth < _MAX_DEPTH:
            stack.extend((part, depth + 1) for part in reversed(list(_parts(item))))
    return list(found.values())


def _parts(item: Any) -> Iterator[object]:
    """One level of a value: the children of a tree node, else the attributes of an object."""
    node = _pytree.SUPPORTED_NODES.get(type(item))
    if node is not None and not isinstance(item, dict):
        children, _ = node.flatten_fn(item)
        yield from children
        return
    if isinstance(item, (list, tuple, set, frozenset)):  # and what derives from them, as named tuples do
        yield from item
    elif isinstance(item, dict):
        yield from item.keys()
        yield from item.values()
    yield from getattr(item, "__dict__", {}).values()
    for cls in type(item).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                mangled = f"_{cls.__name__.lstrip('_')}{name}" if name.startswith("__") else name
                part = getattr(item, mangled, None)
                if part is not None:
                    yield part


def _plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors that hold the memory of one that may be sparse, or of a class of its own."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and hasattr(
        tensor, "__tensor_flatten__"
    ):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_parts(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor
