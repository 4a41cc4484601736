"""Comparison of the two ends of each send and recv, for CUDAFUTURE_DEBUG=order.

The n-th send of a rank to another with a tag belongs to the n-th recv there. Each end writes its entry before it is
issued, and compares it with that of the other end. A message that has arrived is not waited for: if the other end has
no entry, it was issued by torch's own function. An end that torch may still refuse is marked in its entry, and the
other end waits until the entry is final or withdrawn.

The sender of a recv from any rank is known when that recv is done, so only then it is compared. Where it was pending
beside other recvs with its tag, the backend has chosen which message each of them got, and none of them is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

from cudafuture import _C
from cudafuture.distributed._order import Compared, Comparison, refusals
from cudafuture.distributed._order_entry import of_message

if TYPE_CHECKING:
    from cudafuture.distributed._numbered_operation import NumberedOperation

__all__ = ["ComparedMessage", "End", "checked_messages"]

T = TypeVar("T")


class End(NamedTuple):
    """One end of a message."""

    is_send: bool
    peer: int | None
    """The rank of the other end in the group; None: any."""
    tag: int
    carries: str
    """Shape and dtype of the tensor, or the number of objects."""
    sources: Sequence[int] = ()
    """Gets the sender of objects from any rank, as a global rank, when their header has arrived."""


def checked_messages(
    issue: NumberedOperation,
    process_group: dist.ProcessGroup,
    ends: Iterable[End],
    call: Callable[[], _C.CUDAFuture[T]],
) -> _C.CUDAFuture[T]:
    """Issue messages with `call`, show their ends, and return a future that fails if the other ends differ."""
    comparison = Comparison.of(issue.issuer, process_group)
    messages = [ComparedMessage(issue, process_group, comparison, end) for end in ends]
    with comparison.lock:  # messages are numbered in the order of their issue
        for message in messages:
            message.begin()
        try:
            future = call()
        except BaseException:
            for message in messages:
                message.withdraw()
            raise
        if future.done() and future.exception() in refusals:
            for message in messages:
                message.withdraw()
            return future
        for message in messages:
            message.confirm()
    for message in messages:
        future = message.follow(future)
    return future


class ComparedMessage(Compared):
    """One end of a message, compared with the other end."""

    waits_for_all = False

    def __init__(
        self, issue: NumberedOperation, process_group: dist.ProcessGroup, comparison: Comparison, end: End
    ) -> None:
        super().__init__(issue, of_message(issue, end.carries))
        self.process_group = process_group
        self.comparison = comparison
        self.is_send, self.peer, self.tag, _, self.sources = end
        self.is_compared = True
        self.channel = self.key = ""  # of number()

    def begin(self) -> None:
        """Write the entry under the next number, marked as not yet issued; a recv from any rank has neither."""
        if self.peer is not None:
            self.number(self.peer)
            self.comparison.write(self, self.key, {**self.entry, "is_issuing": True})

    def withdraw(self) -> None:
        """Undo begin(): the message was not issued, and the next one has its number."""
        if self.peer is not None:
            self.comparison.messages[self.channel] -= 1
            self.comparison.write(self, self.key, {})

    def confirm(self) -> None:
        """Begin to compare the message, which has been issued."""
        if not self.is_send:
            pending = self.comparison.pending_recvs
            for other in [m for m in pending if m.tag == self.tag]:
                if self.peer is None or other.peer is None:
                    self.skip()
                    other.skip()
            pending.append(self)
        if self.peer is not None and self.is_compared:
            self.comparison.write(self, self.key, self.entry)
            self.comparison.add(self)

    def skip(self) -> None:
        """Compare this recv no longer, neither here nor at the other end."""
        self.is_compared, self.unseen = False, {}
        if self.peer is not None:
            self.comparison.write(self, self.key, {})

    def number(self, peer: int) -> None:
        """Give the message its place among those to or from `peer` with its tag."""
        group, comparison = self.issue.group, self.comparison
        sender, receiver = (group.rank, peer) if self.is_send else (peer, group.rank)
        self.channel = f"{sender}/{receiver}/{self.tag}"
        self.sequence = comparison.messages[self.channel]
        comparison.messages[self.channel] += 1
        self.heading = (
            f"the two ends of message #{self.sequence} from rank {sender} to rank {receiver} with tag {self.tag} on "
            f"group '{group.name}' differ"
        )
        mine, other = ("send", "recv") if self.is_send else ("recv", "send")
        self.key = f"{self.channel}/{self.sequence}/{mine}"
        self.unseen = {peer: f"{self.channel}/{self.sequence}/{other}"}

    def note_end(self, future: _C.CUDAFuture[Any]) -> None:
        """Record that the operation is done, and compare a recv from any rank: its sender is known now."""
        with self.comparison.lock:
            if self in self.comparison.pending_recvs:
                self.comparison.pending_recvs.remove(self)
            if self.peer is not None:
                return
            if not self.sources and future.exception() is None:
                self.sources = [future.wait(non_blocking=True).source]
            for source in self.sources:
                self.number(dist.get_group_rank(self.process_group, source))
                if self.is_compared:
                    self.comparison.add(self)
