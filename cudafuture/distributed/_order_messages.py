"""Comparison of the two ends of each send and recv, for CUDAFUTURE_DEBUG=order.

The n-th send of a rank to another with a tag belongs to the n-th recv there. Each end writes its entry before it is
issued, and compares it with that of the other end. A message that has arrived is not waited for: if the other end has
no entry, it was issued by torch's own function.

The sender of a recv from any rank is known when that recv is done, so only then it is compared. Where it was pending
beside other recvs with its tag, the backend has chosen which message each of them got, and none of them is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

from cudafuture import _C
from cudafuture.distributed._order import Compared, Comparison
from cudafuture.distributed._order_entry import of_message

if TYPE_CHECKING:
    from cudafuture.distributed._issue import Issue

__all__ = ["End", "Message", "checked_messages"]

T = TypeVar("T")


class End(NamedTuple):
    """One end of a message."""

    is_send: bool
    peer: int | None
    """The rank of the other end in the group; None: any."""
    tag: int
    carries: str
    """Shape and dtype of the tensor, or the number of objects."""


def checked_messages(
    issue: Issue, process_group: dist.ProcessGroup, ends: Iterable[End], call: Callable[[], _C.CUDAFuture[T]]
) -> _C.CUDAFuture[T]:
    """Show the ends of messages, issue them with `call`, and return a future that fails if the other ends differ."""
    comparison = Comparison.of(issue.issuer, process_group)
    messages = [Message(issue, process_group, comparison, end) for end in ends]
    for message in messages:
        message.begin()
    try:
        future = call()
    except BaseException:
        for message in messages:
            message.withdraw()
        raise
    for message in messages:
        future = message.follow(future)
    return future


class Message(Compared):
    """One end of a message, compared with the other end."""

    waits_for_all = False

    def __init__(self, issue: Issue, process_group: dist.ProcessGroup, comparison: Comparison, end: End) -> None:
        super().__init__(issue, of_message(issue, end.carries))
        self.process_group = process_group
        self.comparison = comparison
        self.is_send, self.peer, self.tag, _ = end
        self.is_compared = True

    def begin(self) -> None:
        """Write the entry, unless this is a recv from any rank."""
        if not self.is_send:
            with self.comparison.lock:
                beside = [m for m in self.comparison.pending_recvs if m.tag == self.tag]
                for other in beside:
                    if self.peer is None or other.peer is None:
                        self.is_compared = other.is_compared = False
                self.comparison.pending_recvs.append(self)
        if self.peer is not None:
            self.count(self.peer, writes=True)

    def count(self, peer: int, writes: bool) -> None:
        """Count the message, and begin to compare it with the end of `peer`."""
        group, comparison = self.issue.group, self.comparison
        sender, receiver = (group.rank, peer) if self.is_send else (peer, group.rank)
        self.channel = f"{sender}/{receiver}/{self.tag}"
        with comparison.lock:
            self.sequence = comparison.messages[self.channel]
            comparison.messages[self.channel] += 1
        if not self.is_compared:
            return
        self.heading = (
            f"the ranks of group '{group.name}' give different tensors for message #{self.sequence} from rank {sender} "
            f"to rank {receiver} with tag {self.tag}"
        )
        key = f"{self.channel}/{self.sequence}"
        mine, other = ("send", "recv") if self.is_send else ("recv", "send")
        self.unseen = {peer: f"{key}/{other}"}
        comparison.add(self, f"{key}/{mine}" if writes else None)

    def note_end(self, future: _C.CUDAFuture[Any]) -> None:
        """Record that the operation is done, and compare a recv from any rank: its sender is known now."""
        self.leave()
        if self.peer is None and future.exception() is None:
            value = future.wait(non_blocking=True)  # a Received, or the sender
            self.count(dist.get_group_rank(self.process_group, getattr(value, "source", value)), writes=False)

    def leave(self) -> None:
        """Remove a recv from those that are pending."""
        with self.comparison.lock:
            if self in self.comparison.pending_recvs:
                self.comparison.pending_recvs.remove(self)

    def withdraw(self) -> None:
        """Undo begin(): the message was not issued."""
        self.leave()
        self.comparison.remove(self)
        if self.peer is not None:
            with self.comparison.lock:
                self.comparison.messages[self.channel] -= 1
