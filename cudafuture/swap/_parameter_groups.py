"""Parameters of an optimizer: their groups, and the order of their updates during backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cudafuture._arguments import expect_tensor

__all__ = ["Group", "GroupIndex", "UpdateOrder", "name_of", "parameters_of"]

Group = dict[str, Any]


def parameters_of(groups: Sequence[Group]) -> Iterator[tuple[torch.Tensor, Group]]:
    """Yield the parameters with their groups."""
    for group in groups:
        for parameter in group["params"]:
            yield parameter, group


class GroupIndex:
    """Groups by parameter, so that no lookup of a parameter walks over all of them."""

    def __init__(self) -> None:
        self._found: dict[torch.Tensor, tuple[Group, int, int]] = {}  # the group, its position, and its length

    def find(self, groups: Sequence[Group], parameter: torch.Tensor) -> Group | None:
        """Return the group of a parameter, or None if no group has it; the program may have changed the groups."""
        if not self._is_current(groups, parameter):
            self._found = {
                known: (group, i, len(group["params"])) for i, group in enumerate(groups) for known in group["params"]
            }
        return self._found[parameter][0] if parameter in self._found else None

    def _is_current(self, groups: Sequence[Group], parameter: torch.Tensor) -> bool:
        group, i, count = self._found.get(parameter, (None, 0, 0))
        return i < len(groups) and groups[i] is group and len(group["params"]) == count

    def group_of(self, groups: Sequence[Group], parameter: torch.Tensor) -> Group:
        """Return the group of a parameter.

        Raises:
            KeyError: no group has it.
        """
        expect_tensor("parameter", parameter)
        group = self.find(groups, parameter)
        if group is None:
            raise KeyError("the optimizer does not have this parameter")
        return group


def name_of(groups: Sequence[Group], parameter: torch.Tensor) -> str:
    """Return the parameter's name, if torch knows it; else its position in the groups."""
    for i, group in enumerate(groups):
        for j, known in enumerate(group["params"]):
            if known is parameter:
                names = group.get("param_names")
                return f"parameter {names[j]!r}" if names else f"parameter {j} of group {i}"
    return "a parameter"


class UpdateOrder:
    """Order of the updates in the last backward, and the progress of this one in it.

    Args:
        prefetch: the number of parameters that are read ahead.
    """

    def __init__(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._last: list[torch.Tensor] = []
        self._updated: dict[torch.Tensor, None] = {}  # in this backward
        self._read = 0  # the number of the last order's parameters that this backward has read, or is reading

    def begin_update(self, parameter: torch.Tensor) -> None:
        """Begin the update of a parameter; stop reading ahead if it is not the next one of the last order."""
        if parameter in self._updated:  # another backward, and no step between them
            self._begin()
            self.stop_reads()
        position = len(self._updated)
        if position >= len(self._last) or self._last[position] is not parameter:
            self.stop_reads()
        self._updated[parameter] = None

    def end(self) -> None:
        """End this backward; its order is used for the next one."""
        if self._updated:
            self._begin()
        self._read = 0

    def _begin(self) -> None:
        self._last, self._updated = list(self._updated), {}

    def stop_reads(self) -> None:
        """Stop reading ahead in this backward."""
        self._read = len(self._last)

    def next_reads(self) -> Iterator[torch.Tensor]:
        """Yield the parameters whose states must be read now."""
        while self._read < min(len(self._last), len(self._updated) + self._prefetch):
            self._read += 1
            yield self._last[self._read - 1]
