"""The optimizer that offload() was given: it keeps the groups for its schedulers, and refuses to update parameters."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn

import torch

from cudafuture.errors import InvalidStateError

__all__ = ["is_taken", "take"]


def _refuse(method: str) -> Callable[..., NoReturn]:
    """Return a method that refuses: two optimizers must not update the same parameters."""

    def refuse(_optimizer: torch.optim.Optimizer, *_: object, **__: object) -> NoReturn:
        raise InvalidStateError(
            f"offload() has taken this optimizer's parameters: call {method}() of what offload() returned"
        )

    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler looks for it before it warns
    return refuse


_REFUSED: dict[str, Callable[..., NoReturn]] = {
    name: _refuse(name) for name in ("step", "state_dict", "load_state_dict", "add_param_group")
}


def take(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give an optimizer the groups of the offloaded one, so that its schedulers go on, and let its methods refuse."""
    optimizer.param_groups = groups
    optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler warns if no step precedes its own
    vars(optimizer).update({name: MethodType(refuse, optimizer) for name, refuse in _REFUSED.items()})


def is_taken(optimizer: object) -> bool:
    """Return whether an optimizer was given to offload()."""
    step = vars(optimizer).get("step") if isinstance(optimizer, torch.optim.Optimizer) else None
    return isinstance(step, MethodType) and step.__func__ is _REFUSED["step"]
