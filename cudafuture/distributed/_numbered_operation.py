"""Interface of an operation of this rank, with its number, for comparisons and staging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from cudafuture.distributed._group import Group, Issuer
from cudafuture.distributed._operations import DistributedOperation

if TYPE_CHECKING:
    from cudafuture import _C

__all__ = ["NumberedOperation"]


class NumberedOperation(Protocol):
    """Operation with its group, and its number in the order of its issuer."""

    @property
    def operation(self) -> DistributedOperation: ...
    @property
    def group(self) -> Group: ...
    @property
    def issuer(self) -> Issuer: ...
    @property
    def sequence(self) -> int: ...
    @property
    def tensors(self) -> tuple[Any, ...]: ...
    @property
    def is_staged(self) -> bool: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def signature(self) -> str: ...
    def error(self, cause: BaseException) -> BaseException: ...
    def refused(self, error: BaseException) -> _C.CUDAFuture[Any]: ...
    def place_of(self, peer: int) -> tuple[_C.OperationPlace | None, int]: ...
