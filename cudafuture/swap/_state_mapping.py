"""Mapping from parameters to states that an offloaded optimizer has as its `state`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

import torch

from cudafuture.errors import InvalidStateError
from cudafuture.swap._swapper import Swapper

__all__ = ["StateMapping"]


class StateOwner(Protocol):
    """Optimizer whose states the mapping shows."""

    @property
    def _swap(self) -> Swapper: ...
    def _read_state(self, parameter: torch.Tensor, mapped: bool) -> dict[str, Any]: ...
    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]: ...
    def set_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None: ...


class StateMapping(MutableMapping[torch.Tensor, dict[str, Any]]):
    """States of all parameters that have one; each lookup reads the state.

    As in torch, looking up a parameter without state returns an empty dictionary. Changes to a returned dictionary do
    not reach the store: assign the dictionary.
    """

    def __init__(self, optimizer: StateOwner) -> None:
        self._reference = weakref.ref(optimizer)

    @property
    def _optimizer(self) -> StateOwner:
        optimizer = self._reference()
        if optimizer is None:
            raise InvalidStateError("the optimizer of this state no longer exists")
        return optimizer

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self._optimizer._read_state(parameter, mapped=True)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        return self[parameter] if parameter in self else default  # noqa: SIM401 - this is get()

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        if parameter not in self:
            if default:
                return default[0]
            raise KeyError(parameter)
        state = self._optimizer.state_of(parameter)
        del self[parameter]
        return state

    def setdefault(self, parameter: torch.Tensor, default: Any = None) -> Any:
        if parameter not in self:
            self[parameter] = default or {}
        return self[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        self._optimizer.set_state(parameter, state)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self._optimizer.set_state(parameter, {})

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([state.parameter for state in self._optimizer._swap.known()])

    def __len__(self) -> int:
        return len(self._optimizer._swap.known())

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, torch.Tensor) and self._optimizer._swap.has_state(parameter)
