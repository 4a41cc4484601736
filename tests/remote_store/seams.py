"""Controls of the store tests: a disk that completes nothing, a service that keeps requests, handmade requests."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cudafuture import CUDAFuture, executors
from cudafuture.errors import InvalidStateError
from cudafuture.io import Engine, digest
from remote_store import messages as wire
from rpc_ext import _C, RemoteStore, StoreService
from rpc_ext._channel import Reply
from rpc_ext.store import _calls as services
from rpc_ext.store import client
from rpc_ext.store._handler import RequestHandler
from support.patience import PATIENCE
from support.rpc_callees import wait_for
from support.storing import flip, slabs

if TYPE_CHECKING:
    from rpc_ext._C import MessageListener

VERBS = {"put": wire.PUT, "get": wire.GET, "delete": wire.DELETE, "fetch": wire.FETCH, "abandon": wire.ABANDON}
_sequences = itertools.count(1 << 40)  # of requests that a test makes itself


def make_idle_engine() -> Engine:
    """Return a disk that completes no operation before ``release_held()``."""
    return Engine("threads", queue_depth=8, block_size=1 << 18, _faults={"held": True})


@contextlib.contextmanager
def release_at_end(engine: Engine) -> Iterator[None]:
    """Release the disk also when the test fails: ``close()`` waits for it."""
    try:
        yield
    finally:
        engine._native.release_held()


def spoil(folder: Path, tensor: torch.Tensor) -> Callable[[], None]:
    """Change a bit of a tensor in the files of a store. Return a function that changes it back."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    found = {slab: slab.read_bytes().find(content) for slab in slabs(folder)}
    ((slab, offset),) = ((slab, offset) for slab, offset in found.items() if offset >= 0)
    flip(slab, offset)
    return partial(flip, slab, offset)


class Redirected:
    """A message that a client has sent, whose reply a test takes first.

    Attributes:
        verb: verb of the message.
        answered: gives the client a reply.
    """

    def __init__(self, verb: int, listener: MessageListener) -> None:
        self.verb, self.answered = verb, listener.answered


Answered = Callable[[Redirected, bytes, "list[torch.Tensor]"], None]


@contextlib.contextmanager
def redirect_replies(remote: RemoteStore, answered: Answered) -> Iterator[None]:
    """Call `answered` with the replies to the messages that a client sends in the block, instead of the message."""
    real = remote._window.channel

    class Between:
        def __init__(self, body: bytes, listener: MessageListener) -> None:
            self._message = Redirected(body[1], listener)
            self.failed = listener.failed

        def answered(self, body: bytes, tensors: list[torch.Tensor]) -> None:
            answered(self._message, body, tensors)

    def send(body: bytes, tensors: list[torch.Tensor], seconds: float, listener: MessageListener) -> None:
        real.send(body, tensors, seconds, Between(body, listener))

    remote._window.channel = SimpleNamespace(send=send)
    try:
        yield
    finally:
        remote._window.channel = real


def change_last_byte(body: bytes, tensors: list[torch.Tensor]) -> tuple[bytes, list[torch.Tensor]]:
    """Return a message with another last byte of its data."""
    if not tensors:
        return body[:-1] + bytes([body[-1] ^ 1]), []
    data = tensors[0].clone()
    data[-1] ^= 1
    return body, [data]


@contextlib.contextmanager
def change_one_reply(remote: RemoteStore, verb: int) -> Iterator[None]:
    """Change a byte of the first reply to a message with a verb in the block. Require such a reply."""
    messages: list[Redirected] = []

    def answered(message: Redirected, body: bytes, tensors: list[torch.Tensor]) -> None:
        is_first = message.verb == verb and not messages
        if is_first:
            messages.append(message)
        message.answered(*(change_last_byte(body, tensors) if is_first else (body, tensors)))

    with redirect_replies(remote, answered):
        yield
    assert messages


def expect_idle(remote: RemoteStore) -> None:
    """Wait until no operation is pending: ``close()`` would block until then."""

    def is_idle() -> bool:
        found = remote.statistics()
        return (found.pending, found.in_flight, found.waiting) == (0, 0, 0)

    wait_for(is_idle)


def handler_of(service: StoreService) -> RequestHandler:
    """Return the request handler of a service."""
    return service._handler


def late_requests(name: str = "store") -> int:
    """Return the number of operations that a service of this process has dropped."""
    return services.find_service(name).statistics().late


class _Outcome:
    def __init__(self, verb: int, count: int) -> None:
        self._verb, self._count = verb, count
        self.future: CUDAFuture[wire.Answer] = CUDAFuture(executor=executors.inline)

    def answered(self, body: bytes, tensors: list[torch.Tensor]) -> None:
        self.future.set_result(wire.parse_answer(self._verb, self._count, body, tensors))

    def failed(self, error: BaseException) -> None:
        self.future.set_exception(error)


def send(
    remote: RemoteStore,
    verb: int,
    entries: Sequence[Any],
    data: torch.Tensor | None = None,
    *,
    token: bytes | None = None,
    service: str | None = None,
    oldest: int = 0,
) -> CUDAFuture[wire.Answer]:
    """Send a request of a test's own in the session of a client, past its window."""
    outcome = _Outcome(verb, len(entries))
    body, tensors = wire.pack_request(
        verb,
        remote._token if token is None else token,
        time.perf_counter(),
        oldest,
        remote._name if service is None else service,
        entries,
        torch.empty(0, dtype=torch.uint8) if data is None else data,
    )
    remote._window.channel.send(body, tensors, PATIENCE, outcome)
    return outcome.future


def send_body(remote: RemoteStore, body: bytes, tensors: list[torch.Tensor] | None = None) -> CUDAFuture[bytes]:
    """Send any bytes as a request. The future returns the bytes of the answer."""
    future: CUDAFuture[bytes] = CUDAFuture(executor=executors.inline)

    class Listener:
        def answered(self, body: bytes, _: list[torch.Tensor]) -> None:
            future.set_result(body)

        def failed(self, error: BaseException) -> None:
            future.set_exception(error)

    remote._window.channel.send(body, tensors or [], PATIENCE, Listener())
    return future


def in_time(seconds: float = PATIENCE) -> float:
    """Return the expiry of a request of a test's own."""
    return time.perf_counter() + seconds


def change_of(key: str, *, sequence: int | None = None, after: int = 0, expires: float | None = None) -> wire.KeyEntry:
    """Return the entry of a deletion, or of an operation that is abandoned."""
    return wire.KeyEntry(
        next(_sequences) if sequence is None else sequence, after, in_time() if expires is None else expires, key
    )


def put_of(
    key: str,
    tensor: torch.Tensor,
    *,
    part: int = 0,
    at: int = 0,
    sequence: int | None = None,
    after: int = 0,
    expires: float | None = None,
) -> tuple[wire.Put, torch.Tensor]:
    """Return the entry of a tensor on the host, or of one part of it, and its bytes."""
    data = tensor.contiguous().view(-1).view(torch.uint8)[part * wire.PART : (part + 1) * wire.PART].clone()
    change = change_of(key, sequence=sequence, after=after, expires=expires)
    entry = wire.Put(*change, tensor.dtype, tuple(tensor.shape), tensor.nbytes, part, at, data.numel(), digest(data))
    return entry, data


def set_timeout(remote: RemoteStore, seconds: float) -> None:
    """Give a client another timeout, for requests that it submits from now on and that no earlier one outlives."""
    remote._timeout = remote._window.seconds = seconds


class HandledInPython:
    """A block in which ``RequestHandler.handle``, or a replacement of it, handles messages instead of native code."""

    _depth = 0
    _lock = threading.Lock()

    def __init__(self, handle: Callable[..., None]) -> None:
        self._handle = handle

    def __enter__(self) -> HandledInPython:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(RequestHandler, "handle", self._handle)
        self._count(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._count(-1)
        self._patch.undo()

    @classmethod
    def _count(cls, step: int) -> None:
        with cls._lock:
            HandledInPython._depth += step
            _C.use_native_handler(services.CHANNEL, HandledInPython._depth == 0)


class Arrivals:
    """A counter of the requests that the services of this process handle, until the end of the block."""

    handled = 0

    def __enter__(self) -> Arrivals:
        real = RequestHandler.handle
        lock = threading.Lock()
        Arrivals.handled = 0

        def count(handler: RequestHandler, body: bytes, tensors: list[torch.Tensor], reply: Reply) -> None:
            try:
                real(handler, body, tensors, reply)
            finally:
                with lock:
                    Arrivals.handled += 1

        self._handled = HandledInPython(count)
        self._handled.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._handled.__exit__(kind, error, at)


def count_requests() -> int:
    """Return the number of requests that ``Arrivals`` has counted in this process."""
    return Arrivals.handled


class Departures:
    """A counter of the requests that clients opened in the block send."""

    def __init__(self) -> None:
        self.sent = 0

    def __enter__(self) -> Departures:
        self._patch = pytest.MonkeyPatch()
        real = client.channel  # type: ignore[attr-defined]
        lock = threading.Lock()

        def make_channel(*arguments: Any) -> Any:
            channel = real(*arguments)

            def count(body: bytes, tensors: list[torch.Tensor], seconds: float, to: MessageListener) -> None:
                channel.send(body, tensors, seconds, to)
                with lock:
                    self.sent += 1

            return SimpleNamespace(send=count)

        self._patch.setattr(client, "channel", make_channel)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._patch.undo()


class Lost:
    """Calls of a service that are delayed in a block and get no answer, as when a connection stalls.

    Args:
        kind: begin, end, keys or stat: a method of the request handler that returns at once.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._goes_on = threading.Event()
        self.made: deque[None] = deque()
        """one entry for each call that has been made in the end"""

    def release_held(self) -> None:
        """Make all delayed calls now."""
        self._goes_on.set()

    def __enter__(self) -> Lost:
        self._patch = pytest.MonkeyPatch()
        real: Callable[..., Any] = getattr(RequestHandler, self._kind)

        def wait(handler: RequestHandler, *args: object) -> Any:
            assert self._goes_on.wait(PATIENCE)
            try:
                return real(handler, *args)
            finally:
                self.made.append(None)

        self._patch.setattr(RequestHandler, self._kind, wait)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._patch.undo()
        self._goes_on.set()


class Kept:
    """Requests that the services of this process keep until the test continues or fails them.

    Args:
        kind: put, get, delete, fetch or abandon.
    """

    def __init__(self, kind: str) -> None:
        self._verb = VERBS[kind]
        self._come: queue.Queue[CUDAFuture[None]] = queue.Queue()
        self._kept: list[CUDAFuture[None]] = []

    def next(self) -> CUDAFuture[None]:
        """Wait for the next request, and return a future: its completion lets the service handle the request."""
        return self._come.get(timeout=PATIENCE)

    def has_more(self) -> bool:
        """Return True if another request has arrived."""
        return not self._come.empty()

    def __enter__(self) -> Kept:
        real = RequestHandler.handle

        def keep(handler: RequestHandler, body: bytes, tensors: list[torch.Tensor], reply: Reply) -> None:
            if body[1] != self._verb:
                real(handler, body, tensors, reply)
                return
            goes_on: CUDAFuture[None] = CUDAFuture()
            self._kept.append(goes_on)
            self._come.put(goes_on)
            goes_on.add_done_callback(lambda _: real(handler, body, tensors, reply), executor=executors.inline)

        self._handled = HandledInPython(keep)
        self._handled.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Keep no later request. If the test has failed, release the kept ones too."""
        self._handled.__exit__(kind, error, at)
        for goes_on in self._kept if error is not None else ():
            with contextlib.suppress(InvalidStateError):  # it has gone on
                goes_on.set_result(None)
