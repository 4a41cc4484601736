"""Calling functions on other workers. A ``Worker`` is named by its name, its rank, or torch's WorkerInfo of it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar, overload

import torch
from torch._C._distributed_rpc import WorkerInfo
from typing_extensions import Unpack

from cudafuture import CUDAFuture, collect_all
from cudafuture.errors import CallsFailedError, InvalidStateError
from rpc_ext import _C, _batching
from rpc_ext._call import Call
from rpc_ext._codec import Direct, Encoded, Kind, encode
from rpc_ext._destination import Destination
from rpc_ext._serve import expect_free_thread
from rpc_ext.session import current

__all__ = ["Worker", "broadcast_call", "map_call", "rpc_async", "rpc_sync"]

T = TypeVar("T")
Worker: TypeAlias = str | int | WorkerInfo
"""a worker's name, its rank, or torch's WorkerInfo of it"""
Args: TypeAlias = Sequence[Any]
Kwargs: TypeAlias = Mapping[str, Any] | None


class _Limits(TypedDict, total=False):
    timeout: float | None
    priority: int


class _Options(_Limits, total=False):
    non_blocking: bool


# The first of two overloads is for functions that are decorated with async_execution.
@overload
def rpc_async(
    to: Worker, fn: Callable[..., CUDAFuture[T]], args: Args = ..., kwargs: Kwargs = ..., **options: Unpack[_Options]
) -> CUDAFuture[T]: ...
@overload
def rpc_async(
    to: Worker, fn: Callable[..., T], args: Args = ..., kwargs: Kwargs = ..., **options: Unpack[_Options]
) -> CUDAFuture[T]: ...
def rpc_async(
    to: Worker,
    fn: Callable[..., Any],
    args: Args = (),
    kwargs: Kwargs = None,
    *,
    timeout: float | None = None,
    priority: int = 0,
    non_blocking: bool = False,
) -> CUDAFuture[Any]:
    """Call ``fn(*args, **kwargs)`` on another worker, and return a future of what it returns.

    Args:
        to: the worker's name, its rank, or a WorkerInfo. It may be this one.
        fn: a function that the other worker can import, or any callable that pickles. One decorated with
            ``async_execution`` returns a future there, whose outcome is what arrives here.
        args, kwargs: pickled; tensors travel beside. They are sent after what the caller's current streams have to do
            with them so far, and must stay unchanged until the future is done.
        timeout: seconds from now; default: ``rpc_timeout`` of ``init_rpc``. inf: no limit.
        priority: of the future, and of the streams that copy its tensors.
        non_blocking: what happens where as many calls or bytes are in flight to that worker as ``init_rpc`` allows.
            False (default): the call waits until there is room, for `timeout` at most. True: BlockingIOError.

    The future completes when the answer has come; tensors on devices are ordered by its events. Its callbacks run on
    the library's callback thread, unless they are given an executor. It fails with the exception that was raised there,
    of its own type where that can be imported here and else as a RemoteError, with the remote traceback and the name of
    the worker in its notes; with TimeoutError; with WorkerLostError when the connection breaks. Once it is cancelled,
    the answer is dropped; the function runs all the same.

    Raises:
        InvalidStateError: RPC has not begun; or the call would have to wait, on a thread that brings the answers; or
            the thread is inside a ``torch.distributed.autograd.context``, which cannot record the call: use
            ``torch.distributed.rpc.rpc_async`` there.
        ValueError: no such worker; a tensor on a device that has no target there.
        TypeError: `fn` cannot be called; or it is a torch.jit.ScriptFunction, which ``torch.distributed.rpc.rpc_async``
            calls.
        TimeoutError: no room within `timeout`.
        Exception: whatever arguments raise that cannot be pickled.

    >>> pair = rpc_async("me", divmod, (7, 2))
    >>> pair.then(lambda done: sum(done.value())).wait()
    4
    >>> rpc_async("me", sorted, ([2, 3, 1],), {"reverse": True}).wait()
    [3, 2, 1]
    """
    session = current()
    expect_callable("rpc_async", fn)
    destination = session.destination(to)
    seconds = session.timeout(timeout)
    args = tuple(args)
    batch = _batching.open_to(destination)
    how: Encoded | Direct | None = None if batch is None else batch.direct(fn, args, kwargs)
    if how is None:
        how = encode(Kind.CALL, (session.rank, fn, args, kwargs or {}), destination.devices)
    size = how.size
    # Made before there is room for it: where its arguments are wrong none is taken, and waiting is of its time.
    call = Call(session.agent, destination, name_of(fn), size, seconds, priority)
    _admit(call, destination, size, non_blocking)
    try:
        if batch is not None:
            batch.add(call, fn, how)
        else:
            assert isinstance(how, Encoded)
            call.transmit(how.payload, how.tensors, how.targets, priority)
    except BaseException:
        call.abandon()
        raise
    return call.future


@overload
def rpc_sync(
    to: Worker, fn: Callable[..., CUDAFuture[T]], args: Args = ..., kwargs: Kwargs = ..., **options: Unpack[_Limits]
) -> T: ...
@overload
def rpc_sync(
    to: Worker, fn: Callable[..., T], args: Args = ..., kwargs: Kwargs = ..., **options: Unpack[_Limits]
) -> T: ...
def rpc_sync(
    to: Worker,
    fn: Callable[..., Any],
    args: Args = (),
    kwargs: Kwargs = None,
    *,
    timeout: float | None = None,
    priority: int = 0,
) -> Any:
    """Call ``fn(*args, **kwargs)`` on another worker, and wait for what it returns; see ``rpc_async``.

    In a function that another worker has called, this holds one of the worker's threads meanwhile. Where all of them
    would be held, none could bring the answer: that is refused at once.

    Raises:
        InvalidStateError: no thread would be left for the answer. Return a future, and decorate the function with
            ``async_execution``.
        Exception: what the future fails with.

    >>> rpc_sync("me", divmod, (7, 2))
    (3, 1)
    """
    with expect_free_thread("rpc_sync()"):
        future = rpc_async(to, fn, args, kwargs, timeout=timeout, priority=priority)
        _batching.flush()
        return future.wait()


@overload
def broadcast_call(
    workers: Iterable[Worker],
    fn: Callable[..., CUDAFuture[T]],
    args: Args = ...,
    kwargs: Kwargs = ...,
    **options: Unpack[_Limits],
) -> CUDAFuture[list[T]]: ...
@overload
def broadcast_call(
    workers: Iterable[Worker], fn: Callable[..., T], args: Args = ..., kwargs: Kwargs = ..., **options: Unpack[_Limits]
) -> CUDAFuture[list[T]]: ...
def broadcast_call(
    workers: Iterable[Worker],
    fn: Callable[..., Any],
    args: Args = (),
    kwargs: Kwargs = None,
    *,
    timeout: float | None = None,
    priority: int = 0,
) -> CUDAFuture[list[Any]]:
    """Make the same call to several workers; the future has what each returned, in their order.

    It completes when all are done. When some have failed, it fails with a CallsFailedError that has the errors, and the
    values of the others, by worker. For the arguments see ``rpc_async``.

    >>> broadcast_call(["me"], divmod, (7, 2)).wait()
    [(3, 1)]
    """
    every = list(workers)
    return map_call(every, fn, [args] * len(every), kwargs, timeout=timeout, priority=priority)


@overload
def map_call(
    workers: Iterable[Worker],
    fn: Callable[..., CUDAFuture[T]],
    args_per_worker: Iterable[Args],
    kwargs: Kwargs = ...,
    **options: Unpack[_Limits],
) -> CUDAFuture[list[T]]: ...
@overload
def map_call(
    workers: Iterable[Worker],
    fn: Callable[..., T],
    args_per_worker: Iterable[Args],
    kwargs: Kwargs = ...,
    **options: Unpack[_Limits],
) -> CUDAFuture[list[T]]: ...
def map_call(
    workers: Iterable[Worker],
    fn: Callable[..., Any],
    args_per_worker: Iterable[Args],
    kwargs: Kwargs = None,
    *,
    timeout: float | None = None,
    priority: int = 0,
) -> CUDAFuture[list[Any]]:
    """Call `fn` on several workers, on each with arguments of its own; see ``broadcast_call``.

    A call that cannot be made, say because its arguments do not pickle, is one that has failed. A worker that comes
    more than once has its failures and results under ``name[i]``, `i` being its place among `workers`.

    Raises:
        ValueError: not as many `args_per_worker` as `workers`.

    >>> map_call(["me", "me"], divmod, [(7, 2), (9, 4)]).wait()
    [(3, 1), (2, 1)]
    >>> map_call(["me"], divmod, [(7, 0)]).exception().failures
    {'me': ZeroDivisionError(...)}
    >>> map_call(["me", "me"], divmod, [(7, 0), (7, 2)]).exception().results
    {'me[1]': (3, 1)}
    """
    pairs = list(zip(workers, args_per_worker, strict=True))
    session = current()
    expect_callable("map_call", fn)
    session.timeout(timeout)  # raises here what each call would raise
    names = [session.destination(worker).name for worker, _ in pairs]
    times = collections.Counter(names)
    names = [f"{name}[{i}]" if times[name] > 1 else name for i, name in enumerate(names)]
    parts: list[CUDAFuture[Any]] = []
    for worker, args in pairs:
        try:
            parts.append(rpc_async(worker, fn, args, kwargs, timeout=timeout, priority=priority))
        except Exception as e:  # the others are on their way
            parts.append(CUDAFuture.failed(e))
    return collect_all(parts).then(lambda done: _together(names, done.value()), priority=priority)


def _together(names: list[str], parts: list[CUDAFuture[T]]) -> list[T]:
    failures: dict[str, BaseException] = {}
    results: dict[str, T] = {}
    for name, part in zip(names, parts, strict=True):
        try:
            results[name] = part.value()
        except BaseException as e:  # CancelledError among them
            failures[name] = e
    if failures:
        raise CallsFailedError(f"{len(failures)} of {len(parts)} calls have failed", failures, results)
    return [part.value() for part in parts]


def _admit(call: Call, destination: Destination, size: int, non_blocking: bool) -> None:
    """Take room for a call, which may have to wait for it."""
    if not destination.try_admit(size):
        destination.flush()  # what waits in batches takes room, too
        if non_blocking:
            raise destination.would_block()
        with expect_free_thread("a call that has to wait for room"):
            destination.admit(size, call.timeout)


def expect_callable(caller: str, fn: Any) -> None:
    """Raise unless `fn` is a function that this thread can call on another worker.

    Raises:
        TypeError: it is not callable, or it is a torch.jit.ScriptFunction.
        InvalidStateError: this thread is inside a torch.distributed.autograd.context.
    """
    if not callable(fn):
        raise TypeError(f"{caller}() takes a callable, not {fn!r}")
    if isinstance(fn, torch.jit.ScriptFunction):
        raise TypeError(
            f"{caller}() cannot call the torch.jit.ScriptFunction '{fn.name}': use torch.distributed.rpc.rpc_async, or "
            "call a Python function that calls it"
        )
    if _C.in_distributed_autograd():
        raise InvalidStateError(
            f"{caller}() inside a torch.distributed.autograd.context would lose gradients without notice: use "
            "torch.distributed.rpc.rpc_async there, or make the call outside of the context"
        )


def name_of(fn: Any) -> str:
    """Return the name of a callable, for messages."""
    name = getattr(fn, "__qualname__", None)
    return name if isinstance(name, str) and name.isascii() else type(fn).__qualname__
