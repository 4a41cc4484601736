"""The one way that every collective takes: find who issues, number it, call torch, follow the Work.

::

    collectives.broadcast(t, src=0)
        begin("broadcast", group, (t,))       whose order is it in? which number?
        Issue.run(call, value)                call(process group) -> Work -> CUDAFuture[value]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cudafuture import _C
from cudafuture.config import config
from cudafuture.distributed import _gloo, _order
from cudafuture.distributed._group import Group, Issuer, group_of, resolve
from cudafuture.errors import CollectiveError

__all__ = ["Issue", "begin", "begin_beside", "begin_in_line", "nothing"]

T = TypeVar("T")


class Issue:
    """One operation that this rank has issued, or is about to."""

    __slots__ = ("_tensors", "group", "issuer", "operation", "process_group", "sequence")

    def __init__(self, operation: str, group: Group, issuer: Issuer, tensors: tuple[Any, ...]) -> None:
        self.operation = operation
        self.group = group
        self.issuer = issuer
        self.sequence = -1  # until it is issued
        self._tensors = tuple([_facts(t, operation) for t in tensors])  # not the tensors: futures may live for long

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of every tensor that was given, in order."""
        return tuple(tuple(shape) for shape, _ in _flat(self._tensors))

    @property
    def signature(self) -> str:
        """The tensors that were given, as ``float32[4, 2]``."""
        return ", ".join(_text(facts) for facts in self._tensors)

    def error(self, cause: BaseException) -> BaseException:
        """Return what the future fails with when torch reports `cause`; called by the native module, too."""
        if isinstance(cause, CollectiveError) or not isinstance(cause, RuntimeError):
            return cause
        group = self.group
        beside = f" in lane '{self.issuer.lane}'" if self.issuer.lane is not None else ""
        tensors = f" of {self.signature}" if self._tensors else ""
        why = str(cause).strip() or type(cause).__name__
        if _gloo.failures:
            why += f". Before that Gloo met a message of another size than expected, and its thread ended: the ranks \
did not all give tensors of the same shape and dtype. It said: {_gloo.failures[-1]}"
        error = CollectiveError(
            f"{self.operation} #{self.sequence}{beside} on group '{group.name}', rank {group.rank} of {group.size}"
            f"{tensors}: {why}",
            operation=self.operation,
            group=group.name,
            rank=group.rank,
            sequence=self.sequence,
            shapes=self.shapes,
        )
        error.__cause__ = cause
        return error

    def follow(self, work: Any, value: T) -> _Future[T]:
        """Return the future of a Work that has been issued."""
        group = self.group
        return _C.collective(work, value, self.operation, group.callbacks, self, group.timeout)

    def run(self, process_group: dist.ProcessGroup, call: Callable[[dist.ProcessGroup], Any], value: T) -> _Future[T]:
        """Issue it: `call` gets the group to issue on and returns a Work. The future completes with `value`."""
        try:
            work = call(self.issuer.process_group or process_group)
        except RuntimeError as e:  # anything else is about the arguments, and raised here and now
            self.sequence = next(self.issuer.count)
            return _failed(self, e)
        self.sequence = next(self.issuer.count)
        future: _Future[T] = self.follow(work, value)
        return _order.checked(future, self, process_group) if config.debug_order else future

    def run_in_line(
        self, process_group: dist.ProcessGroup, call: Callable[[dist.ProcessGroup], object], value: T
    ) -> _Future[T]:
        """Issue one that blocks: `call` runs on a thread of the library, behind those that were issued before it."""
        group = self.group
        self.sequence = next(self.issuer.count)
        future: _Future[T] = _C.issued(self.operation, group.callbacks, self)

        def run() -> None:
            try:
                companion = group.issuer(process_group).process_group
                assert companion is not None, "it runs in a lane"
                call(companion)
            except BaseException as e:
                future.set_exception(self.error(e))
            else:
                future.set_result(value)

        _C.submit(run, group.objects, 0, self.operation)
        return future


_Future = _C.CUDAFuture


def _failed(issue: Issue, cause: BaseException) -> _Future[Any]:
    future: _Future[Any] = _C.issued(issue.operation, issue.group.callbacks, issue)
    future.set_exception(issue.error(cause))
    return future


def begin(operation: str, group: Any, tensors: tuple[Any, ...]) -> tuple[Issue, dist.ProcessGroup] | None:
    """Begin an operation on `group`; None where this rank is not in it.

    Raises:
        ValueError: a tensor is not contiguous.
        InvalidStateError: issued by a callback that has no order among those of the other ranks.
        CollectiveError: issued by a callback, and the companion group for it could not be made.
    """
    process_group = resolve(group)
    if process_group is None:
        return None
    state = group_of(process_group)
    return Issue(operation, state, state.issuer(process_group), tensors), process_group


def begin_in_line(operation: str, group: Any) -> tuple[Issue, dist.ProcessGroup] | None:
    """Like `begin`, for what runs in a line of its own (`Issue.run_in_line`), which has a group of its own."""
    begun = begin_beside(operation, group, ())
    if begun is not None:
        _C.issuing_lane(begun[0].group.callbacks)  # raises where there is no order
    return begun


def begin_beside(operation: str, group: Any, tensors: tuple[Any, ...]) -> tuple[Issue, dist.ProcessGroup] | None:
    """Like `begin`, for what is matched by its peer and its tag: it needs no order."""
    process_group = resolve(group)
    if process_group is None:
        return None
    state = group_of(process_group)
    return Issue(operation, state, state.beside, tensors), process_group


def nothing() -> _Future[Any]:
    """Return what a rank outside of the group gets."""
    return _C.CUDAFuture.completed(None)


# They work on memory, element by element: any layout without gaps does that is the same on every rank.
_ELEMENTWISE = {"all_reduce", "all_reduce_coalesced", "broadcast", "reduce"}


def _facts(tensors: Any, operation: str) -> Any:
    """Return shape and dtype of each tensor; None for what is none, which torch will complain of.

    Raises:
        ValueError: a tensor that is not contiguous: the backends take its memory as if it were.
    """
    if isinstance(tensors, torch.Tensor):
        if tensors.layout is torch.strided and not (tensors.is_contiguous() or _is_fit(tensors, operation)):
            raise ValueError(
                f"{operation}() takes contiguous tensors, and one of shape {list(tensors.shape)} has the strides "
                f"{list(tensors.stride())}; give it tensor.contiguous(), and copy the result back"
            )
        return tensors.shape, tensors.dtype
    if isinstance(tensors, (list, tuple)):
        return [_facts(t, operation) for t in tensors]
    return None


def _is_fit(tensor: torch.Tensor, operation: str) -> bool:
    """Say whether the memory of a tensor that is not contiguous has no gaps, and the operation does not mind."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return operation in _ELEMENTWISE and tensor.permute(by_stride).is_contiguous()


def _flat(facts: Iterable[Any]) -> Iterable[tuple[torch.Size, torch.dtype]]:
    for one in facts:
        if isinstance(one, list):
            yield from _flat(one)
        elif one is not None:
            yield one


def _text(facts: Any) -> str:
    if isinstance(facts, list):
        return f"[{', '.join(_text(f) for f in facts)}]"
    if facts is None:
        return "None"
    shape, dtype = facts
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
