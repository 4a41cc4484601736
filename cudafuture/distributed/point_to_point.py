"""Point-to-point operations: send, recv and batches of them, each returning a CUDAFuture.

They are matched by peer, tag and their own order, not by the order of collectives, so callbacks may use them freely.
Each pending operation on Gloo has its own thread, which blocks until the operation ends. Any number may be pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from cudafuture import _C
from cudafuture._arguments import expect_int
from cudafuture._C import CUDAFuture
from cudafuture.combine import gather
from cudafuture.distributed import _issue, _staged
from cudafuture.distributed._group import rank_in
from cudafuture.distributed._issue import Issue, begin_beside, nothing
from cudafuture.distributed._operations import BATCH_ISEND_IRECV, RECV, SEND
from cudafuture.distributed._order_entry import text_of
from cudafuture.distributed._order_messages import End, checked_messages

__all__ = ["Received", "batch_isend_irecv", "irecv", "isend", "recv", "send"]

T = TypeVar("T")


class Received(NamedTuple):
    """Value of ``recv``."""

    tensor: torch.Tensor
    """The tensor that was passed in, filled."""
    source: int
    """The global rank of the sender."""


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> CUDAFuture[None]:
    """Send `tensor` to global rank `dst`, or to `group_dst` of the group; complete when the tensor may be changed.

    Raises:
        TypeError, ValueError: wrong arguments, as torch raises them.

    >>> peer = 1 - dist.get_rank()  # of two
    >>> sent = send(torch.ones(2), dst=peer)
    >>> recv(torch.empty(2), src=peer).wait().tensor
    tensor([1., 1.])
    >>> sent.wait()
    """
    issued = begin_beside(SEND, group, (tensor,))
    if issued is None:
        return nothing()
    issue, pg = issued
    tag = expect_int("tag", tag)
    peer = peer_in(pg, dst, group_dst, "dst")
    return compared(issue, pg, [(True, peer, tag)], issue_send, issue, pg, tensor, peer, tag)


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> CUDAFuture[Received]:
    """Receive into `tensor` from global rank `src`, or from `group_src` of the group; None: from any rank.

    Raises:
        TypeError, ValueError: wrong arguments, as torch raises them.

    >>> sent = send(torch.ones(2), dst=1 - dist.get_rank())  # to the other of two
    >>> received = recv(torch.empty(2)).wait()
    >>> received.tensor, received.source == 1 - dist.get_rank()
    (tensor([1., 1.]), True)
    """
    issued = begin_beside(RECV, group, (tensor,))
    if issued is None:
        return nothing()
    issue, pg = issued
    tag = expect_int("tag", tag)
    if src is None and group_src is None:
        return compared(issue, pg, [(False, None, tag)], issue_recv_from_anyone, issue, pg, tensor, tag)
    peer = peer_in(pg, src, group_src, "src")
    return compared(issue, pg, [(False, peer, tag)], issue_recv, issue, pg, tensor, peer, tag)


isend = send
irecv = recv


def batch_isend_irecv(p2p_op_list: Sequence[dist.P2POp]) -> CUDAFuture[list[Received | None]]:
    """Issue several ``torch.distributed.P2POp`` at once.

    The value has one entry per operation: :class:`~cudafuture.distributed.point_to_point.Received` for ``irecv``, None
    for ``isend``.

    Raises:
        TypeError, ValueError, RuntimeError: the list is empty or its entries do not fit together.

    >>> peer = 1 - dist.get_rank()  # of two
    >>> out, into = torch.ones(2), torch.empty(2)
    >>> batch_isend_irecv([dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]).wait()
    [None, Received(tensor=tensor([1., 1.]), source=...)]
    """
    ops = list(p2p_op_list)
    if not ops:
        raise ValueError("batch_isend_irecv() takes at least one P2POp")
    dist.distributed_c10d._check_p2p_op_list(ops)
    issued = begin_beside(BATCH_ISEND_IRECV, ops[0].group, tuple(op.tensor for op in ops))
    if issued is None:
        return nothing()
    issue, pg = issued
    ends = [(op.op is dist.isend, op.group_peer, expect_int("tag", op.tag)) for op in ops]
    return compared(issue, pg, ends, _issue_batch, issue, pg, ops)


def _issue_batch(issue: Issue, pg: dist.ProcessGroup, ops: list[dist.P2POp]) -> CUDAFuture[list[Received | None]]:
    if issue.is_staged or any(_is_behind_others(issue, op.tensor) for op in ops):
        return gather(*[_issue_alone(issue, pg, op) for op in ops])
    values = [_value_of(op, pg) for op in ops]
    works: list[Any] = []

    tensors = tuple(op.tensor for op in ops)

    def issue_all(*_: torch.Tensor, **__: Any) -> Any:  # each operation names its tensor and the group itself
        works.extend(BATCH_ISEND_IRECV.function(ops))
        return works[0]

    if pg._get_backend(ops[0].tensor.device).supports_coalescing:  # one Work for all operations
        return issue.run(pg, issue_all, values, tensors)
    for op in ops:
        peer_in(pg, None, op.group_peer, "peer")
    first = issue.run(pg, issue_all, values[0], tensors, peer=ops[0].group_peer)
    if not works:  # refused
        return gather(first)
    others = [
        issue.follow(pg, work, value, tensor, peer=op.group_peer)
        for work, value, tensor, op in zip(works[1:], values[1:], tensors[1:], ops[1:], strict=True)
    ]
    return gather(first, *others)


def compared(
    issue: Issue,
    group: dist.ProcessGroup,
    ends: Sequence[tuple[bool, int | None, int]],
    function: Callable[..., CUDAFuture[T]],
    *arguments: Any,
    carries: str | None = None,
    sources: Sequence[int] = (),
) -> CUDAFuture[T]:
    """Call the function, which issues messages; with CUDAFUTURE_DEBUG=order, compare them with their other ends.

    `ends`: for each message, True for a send, the peer, and the tag. `carries`: None: the tensors of `issue`, in order.
    `sources`: as in End.
    """
    if not _issue._compares_order:
        return function(*arguments)
    tensors = [text_of(facts) for facts in issue.tensors] if carries is None else [carries]
    shown = [End(*end, tensor, sources) for end, tensor in zip(ends, tensors, strict=True)]
    return checked_messages(issue, group, shown, partial(function, *arguments))


def peer_in(group: dist.ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    """Return the rank in the group of another rank; raise ValueError if it is this rank."""
    peer = rank_in(group, rank, group_rank, name)
    if peer == group.rank():
        raise ValueError(f"{name} is this rank itself; give the rank of another process")
    return peer


def issue_send(issue: Issue, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> CUDAFuture[None]:
    """Send a tensor to rank `peer` of the group, behind the sends that wait for their copies to the host."""
    function = partial(SEND.function, tag=tag, group_dst=peer)
    if issue.is_staged or _is_behind_others(issue, tensor):
        return _staged.run_send(issue, group, function, tensor, peer)
    return issue.run(group, function, None, (tensor,), peer=peer)


def _is_behind_others(issue: Issue, tensor: torch.Tensor) -> bool:
    """Return True if sends wait for their copies to the host: a send from the host must not overtake them."""
    return issue.group.sends_waiting > 0 and tensor.is_cpu


def issue_recv(
    issue: Issue, group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int
) -> CUDAFuture[Received]:
    """Receive into a tensor from rank `peer` of the group."""
    function = partial(RECV.function, tag=tag, group_src=peer)
    received = Received(tensor, dist.get_global_rank(group, peer))
    if issue.is_staged:
        return _staged.run_recv(issue, group, function, lambda _: received, tensor, peer)
    return issue.run(group, function, received, (tensor,), peer=peer)


def _issue_alone(issue: Issue, group: dist.ProcessGroup, op: dist.P2POp) -> CUDAFuture[Any]:
    peer = peer_in(group, None, op.group_peer, "peer")
    return (issue_send if op.op is dist.isend else issue_recv)(issue, group, op.tensor, peer, op.tag)


def _value_of(op: dist.P2POp, group: dist.ProcessGroup) -> Received | None:
    if op.op is not dist.irecv:
        return None
    return Received(op.tensor, dist.get_global_rank(group, op.group_peer))


def issue_recv_from_anyone(
    issue: Issue, group: dist.ProcessGroup, tensor: torch.Tensor, tag: int
) -> CUDAFuture[Received]:
    """Receive from any rank; only the completed Work knows the sender."""

    def received_by(work: Any) -> Received:
        return Received(tensor, dist.get_global_rank(group, work._source_rank()))

    function = partial(RECV.function, tag=tag)
    if issue.is_staged:
        return _staged.run_recv(issue, group, function, received_by, tensor)
    work: Any = None

    def keep_work(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        nonlocal work
        work = function(tensor, group=group)
        return work

    received = issue.run(group, keep_work, tensor, (tensor,))
    return with_sender(received, work, issue, group)


def with_sender(
    received: CUDAFuture[torch.Tensor], work: Any, issue: Issue, group: dist.ProcessGroup
) -> CUDAFuture[Received]:
    """Return the future of a recv from any rank: `received`, with the sender that its completed Work knows."""
    result: CUDAFuture[Received] = _C.issued(issue.operation.name, issue.group.callbacks, issue)

    def finish(received: CUDAFuture[torch.Tensor]) -> None:
        try:
            result.set_result(Received(received.value(), dist.get_global_rank(group, work._source_rank())))
        except BaseException as e:  # the group may have been destroyed
            result.set_exception(issue.error(e))

    received.add_done_callback(finish, executor=_C.callback_thread)
    return result
