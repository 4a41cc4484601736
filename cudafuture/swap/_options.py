"""Options of an offloaded optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cudafuture._arguments import expect_bool, expect_int

__all__ = ["SwapOptions"]


@dataclass(frozen=True)
class SwapOptions:
    """Options of ``offload()`` that select the state in the store, and the way it is moved."""

    min_bytes: int
    memory: int
    prefetch: int
    chunk_bytes: int
    buffer_bytes: int | None
    compute: Literal["parameter", "cpu"]
    master_weights: bool
    swap_gradients: bool

    def __post_init__(self) -> None:
        for name in ("min_bytes", "memory", "prefetch"):
            expect_int(name, getattr(self, name), 0)
        if self.buffer_bytes is not None:
            expect_int("buffer_bytes", self.buffer_bytes, 1)
        expect_int("chunk_bytes", self.chunk_bytes, 1 << 16)
        expect_bool("master_weights", self.master_weights)
        expect_bool("swap_gradients", self.swap_gradients)
        if self.compute not in ("parameter", "cpu"):
            raise ValueError(f"compute={self.compute!r} is neither 'parameter' nor 'cpu'")
