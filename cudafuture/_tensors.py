"""Search for tensors in the Python objects of a value that the native core cannot traverse itself."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree

from cudafuture.errors import TensorSearchError

__all__ = ["find_tensors", "search_objects", "version_of"]

# An object graph may be infinite: a property can create new objects each time. A million take one to two seconds.
_MAX_OBJECTS = 1_000_000

# Modules are not part of a value: through them a search would reach the whole program.
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


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def find_tensors(value: object) -> list[torch.Tensor]:
    """Return the plain tensors whose storages `value` uses, each once, in the order of the search.

    The search uses ``torch.utils._pytree`` for lists, tuples, dicts and registered classes, and ``__dict__`` and
    ``__slots__`` for dataclasses and all other objects. Sparse tensors and tensor subclasses yield all their parts.
    Cycles are harmless, nesting may have any depth, and nothing is pickled.

    Raises:
        TensorSearchError: the value has more objects than a search visits.
    """
    return search_objects([value], value, False)


def search_objects(objects: list[object], value: object, may_stop: bool) -> list[torch.Tensor]:
    """Return the plain tensors in `objects`, which are parts of `value`; called by the native core.

    Args:
        objects: the parts to search.
        value: the whole value; errors name its class.
        may_stop: if the search cannot finish, return the tensors found so far instead of raising.
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
    seen: dict[int, object] = {}  # by id; keeps the objects alive, because attributes may be created on access
    while stack:
        item = stack.pop()
        if type(item) in _LEAF_CLASSES or id(item) in seen or isinstance(item, _LEAVES):
            continue
        if len(seen) >= _MAX_OBJECTS:
            raise _too_many_objects(value)
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            for tensor in _plain_parts(item):
                found.setdefault(id(tensor), tensor)
        else:
            parts = _parts(item)
            parts.reverse()
            stack += parts


def _too_many_objects(value: object) -> TensorSearchError:
    cls = type(value)
    return TensorSearchError(
        f"the search for tensors in a value of class '{cls.__module__}.{cls.__qualname__}' gave up after "
        f"{_MAX_OBJECTS:,} objects, so consumers of tensors behind them would not be ordered; name the tensors that "
        "the value uses: set_result(value, tensors=[...])"
    )


def _parts(item: Any) -> list[object]:
    """Return one level of a value: the children of a tree node, or the attributes of an object."""
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
    elif isinstance(item, (list, tuple, set, frozenset)):  # and their subclasses, such as named tuples
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
    """Return the strided tensors that hold the memory of a tensor that may be sparse or a subclass."""
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
