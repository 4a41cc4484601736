"""Entry of one operation in the comparison of CUDAFUTURE_DEBUG=order, and the difference between two entries.

An entry has the operation, the place in the program that issued it, and its options. Where the tensors may differ
between ranks, as in all_to_all(), it has the tensors that this rank gives to each other rank and takes from it: a rank
takes the tensor that the other gives. Two tensors fit if they have the same number of elements and the same dtype,
since backends transfer elements.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from cudafuture import _frames

if TYPE_CHECKING:
    from cudafuture.distributed._numbered_operation import NumberedOperation

__all__ = ["OrderEntry", "count_of", "difference", "of_collective", "of_message", "text_of"]

OrderEntry = dict[str, Any]
_NOT_COMPARED = {"async_op", "device", "device_ids", "timeout", "input_split_sizes", "output_split_sizes"}


def of_collective(issue: NumberedOperation, function: Callable[..., Any] | None, roles: str) -> OrderEntry:
    """Return the entry of a collective; `function` is a partial with the options of torch's function."""
    operation = issue.operation
    keywords: dict[str, Any] = getattr(function, "keywords", {})
    what = f"{operation.name} {issue.signature}".strip() if operation.has_same_tensors else operation.name
    if operation.has_same_count and isinstance(objects := getattr(function, "args", [()])[0], list):
        what += f" of {count_of(len(objects))}"
    if issue.is_staged:
        what += " on a device"
    entry: OrderEntry = {"what": what, "where": _frames.call_site(), "options": _options(keywords)}
    if not operation.has_same_tensors:
        entry["gives"], entry["takes"] = {}, {}
        for role, peer, tensor in _exchanged(issue, keywords, roles):
            for direction in {"r": ["gives"], "w": ["takes"], "x": ["gives", "takes"], "-": []}[role]:
                entry[direction][str(peer)] = text_of(tensor)
    return entry


def of_message(issue: NumberedOperation, carries: str) -> OrderEntry:
    """Return the entry of one end of a message."""
    return {"what": f"{issue.operation.name} {carries}", "where": _frames.call_site(), "carries": carries}


def difference(rank: int, mine: OrderEntry, other_rank: int, other: OrderEntry) -> str | None:
    """Return two lines that name both operations, if they do not belong together; None: they do."""
    details = _differ(rank, mine, other_rank, other)
    if details is None:
        return None
    return "\n".join(
        f"  rank {r}: {entry['what']} at {entry['where']}{detail}"
        for r, entry, detail in zip((rank, other_rank), (mine, other), details, strict=True)
    )


def text_of(facts: Any) -> str:
    """Return shape and dtype, or a list of them, as ``float32[4, 2]``."""
    if isinstance(facts, list):
        return f"[{', '.join(text_of(f) for f in facts)}]"
    if facts is None:
        return "None"
    shape, dtype = facts
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def count_of(number: int) -> str:
    """Return a number of objects, as ``2 objects``."""
    return "1 object" if number == 1 else f"{number} objects"


def _fit(one: str | None, other: str | None) -> bool:
    """Return True if two texts differ at most in shapes of the same number of elements."""
    return one == other or (one is not None and other is not None and _flattened(one) == _flattened(other))


def _flattened(text: str) -> str:
    """Return the text with numbers of elements for shapes; complex ones are pairs, as torch gives them to backends."""

    def flat(tensor: re.Match[str]) -> str:
        dtype, elements = tensor[1], math.prod(json.loads(tensor[2]))
        if dtype.startswith("complex"):
            dtype, elements = f"float{int(dtype.removeprefix('complex')) // 2}", 2 * elements
        return f"{dtype}[{elements}]"

    return re.sub(r"(\w+)(\[[\d, ]*\])", flat, text)


def _differ(rank: int, mine: OrderEntry, other_rank: int, other: OrderEntry) -> tuple[str, str] | None:
    if "carries" in mine:
        return None if _fit(mine["carries"], other["carries"]) else ("", "")
    if not _fit(mine["what"], other["what"]):
        return "", ""
    options = [entry.get("options", "") for entry in (mine, other)]
    if options[0] != options[1]:
        return f", with {options[0] or 'the default options'}", f", with {options[1] or 'the default options'}"
    for given, taken in (("gives", "takes"), ("takes", "gives")):
        here, there = mine.get(given, {}).get(str(other_rank)), other.get(taken, {}).get(str(rank))
        if not _fit(here, there):
            return _part(given, other_rank, here), _part(taken, rank, there)
    return None


def _part(direction: str, peer: int, tensor: str | None) -> str:
    return f", {direction} {tensor or 'nothing'} {'to' if direction == 'gives' else 'from'} rank {peer}"


def _options(keywords: dict[str, Any]) -> str:
    shown = {name: value for name, value in keywords.items() if name not in _NOT_COMPARED}
    if "op" in shown:
        shown["op"] = getattr(shown["op"], "op", shown["op"]).name  # of a ReduceOp, or one of its constants
        if shown["op"] == "SUM":  # the default
            del shown["op"]
    return ", ".join(f"{name}={value}" for name, value in sorted(shown.items()))


def _exchanged(issue: NumberedOperation, keywords: dict[str, Any], roles: str) -> Iterator[tuple[str, int, Any]]:
    """Yield each tensor that another rank gets or gives: its role, the other rank, its shape and dtype."""
    root = keywords.get("group_src", keywords.get("group_dst"))
    size = issue.group.size
    for tensors, role in zip(issue.tensors, roles, strict=True):
        if role in issue.operation.split_roles:
            parts = _split(tensors, keywords.get("output_split_sizes" if role == "w" else "input_split_sizes"), size)
        elif isinstance(tensors, list):
            parts = tensors
        elif tensors is None:
            parts = []
        elif root is None:
            parts = [tensors] * size
        else:
            yield role, root, tensors
            continue
        for peer, part in enumerate(parts):
            yield role, peer, part


def _split(tensor: tuple[torch.Size, torch.dtype], rows: list[int] | None, size: int) -> list[Any]:
    shape, dtype = tensor
    if rows:
        return [((n, *shape[1:]), dtype) for n in rows]
    is_by_rows = len(shape) > 0 and shape[0] % size == 0
    return [((shape[0] // size, *shape[1:]) if is_by_rows else (shape.numel() // size,), dtype)] * size
