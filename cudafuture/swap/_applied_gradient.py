"""The mark in place of a gradient that an update during backward has already used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["AppliedGradient"]


class AppliedGradient(torch.Tensor):
    """A tensor without memory, of the shape of a gradient. Every operation on it raises RuntimeError.

    Clipping, scalers and a further backward would otherwise skip the gradient, or use it a second time, without notice.
    """

    @staticmethod
    def __new__(cls, gradient: torch.Tensor) -> AppliedGradient:
        return torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device, strides=gradient.stride()
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<AppliedGradient of shape {list(self.shape)}>"

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
        raise RuntimeError(
            "backward has already applied this gradient (when='backward'). Call zero_grad() before the next backward; "
            "clipping, gradient scalers and accumulation need when='step'"
        )
