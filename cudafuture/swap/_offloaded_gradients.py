"""Gradients of an offloaded optimizer that are in the store."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from cudafuture._arguments import expect_number, expect_tensor
from cudafuture._modes import outside_inference
from cudafuture.errors import SwapError
from cudafuture.swap._gradients import GradientMark, SwappedGradient
from cudafuture.swap._parameter_state import is_shard
from cudafuture.swap._swapper import Swapper

__all__ = ["OffloadedGradients"]

_logger = logging.getLogger("cudafuture.swap")


class OffloadedGradients(ABC):
    """Methods of an offloaded optimizer for gradients in the store, and for gradients in memory."""

    _lock: threading.RLock
    _min_bytes: int

    @property
    @abstractmethod
    def _swap(self) -> Swapper: ...

    @abstractmethod
    def _parameters(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]: ...

    def _swap_gradient(self, parameter: torch.Tensor) -> None:
        """Move the gradient of this backward, or the part that it has added, into the store."""
        with self._lock, outside_inference(), torch.no_grad():
            gradient = parameter.grad
            try:
                if gradient is None or self._has_swapped_gradient(parameter) or isinstance(gradient, GradientMark):
                    return
            except SwapError as e:  # an error would end this backward; the added part stays in memory
                _logger.warning("the added part of a gradient stays in memory until it is used: %s", e)
                return
            if gradient.is_sparse or is_shard(parameter) or not parameter.is_contiguous():
                return
            if gradient.nbytes < self._min_bytes:
                return  # it stays in memory
            parameter.grad = SwappedGradient(parameter)
            self._swap.pipeline.write_gradient(self._swap.state(parameter), gradient)

    def _has_swapped_gradient(self, parameter: torch.Tensor) -> bool:
        """Return whether the gradient is in the store, after moving the added part there."""
        state, mark = self._swap.state(parameter), parameter.grad
        if not isinstance(mark, SwappedGradient):
            self._swap.pipeline.forget_gradient(state)  # the program has replaced or dropped it
            return False
        if state.gradient is None:
            return False
        if mark.added is not None:
            total = self._swap.pipeline.read_gradient(state)
            total += mark.added
            mark.added = None
            self._swap.pipeline.write_gradient(state, total)
        return True

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the gradient of a parameter, from the store if it is there; None if there is none.

        Raises:
            SwapError: the gradient cannot be read.
            RuntimeError: a step has already applied the gradient.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states", swap_gradients=True, min_bytes=0)
        >>> weight.sum().backward()
        >>> optimizer.gradient_of(weight)
        tensor([1., 1., 1.])
        """
        expect_tensor("parameter", parameter)
        with self._lock, outside_inference(), torch.no_grad():
            if self._has_swapped_gradient(parameter):
                return self._swap.pipeline.read_gradient(self._swap.state(parameter))
            return None if parameter.grad is None else parameter.grad.clone()

    def _multiply(self, parameter: torch.Tensor, factor: torch.Tensor) -> None:
        """Multiply a gradient: in memory at once, in the store when it is read."""
        stored = self._swap.state(parameter).gradient
        if stored is not None:
            stored.factors.append(factor)
        elif parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))

    def _gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parameters that have gradients, with copies of those; two copies exist at a time."""
        for parameter, _ in self._parameters():
            gradient = self.gradient_of(parameter)
            if gradient is not None:
                yield parameter, gradient

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

        The result equals that of ``torch.nn.utils.clip_grad_norm_`` bit for bit, for gradients in the store and in
        memory. Gradients in the store are read once for the norm; the step applies the factor when it reads them.

        Args:
            max_norm: of all gradients together, as one vector.
            norm_type: of the norm; ``math.inf`` for the largest element.
            error_if_nonfinite: raise if the norm is infinite or not a number.

        Raises:
            SwapError: a gradient cannot be read.
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is True.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states", swap_gradients=True, min_bytes=0)
        >>> weight.sum().backward()
        >>> optimizer.clip_grad_norm_(1.0)
        tensor(2.)
        >>> optimizer.gradient_of(weight)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        for name, number in (("max_norm", max_norm), ("norm_type", norm_type)):
            expect_number(name, number)
        with self._lock, outside_inference(), torch.no_grad():
            clipped: list[torch.Tensor] = []
            norms: list[torch.Tensor] = []
            for parameter, gradient in self._gradients():
                clipped.append(parameter)
                norms.append(torch.linalg.vector_norm(gradient, norm_type))
            if not norms:
                return torch.tensor(0.0, dtype=torch.float32, device="cpu")
            total: torch.Tensor = torch.linalg.vector_norm(
                torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
            )
            if error_if_nonfinite and not total.isfinite():
                raise RuntimeError(f"the norm of order {norm_type} of the gradients is {total.item()}")
            factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            for parameter in clipped:
                self._multiply(parameter, factor)
            return total

    def unscale_(self, scale: float | torch.Tensor) -> bool:
        """Divide all gradients by a loss scale; return whether they are all finite.

        It replaces ``GradScaler.unscale_`` if gradients are in the store. If it returns False, skip the step, call
        ``zero_grad()``, and use a smaller scale.

        Args:
            scale: the factor of the loss.

        Raises:
            SwapError: a gradient cannot be read.

        >>> from cudafuture.swap import offload
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = offload(torch.optim.Adam([weight]), "states", swap_gradients=True, min_bytes=0)
        >>> (weight.sum() * 8).backward()
        >>> optimizer.unscale_(8)
        True
        >>> optimizer.gradient_of(weight)
        tensor([1., 1.])
        """
        expect_number("scale", scale)
        with self._lock, outside_inference(), torch.no_grad():
            device = scale.device if isinstance(scale, torch.Tensor) else "cpu"
            inverse = torch.as_tensor(scale, dtype=torch.float64, device=device).reciprocal().float()
            finite = True
            unscaled: list[torch.Tensor] = []
            for parameter, gradient in self._gradients():
                unscaled.append(parameter)
                finite = finite and bool(gradient.isfinite().all())
            for parameter in unscaled:
                self._multiply(parameter, inverse)
            return finite
