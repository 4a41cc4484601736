"""Modes of a thread: grad mode, inference mode and autocast."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

__all__ = ["Modes", "ThreadContext", "outside_inference"]

T = TypeVar("T")


def outside_inference() -> AbstractContextManager[object]:
    """Return a context for the allocation of memory that later users share.

    A tensor that is created in inference mode cannot take part in training for as long as it lives. Memory that
    outlives the call must therefore not depend on the mode of its first user.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class Modes:
    """Grad mode, inference mode and autocast of the thread that created it."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = _Autocast()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Modes) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context manager that sets these modes, and restores those of the thread."""
        with ExitStack() as scope:
            if self._inference != torch.is_inference_mode_enabled():
                scope.enter_context(torch.inference_mode(self._inference))
            scope.enter_context(torch.set_grad_enabled(self._grad))
            if self._autocast != (before := _Autocast()):
                scope.enter_context(self._autocast.applied(before))
            yield


class ThreadContext:
    """Modes and contextvars of the thread that created it, for functions that any thread calls, any number of times."""

    def __init__(self) -> None:
        self._modes = Modes()
        self._variables = contextvars.copy_context()

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return ``function(*args)``."""
        return self._variables.copy().run(self._run, function, *args)  # a copy: a context can be entered only once

    def _run(self, function: Callable[..., T], *args: Any) -> T:
        with self._modes.applied():
            return function(*args)


class _Autocast:
    """Autocast settings of the calling thread."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        kinds = {"cpu", "cuda", *([] if accelerator is None else [accelerator.type])}
        self._kinds = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self._is_cached = torch.is_autocast_cache_enabled()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Autocast) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def applied(self, before: _Autocast) -> AbstractContextManager[None]:
        """Return a context manager that sets these settings, and restores those of `before`."""
        return self._applied(before)

    @contextmanager
    def _applied(self, before: _Autocast) -> Iterator[None]:
        self._apply()
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            before._apply()

    def _apply(self) -> None:
        for kind, (enabled, dtype) in self._kinds.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._is_cached)
