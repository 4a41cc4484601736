"""Placeholder tensors in ``parameter.grad`` for a gradient that is not there: applied already, or in the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["AppliedGradient", "GradientMark", "SwappedGradient"]


class GradientMark(torch.Tensor):
    """Tensor without memory, of the shape of a gradient. Operations on it raise RuntimeError.

    Clipping, scalers and a further backward would otherwise skip the gradient, or use it twice, without an error.
    """

    reason = ""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> GradientMark:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device, strides=like.stride()
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{type(self).__name__} of shape {list(self.shape)}>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        operation: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if operation is torch.ops.aten.detach.default:
            return args[0]
        mark = args[0] if args else None
        if operation is torch.ops.aten.add_.Tensor and isinstance(mark, SwappedGradient) and not kwargs:
            mark.added = args[1].clone() if mark.added is None else mark.added + args[1]
            return mark
        raise RuntimeError(cls.reason)


class AppliedGradient(GradientMark):
    """Placeholder for a gradient that an update has already applied."""

    reason = (
        "an update has already applied this gradient (when='backward' or swap_gradients=True). Call zero_grad() before "
        "the next backward; clipping, gradient scalers and accumulation need when='step'"
    )


class SwappedGradient(GradientMark):
    """Placeholder for a gradient in the store. Backward adds to it."""

    reason = (
        "this gradient is in the store (swap_gradients=True): use the optimizer's clip_grad_norm_(), unscale_() and "
        "gradient_of() instead of functions that take parameters"
    )
    added: torch.Tensor | None = None
    """the sum that backward has added, until the optimizer writes it"""
