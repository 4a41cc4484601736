"""The callee's half of a call: it decodes the call, runs the function and replies.

::

    RPC worker thread:  payload ──► decode ──► fn(*args) ──► encode ──► Reply.send
                                                  │             ▲
                                                  └── a future ─┘   later, on another thread; none blocks until then
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from cudafuture import CUDAFuture, collect_all, current_streams, use_streams
from cudafuture.errors import InvalidStateError
from cudafuture.executors import inline
from cudafuture.timer import expire
from rpc_ext import _C, _failure, _handlers, _staging
from rpc_ext._codec import (
    ATOMS,
    NO_DEVICES,
    DeviceMap,
    PayloadKind,
    decode,
    decode_with_owners,
    encode,
    has_rrefs,
    kind_of,
    targets_of,
)
from rpc_ext._device_order import DeviceOrder

__all__ = ["Server", "async_execution", "expect_free_thread", "is_async", "is_serving"]

F = TypeVar("F", bound=Callable[..., Any])
Answer = tuple[bytes, "list[torch.Tensor]"]
"""payload and tensors of a reply, which the agent can carry"""
Outcome = tuple[int, Any, bool]
"""the caller's rank, the function's result, and whether that is a future of the value to send"""


def async_execution(fn: F) -> F:
    """Mark a function that returns a CUDAFuture, so that the reply to its callers is the future's outcome.

    The callee replies when the future completes, in the order of its device work, and blocks no thread until then. So
    functions that call further workers can be nested to any depth. The future may be of any operation: a collective,
    another call, a read from disk. The function may also return a torch.futures.Future. The decorator goes below or
    above ``@staticmethod`` and ``@classmethod``.

    >>> @async_execution
    ... def later(x):
    ...     return CUDAFuture.completed(x)
    >>> later(3).wait()
    3
    """
    if not callable(fn) and not isinstance(fn, (staticmethod, classmethod)):
        raise TypeError(f"async_execution decorates a function, not {fn!r}")
    target: Any = fn.__func__ if isinstance(fn, (staticmethod, classmethod)) else fn
    target._rpc_ext_async_execution = True
    return fn


def is_async(fn: Any) -> bool:
    """Return whether a function has the ``async_execution`` decorator, ours or torch's."""
    return getattr(fn, "_rpc_ext_async_execution", False) or hasattr(fn, "_wrapped_async_rpc_function")


class _ThreadState(threading.local):
    server: Server | None = None  # server of the call that this thread runs


_thread_state = _ThreadState()


class _ReplyCounter:
    """A callback that counts the reply to a call. Its destructor counts a call whose future was dropped.

    It takes no lock, because garbage collection may drop it anywhere.
    """

    __slots__ = ("_number", "_open")

    def __init__(self, open_calls: set[int], number: int) -> None:
        self._open, self._number = open_calls, number

    def __call__(self, _: object) -> None:
        self._open.discard(self._number)

    def __del__(self) -> None:
        self._open.discard(self._number)


class Server:
    """The incoming calls of this worker.

    Args:
        name: name of this worker.
        num_threads: number of the agent's threads.
        patience: timeout in seconds of the owners' confirmations of RRefs; 0: no limit.
    """

    def __init__(self, name: str, num_threads: int, patience: float = 0) -> None:
        self.name, self.order = name, DeviceOrder()
        self.served = 0  # calls that have begun
        self._num_threads, self._patience = num_threads, patience
        self._devices: dict[int, DeviceMap] = {}  # by caller
        self._lock = threading.Lock()  # guards served and _blocked; a leaf
        self._blocked = 0  # threads of the agent that wait for a reply
        self._open: set[int] = set()  # numbers of the calls without a reply; not under the lock
        self._awaited: set[CUDAFuture[Any]] = set()  # not under the lock
        self._is_closed = False

    def set_devices(self, devices: dict[int, DeviceMap]) -> None:
        """Set the target devices of the tensors in replies, by caller."""
        self._devices = devices
        self.order.set_devices(device for of in devices.values() for device in (*of.native, *of.staged))

    def fail_at_end(self, future: CUDAFuture[Any]) -> None:
        """Fail a future that waits for an RRef at the end of the session, or at once if it has ended."""
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard, executor=inline)
        if self._is_closed:  # checked last: close() may not have seen the future
            _fail(future)

    def close(self) -> None:
        """Fail the futures that wait for other workers, and stop ordering device work."""
        self._is_closed = True
        for future in list(self._awaited):
            _fail(future)
        self.order.close()

    @property
    def serving(self) -> int:
        """The number of calls that have begun and have no reply yet."""
        return len(self._open)

    def serve(self, payload: bytes, tensors: list[torch.Tensor], reply: _C.Reply) -> None:
        """Handle a message and reply. Called by a thread of the agent. Raises nothing."""
        outer, _thread_state.server = _thread_state.server, self
        try:
            kind = kind_of(payload)
            if kind == PayloadKind.CHANNEL:
                _handlers.serve(payload, tensors, reply)
                return
            if kind == PayloadKind.BATCH:
                answer = self._answer_batch(decode(payload, []), tensors)
            else:
                answer = self._answer(payload, tensors)
        except BaseException as e:
            answer = self._failed(e)
        finally:
            _thread_state.server = outer
        if isinstance(answer, CUDAFuture):
            answer.then(lambda done: reply.send(*self._of_future(done)))
        else:
            reply.send(*answer)

    # ---- one call

    def _answer(self, payload: bytes, tensors: list[torch.Tensor]) -> Answer | CUDAFuture[Answer]:
        """Run a call; return its reply, or a future of the reply."""
        number = self._begin()
        try:
            targets = targets_of(payload)
            if targets is None:
                return self._pack_outcome(*self._run(payload, tensors), number)
            with _staging.streams_for(targets):  # the reply's tensors are also read on them
                tensors = _staging.to_devices(tensors, targets)
                return self._pack_outcome(*self._run(payload, tensors), number)
        except BaseException as e:
            self._open.discard(number)
            return self._failed(e)

    def _begin(self) -> int:
        """Count a call; return its number."""
        with self._lock:
            number = self.served = self.served + 1
        self._open.add(number)
        return number

    def _run(self, payload: bytes, tensors: list[torch.Tensor]) -> Outcome:
        if has_rrefs(payload):
            return self._run_when_confirmed(payload, tensors)
        return self._call(*decode(payload, tensors))

    def _call(self, caller: int, fn: Any, args: Any, kwargs: Any) -> Outcome:
        outcome = self.order.call(caller, fn, args, kwargs)
        if not is_async(fn):
            return caller, outcome, False
        if isinstance(outcome, torch.futures.Future):
            outcome = CUDAFuture.from_torch(outcome)
        if not isinstance(outcome, CUDAFuture):
            name = getattr(fn, "__qualname__", None) or repr(fn)
            raise TypeError(f"{name} is decorated with async_execution and must return a CUDAFuture, not {outcome!r}")
        return caller, outcome, True

    def _pack_outcome(self, caller: int, outcome: Any, is_future: bool, number: int) -> Answer | CUDAFuture[Answer]:
        """Return the reply to a call, or a future of it, and count the reply when it is ready."""
        answer: Answer | CUDAFuture[Answer]
        if is_future:
            answer = outcome.then_async(functools.partial(self._later_answer, caller))
        else:
            answer = self._packed(outcome, caller)
        if isinstance(answer, CUDAFuture):
            answer.add_done_callback(_ReplyCounter(self._open, number), executor=inline)
        else:
            self._open.discard(number)
        return answer

    def _later_answer(self, caller: int, outcome: CUDAFuture[Any]) -> CUDAFuture[Answer]:
        self.order.add_future(caller, outcome)
        try:
            answer = self._packed(outcome.value(), caller)
        except BaseException as e:
            answer = self._failed(_failure.without_frame(e))
        return answer if isinstance(answer, CUDAFuture) else CUDAFuture.completed(answer)

    def _packed(self, value: object, caller: int) -> Answer | CUDAFuture[Answer]:
        """Return the reply with a value, or a future of it if tensors go through the host."""
        if isinstance(value, CUDAFuture):
            raise TypeError(
                "a function that returns a CUDAFuture must be decorated with @rpc_ext.async_execution: then the caller "
                "gets the outcome of the future"
            )
        encoded = encode(PayloadKind.VALUE, value, self._devices.get(caller, NO_DEVICES))
        if encoded.targets is None:
            return encoded.payload, encoded.tensors
        copies = _staging.to_host(encoded.tensors, encoded.targets, 0, 0)
        return copies.then(lambda done: (encoded.payload, done.value()))

    def _of_future(self, answer: CUDAFuture[Any]) -> Any:
        """Return the reply in a future, ordered on the current streams."""
        try:
            return answer.wait(non_blocking=True)
        except BaseException as e:  # the producer dropped the future before it was done
            return self._failed(e)

    def _failed(self, error: BaseException) -> Answer:
        return encode(PayloadKind.FAILURE, tuple(_failure.describe(error, self.name))).payload, []

    # ---- RRefs

    def evaluate(self, payload: bytes, tensors: list[torch.Tensor]) -> CUDAFuture[Any]:
        """Run a call of ``remote``; return a future of its outcome, which stays on this worker."""
        try:
            with self._in_this_thread():
                _, outcome, is_future = self._run(payload, tensors)
                return outcome if is_future else CUDAFuture.completed(outcome)
        except BaseException as e:
            return CUDAFuture.failed(e)

    @contextlib.contextmanager
    def _in_this_thread(self) -> Iterator[None]:
        outer, _thread_state.server = _thread_state.server, self
        try:
            yield
        finally:
            _thread_state.server = outer

    def _run_when_confirmed(self, payload: bytes, tensors: list[torch.Tensor]) -> Outcome:
        """Run a call with RRefs as arguments after their owners have confirmed them, possibly later."""
        _C.record_rrefs()
        try:
            call, owners = decode_with_owners(payload, tensors)
        except BaseException:
            _C.forget_rrefs()
            raise
        streams = current_streams(dict.fromkeys(tensor.device for tensor in tensors))

        def run(done: CUDAFuture[None]) -> CUDAFuture[Any]:
            done.value()  # raises if an owner has not confirmed
            with self._in_this_thread(), use_streams(*streams):
                _, outcome, is_future = self._call(*call)
                return outcome if is_future else CUDAFuture.completed(outcome)

        caller: int = call[0]
        return caller, self._confirmed(owners).then_async(run), True

    def _confirmed(self, owners: set[str]) -> CUDAFuture[None]:
        """Return a future that is done when `owners` have confirmed the RRefs that this thread has just received."""
        confirmed: CUDAFuture[None] = CUDAFuture()

        def confirm() -> None:
            with contextlib.suppress(InvalidStateError):  # too late
                confirmed.set_result(None)

        _C.when_rrefs_are_confirmed(confirm)
        if not confirmed.done():
            who = ", ".join(f"'{owner}'" for owner in sorted(owners)) or "an RRef's owner"
            message = f"worker {who} has not confirmed the RRef that is an argument within {self._patience:g} s"
            self.fail_at_end(confirmed)
            expire(confirmed, self._patience, message)
        return confirmed

    # ---- batches

    def _answer_batch(self, message: Any, tensors: list[torch.Tensor]) -> Answer | CUDAFuture[Answer]:
        """Run the calls of a batch one after the other; return the reply, or a future of it. See _batching."""
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
        # Replies that are ready become futures, whose events order the tensors for the sending thread.
        futures = [answer if isinstance(answer, CUDAFuture) else CUDAFuture.completed(answer) for answer in answers]
        return collect_all(futures).then(lambda _: _together([self._of_future(future) for future in futures]))

    def _answer_direct(
        self, caller: int, functions: dict[int, Any], table: Mapping[int, bytes], place: int, args: tuple[Any, ...]
    ) -> Any:
        """Run a call with plain values as arguments; a result that is a plain value is the reply itself."""
        number = self._begin()
        try:
            fn = functions.get(place)
            if fn is None:
                fn = functions[place] = decode(table[place], [])
            _, outcome, is_future = self._call(caller, fn, args, {})
            if type(outcome) in ATOMS:
                self._open.discard(number)
                return outcome
            return self._pack_outcome(caller, outcome, is_future, number)
        except BaseException as e:
            self._open.discard(number)
            return self._failed(e)

    # ---- threads

    @contextlib.contextmanager
    def blocking(self, what: str) -> Iterator[None]:
        """Allow this thread to block inside the context; see ``expect_free_thread``."""
        with self._lock:
            if self._blocked + 1 >= self._num_threads:
                raise InvalidStateError(
                    f"{what} on an RPC worker thread would never end: {self._blocked} of the {self._num_threads} "
                    "threads of this worker wait already, and none would be left for the reply. Return a future from "
                    "a function that is decorated with @rpc_ext.async_execution, or raise num_worker_threads"
                )
            self._blocked += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocked -= 1


def _together(answers: list[Any]) -> Answer:
    """Return the reply to a batch from the replies to its calls."""
    parts: list[Any] = []
    tensors: list[torch.Tensor] = []
    for answer in answers:
        if type(answer) in ATOMS:
            parts.append(answer)
        else:
            payload, part = answer
            parts.append((payload, len(part)))
            tensors += part
    return encode(PayloadKind.BATCH, parts).payload, tensors


def _fail(future: CUDAFuture[Any]) -> None:
    with contextlib.suppress(InvalidStateError):  # it is done
        future.set_exception(InvalidStateError("RPC was shut down before an RRef was confirmed or had a value"))


def is_serving() -> bool:
    """Return whether this thread runs a function for another worker."""
    return _thread_state.server is not None


def expect_free_thread(what: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which this thread may wait for a reply.

    Raises:
        InvalidStateError: this is an RPC worker thread, and no other one would be left to deliver the reply.
    """
    server = _thread_state.server
    return contextlib.nullcontext() if server is None else server.blocking(what)
