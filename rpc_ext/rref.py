"""References to values on other workers: torch's RRefs with methods that return CUDAFuture."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

import torch
from torch._C._distributed_rpc import WorkerInfo

from cudafuture import CUDAFuture, executors, gather
from cudafuture.errors import InvalidStateError, WorkerLostError
from cudafuture.timer import expire
from rpc_ext import _C, _batching, _engine, _failure
from rpc_ext._codec import DeviceMap, Encoded, PayloadKind, encode
from rpc_ext._creation import Creation
from rpc_ext._destination import Destination
from rpc_ext._options import SHORTEST_TIMEOUT
from rpc_ext._serve import async_execution, expect_free_thread, is_async
from rpc_ext.calls import Args, Kwargs, Worker, call_arguments, expect_callable, name_of, rpc_async, rpc_sync
from rpc_ext.session import current

__all__ = ["RRef", "remote"]

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value on one worker, its owner. Any worker may hold it.

    It may be an argument or result of calls. The value lives until no worker has a reference to it (torch counts
    references by the protocol of torch.distributed.rpc). ``remote()`` returns a reference to a function's result.

    Args:
        value: the value; this worker is its owner.
    """

    __slots__ = ("_creation", "_due", "_rref")

    def __init__(self, value: T) -> None:
        current()
        self._rref: Any = _engine.RRef(_Kept(CUDAFuture.completed(value)))
        self._due = math.inf
        self._creation: Creation | None = None  # on the worker that has called ``remote``

    @classmethod
    def _of(cls, rref: Any, due: float = math.inf, creation: Creation | None = None) -> RRef[Any]:
        """Return a reference from torch's; `due` is the deadline of its value on time.perf_counter()."""
        new = cls.__new__(cls)
        new._rref, new._due, new._creation = rref, due, creation
        return new

    def __reduce__(self) -> Any:
        if self._due < time.perf_counter() and self._is_late():
            raise TimeoutError(f"worker '{self.owner_name()}' has not made the value of an RRef in time")
        return self._reduced()

    def _is_late(self) -> bool:
        """Return whether the value is missing, if this worker knows: torch crashes if another worker asks it."""
        if self._creation is not None:
            return not self._rref._get_future().done()
        return self.is_owner() and ((made := self._made()) is None or not made.done())

    def _reduced(self) -> Any:
        self._watch_creation()
        if self._due == math.inf:
            return RRef._of, (self._rref,)
        return _received, (self._rref, self._due - time.perf_counter())

    def __repr__(self) -> str:
        try:
            return f"<RRef owned by '{self.owner_name()}'>"
        except RuntimeError:
            return "<RRef of a session that has ended>"

    def owner(self) -> WorkerInfo:
        """Return torch's WorkerInfo of the owner.

        >>> RRef(1).owner().id
        0
        """
        current()
        return self._rref.owner()  # type: ignore[no-any-return]

    def owner_name(self) -> str:
        """Return the name of the owner.

        >>> RRef(1).owner_name()
        'me'
        """
        current()
        return self._rref.owner_name()  # type: ignore[no-any-return]

    def is_owner(self) -> bool:
        """Return whether this worker is the owner of the value.

        >>> RRef(1).is_owner()
        True
        """
        current()
        return self._rref.is_owner()  # type: ignore[no-any-return]

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner is known to have this reference.

        >>> RRef(1).confirmed_by_owner()
        True
        """
        current()
        return self._rref.confirmed_by_owner()  # type: ignore[no-any-return]

    def get_future(self, *, timeout: float | None = None, priority: int = 0) -> CUDAFuture[T]:
        """Return a future of a copy of the value; on the owner, of the value itself.

        It fails with the exception of the function that makes the value, or with AuthenticationError if the owner has
        refused the message of ``remote``. It fails with TimeoutError if the value does not arrive within `timeout`
        (default: ``rpc_timeout`` of ``init_rpc``), or is not made within the timeout of ``remote``. Both also apply on
        the owner.

        >>> remote("me", divmod, (7, 2)).get_future().then(lambda done: sum(done.value())).wait()
        4
        """
        if self.is_owner():
            # A thread of the engine or the timer thread may complete it.
            return self._limited(current().timeout(timeout), executors.callback_thread)
        return rpc_async(self.owner_name(), _fetch, (_Asked(self),), timeout=timeout, priority=priority)

    def to_here(self, timeout: float | None = None) -> T:
        """Return the value or a copy of it: ``get_future().wait()``.

        >>> remote("me", divmod, (7, 2)).to_here()
        (3, 1)
        """
        current().timeout(timeout)  # raises here what get_future() would raise
        if self.is_owner() and (made := self._made()) is not None and made.done():
            return made.wait()
        with expect_free_thread("RRef.to_here()"):
            future = self.get_future(timeout=timeout)
            _batching.flush()
            return future.wait()

    def local_value(self) -> T:
        """Return the value on its owner; wait until it is made.

        Raises:
            RuntimeError: this worker is not the owner.
            TimeoutError: the value has not been made within the `timeout` of ``remote``.

        >>> RRef([1, 2]).local_value()
        [1, 2]
        """
        if self._due < math.inf and self.is_owner():
            return self._limited(0).wait(non_blocking=True)
        current()
        kept: _Kept = self._rref.local_value()
        value: T = kept.future.wait(non_blocking=True)
        return value

    def rpc_async(self, timeout: float | None = None) -> Any:
        """Return a proxy whose methods call the value's methods on the owner and return futures.

        ``rref.rpc_async().method(1)`` is like ``rpc_async(rref.owner(), method of the value, (1,))``.

        >>> counts = RRef([3, 1, 3])
        >>> counts.rpc_async().count(3).wait()
        2
        """
        return _Proxy(self, lambda *call: rpc_async(self.owner_name(), _invoke, call, timeout=timeout))

    def rpc_sync(self, timeout: float | None = None) -> Any:
        """Return a proxy like that of ``rpc_async`` whose methods wait and return values.

        >>> RRef([3, 1, 3]).rpc_sync().count(3)
        2
        """
        return _Proxy(self, lambda *call: rpc_sync(self.owner_name(), _invoke, call, timeout=timeout))

    def remote(self, timeout: float | None = None) -> Any:
        """Return a proxy like that of ``rpc_async`` whose methods return RRefs of the results.

        >>> RRef([3, 1, 3]).remote().count(3).to_here()
        2
        """
        return _Proxy(self, lambda *call: remote(self.owner_name(), _invoke, call, timeout=timeout))

    def _watch_creation(self) -> None:
        if self._creation is not None:
            self._creation.watch()

    def _made(self) -> CUDAFuture[T] | None:
        """Return the future that the owner holds; None if it holds none yet."""
        return self._rref.local_value().future if _C.has_value(self._rref) else None

    def _limited(self, seconds: float, executor: executors.HostExecutor | None = None) -> CUDAFuture[T]:
        """Return a future of the value, on its owner.

        It fails after `seconds` (0: no limit), or at the deadline of the value. It completes with the value, on any
        thread; `executor` runs its callbacks by default.
        """
        self._watch_creation()
        value = self._value()
        if value.done():
            return value
        come: CUDAFuture[None] = CUDAFuture(executor=executor)
        value.add_done_callback(lambda _: come.set_result(None), executor=executors.inline)
        mine = come.then_async(lambda _: value, executor=executors.inline)
        me = current().name
        expire(mine, seconds, f"an RRef of this worker, '{me}', had no value within {seconds:g} s")
        left = self._due - time.perf_counter()
        if left < math.inf:
            expire(mine, max(left, SHORTEST_TIMEOUT), f"worker '{me}' has not made the value of an RRef in time")
        return mine

    def _value(self) -> CUDAFuture[T]:
        """Return a future of the value, on its owner, before or after the value is made."""
        if (made := self._made()) is not None:
            return made
        there: CUDAFuture[Any] = CUDAFuture()

        def come(owner: Any) -> None:
            with contextlib.suppress(InvalidStateError):  # RPC was shut down
                there.set_result(owner)

        _C.when_owned(self._rref, come)
        if not there.done():
            current().server.fail_at_end(there)
        return there.then_async(lambda done: done.value().local_value().future)


class _Kept:
    """The object that torch holds on the owner. torch pickles it to find tensors, and must find none."""

    __slots__ = ("future",)

    def __init__(self, future: CUDAFuture[Any]) -> None:
        self.future = future

    def __reduce__(self) -> Any:
        return tuple, ()


def _received(rref: Any, left: float) -> RRef[Any]:
    """Return a reference that another worker has sent; `left` is the time until the deadline of its value."""
    return RRef._of(rref, time.perf_counter() + left)


def _tell_owner(owner: Destination, rref: Any, error: Exception) -> None:
    """Fail the requests for a value at its owner, which has not taken the message of ``remote``."""
    if owner.is_closed:
        return  # RPC has ended here
    with contextlib.suppress(InvalidStateError, BlockingIOError, WorkerLostError):  # or ends now; or there is no room
        told = rpc_async(owner.name, _fail, (_Asked(RRef._of(rref)), error), non_blocking=True)
        told.add_done_callback(CUDAFuture.exception, executor=executors.inline)


def _fail(rref: RRef[Any], error: BaseException) -> None:
    """Fail the requests for a value that the owner will not make."""
    if rref._made() is None:
        _C.set_value(rref._rref, _Kept(CUDAFuture.failed(error)))


class _Asked:
    """A reference that is sent to its owner, which checks the deadline of the value itself."""

    __slots__ = ("_reference",)

    def __init__(self, reference: RRef[Any]) -> None:
        self._reference = reference

    def __reduce__(self) -> Any:
        return self._reference._reduced()


class _Proxy:
    __slots__ = ("_call", "_rref")

    def __init__(self, rref: RRef[Any], call: Callable[..., Any]) -> None:
        self._rref, self._call = rref, call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("__"):
            raise AttributeError(method)
        return lambda *args, **kwargs: self._call(_Asked(self._rref), method, args, kwargs)


@overload
def remote(
    to: Worker, fn: Callable[..., CUDAFuture[T]], args: Args = ..., kwargs: Kwargs = ..., *, timeout: float | None = ...
) -> RRef[T]: ...
@overload
def remote(
    to: Worker, fn: Callable[..., T], args: Args = ..., kwargs: Kwargs = ..., *, timeout: float | None = ...
) -> RRef[T]: ...
def remote(
    to: Worker,
    fn: Callable[..., Any],
    args: Args = (),
    kwargs: Kwargs = None,
    *,
    timeout: float | None = None,
) -> RRef[Any]:
    """Call ``fn(*args, **kwargs)`` on another worker, which keeps the result; return a reference to it at once.

    For the arguments see ``rpc_async``. Requests for the value raise the exception of `fn`.

    Args:
        timeout: seconds in which the owner has to make the value; default: ``rpc_timeout`` of ``init_rpc``. inf: no
            limit. After that time a request for the value, from any worker, fails with TimeoutError. A worker that
            knows that the value is late cannot send the reference: the owner, and the caller of ``remote`` unless `fn`
            is an async function. If the owner makes the value late, later requests return it. The owner checks the
            time: if its process is stopped or all its threads are busy, the timeout of the request applies.

    Raises:
        WorkerLostError: the worker is known to be lost. If it is lost later, the reference raises the error.
        ValueError: there is no such worker.
        TensorError: a tensor cannot be sent; or the engine does not carry tensors of its device: copy the tensor to the
            host first.
        InvalidStateError, TypeError: as for ``rpc_async``; inside a ``torch.distributed.autograd.context`` use
            ``torch.distributed.rpc.remote``.

    >>> there = remote("me", sorted, ([3, 1, 2],))
    >>> there
    <RRef owned by 'me'>
    >>> there.to_here()
    [1, 2, 3]
    """
    session = current()
    expect_callable("remote", fn)
    destination = session.destination(to)
    call = (session.rank, fn, *call_arguments(args, kwargs))
    devices = DeviceMap(destination.name, destination.devices.native, {})  # nothing goes through the host
    encoded = encode(PayloadKind.CALL, call, devices)
    seconds = session.timeout(timeout)
    due = time.perf_counter() + seconds if seconds else math.inf
    rref = _kept_there(destination, name_of(fn), encoded)
    tell = functools.partial(_tell_owner, destination)
    return RRef._of(rref, due, Creation(rref, destination.name, name_of(fn), tell))


def _kept_there(destination: Destination, name: str, encoded: Encoded) -> Any:
    """Return torch's reference to the outcome of a call of the function `name` on the owner.

    The engine has no timeout: after a timeout, torch marks the first reference of the process that was ever late, and
    so may write into freed memory (RRef::handleError in torch 2.13).
    """
    try:
        return _engine.remote(destination.name, _make, (encoded.payload, encoded.tensors), timeout=0)
    except RuntimeError as e:  # the owner is known to be lost
        raise _failure.of_torch(e, name, destination.name) from None


def _make(payload: bytes, tensors: list[torch.Tensor]) -> _Kept:
    """Make the value of an RRef on its owner. torch keeps the future."""
    return _Kept(current().server.evaluate(payload, tensors))


# ---- methods of the value


@async_execution
def _fetch(rref: RRef[T]) -> CUDAFuture[T]:
    return rref._limited(0)


@async_execution
def _invoke(rref: RRef[Any], method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CUDAFuture[Any]:
    given = CUDAFuture.completed((args, kwargs))  # on the streams of this call; the value has other streams

    def call(both: CUDAFuture[list[Any]]) -> CUDAFuture[Any]:
        return _outcome(getattr(both.value()[0], method), args, kwargs)

    return gather(rref._limited(0), given).then_async(current().server.order.part_of_call(call))


def _outcome(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> CUDAFuture[Any]:
    """Call a function on the current streams; return a future of the outcome for its caller."""
    outcome = fn(*args, **kwargs)
    return CUDAFuture.from_torch(outcome) if is_async(fn) else CUDAFuture.completed(outcome)
