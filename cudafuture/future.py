"""What Python adds beside the native CUDAFuture: running functions and copying values asynchronously."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.utils import _pytree

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.config import config
from cudafuture.executors import default_executor
from cudafuture.streams import pool_stream, use_streams

__all__ = ["CUDAFuture", "copy", "submit"]

P = ParamSpec("P")
T = TypeVar("T")

_C.set_watcher_pauses(config.watcher_first_pause, config.watcher_longest_pause)


# The first two come first: a call that names neither `executor` nor `priority` has its arguments checked against `fn`.
@overload
def submit(
    fn: Callable[..., T],
    /,
    *args: Any,
    executor: Executor | _C.HostExecutor | None,
    priority: int = ...,
    **kwargs: Any,
) -> CUDAFuture[T]: ...
@overload
def submit(fn: Callable[..., T], /, *args: Any, priority: int, **kwargs: Any) -> CUDAFuture[T]: ...
@overload
def submit(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CUDAFuture[T]: ...
def submit(  # type: ignore[misc]
    fn: Callable[..., T],
    /,
    *args: Any,
    executor: Executor | _C.HostExecutor | None = None,
    priority: int = 0,
    **kwargs: Any,
) -> CUDAFuture[T]:
    """Run ``fn(*args, **kwargs)`` on an executor and return a future of what it returns.

    Args:
        fn: runs with the caller's grad mode, inference mode, autocast and contextvars.
        executor: None (default): the library's thread pool, ``executors.default_executor()``. Or any
            concurrent.futures.Executor, ``executors.callback_thread``, or ``executors.inline`` (here and now).
        priority: of the future; its callbacks' pool streams have it.

    Cancelling the future before `fn` has begun keeps it from running; afterwards ``cancel()`` returns False.

    Raises:
        TypeError: `fn` cannot be called, or `executor` cannot submit.

    >>> submit(divmod, 7, 2).wait()
    (3, 1)
    """
    if not callable(fn):
        raise TypeError(f"submit() takes a callable and its arguments, not {fn!r}")
    call = functools.partial(fn, *args, **kwargs) if args or kwargs else fn
    name = getattr(fn, "__qualname__", None)
    if not isinstance(name, str):
        name = type(fn).__qualname__
    if not name.isascii():
        name = name.encode("utf-8", "backslashreplace").decode()  # a surrogate has no UTF-8
    return _C.submit(call, executor if executor is not None else default_executor(), priority, name)


def copy(value: T, device: torch.device | str | int, *, priority: int = 0) -> CUDAFuture[T]:
    """Copy every tensor of `value` to `device` and return a future of the same structure with the copies.

    Args:
        value: a tensor, or any nesting that ``torch.utils._pytree`` knows; what is no tensor is passed on as it is.
            It is read after the work that the caller has enqueued so far, and must stay unchanged until the future is
            ready.
        device: where to. Copies between a host and a device go through pinned memory, on a pool stream.
        priority: of the stream and of the future; 0 (default), -1 high.

    Copies within the host run on ``executors.default_executor()``.

    Raises:
        TypeError, ValueError, RuntimeError: no such device, or nothing to copy out of it (meta).

    >>> copy({"x": torch.ones(2)}, "cpu").wait()
    {'x': tensor([1., 1.])}
    """
    target = torch.device(device)
    leaves, spec = _pytree.tree_flatten(value)
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)} | {target}
    with_streams = sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)
    if not with_streams:
        return _C.submit(functools.partial(_copy_leaves, leaves, spec, target), default_executor(), priority, "copy")
    # One stream carries the copies: the target's, or the source's when the target is the host.
    carrier = target if target.type not in ("cpu", "meta") else with_streams[0]
    stream = pool_stream(carrier, priority)
    for source in with_streams:
        stream.wait_stream(torch.accelerator.current_stream(source))
    future: CUDAFuture[T] = CUDAFuture(priority=priority, name="copy")
    with use_streams(stream):
        copied = _copy_leaves(leaves, spec, target)
        future.set_result(copied, stream=stream, tensors=[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    return future


def _copy_leaves(leaves: list[Any], spec: _pytree.TreeSpec, target: torch.device) -> Any:
    return _pytree.tree_unflatten([_copy_leaf(leaf, target) for leaf in leaves], spec)


def _copy_leaf(leaf: Any, target: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.device.type == "cpu" and target.type == "cpu":
        return leaf.detach().clone()
    if "meta" in (leaf.device.type, target.type):
        return leaf.detach().to(target, copy=True)
    if leaf.device.type == "cpu":
        return leaf.detach().pin_memory().to(target, non_blocking=True)
    if target.type == "cpu":
        staged = torch.empty_like(leaf, device="cpu", pin_memory=True)
        return staged.copy_(leaf.detach(), non_blocking=True)
    return leaf.detach().to(target, non_blocking=True, copy=True)
