"""Calls of functions on other workers. A ``Worker`` is a name, a rank, or torch's WorkerInfo."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar, overload

import torch
from torch._C._distributed_rpc import WorkerInfo
from typing_extensions import Unpack

from cudafuture import CUDAFuture, collect_all
from cudafuture.errors import CallsFailedError, InvalidStateError, TensorError
from cudafuture.ownership import owns, tensors_in
from rpc_ext import _C, _batching
from rpc_ext._call import RemoteCall
from rpc_ext._codec import DirectCall, Encoded, PayloadKind, encode
from rpc_ext._destination import Destination
from rpc_ext._failure import add_note
from rpc_ext._serve import expect_free_thread
from rpc_ext.session import current

__all__ = ["Worker", "broadcast_call", "map_call", "rpc_async", "rpc_sync"]

T = TypeVar("T")
Worker: TypeAlias = str | int | WorkerInfo
"""a worker's name, its rank, or its WorkerInfo of torch"""
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
@owns("rpc_async", lambda to, fn, args=(), kwargs=None, **_: tensors_in((args, kwargs)))
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
    """Call ``fn(*args, **kwargs)`` on another worker, and return a future of its result.

    Args:
        to: the worker's name, its rank, or a WorkerInfo. It may be this worker.
        fn: a function that the callee can import, or any callable that pickles. If it is decorated with
            ``async_execution``, it returns a future, and the callee replies with that future's outcome.
        args, kwargs: arguments, which are pickled without their tensors. Tensors are sent after the work that is now on
            the caller's current streams, and must not change until the future is done.
        timeout: seconds from now; default: ``rpc_timeout`` of ``init_rpc``. inf: no limit.
        priority: priority of the future, and of the streams that copy its tensors.
        non_blocking: behaviour when the calls or bytes in flight to that worker have reached the limit of ``init_rpc``.
            False (default): block until there is room, at most for `timeout`. True: raise BlockingIOError.

    The future completes with the reply; its events order tensors on devices. Its callbacks run on the library's
    callback thread by default. The future fails with the exception of the function, which has the remote traceback and
    the name of the worker in its notes. It is a RemoteError if its type cannot be imported here. The future may also
    fail with TimeoutError, or with WorkerLostError if the connection breaks. After a cancellation, the function still
    runs and its reply is dropped.

    Raises:
        InvalidStateError: RPC has not begun; the call would block a thread that delivers replies; or the thread is
            inside a ``torch.distributed.autograd.context``, which cannot record the call: use
            ``torch.distributed.rpc.rpc_async`` there.
        ValueError: there is no such worker.
        TensorError: a tensor cannot be sent, or its device has no target there.
        TypeError: `fn` is not callable, or is a torch.jit.ScriptFunction: use ``torch.distributed.rpc.rpc_async``;
            `args` is no list or tuple, or `kwargs` no mapping.
        TimeoutError: there was no room within `timeout`.
        Exception: the error of an argument that cannot be pickled.

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
    args, kwargs = call_arguments(args, kwargs)
    batch = _batching.open_to(destination)
    how: Encoded | DirectCall | None = None if batch is None else batch.direct(fn, args, kwargs)
    if how is None:
        how = _encoded(session.rank, fn, args, kwargs, destination)
    size = how.size
    # Made before it has room: a call with wrong arguments takes no room, and the wait counts for its timeout.
    call = RemoteCall(session.agent, destination, name_of(fn), size, seconds, priority)
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
    """Call ``fn(*args, **kwargs)`` on another worker, and wait for its result; see ``rpc_async``.

    In a function that another worker has called, this blocks an RPC worker thread. If that is the last free thread, no
    thread could deliver the reply, so the call fails at once.

    Raises:
        InvalidStateError: no thread would be left to deliver the reply. Return a future, and decorate the function with
            ``async_execution``.
        Exception: the error of the future.

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
    """Call the same function with the same arguments on several workers; return a future of the results in their order.

    It is done when all calls are. If some of them fail, it fails with a CallsFailedError, which has the errors and the
    other results by worker. For the arguments see ``rpc_async``.

    >>> broadcast_call(["me"], divmod, (7, 2)).wait()
    [(3, 1)]
    """
    every = listed(workers)
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
    """Call `fn` on several workers with separate arguments for each; see ``broadcast_call``.

    A call that cannot be sent, for example because its arguments do not pickle, counts as failed. If a worker occurs
    more than once, its errors and results have the keys ``name[i]``, where `i` is the index in `workers`.

    Raises:
        ValueError: the lengths of `args_per_worker` and `workers` differ.
        TypeError: `workers` is a str.

    >>> map_call(["me", "me"], divmod, [(7, 2), (9, 4)]).wait()
    [(3, 1), (2, 1)]
    >>> map_call(["me"], divmod, [(7, 0)]).exception().failures
    {'me': ZeroDivisionError(...)}
    >>> map_call(["me", "me"], divmod, [(7, 0), (7, 2)]).exception().results
    {'me[1]': (3, 1)}
    """
    every, each_args = listed(workers), list(args_per_worker)
    if len(every) != len(each_args):
        raise ValueError(f"workers has {len(every)} elements, and args_per_worker {len(each_args)}: pass one for each")
    pairs = list(zip(every, each_args, strict=True))
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
        except Exception as e:  # other calls are in flight
            parts.append(CUDAFuture.failed(e))
    return collect_all(parts).then(lambda done: _together(names, done.value()), priority=priority)


def _together(names: list[str], parts: list[CUDAFuture[T]]) -> list[T]:
    failures: dict[str, BaseException] = {}
    results: dict[str, T] = {}
    for name, part in zip(names, parts, strict=True):
        try:
            results[name] = part.value()
        except BaseException as e:  # includes CancelledError
            failures[name] = e
    if failures:
        raise CallsFailedError(f"{len(failures)} of {len(parts)} calls have failed", failures, results)
    return [part.value() for part in parts]


def listed(workers: Iterable[Worker]) -> list[Worker]:
    """Return several workers as a list; raise TypeError for a str, which would be the workers of its characters."""
    if isinstance(workers, str):
        raise TypeError(f"workers is a list of workers, not the str {workers!r}: pass [{workers!r}]")
    return list(workers)


def _encoded(rank: int, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], to: Destination) -> Encoded:
    """Pickle a call; a note on the error says what can be pickled."""
    try:
        return encode(PayloadKind.CALL, (rank, fn, args, kwargs), to.devices)
    except TensorError:
        raise
    except Exception as e:
        add_note(
            e,
            f"the function or an argument of the call of {name_of(fn)} on worker '{to.name}' cannot be pickled: pass a "
            "function at the top level of a module that the worker can import, and values that pickle",
        )
        raise


def _admit(call: RemoteCall, destination: Destination, size: int, non_blocking: bool) -> None:
    """Take room for a call, and wait for it if necessary."""
    if not destination.try_admit(size):
        destination.flush()  # waiting calls of batches take room, too
        if non_blocking:
            raise destination.would_block()
        with expect_free_thread("a call that has to wait for room"):
            destination.admit(size, call.timeout)


def call_arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as a tuple and a dict.

    Raises:
        TypeError: `args` is a single value, such as a str or a tensor, or `kwargs` is no mapping.
    """
    if type(args) is not tuple:
        if isinstance(args, (str, bytes, torch.Tensor)) or not isinstance(args, Iterable):
            raise TypeError(
                f"args is a tuple of arguments, not {type(args).__name__}: for a single one pass args=(value,)"
            )
        args = tuple(args)
    if not kwargs:
        return args, {}
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is a mapping, {{name: value}}, not {type(kwargs).__name__}")
    return args, dict(kwargs)


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
