"""Gradients of an offloaded optimizer in the store, and their placeholders in ``parameter.grad``."""

from __future__ import annotations

import bisect
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cudafuture._C import CUDAFuture
from cudafuture.store import Store
from cudafuture.swap._errors import error_of
from cudafuture.swap.statistics import SwapCounters

__all__ = [
    "FIRST",
    "AppliedGradient",
    "GradientMark",
    "GradientPiece",
    "Gradients",
    "StoredGradient",
    "SwappedGradient",
]


FIRST = -10  # the priority of reads that the computation waits for
_logger = logging.getLogger("cudafuture.swap")


@dataclass(eq=False)
class GradientPiece:
    """Adjacent elements of a gradient, flat: in memory, in the store, or in flight."""

    begin: int
    end: int
    key: str
    tensor: torch.Tensor | None
    """the elements, until they are written"""
    is_large: bool
    """True if the piece goes to the store"""
    written: CUDAFuture[int] | None = None
    """the write in flight"""


@dataclass(eq=False)
class StoredGradient:
    """Gradient of one parameter in pieces. Elements outside of the pieces are zero."""

    dtype: torch.dtype
    pieces: dict[int, GradientPiece] = field(default_factory=dict)
    """by their first element"""
    factors: list[torch.Tensor] = field(default_factory=list)
    """factors of the elements, applied in order after a read"""
    _begins: list[int] = field(default_factory=list)
    """the first elements of the pieces, sorted"""

    def put(self, piece: GradientPiece) -> None:
        """Add a piece, which overlaps no other one, or replace the one that begins at the same element."""
        if piece.begin not in self.pieces:
            bisect.insort(self._begins, piece.begin)
        self.pieces[piece.begin] = piece

    def within(self, begin: int, end: int) -> Iterator[GradientPiece]:
        """Return an iterator over the pieces that have elements of a range, in their order."""
        first = bisect.bisect_right(self._begins, begin)
        if first and self.pieces[self._begins[first - 1]].end > begin:
            first -= 1
        return (self.pieces[i] for i in self._begins[first : bisect.bisect_left(self._begins, end)])

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """Multiply the read elements in place."""
        for factor in self.factors:
            gradient.mul_(factor.to(gradient.device))
        return gradient


class Gradients:
    """Gradients of parameters in a store, with a limit for those that are being written.

    Args:
        store: of the pieces.
        prefix: of their keys.
        min_bytes: smaller pieces stay in memory.
        window_bytes: limit of the bytes in flight; a further write waits for the oldest.
    """

    def __init__(self, store: Store, prefix: str, min_bytes: int, window_bytes: int) -> None:
        self._store, self._prefix, self._min_bytes, self._window = store, prefix, min_bytes, window_bytes
        self.counters = SwapCounters()
        self._writing: OrderedDict[GradientPiece, None] = OrderedDict()
        self._in_flight = 0
        self._error: BaseException | None = None

    def write(self, gradient: StoredGradient, number: int, begin: int, elements: torch.Tensor) -> CUDAFuture[int]:
        """Write a piece, and replace the one that begins at the same element; `elements` must not change any more.

        A piece that cannot be written stays in memory.

        Args:
            gradient: of the parameter.
            number: the parameter's, for the key.
            begin: of the piece in the flat gradient.
            elements: flat, of the gradient's dtype.

        Raises:
            ValueError: the piece overlaps another one.
        """
        end = begin + elements.numel()
        for other in gradient.within(begin, end):
            if other.begin != begin:
                raise ValueError(
                    f"a piece of elements {begin} to {end} overlaps one of elements {other.begin} to {other.end}"
                )
        if (old := gradient.pieces.get(begin)) is not None:
            self._finish(old)
        is_large = elements.nbytes >= self._min_bytes
        piece = GradientPiece(begin, end, f"{self._prefix}{number}/gradient/{begin}", elements, is_large)
        gradient.put(piece)
        if not is_large:
            return CUDAFuture.completed(0)
        piece.written = self._store.writev({piece.key: elements})
        self._writing[piece] = None
        self._in_flight += elements.nbytes
        written = piece.written
        while self._in_flight > self._window:
            self._finish(next(iter(self._writing)))
        return written

    def _finish(self, piece: GradientPiece) -> None:
        """Wait for the write of a piece; its memory is then freed, unless the write failed."""
        if piece.written is None:
            return
        assert piece.tensor is not None
        begin = time.perf_counter()
        error = error_of(piece.written)
        self.counters.gradient_wait_seconds += time.perf_counter() - begin
        del self._writing[piece]
        self._in_flight -= piece.tensor.nbytes
        piece.written = None
        if error is None:
            self.counters.gradient_bytes_written += piece.tensor.nbytes
            piece.tensor = None
        else:
            _logger.warning("a gradient stays in memory, because %r cannot be written: %s", piece.key, error)
            self._error = self._error or error

    def settle(self, gradient: StoredGradient) -> None:
        """Wait for the writes of a gradient."""
        for piece in gradient.pieces.values():
            self._finish(piece)

    def flush(self) -> BaseException | None:
        """Wait for all writes; return the first error since the last call."""
        while self._writing:
            self._finish(next(iter(self._writing)))
        error, self._error = self._error, None
        return error

    def read(self, gradient: StoredGradient, begin: int, out: torch.Tensor) -> CUDAFuture[Any]:
        """Read a range of elements into a flat tensor of the gradient's dtype; the gradient is settled.

        The caller applies ``gradient.scaled`` when the future is complete.

        Args:
            gradient: of the parameter.
            begin: the first element; no piece begins before it and ends after it.
            out: as long as the range.
        """
        end = begin + out.numel()
        keys: list[str] = []
        outs: list[torch.Tensor] = []
        pieces = list(gradient.within(begin, end))
        if sum(piece.end - piece.begin for piece in pieces) < out.numel():
            out.zero_()
        for piece in pieces:
            part = out[piece.begin - begin : piece.end - begin]
            if piece.tensor is not None:
                part.copy_(piece.tensor)
            else:
                keys.append(piece.key)
                outs.append(part)
        if not keys:
            return CUDAFuture.completed(None)
        return self._store.readv(keys, outs, priority=FIRST)

    def note_read(self, gradient: StoredGradient | None, begin: int, end: int) -> None:
        """Count the bytes of a range that was read."""
        if gradient is not None:
            read = sum(p.end - p.begin for p in gradient.within(begin, end) if p.tensor is None)
            self.counters.gradient_bytes_read += read * gradient.dtype.itemsize

    def forget(self, gradient: StoredGradient) -> list[str]:
        """Free the memory of a gradient; return the keys of its pieces, which the caller deletes."""
        self.settle(gradient)
        keys = [piece.key for piece in gradient.pieces.values() if piece.is_large]
        gradient.pieces.clear()
        gradient._begins.clear()
        return keys


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
