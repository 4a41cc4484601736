"""Search for tensors in the Python objects of a value that the native core cannot take apart by itself."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree

from cudafuture.errors import TensorSearchError

__all__ = ["find_tensors", "search_objects"]

# An object graph may have no end: a property can make new objects each time. A million take one to two seconds.
_MAX_OBJECTS = 1_000_000

# Modules are no part of a value: through them a search would reach all of the program.
_LEAVES = (
    str,
    bytes,
    bytearray,
    memoryview,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    type,
    ModuleType,
)
_LEAF_CLASSES = frozenset((*_LEAVES, bool))


def find_tensors(value: object) -> list[torch.Tensor]:
    """Return the plain tensors whose storages `value` uses, each once, in the order in which they are found.

    Lists, tuples, dicts and classes registered with ``torch.utils._pytree`` are taken apart by it, dataclasses and all
    other objects by their ``__dict__`` and ``__slots__``. Sparse tensors and tensor subclasses yield all their parts.
    Cycles are harmless, nesting may be of any depth, and nothing is pickled.

    Raises:
        TensorSearchError: the value has more objects than a search visits.
    """
    return search_objects([value], value, False)


def search_objects(objects: list[object], value: object, may_stop: bool) -> list[torch.Tensor]:
    """Return the plain tensors in `objects`, which are parts of `value`; called by the native core.

    Args:
        objects: the parts to search.
        value: the whole value; errors name its class.
        may_stop: where the search cannot finish, return the tensors found until then instead of raising.
    """
    found: dict[int, torch.Tensor] = {}
    try:
        _search(objects[::-1], value, found)
    except Exception:
        if not may_stop:
            raise
    return list(found.values())


def _search(stack: list[object], value: object, found: dict[int, torch.Tensor]) -> None:
    """Add the plain tensors behind `stack` to `found`, by id."""
    seen: dict[int, object] = {}  # by id; the objects too, because attributes may be made on the fly
    while stack:
        item = stack.pop()
        if type(item) in _LEAF_CLASSES or id(item) in seen or isinstance(item, _LEAVES):
            continue
        if len(seen) >= _MAX_OBJECTS:
            raise _gave_up(value)
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            for tensor in _plain_parts(item):
                found.setdefault(id(tensor), tensor)
        else:
            parts = _parts(item)
            parts.reverse()
            stack += parts


def _gave_up(value: object) -> TensorSearchError:
    cls = type(value)
    return TensorSearchError(
        f"the search for tensors in a value of class '{cls.__module__}.{cls.__qualname__}' gave up after "
        f"{_MAX_OBJECTS:,} objects, so consumers of tensors behind them would not be ordered; name the tensors that "
        "the value uses: set_result(value, tensors=[...])"
    )


def _parts(item: Any) -> list[object]:
    """Return one level of a value: the children of a tree node, else the attributes of an object."""
    cls = type(item)
    if cls is list or cls is tuple:
        return list(item)
    is_dict = isinstance(item, dict)
    node = _pytree.SUPPORTED_NODES.get(cls)
    if node is not None and not is_dict:
        return list(node.flatten_fn(item)[0])
    parts: list[object] = []
    if is_dict:
        parts += item.keys()
        parts += item.values()
    elif isinstance(item, (list, tuple, set, frozenset)):  # and what derives from them, as named tuples do
        parts += item
    parts += getattr(item, "__dict__", {}).values()
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__")
        if slots:
            parts += _slot_values(item, base, slots)
    return parts


def _slot_values(item: object, base: type, slots: str | Iterable[str]) -> list[object]:
    names = [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]
    prefix = "_" + base.__name__.lstrip("_")
    return [getattr(item, prefix + name if name.startswith("__") else name, None) for name in names]


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that hold the memory of one that may be sparse, or of a class of its own."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and hasattr(
        tensor, "__tensor_flatten__"
    ):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _plain_parts(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
