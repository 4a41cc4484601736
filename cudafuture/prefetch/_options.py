"""Arguments of prefetch()."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cudafuture._arguments import expect_callable

__all__ = ["PrefetchOptions"]


@dataclass(frozen=True)
class PrefetchOptions:
    """Arguments of ``prefetch``, which documents them. Raises its TypeError and ValueError."""

    depth: int
    bytes: int | None
    priority: int
    pin: bool | Literal["auto"]
    transform: Callable[[Any], Any] | None
    pack: bool
    futures: bool
    across_epochs: bool | Callable[[int], object]

    def __post_init__(self) -> None:
        """Raise unless all arguments are valid."""
        for name in ("depth", "priority") if self.bytes is None else ("depth", "priority", "bytes"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name}={getattr(self, name)!r}: pass an int")
        for name in ("pack", "futures"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"{name}={getattr(self, name)!r}: pass True or False")
        if self.transform is not None:
            expect_callable("transform", self.transform, "transform(batch)")
        if type(self.across_epochs) is not bool and not callable(self.across_epochs):
            raise TypeError(f"across_epochs={self.across_epochs!r}: pass True, False or a callable")
        if self.depth < 1:
            raise ValueError(f"depth={self.depth} is less than 1: at least one batch must be read ahead")
        if self.bytes is not None and self.bytes < 1:
            raise ValueError(f"bytes={self.bytes} is less than 1; pass None for no limit")
        if self.pin not in (True, False, "auto"):
            raise ValueError(f"pin={self.pin!r}: pass True, False or 'auto'")
        if self.priority > 0:
            raise ValueError(f"priority={self.priority} is positive; pass 0 (the default) or less (more urgent)")
