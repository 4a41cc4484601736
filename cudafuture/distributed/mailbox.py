"""Mailbox of a rank: messages with tensors to and from the other ranks of a group, on connections of their own.

::

    send() ──► outbox of a rank ──► numbers ─ layout ─ body ─ tensors ──► thread of the other rank ──►
                                    over Gloo                             deliver(rank, message)

The messages of two ranks arrive in the order in which they were sent; no rank has to expect one. Each rank has a thread
that receives for each other rank, so that no message holds up another rank's, and the loss of a rank is noticed at
once, also by ranks that do not wait for it.

What is unpickled was sent by a rank of the group, which must be trusted.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.distributed._backends import backend_for
from cudafuture.distributed._group import group_of, resolve
from cudafuture.distributed._side_group import make_side_group
from cudafuture.errors import InvalidStateError
from cudafuture.transfer import are_dense, plain_view

__all__ = ["Mailbox", "Message"]

_HOST = torch.device("cpu")
_CLOSED = -1  # in place of a channel: the last message of a rank

Tensors = Sequence[torch.Tensor]


class Message(NamedTuple):
    """Message of another rank."""

    channel: int
    numbers: tuple[int, int]
    """Of the sender's choice."""
    layout: Any
    """Object that few messages of a channel change; None: the sender gave none."""
    body: Any
    """Any other object; None: the sender gave none."""
    tensors: list[torch.Tensor]
    """On the host, with the strides of the sender's tensors if these had no gaps."""


class Mailbox:
    """Messages to and from the other ranks of a group.

    All ranks of the group create their mailboxes in the same order.

    Args:
        group: a process group; None: the default one. Its timeout limits how long the ranks wait for each other here.

    Raises:
        ValueError: this rank is not in the group.
        CollectiveError: the other ranks did not arrive.

    >>> box = Mailbox()
    >>> box.open(lambda rank, message: print(message.body), lambda rank, error: print("rank", rank, "is lost"))
    >>> for rank in range(1, box.size):
    ...     box.send(rank, channel=0, body="hello")
    >>> box.close()
    """

    def __init__(self, group: Any = None) -> None:
        process_group = resolve(group)
        if process_group is None:
            raise ValueError("this rank is not in the group")
        self.rank: int = process_group.rank()
        """Of this process, in the group."""
        self.size: int = process_group.size()
        """The number of ranks."""
        self.timeout: float = group_of(process_group).timeout
        """Of the group, in seconds."""
        self._lock = threading.Lock()  # guards the fields below
        self._lost: set[int] = set()
        self._outboxes: dict[int, _Outbox] = {}
        self._is_closed = False
        number = next(group_of(process_group).mailboxes)
        if self.size > 1:
            self._group = make_side_group(process_group, f"mailbox/{number}")
            self._gloo: Any = backend_for(self._group, _HOST)

    def __repr__(self) -> str:
        return f"<Mailbox of rank {self.rank} of {self.size}>"

    def open(
        self, deliver: Callable[[int, Message], object], lost: Callable[[int, BaseException | None], object]
    ) -> None:
        """Begin to receive; call this once.

        Args:
            deliver: called with the sender's rank in the group and the message, on the thread that receives from it.
            lost: called once for a rank that has closed its mailbox (with None), or whose connection has failed.

        >>> Mailbox().open(print, print)
        """
        self._deliver, self._told_lost = deliver, lost
        for rank in range(self.size):
            if rank != self.rank:
                _start(self._receive, rank, f"cudafuture-from-{rank}")

    def send(
        self,
        rank: int,
        channel: int,
        numbers: tuple[int, int] = (0, 0),
        layout: Any = None,
        body: Any = None,
        tensors: Tensors | CUDAFuture[Tensors] = (),
        failed: Callable[[BaseException], object] | None = None,
    ) -> None:
        """Send a message to another rank, behind the earlier ones; never block. A rank that is lost gets nothing.

        Args:
            rank: in the group.
            channel: 0 or greater.
            numbers: integers of 64 bits.
            layout: an object that is sent only if it differs (``!=``) from the last one of this channel.
            body: an object that is always sent.
            tensors: on the host, with strides; or a future of them. They must not change until they have arrived.
            failed: called with an error that kept the message from being sent, such as that of the future.

        Raises:
            InvalidStateError: the mailbox was closed.

        >>> box = Mailbox()
        >>> if box.size > 1:
        ...     box.send((box.rank + 1) % box.size, channel=0, tensors=[torch.ones(2)])
        """
        with self._lock:
            if self._is_closed:
                raise InvalidStateError("the mailbox is closed")
            outbox = self._outboxes.get(rank)
            if outbox is None:
                outbox = self._outboxes[rank] = _Outbox(self, rank)
        outbox.put(_Letter(channel, numbers, layout, body, tensors, failed))

    def flush(self, ranks: Collection[int], timeout: float) -> bool:
        """Wait until all messages to some ranks were sent, for at most `timeout` seconds; return whether they were.

        A message to a stopped process is not sent before that continues.

        >>> Mailbox().flush([0, 1], 1.0)
        True
        """
        with self._lock:
            outboxes = [outbox for rank, outbox in self._outboxes.items() if rank in ranks]
        deadline = time.monotonic() + timeout
        return all(outbox.flush(deadline) for outbox in outboxes)

    def close(self) -> None:
        """Send the other ranks the end of this one's messages, and refuse to send more. Do not block.

        >>> box = Mailbox()
        >>> box.close()
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            outboxes = dict(self._outboxes)
        for rank in range(self.size):
            if rank != self.rank:
                outbox = outboxes.get(rank) or _Outbox(self, rank)
                outbox.put(_Letter(_CLOSED, (0, 0), None, None, (), None))

    # ---- threads

    def _receive(self, rank: int) -> None:
        layouts: dict[int, tuple[Any, list[_Form]]] = {}
        try:
            while True:
                (channel, first, second, has_layout, has_body), parts = _C.receive_message(self._gloo, rank)
                if channel == _CLOSED:
                    self._lose(rank, None)
                    return
                if has_layout:
                    layouts[channel] = _unpickled(parts.pop(0))
                body = _unpickled(parts.pop(0)) if has_body else None
                layout, forms = layouts[channel]
                tensors = [form.tensor_of(part) for form, part in zip(forms, parts, strict=True)]
                self._deliver(rank, Message(channel, (first, second), layout, body, tensors))
                del parts, tensors, body  # the next message may come much later
        except Exception as error:  # a lost connection, or an object that cannot be unpickled here
            self._lose(rank, error)

    def _lose(self, rank: int, error: BaseException | None) -> None:
        with self._lock:
            if rank in self._lost:
                return
            self._lost.add(rank)
        self._told_lost(rank, error)


class _Letter(NamedTuple):
    """Message that waits to be sent."""

    channel: int
    numbers: tuple[int, int]
    layout: Any
    body: Any
    tensors: Tensors | CUDAFuture[Tensors]
    failed: Callable[[BaseException], object] | None


class _Form(NamedTuple):
    """Form of a tensor without gaps."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def tensor_of(self, part: torch.Tensor) -> torch.Tensor:
        return part.view(self.dtype).as_strided(self.shape, self.stride)


class _Outbox:
    """Messages to one rank.

    The caller's thread begins a message whose tensors are on the host. One whose tensors are still copied to the host
    is begun, as those behind it, in a serial queue.
    """

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox, self._rank = mailbox, rank
        self._copies = _C.serial_executor(f"cudafuture-to-{rank}")
        self._lock = threading.RLock()  # guards the fields below, and the order of the messages
        self._layouts: dict[int, Any] = {}
        self._waiting = 0  # messages in the serial queue
        self._last: _C.RankMessage | None = None
        self._is_broken = False

    def put(self, letter: _Letter) -> None:
        """Begin to send a message, behind the earlier ones."""
        with self._lock:
            if not self._waiting and not isinstance(letter.tensors, CUDAFuture):
                self._begin(letter)
                return
            self._waiting += 1
        _C.submit(partial(self._begin_later, letter), self._copies, 0, "message")

    def flush(self, deadline: float) -> bool:
        """Wait until all messages were sent, or cannot be sent; return whether they were, until then."""
        with self._lock:
            waiting, last = self._waiting, self._last
        if waiting:
            begun: CUDAFuture[None] = _C.submit(_nothing, self._copies, 0, "flush")
            with contextlib.suppress(TimeoutError):
                begun.wait(timeout=max(0.0, deadline - time.monotonic()))
            last = self._last
        try:
            return last is None or last.wait(max(0.0, deadline - time.monotonic()))
        except RuntimeError:
            return False

    def _begin_later(self, letter: _Letter) -> None:
        if isinstance(letter.tensors, CUDAFuture):
            letter.tensors.exception()  # waits for the copies without the lock
        with self._lock:
            self._waiting -= 1
            self._begin(letter)

    def _begin(self, letter: _Letter) -> None:
        if self._is_broken:
            return
        try:
            numbers, parts = self._parts_of(letter)
        except BaseException as error:  # of the copy to the host, or of pickling
            if letter.failed is not None:
                letter.failed(error)
            return
        try:
            self._last = _C.send_message(self._mailbox._gloo, self._rank, numbers, parts)
        except RuntimeError:  # the thread that receives from this rank reports it
            self._is_broken = True

    def _parts_of(self, letter: _Letter) -> tuple[list[int], list[torch.Tensor]]:
        given = letter.tensors.wait() if isinstance(letter.tensors, CUDAFuture) else letter.tensors
        tensors = [plain_view(_without_gaps(tensor.detach())) for tensor in given]
        layout = letter.layout, [_Form(t.dtype, tuple(t.shape), t.stride()) for t in tensors]
        pickled = []
        has_layout = self._layouts.get(letter.channel) != layout
        if has_layout:
            pickled.append(_pickled(layout))
            self._layouts[letter.channel] = layout
        if letter.body is not None:
            pickled.append(_pickled(letter.body))
        numbers = [letter.channel, *letter.numbers, has_layout, letter.body is not None]
        return numbers, [*pickled, *map(_bytes_of, tensors)]


def _nothing() -> None:
    """Mark a place in a queue."""


def _pickled(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(part: torch.Tensor) -> Any:
    return pickle.loads(part.numpy().tobytes())


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    return tensor if are_dense(tensor) else tensor.contiguous()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _start(run: Callable[[int], None], rank: int, name: str) -> None:
    """Run a function on a thread of its own, which the exit of the process leaves where it is."""

    def run_leavable() -> None:
        _C.set_leavable(True)  # Gloo's calls cannot be interrupted
        run(rank)

    _C.submit(run_leavable, _C.serial_executor(name), 0, name)
