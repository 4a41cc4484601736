"""The mapping from parameters to states that an offloaded optimizer has as its `state`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from cudafuture.errors import InvalidStateError

if TYPE_CHECKING:
    from cudafuture.swap.offloaded_optimizer import OffloadedOptimizer

__all__ = ["StateMapping"]


class StateMapping(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The states of all parameters that have one, each read when it is looked up."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._reference = weakref.ref(optimizer)

    @property
    def _optimizer(self) -> OffloadedOptimizer:
        optimizer = self._reference()
        if optimizer is None:
            raise InvalidStateError("the optimizer of this state no longer exists")
        return optimizer

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        if not any(parameter is known for known in self):
            raise KeyError(parameter)
        return self._optimizer._read_state(parameter, mapped=True)

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        self._optimizer.set_state(parameter, state)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self._optimizer.set_state(parameter, {})

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([state.parameter for state in self._optimizer._swap.known()])

    def __len__(self) -> int:
        return len(self._optimizer._swap.known())

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is known for known in self)
