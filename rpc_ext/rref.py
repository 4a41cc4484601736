"""References to values that live on other workers: torch's, with futures of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch._C._distributed_rpc import WorkerInfo

from cudafuture import CUDAFuture, copy
from rpc_ext import _C, _engine
from rpc_ext._codec import Kind, encode
from rpc_ext._serve import async_execution, expect_free_thread, is_async
from rpc_ext.calls import Worker, rpc_async, rpc_sync
from rpc_ext.session import current

__all__ = ["RRef", "remote"]

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value on one worker, its owner, which any worker may hold.

    It may be sent along with calls. The value lives as long as some worker has a reference to it; torch counts them
    (the protocol is torch.distributed.rpc's). ``remote()`` makes one of what a function returns on another worker.

    Args:
        value: what to refer to; this worker is its owner.
    """

    __slots__ = ("_rref",)

    def __init__(self, value: T) -> None:
        current()
        self._rref: Any = _engine.RRef(CUDAFuture.completed(value))

    @classmethod
    def _of(cls, rref: Any) -> RRef[Any]:
        new = cls.__new__(cls)
        new._rref = rref
        return new

    def __reduce__(self) -> Any:
        return RRef._of, (self._rref,)

    def __repr__(self) -> str:
        return f"<RRef owned by '{self.owner_name()}'>"

    def owner(self) -> WorkerInfo:
        """Return torch's WorkerInfo of the owner."""
        return self._rref.owner()  # type: ignore[no-any-return]

    def owner_name(self) -> str:
        """Return the name of the owner."""
        return self._rref.owner_name()  # type: ignore[no-any-return]

    def is_owner(self) -> bool:
        """Say whether the value lives in this process."""
        return self._rref.is_owner()  # type: ignore[no-any-return]

    def confirmed_by_owner(self) -> bool:
        """Say whether the owner is known to have this reference."""
        return self._rref.confirmed_by_owner()  # type: ignore[no-any-return]

    def get_future(self, *, timeout: float | None = None, priority: int = 0) -> CUDAFuture[T]:
        """Return a future of the value, copied here from its owner; on the owner, of the value itself.

        It fails with what the function has raised that was to make the value.
        """
        if self.is_owner():
            return self._value()
        return rpc_async(self.owner_name(), _fetch, (self,), timeout=timeout, priority=priority)

    def to_here(self, timeout: float | None = None) -> T:
        """Wait for the value, copied here from its owner: ``get_future().wait()``."""
        with expect_free_thread("RRef.to_here()"):
            return self.get_future(timeout=timeout).wait()

    def local_value(self) -> T:
        """Return the value, on its owner, when it is there.

        Raises:
            RuntimeError: this worker is not the owner.
        """
        future: CUDAFuture[T] = self._rref.local_value()
        return future.wait(non_blocking=True)

    def rpc_async(self, timeout: float | None = None) -> Any:
        """Return a proxy: its methods are the value's, called on the owner, and return futures.

        ``rref.rpc_async().method(1)`` is like ``rpc_async(rref.owner(), method of the value, (1,))``.
        """
        return _Proxy(self, lambda *call: rpc_async(self.owner_name(), _invoke, call, timeout=timeout))

    def rpc_sync(self, timeout: float | None = None) -> Any:
        """Return a proxy like that of ``rpc_async``, which waits and returns values."""
        return _Proxy(self, lambda *call: rpc_sync(self.owner_name(), _invoke, call, timeout=timeout))

    def remote(self, timeout: float | None = None) -> Any:
        """Return a proxy like that of ``rpc_async``, which returns RRefs to what the methods return."""
        return _Proxy(self, lambda *call: remote(self.owner_name(), _invoke, call, timeout=timeout))

    def _value(self) -> CUDAFuture[T]:
        """Return a future of the value, on its owner; it may still have to be made."""
        there: CUDAFuture[None] = CUDAFuture()
        _C.when_owned(self._rref, lambda: there.set_result(None))
        return there.then_async(lambda _: self._rref.local_value())


class _Proxy:
    __slots__ = ("_call", "_rref")

    def __init__(self, rref: RRef[Any], call: Callable[..., Any]) -> None:
        self._rref, self._call = rref, call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("__"):
            raise AttributeError(method)
        return lambda *args, **kwargs: self._call(self._rref, method, args, kwargs)


def remote(
    to: Worker,
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> RRef[T]:
    """Call ``fn(*args, **kwargs)`` on another worker, which keeps what it returns; return a reference to that at once.

    For the arguments see ``rpc_async``. What `fn` raises comes out of the reference when the value is asked for.
    Arguments on devices that TensorPipe cannot carry are waited for.
    """
    session = current()
    if not callable(fn):
        raise TypeError(f"remote() takes a callable, not {fn!r}")
    destination = session.destination(to)
    call = (session.rank, fn, tuple(args), kwargs or {})
    encoded = encode(Kind.CALL, call, destination.devices)
    tensors = encoded.tensors
    if encoded.targets is not None:
        tensors = copy(tensors, "cpu").wait()
    made = _engine.remote(destination.name, _make, (encoded.payload, tensors), timeout=session.timeout(timeout))
    return RRef._of(made)


def _make(payload: bytes, tensors: list[torch.Tensor]) -> CUDAFuture[Any]:
    """Make the value of an RRef, on its owner: torch keeps the future."""
    return current().server.evaluate(payload, tensors)


@async_execution
def _fetch(rref: RRef[T]) -> CUDAFuture[T]:
    return rref._value()


@async_execution
def _invoke(rref: RRef[Any], method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CUDAFuture[Any]:
    def call(value: CUDAFuture[Any]) -> CUDAFuture[Any]:
        bound = getattr(value.value(), method)
        outcome = bound(*args, **kwargs)
        if not is_async(bound):
            return CUDAFuture.completed(outcome)
        return CUDAFuture.from_torch(outcome)  # a CUDAFuture stays what it is

    return rref._value().then_async(call)
