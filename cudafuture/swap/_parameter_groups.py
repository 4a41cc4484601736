"""Groups of an optimizer's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["group_of", "name_of", "parameters_of"]

Group = dict[str, Any]


def parameters_of(groups: Sequence[Group]) -> Iterator[tuple[torch.Tensor, Group]]:
    """Yield the parameters with their groups."""
    for group in groups:
        for parameter in group["params"]:
            yield parameter, group


def group_of(groups: Sequence[Group], parameter: torch.Tensor) -> Group:
    """Return the group of a parameter.

    Raises:
        KeyError: no group has it.
    """
    for known, group in parameters_of(groups):
        if known is parameter:
            return group
    raise KeyError("the optimizer does not have this parameter")


def name_of(groups: Sequence[Group], parameter: torch.Tensor) -> str:
    """Return the parameter's name, if torch knows it; else its position in the groups."""
    for i, group in enumerate(groups):
        for j, known in enumerate(group["params"]):
            if known is parameter:
                names = group.get("param_names")
                return f"parameter {names[j]!r}" if names else f"parameter {j} of group {i}"
    return "a parameter"
