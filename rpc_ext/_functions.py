"""The functions that workers call: those that return a value, and those that return a future of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from cudafuture import CUDAFuture

__all__ = ["async_execution", "call_function", "is_async"]

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Decorate a function that other workers call and that returns a CUDAFuture: the answer is the future's outcome.

    The answer is sent when the future completes, ordered after its device work, and no thread of the callee's is held
    until then. So functions that call further workers can be nested at will. The future may be of anything: a
    collective, another call, a read from disk. A torch.futures.Future will do, too. It goes below or above
    ``@staticmethod`` and ``@classmethod``.

    >>> @async_execution
    ... def later(x):
    ...     return CUDAFuture.completed(x)
    >>> later(3).wait()
    3
    """
    target: Any = fn.__func__ if isinstance(fn, (staticmethod, classmethod)) else fn
    target._rpc_ext_async_execution = True
    return fn


def is_async(fn: Any) -> bool:
    """Return whether the function returns a future, by our decorator or torch's."""
    return getattr(fn, "_rpc_ext_async_execution", False) or hasattr(fn, "_wrapped_async_rpc_function")


def call_function(call: Any) -> tuple[int, Any, bool]:
    """Return the caller, what the function has returned, and whether that is a future whose outcome is meant."""
    caller, fn, args, kwargs = call
    outcome = fn(*args, **kwargs)
    if not is_async(fn):
        return caller, outcome, False
    if isinstance(outcome, torch.futures.Future):
        outcome = CUDAFuture.from_torch(outcome)
    if not isinstance(outcome, CUDAFuture):
        name = getattr(fn, "__qualname__", None) or repr(fn)
        raise TypeError(f"{name} is decorated with async_execution and must return a CUDAFuture, not {outcome!r}")
    return caller, outcome, True
