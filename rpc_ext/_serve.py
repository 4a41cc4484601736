"""The callee's side: a call comes in, a function runs, an answer goes out.

::

    RPC worker thread:  payload ──► decode ──► fn(*args) ──► encode ──► Reply.send
                                                  │             ▲
                                                  └── a future ─┘   later, and on another thread: none is held meanwhile

A batch is several payloads in one. It is answered when all of its calls are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cudafuture import CUDAFuture, collect_all, current_streams, use_streams
from cudafuture.errors import InvalidStateError
from rpc_ext import _C, _failure, _handlers, _staging
from rpc_ext._awaited import Awaited
from rpc_ext._codec import (
    ATOMS,
    NO_DEVICES,
    DeviceMap,
    Kind,
    decode,
    decode_with_owners,
    encode,
    has_rrefs,
    is_plain,
    kind_of,
    targets_of,
)
from rpc_ext._device_order import DeviceOrder
from rpc_ext._timer import expire

__all__ = ["Server", "expect_free_thread", "is_serving"]

Answer = tuple[bytes, "list[torch.Tensor]"]
"""The payload of an answer, and its tensors, which the agent can carry."""


class _Threads(threading.local):
    server: Server | None = None  # whose call this thread runs


_threads = _Threads()


class _End:
    """A callback that counts a call as answered; so does dropping it with a future that nobody completes any more.

    No lock: garbage collection may drop it anywhere.
    """

    __slots__ = ("_number", "_open")

    def __init__(self, open_calls: set[int], number: int) -> None:
        self._open, self._number = open_calls, number

    def __call__(self, _: object) -> None:
        self._open.discard(self._number)

    def __del__(self) -> None:
        self._open.discard(self._number)


class Server:
    """Answers the calls that come to this worker."""

    def __init__(self, name: str, num_threads: int, patience: float = 0) -> None:
        self.name = name
        self._patience = patience  # seconds that owners of RRefs have to confirm them; 0: no limit
        self.awaited = Awaited()
        """what waits for RRefs here: for owners to confirm them, and for the values of this worker's own; it fails when
        the session ends"""
        self._num_threads = num_threads
        self._devices: dict[int, DeviceMap] = {}  # by caller
        self.order = DeviceOrder()
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._begun = self._blocked = 0
        self._open: set[int] = set()  # numbers of the calls that have no answer yet; not under the lock

    def set_devices(self, devices: dict[int, DeviceMap]) -> None:
        """Set which of the callers' devices the tensors of answers go to."""
        self._devices = devices
        self.order.set_devices(device for of in devices.values() for device in (*of.native, *of.staged))

    def close(self) -> None:
        """Fail the futures that wait for other workers, and order no more device work."""
        self.awaited.close()
        self.order.close()

    @property
    def served(self) -> int:
        """Calls that were begun."""
        return self._begun

    @property
    def serving(self) -> int:
        """Calls that were begun and not answered yet."""
        return len(self._open)

    def serve(self, payload: bytes, tensors: list[torch.Tensor], reply: _C.Reply) -> None:
        """Answer what has come; called by the agent, in one of its threads. Raises nothing."""
        outer, _threads.server = _threads.server, self
        try:
            kind = kind_of(payload)
            if kind == Kind.CHANNEL:
                _handlers.serve(payload, tensors, reply)
                return
            if kind == Kind.BATCH:
                answer = self._answer_batch(decode(payload, []), tensors)
            else:
                answer = self._answer(payload, tensors)
        except BaseException as e:
            answer = self._failed(e)
        finally:
            _threads.server = outer
        if isinstance(answer, CUDAFuture):
            answer.then(lambda done: reply.send(*self._of_future(done)))
        else:
            reply.send(*answer)

    # ---- one call

    def evaluate(self, payload: bytes, tensors: list[torch.Tensor]) -> CUDAFuture[Any]:
        """Run a call of ``remote``, whose outcome stays here."""
        try:
            with self._in_this_thread():
                _, outcome, is_future = self._run(payload, tensors)
                return outcome if is_future else CUDAFuture.completed(outcome)
        except BaseException as e:
            return CUDAFuture.failed(e)

    @contextlib.contextmanager
    def _in_this_thread(self) -> Iterator[None]:
        outer, _threads.server = _threads.server, self
        try:
            yield
        finally:
            _threads.server = outer

    def _answer(self, payload: bytes, tensors: list[torch.Tensor]) -> Answer | CUDAFuture[Answer]:
        """Run a call and return what its caller gets, or a future of that."""
        number = self._begin()
        try:
            with _streams_of(payload):  # the answer's tensors are read on them, too
                caller, outcome, is_future = self._run(payload, tensors)
                return self._answer_with(outcome, is_future, caller, number)
        except BaseException as e:
            return self._answer_with(CUDAFuture.failed(e), True, -1, number)

    def _answer_with(self, outcome: Any, is_future: bool, caller: int, number: int) -> Answer | CUDAFuture[Answer]:
        answer: Answer | CUDAFuture[Answer]
        try:
            if is_future:
                answer = outcome.then_async(functools.partial(self._later_answer, caller))
            else:
                answer = self._packed(outcome, caller)
        except BaseException as e:
            answer = self._failed(e)
        if isinstance(answer, CUDAFuture):
            answer.add_done_callback(_End(self._open, number))
        else:
            self._open.discard(number)
        return answer

    def _run(self, payload: bytes, tensors: list[torch.Tensor]) -> tuple[int, Any, bool]:
        """Return the caller, and what the function has returned: a value, or a future."""
        if not is_plain(payload):
            if (targets := targets_of(payload)) is not None:
                tensors = _staging.to_devices(tensors, targets)
            if has_rrefs(payload):
                return self._run_when_confirmed(payload, tensors)
        return self.order.call(decode(payload, tensors))

    def _run_when_confirmed(self, payload: bytes, tensors: list[torch.Tensor]) -> tuple[int, Any, bool]:
        """Run a call with RRefs as arguments when their owners have confirmed them, which may be later."""
        _C.record_rrefs()
        try:
            call, owners = decode_with_owners(payload, tensors)
        except BaseException:
            _C.forget_rrefs()
            raise
        streams = current_streams(dict.fromkeys(tensor.device for tensor in tensors))

        def run(done: CUDAFuture[None]) -> CUDAFuture[Any]:
            done.value()  # raises where an owner has not
            with self._in_this_thread(), use_streams(*streams):
                _, outcome, is_future = self.order.call(call)
                return outcome if is_future else CUDAFuture.completed(outcome)

        caller: int = call[0]
        return caller, self._confirmed(owners).then_async(run), True

    def _confirmed(self, owners: set[str]) -> CUDAFuture[None]:
        """Return a future that is done when owners have confirmed the RRefs that this thread has just received."""
        confirmed: CUDAFuture[None] = CUDAFuture()

        def confirm() -> None:
            with contextlib.suppress(InvalidStateError):  # too late
                confirmed.set_result(None)

        _C.when_rrefs_are_confirmed(confirm)
        if not confirmed.done():
            who = ", ".join(f"'{owner}'" for owner in sorted(owners)) or "an RRef's owner"
            message = f"worker {who} has not confirmed the RRef that came as an argument within {self._patience:g} s"
            self.awaited.add(confirmed)
            expire(confirmed, self._patience, message)
        return confirmed

    def _later_answer(self, caller: int, outcome: CUDAFuture[Any]) -> CUDAFuture[Answer]:
        self.order.add_future(caller, outcome)
        try:
            answer = self._packed(outcome.value(), caller)
        except BaseException as e:
            answer = self._failed(_failure.without_frame(e))
        return answer if isinstance(answer, CUDAFuture) else CUDAFuture.completed(answer)

    def _packed(self, value: object, caller: int) -> Answer | CUDAFuture[Answer]:
        """Return the message with a value; where its tensors go through the host, a future of that."""
        if isinstance(value, CUDAFuture):
            raise TypeError(
                "a function that returns a CUDAFuture is decorated with @rpc_ext.async_execution: the caller gets "
                "the outcome of the future"
            )
        encoded = encode(Kind.VALUE, value, self._devices.get(caller, NO_DEVICES))
        if encoded.targets is None:
            return encoded.payload, encoded.tensors
        answer: CUDAFuture[Answer] = CUDAFuture()

        def staged(tensors: list[torch.Tensor] | None, error: BaseException | None) -> None:
            try:
                answer.set_result(self._failed(error) if tensors is None else (encoded.payload, tensors))
            except BaseException as e:  # the caller gets this error
                answer.set_exception(e)

        _staging.to_host(encoded.tensors, encoded.targets, 0, 0, staged)
        return answer

    def _of_future(self, answer: CUDAFuture[Any]) -> Any:
        """Return the answer that a future has, for the current streams."""
        try:
            return answer.wait(non_blocking=True)
        except BaseException as e:  # of a future that was dropped before anybody completed it
            return self._failed(e)

    def _failed(self, error: BaseException | None) -> Answer:
        assert error is not None
        return encode(Kind.FAILURE, tuple(_failure.describe(error, self.name))).payload, []

    def _begin(self) -> int:
        """Count a call, and return its number."""
        with self._lock:
            number = self._begun = self._begun + 1
        self._open.add(number)
        return number

    # ---- batches

    def _answer_batch(self, message: Any, tensors: list[torch.Tensor]) -> Answer | CUDAFuture[Answer]:
        """Run the calls of a message one after the other; for its form see _batching."""
        caller, table, calls = message
        functions: dict[int, Any] = {}
        carried = iter(tensors)
        answers = [
            self._answer_direct(caller, functions, table, how, what)
            if type(how) is int
            else self._answer(how, list(itertools.islice(carried, what)))
            for how, what in calls
        ]
        if not any(isinstance(answer, CUDAFuture) for answer in answers):
            return _together(answers)
        # Complete answers as futures, too: their events order their tensors, which another thread sends.
        futures = [answer if isinstance(answer, CUDAFuture) else CUDAFuture.completed(answer) for answer in answers]
        return collect_all(futures).then(lambda _: _together([self._of_future(future) for future in futures]))

    def _answer_direct(
        self, caller: int, functions: dict[int, Any], table: Mapping[int, bytes], place: int, args: tuple[Any, ...]
    ) -> Any:
        """Run a call of plain values; a plain value is its own answer."""
        number = self._begin()
        try:
            fn = functions.get(place)
            if fn is None:
                fn = functions[place] = decode(table[place], [])
            _, outcome, is_future = self.order.call((caller, fn, args, {}))
            if type(outcome) in ATOMS:
                self._open.discard(number)
                return outcome
        except BaseException as e:
            outcome, is_future = CUDAFuture.failed(e), True
        return self._answer_with(outcome, is_future, caller, number)

    # ---- threads

    @contextlib.contextmanager
    def blocking(self, what: str) -> Iterator[None]:
        """See ``expect_free_thread``."""
        with self._lock:
            if self._blocked + 1 >= self._num_threads:
                raise InvalidStateError(
                    f"{what} on an RPC worker thread would wait for ever: {self._blocked} of the {self._num_threads} "
                    "threads of this worker wait already, and none would be left for the answer. Return a future from "
                    "a function that is decorated with @rpc_ext.async_execution, or raise num_worker_threads"
                )
            self._blocked += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocked -= 1


def _together(answers: list[Any]) -> Answer:
    """Return the message with the answers to the calls of a batch, of which plain values stand for themselves."""
    parts: list[Any] = []
    tensors: list[torch.Tensor] = []
    for answer in answers:
        if type(answer) in ATOMS:
            parts.append(answer)
        else:
            payload, part = answer
            parts.append((payload, len(part)))
            tensors += part
    return encode(Kind.BATCH, parts).payload, tensors


_NO_STREAMS = contextlib.nullcontext()


def _streams_of(payload: bytes) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a call runs: with streams of its own, where its tensors go to devices."""
    targets = None if is_plain(payload) else targets_of(payload)
    return _NO_STREAMS if targets is None else _staging.streams_for(targets)


def is_serving() -> bool:
    """Return whether this thread runs a function that a worker has called."""
    return _threads.server is not None


def expect_free_thread(what: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which this thread may wait for an answer.

    An RPC worker thread may only if another is left for that.

    Raises:
        InvalidStateError: none is left.
    """
    server = _threads.server
    return contextlib.nullcontext() if server is None else server.blocking(what)
