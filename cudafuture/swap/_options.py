"""Options of an offloaded optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is negative")
        if self.chunk_bytes < 1 << 16:
            raise ValueError(f"chunk_bytes={self.chunk_bytes!r} is less than 64 KiB")
        if self.compute not in ("parameter", "cpu"):
            raise ValueError(f"compute={self.compute!r} is neither 'parameter' nor 'cpu'")
