"""Dependencies between the backward passes of two parts of a model that do not use each other's tensors.

``fork`` returns a phony, an empty tensor, and ``join`` takes it. Autograd runs the forked part only after the whole
joined part, since the phony could carry a gradient; it never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["alias", "fork", "join", "phony"]


def phony(device: torch.device, *, requires_grad: bool = False) -> Tensor:
    """Return an empty tensor that only carries a dependency."""
    return torch.empty(0, dtype=torch.float32, device=device, requires_grad=requires_grad)


def alias(ctx: Any, tensors: Sequence[Tensor], requires_grad: Sequence[bool]) -> tuple[Tensor, ...]:
    """Return the outputs of an autograd function that passes tensors on; for use in its forward.

    Args:
        ctx: of the function. The outputs that need no gradient are marked, and gradients that do not exist stay None.
        tensors: inputs of the function, or copies of them.
        requires_grad: for each tensor, True if its input requires a gradient.
    """
    # Detached outputs are not views of the inputs, so later operations may change them in place.
    outputs = tuple(tensor.detach() for tensor in tensors)
    ctx.mark_non_differentiable(*(output for output, needs in zip(outputs, requires_grad, strict=True) if not needs))
    ctx.set_materialize_grads(False)
    return outputs


def fork(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the tensors, and a phony: backward passes through the tensors after all tensors joined with the phony.

    The phony requires no gradient, and has no effect, if none of the tensors does.
    """
    if not _is_tracked(tensors):
        return tuple(tensors), phony(tensors[0].device)
    *forked, carrier = Fork.apply(*tensors)  # type: ignore[no-untyped-call]
    return tuple(forked), carrier


def join(tensors: Sequence[Tensor], carrier: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors: backward passes through them before it passes through the tensors that forked `carrier`.

    Tensors that require no gradient have no backward pass, and are returned unchanged.
    """
    if not (_is_tracked(tensors) and carrier.requires_grad):
        return tuple(tensors)
    joined: tuple[Tensor, ...] = Join.apply(carrier, *tensors)  # type: ignore[no-untyped-call]
    return joined


def _is_tracked(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class Fork(torch.autograd.Function):
    """Identity with one more output, a phony."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (*alias(ctx, tensors, ctx.needs_input_grad), phony(tensors[0].device))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients[:-1]


class Join(torch.autograd.Function):
    """Identity with one more input, a phony."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return alias(ctx, tensors, ctx.needs_input_grad[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients
