"""Collectives on device tensors that the group's backend cannot carry, through pinned memory of the host.

::

    call ──► copies to the host, on pool streams after the caller's ─────────────────────┐ events
      └────► a place in a serial queue, at once ──► head of the queue, and copies complete ┘
                                                         │ issue, on the queue's own side group
                                                         ▼
                   the Work is done ──► copies to the device, on pool streams ──► the future, with their events

A copy may take longer on one rank than on another. So staged operations are issued in the order of the calls: in a
serial queue, on a side group that only this queue uses. Only operations in that queue wait for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.distributed._flight_recorder import record_collective
from cudafuture.distributed._group import Group
from cudafuture.distributed._operations import DistributedOperation
from cudafuture.distributed._side_group import kind_of
from cudafuture.distributed._staging_buffers import StagingBuffers, are_on_host, each, record
from cudafuture.transfer import complete

if TYPE_CHECKING:
    from cudafuture.distributed._numbered_operation import NumberedOperation

__all__ = ["is_over_gloo", "is_staged", "run", "run_recv", "run_send"]

T = TypeVar("T")
Call = Callable[..., Any]
_HOST = torch.device("cpu")


def is_staged(
    group: Group, process_group: dist.ProcessGroup, operation: DistributedOperation, tensors: tuple[Any, ...]
) -> bool:
    """Return True if the tensors go through the host, because the backend cannot carry their devices.

    Raises:
        ValueError: they are on devices of different types, and some have to go through the host.
    """
    if are_on_host(tensors):
        return False
    kinds = {t.device.type for t in each(tensors)}
    if not any(_is_kind_staged(group, process_group, operation, k) for k in kinds):
        return False
    if len(kinds) > 1:
        raise ValueError(
            f"{operation.name}() was given tensors on {' and '.join(sorted(kinds))}: all must be on devices of one type"
        )
    return True


def _is_kind_staged(group: Group, process_group: dist.ProcessGroup, operation: DistributedOperation, kind: str) -> bool:
    if kind == "cpu":
        return False
    key = operation.name, kind
    if key not in group.staged_kinds:
        group.staged_kinds[key] = _needs_staging(process_group, operation, kind)
    return group.staged_kinds[key]


def _needs_staging(process_group: dist.ProcessGroup, operation: DistributedOperation, kind: str) -> bool:
    backend = kind_of(process_group, torch.device(kind))
    if kind == "meta" or (backend is None and kind_of(process_group, _HOST) is None):
        return False  # no backend can carry it: torch raises
    if backend is not None and backend != "gloo":
        return False
    # torch's Gloo does not check the device in send and recv.
    return not (backend == "gloo" and kind == "cuda" and operation.gloo_copies_cuda)


def is_over_gloo(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if Gloo carries tensors of the device, directly or through the host."""
    return (kind_of(process_group, device) or kind_of(process_group, _HOST)) == "gloo"


def run(
    issue: NumberedOperation,
    process_group: dist.ProcessGroup,
    function: Call,
    value: T,
    tensors: tuple[Any, ...],
    roles: str,
) -> CUDAFuture[T]:
    """Issue a collective that goes through the host: `function` gets staging buffers of `tensors`, and a group.

    The future completes with `value`.
    """
    return _StagedOperation(issue, process_group, lambda _: value).start(function, tensors, roles, issue.group.staged)


def run_send(
    issue: NumberedOperation, process_group: dist.ProcessGroup, function: Call, tensor: torch.Tensor, peer: int
) -> CUDAFuture[None]:
    """Issue a send after those that wait for their copies: the peer matches them by order only."""
    return _StagedOperation[None](issue, process_group, lambda _: None, peer).start(
        function, (tensor,), "r", issue.group.sends
    )


def run_recv(
    issue: NumberedOperation,
    process_group: dist.ProcessGroup,
    function: Call,
    value: Callable[[Any], T],
    tensor: torch.Tensor,
    peer: int = -1,
) -> CUDAFuture[T]:
    """Issue a recv at once, since no copy precedes it. `value` creates the value from the Work."""
    return _StagedOperation(issue, process_group, value, peer).start(function, (tensor,), "w", None)


class _StagedOperation(Generic[T]):
    """One operation that goes through the host."""

    def __init__(
        self, issue: NumberedOperation, process_group: dist.ProcessGroup, value: Callable[[Any], T], peer: int = -1
    ) -> None:
        self.issue, self.process_group, self.value, self.peer = issue, process_group, value, peer

    def start(
        self, function: Call, tensors: tuple[Any, ...], roles: str, queue: _C.HostExecutor | None
    ) -> CUDAFuture[T]:
        """Copy to the host, and take a place in `queue`, or issue at once without a queue."""
        self.queue = queue
        group = self.issue.group
        is_alone = True  # True where an error concerns this rank only: the other ranks issue the operation
        try:
            self.buffers = StagingBuffers(tensors, roles)
            is_alone = False
            self.issue_on = record(self.process_group, function, self.buffers.arguments)
            is_alone = True
            fetched = self.buffers.fetch()
        except BaseException as e:
            if is_alone and queue is not None and isinstance(e, RuntimeError):
                self.issue.issuer.lost = e
            return self.issue.refused(e)
        operation = self.issue.operation
        record_collective(operation, roles, group, self.issue.issuer, self.issue.sequence, self.issue.tensors)
        place, number = self.issue.place_of(self.peer)
        self.future: CUDAFuture[T] = _C.issued(operation.name, group.callbacks, self.issue, place, number, self.peer)
        if queue is None:
            self.begin(fetched)
            return self.future
        if queue is group.sends:
            group.count_sends(1)
        begun = fetched.then(self.begin, executor=queue, non_blocking=not _C.has_sync_edge("staging.out_done"))
        begun.add_done_callback(self.check, executor=_C.inline_executor)
        return self.future

    def begin(self, fetched: CUDAFuture[None]) -> None:
        """Issue the operation on the host; called when its copies are complete and it is at the head of the queue."""
        issue, group = self.issue, self.issue.group
        try:
            self.require_step(fetched)
            self.work = self.issue_on(self.communicator())
            host = _C.collective(
                self.work, None, issue.operation.name, group.callbacks, issue, group.timeout, None, issue.sequence
            )
        except BaseException as e:
            self.future.set_exception(issue.error(e))
        else:
            host.add_done_callback(self.end, executor=_C.callback_thread)

    def check(self, begun: CUDAFuture[None]) -> None:
        """Leave the queue; fail the future if begin() could not be called because the device is broken."""
        if self.queue is self.issue.group.sends:
            self.issue.group.count_sends(-1)
        error = begun.exception()
        if error is not None and not self.future.done():
            self.issue.issuer.lost = error
            self.future.set_exception(self.issue.error(error))

    def require_step(self, fetched: CUDAFuture[None]) -> None:
        """Raise if the copies failed, or if an earlier operation was not issued for such a reason."""
        if self.issue.group.is_broken:
            raise RuntimeError("the group's Gloo thread has ended; create a new group")
        if self.queue is None:
            return
        issuer = self.issue.issuer
        if issuer.lost is not None:
            raise RuntimeError(f"out of step with the other ranks: an earlier one was not issued here: {issuer.lost}")
        issuer.lost = fetched.late_error
        if issuer.lost is not None:
            raise issuer.lost

    def communicator(self) -> dist.ProcessGroup:
        """Return the group to issue on: for collectives, the side group of the serial queue."""
        group = self.issue.group
        if self.queue is not group.staged:
            return self.process_group
        name = _C.issuing_serial_queue(group.staged)
        assert name is not None
        side_group = group.side_group(self.process_group, name).process_group
        assert side_group is not None
        return side_group

    def end(self, host: CUDAFuture[Any]) -> None:
        """Copy to the device and complete the future; called when the host has received the data."""
        try:
            error = host.exception()
            if error is not None:
                raise error
            complete(self.future, self.value(self.work), self.buffers.store(), "staging.in_record")
        except BaseException as e:
            self.future.set_exception(self.issue.error(e))
