"""Update of parameters, or of a chunk of one, by an optimizer of torch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

__all__ = ["Update", "laid_out"]

_ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


class Update:
    """Step of an optimizer, applied to some tensors at a time.

    A copy of the optimizer computes it, whose groups and state are empty between updates. Hooks do not run, because
    they belong to the whole step.

    Raises:
        ValueError: the optimizer updates all parameters together, so its state cannot be split by parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS keeps the history of all parameters in one flat vector, which cannot be swapped")
        self._optimizer = object.__new__(type(optimizer))  # copy.copy would lose the attributes of subclasses
        self._optimizer.__dict__.update(optimizer.__dict__)
        self._made = max((_like(parameter, state) for parameter, state in optimizer.state.items()), default=0)
        self._counts: dict[tuple[object, ...], int] = {}
        self.optimizer_class = type(optimizer)
        # Subclasses of torch's optimizers may override the update.
        self.is_elementwise = type(optimizer) in _ELEMENTWISE
        """True if the update of an element depends only on its own parameter, gradient and state"""
        self.assigns_new_state_last = type(optimizer) is torch.optim.SGD
        """True if the optimizer updates all parameters of a call before it assigns their first states"""
        step: Any = type(optimizer).step
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step

    def __call__(
        self, group: dict[str, Any], parameters: list[torch.Tensor], states: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Update parameters from their `grad`, with the options of a group; return their new states.

        A known optimizer updates the dictionaries of the states in place.
        """
        single = {"foreach": False} if "foreach" in group else {}
        optimizer = self._optimizer
        optimizer.param_groups = [{**group, "params": parameters, **single}]
        if group.get("fused"):
            for parameter, state in zip(parameters, states, strict=True):
                state.update({name: laid_out(value, parameter) for name, value in state.items()})
        given = zip(parameters, states, strict=True)
        optimizer.state = defaultdict(dict, ((p, state) for p, state in given if state or self.is_elementwise))
        try:
            self._step(optimizer)
            return [optimizer.state[parameter] for parameter in parameters]
        finally:
            optimizer.param_groups = []
            optimizer.state = defaultdict(dict)

    def completed(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` and ``param_groups`` of a state dict, with the entries that an older torch did not save."""
        optimizer = object.__new__(type(self._optimizer))
        optimizer.__dict__.update(self._optimizer.__dict__)
        optimizer.__setstate__({"state": dict(saved["state"]), "param_groups": saved["param_groups"]})
        return {"state": optimizer.state, "param_groups": optimizer.param_groups}

    def count_tensors(self, group: dict[str, Any]) -> int:
        """Return the number of state tensors of a parameter's shape that the optimizer keeps, with given options."""
        options = tuple((key, value) for key, value in group.items() if isinstance(value, (bool, int, float, str)))
        if options not in self._counts:
            self._counts[options] = max(self._count(group, (2,)), self._count(group, (2, 2)))
        return self._counts[options]

    def count_changes(self, group: dict[str, Any]) -> int:
        """Return how many times an update changes a parameter in place, with given options."""
        tried = self._tried(group, (2,))
        return 1 if tried is None else tried[0]._version

    def _count(self, group: dict[str, Any], shape: tuple[int, ...]) -> int:
        tried = self._tried(group, shape)
        return self._made if tried is None else _like(*tried)

    def _tried(self, group: dict[str, Any], shape: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, Any]] | None:
        """Return a small parameter after its first update, and its state; None: the optimizer does not update it."""
        tried = torch.zeros(shape, dtype=torch.float32, device="cpu")
        tried.grad = torch.zeros_like(tried)
        try:
            with torch.no_grad():
                (state,) = self({**group, "fused": None, "capturable": False}, [tried], [{}])
        except Exception:  # the optimizer is not for such parameters, or has its state already
            return None
        return tried, state


def laid_out(value: Any, parameter: torch.Tensor) -> Any:
    """Return a tensor of the parameter's shape with its strides; return other values unchanged.

    Fused kernels take the elements of parameter, gradient and state in the order of memory. A store returns contiguous
    tensors.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _like(parameter: torch.Tensor, state: dict[str, Any]) -> int:
    """Return the number of tensors of a state that have the shape of the parameter."""
    return sum(isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in state.values())
