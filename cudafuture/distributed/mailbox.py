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

import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.distributed._backends import backend_for
from cudafuture.distributed._group import group_of, resolve
from cudafuture.distributed._side_group import make_side_group
from cudafuture.errors import CUDAFutureError, InvalidStateError
from cudafuture.graph_breaks import break_graphs
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
    """On the host, with the strides of the sender's tensors if these had no gaps. Those that shared memory share it."""


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
        self._process = os.getpid()
        self._is_closed = False
        number = next(group_of(process_group).mailboxes)
        self._outboxes: dict[int, _Outbox] = {}
        if self.size > 1:
            self._group = make_side_group(process_group, f"mailbox/{number}", lives_with_group=False)
            self._gloo: Any = backend_for(self._group, _HOST)
            self._outboxes = {rank: _Outbox(self._gloo, rank) for rank in range(self.size) if rank != self.rank}

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
        if self._is_closed:
            raise InvalidStateError("the mailbox is closed")
        if os.getpid() != self._process:
            raise InvalidStateError("the mailbox belongs to the process that this one was forked from")
        self._outboxes[rank].put(_Letter(channel, numbers, layout, body, tensors, failed))

    def flush(self, ranks: Collection[int], timeout: float) -> bool:
        """Wait until all messages to some ranks were sent, for at most `timeout` seconds; return whether they were.

        Few messages to a stopped process are sent before that continues.

        >>> Mailbox().flush([0, 1], 1.0)
        True
        """
        outboxes = [outbox for rank, outbox in self._outboxes.items() if rank in ranks]
        deadline = time.monotonic() + timeout
        return all(outbox.flush(deadline) for outbox in outboxes)

    def close(self) -> None:
        """Send the other ranks the end of this one's messages, and refuse to send more. Do not block.

        The connections are closed when all ranks have done so. In a forked process, nothing happens.

        >>> box = Mailbox()
        >>> box.close()
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        for outbox in self._outboxes.values():
            outbox.put(_Letter(_CLOSED, (0, 0), None, None, (), None))

    # ---- threads

    def _receive(self, rank: int) -> None:
        layouts: dict[int, tuple[Any, list[_Form]]] = {}
        receiver = _C.RankMessageReceiver(self._gloo, rank)
        while True:
            try:
                (channel, first, second, has_layout, has_body), parts = receiver.receive()
            except RuntimeError as error:
                self._told_lost(rank, error)
                return
            if channel == _CLOSED:
                self._told_lost(rank, None)
                return
            try:
                if has_layout:
                    layouts[channel] = _unpickled(parts.pop(0))
                body = _unpickled(parts.pop(0)) if has_body else None
                layout, forms = layouts[channel]
                tensors = [form.tensor_of(parts) for form in forms]
                self._deliver(rank, Message(channel, (first, second), layout, body, tensors))
            except Exception as error:
                self._told_lost(
                    rank, CUDAFutureError(f"rank {self.rank} cannot read a message of rank {rank}: {error!r}")
                )
                return
            del parts, tensors, body  # the next message may come much later


class _Letter(NamedTuple):
    """Message that waits to be sent."""

    channel: int
    numbers: tuple[int, int]
    layout: Any
    body: Any
    tensors: Tensors | CUDAFuture[Tensors]
    failed: Callable[[BaseException], object] | None

    def fail(self, error: BaseException) -> None:
        if self.failed is not None:
            self.failed(error)


class _Form(NamedTuple):
    """Form of a tensor, and its place in the parts of a message. Tensors that share memory share a part."""

    part: int
    offset: int
    """In bytes, a multiple of the size of an element."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor_of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor in a received part."""
        empty = torch.empty(0, dtype=self.dtype, device=_HOST)
        storage = parts[self.part].untyped_storage()
        return empty.set_(storage, self.offset // self.dtype.itemsize, self.shape, self.stride)


def _divided(tensors: list[torch.Tensor]) -> tuple[list[_Form], list[torch.Tensor]]:
    """Return the forms of tensors, and the parts of bytes that hold them."""
    forms: dict[int, _Form] = {}
    parts: list[torch.Tensor] = []
    for places in _neighbours(tensors):
        if len(places) == 1:
            tensor = _without_gaps(tensors[places[0]])
            forms[places[0]] = _Form(len(parts), 0, tensor.dtype, tuple(tensor.shape), tensor.stride())
            parts.append(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8))
            continue
        spans = [_span(tensors[i]) for i in places]
        start, end = min(first for first, _ in spans) // 16 * 16, max(last for _, last in spans)
        for i, (first, _) in zip(places, spans, strict=True):
            forms[i] = _Form(len(parts), first - start, tensors[i].dtype, tuple(tensors[i].shape), tensors[i].stride())
        storage = tensors[places[0]].untyped_storage()
        parts.append(torch.empty(0, dtype=torch.uint8, device=_HOST).set_(storage, start, (end - start,), (1,)))
    return [forms[i] for i in range(len(tensors))], parts


def _neighbours(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Return the indices of the tensors: those whose ranges in one storage overlap are together."""
    if len(tensors) == 1:
        return [[0]]
    groups: list[list[int]] = []
    last: tuple[int, int] = (0, 0)  # the storage, and the end of the group
    order = sorted((tensor.untyped_storage().data_ptr(), *_span(tensor), i) for i, tensor in enumerate(tensors))
    for storage, start, end, i in order:
        if groups and storage == last[0] and start < last[1] and end > start:
            groups[-1].append(i)
            last = storage, max(end, last[1])
        else:
            groups.append([i])
            last = storage, end
    return groups


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind its last."""
    size, start = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return start * size, start * size
    elements = 1 + sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + elements) * size


class _Outbox:
    """Messages to one rank.

    The caller's thread begins a message whose tensors are on the host. One whose tensors are still copied to the host
    is begun, as those behind it, in a serial queue.
    """

    def __init__(self, gloo: Any, rank: int) -> None:
        self._sender = _C.RankMessageSender(gloo, rank)
        self._copies = _C.serial_executor(f"cudafuture-to-{rank}")
        self._lock = threading.RLock()  # guards the fields below, and the order of the messages
        self._layouts: dict[int, Any] = {}
        self._waiting = 0  # messages in the serial queue
        self._is_broken = False

    def put(self, letter: _Letter) -> None:
        """Begin to send a message, behind the earlier ones."""
        error = None
        with self._lock:
            if self._waiting or isinstance(letter.tensors, CUDAFuture):
                self._waiting += 1
                _C.submit(partial(self._begin_later, letter), self._copies, 0, "message")
            else:
                error = self._begin(letter)
        if error is not None:
            letter.fail(error)

    def flush(self, deadline: float) -> bool:
        """Wait until all messages were sent, or cannot be sent; return whether they were, until then."""
        with self._lock:
            waiting = self._waiting
        if waiting:
            begun: CUDAFuture[None] = _C.submit(_nothing, self._copies, 0, "flush")
            try:
                begun.wait(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return False
        return self._sender.wait(max(0.0, deadline - time.monotonic()))

    def _begin_later(self, letter: _Letter) -> None:
        if isinstance(letter.tensors, CUDAFuture):
            letter.tensors.exception()  # waits for the copies without the lock
        with self._lock:
            self._waiting -= 1
            error = self._begin(letter)
        if error is not None:
            letter.fail(error)

    def _begin(self, letter: _Letter) -> BaseException | None:
        """Begin to send a message; return the error of a copy to the host or of pickling, which keeps it here."""
        if self._is_broken:
            return None
        try:
            layout, numbers, parts = self._parts_of(letter)
        except Exception as error:
            return error
        try:
            self._sender.send(numbers, parts)
            self._layouts[letter.channel] = layout
        except RuntimeError:  # the thread that receives from this rank reports it
            self._is_broken = True
        return None

    def _parts_of(self, letter: _Letter) -> tuple[Any, list[int], list[torch.Tensor]]:
        given = letter.tensors.wait() if isinstance(letter.tensors, CUDAFuture) else letter.tensors
        forms, parts = _divided([plain_view(_resolved(tensor.detach())) for tensor in given])
        layout = letter.layout, forms
        has_layout = self._layouts.get(letter.channel) != layout
        pickled = [_pickled(layout)] if has_layout else []
        if letter.body is not None:
            pickled.append(_pickled(letter.body))
        numbers = [letter.channel, *letter.numbers, has_layout, letter.body is not None]
        return layout, numbers, [*pickled, *parts]


def _nothing() -> None:
    """Mark a place in a queue."""


def _pickled(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(part: torch.Tensor) -> Any:
    return pickle.loads(part.numpy().tobytes())


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.is_conj() or tensor.is_neg() else tensor


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if are_dense(tensor) else tensor.contiguous()


def _start(run: Callable[[int], None], rank: int, name: str) -> None:
    """Run a function on a thread of its own, which the exit of the process leaves where it is."""

    def run_leavable() -> None:
        _C.set_leavable(True)  # Gloo's calls cannot be interrupted
        run(rank)

    _C.submit(run_leavable, _C.serial_executor(name), 0, name)


break_graphs(Mailbox)
