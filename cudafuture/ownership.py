"""Ownership of tensors by operations in progress, which CUDAFUTURE_DEBUG=ownership checks.

The bytes of a host tensor that an operation only reads are hashed at the call, and again when the operation releases
the tensor. For other tensors the counter of in-place changes is compared. All parts of a tensor have one counter, so a
part is checked by its bytes, or not at all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from cudafuture import _C, _xxhash
from cudafuture._frames import call_site
from cudafuture._tensors import find_tensors
from cudafuture.config import config
from cudafuture.errors import InvalidStateError, OwnershipError
from cudafuture.executors import callback_thread

__all__ = ["owns", "tensors_by_key", "tensors_in"]

ENABLED = config.debug_ownership
F = TypeVar("F", bound=Callable[..., Any])


def owns(operation: str, tensors_of: Callable[..., Mapping[str, torch.Tensor]]) -> Callable[[F], F]:
    """Return a decorator of a function that owns tensors until the future that it returns has released them.

    Without CUDAFUTURE_DEBUG=ownership the decorator returns the function unchanged.

    Args:
        operation: for the message.
        tensors_of: returns the tensors, given the arguments of the function, by the names that the message uses.

    >>> from cudafuture import CUDAFuture
    >>> @owns("sum", lambda tensor: {"the tensor": tensor})
    ... def summed(tensor):
    ...     return CUDAFuture.completed(tensor.sum())
    >>> summed(torch.ones(2)).wait()
    tensor(2.)
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                tensors = tensors_of(*args, **options)
            except TypeError:  # an argument is missing: the function names it
                tensors = {}
            return checked(function, operation, tensors, *args, **options)

        return call if ENABLED else function  # type: ignore[return-value]

    return decorate


def tensors_in(value: object) -> dict[str, torch.Tensor]:
    """Return the tensors in a value, named by their positions.

    >>> tensors_in([torch.zeros(1), "text", torch.ones(1)])
    {'tensor 0': tensor([0.]), 'tensor 1': tensor([1.])}
    """
    return {f"tensor {i}": tensor for i, tensor in enumerate(find_tensors(value))}


def tensors_by_key(tensors: object) -> dict[str, torch.Tensor]:
    """Return the values of a mapping, named by their keys. Anything else is for the function that it was passed to.

    >>> tensors_by_key({"weight": torch.ones(1)})
    {"the tensor of key 'weight'": tensor([1.])}
    """
    items = tensors.items() if isinstance(tensors, Mapping) else ()
    return {f"the tensor of key {key!r}": tensor for key, tensor in items}


def checked(
    function: Callable[..., _C.CUDAFuture[Any]],
    operation: str,
    tensors: Mapping[str, Any],
    /,
    *args: Any,
    **options: Any,
) -> _C.CUDAFuture[Any]:
    """Call a function that reads tensors; its future fails if one of them changes before it is released."""
    loans = [_Loan(name, tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)]
    return _guarded(function(*args, **options), operation, loans)


def checked_in_place(
    future: _C.CUDAFuture[Any], operation: str, tensors: list[torch.Tensor], result: _C.CUDAFuture[Any]
) -> _C.CUDAFuture[Any]:
    """Give `result` the outcome of a collective that was begun, and that may fill tensors without counting it.

    Gloo counts that it fills the outputs of gathers and reduce-scatters, so their host tensors are not checked.
    """
    is_counted = "gather" in operation or "reduce_scatter" in operation
    loans = [_Loan("a tensor", tensor, is_filled=True) for tensor in tensors if not (is_counted and tensor.is_cpu)]
    return _guarded(future, operation, loans, result)


class _Loan:
    """Tensor that an operation owns."""

    def __init__(self, name: str, tensor: torch.Tensor, is_filled: bool = False) -> None:
        self.name, self._tensor = name, tensor
        self._digest = None if is_filled else _digest(tensor)
        self._memory = None if self._digest is None else _memory(tensor)
        is_strided = tensor.layout is torch.strided and not tensor.is_nested
        is_whole = is_strided and tensor.nbytes == tensor.untyped_storage().nbytes()
        self._version = tensor._version if is_whole and not tensor.is_inference() else None

    def has_changed(self) -> bool:
        """Return whether the tensor has changed since the call."""
        if self._memory is not None and _memory(self._tensor) != self._memory:  # it may be freed: do not hash it
            return True
        if self._digest is not None and _digest(self._tensor) != self._digest:
            return True
        return self._version is not None and self._tensor._version != self._version


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _digest(tensor: torch.Tensor) -> int | None:
    """Return a hash of a tensor's bytes; None if they are not on the host."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    _xxhash.install()
    data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return _C.digests_of(data, [(0, data.nbytes)], [0])[0]


def _guarded(
    future: _C.CUDAFuture[Any], operation: str, loans: list[_Loan], result: _C.CUDAFuture[Any] | None = None
) -> _C.CUDAFuture[Any]:
    """Return a future with the outcome of `future`, which fails if a tensor has changed; so does its ``released``."""
    if result is None:
        result = _C.CUDAFuture(name=operation, executor=callback_thread)
        result.set_running_or_notify_cancel()
    where = call_site()

    def check(_: _C.CUDAFuture[Any]) -> None:
        for loan in loans:
            if loan.has_changed():
                raise OwnershipError(
                    f"{operation}: {loan.name} was changed while the operation owned it; the call is at {where}. Wait "
                    "for the future, or for its `released`, before you change the tensor, or pass a copy"
                )

    def settle(_: object) -> None:
        with contextlib.suppress(InvalidStateError):  # the program has cancelled it
            try:
                future.exception()  # retrieves it, also if that of the guard replaces it
                guard.value()
                result.set_result(future.wait(non_blocking=True))
            except BaseException as e:
                _C.fail(result, e)

    guard = (future.released or future).then(check, executor=callback_thread)
    if future.released is not None:
        result.released = guard
    _C.collect_all([guard, future]).add_done_callback(settle, executor=callback_thread)
    return result
