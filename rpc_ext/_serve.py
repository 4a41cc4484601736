"""The callee's side: a call comes in, a function runs, an answer goes out.

::

    RPC worker thread:  payload ──► decode ──► fn(*args) ──► encode ──► Reply.send
                                                  │             ▲
                                                  └── a future ─┘   later, and on another thread: none is held meanwhile

A batch is several payloads in one. Those of its calls that have no answer yet when the others have are answered with a
number, under which the caller asks again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from cudafuture import CUDAFuture, current_streams, use_streams
from cudafuture.errors import InvalidStateError, NotFoundError
from rpc_ext import _C, _failure, _staging
from rpc_ext._codec import ATOMS, NO_DEVICES, DeviceMap, Kind, decode, encode, has_rrefs, is_plain, kind_of, targets_of
from rpc_ext._promises import Promises

__all__ = ["Server", "async_execution", "expect_free_thread", "is_async", "is_serving"]

F = TypeVar("F", bound=Callable[..., Any])
Answer = tuple[bytes, "list[torch.Tensor]"]
"""The payload of an answer, and its tensors, which the agent can carry."""

_KEPT = 600.0  # seconds: a caller asks again at once, or has died


def async_execution(fn: F) -> F:
    """Decorate a function that other workers call and that returns a CUDAFuture: the answer is the future's outcome.

    The answer is sent when the future completes, ordered after its device work, and no thread of the callee's is held
    until then. So functions that call further workers can be nested at will. The future may be of anything: a
    collective, another call, a read from disk. A torch.futures.Future will do, too. It goes below or above
    ``@staticmethod`` and ``@classmethod``.

    >>> @async_execution
    ... def later(x):
    ...     return CUDAFuture.completed(x)
    >>> later(3).wait()
    3
    """
    target: Any = fn.__func__ if isinstance(fn, (staticmethod, classmethod)) else fn
    target._rpc_ext_async_execution = True
    return fn


def is_async(fn: Any) -> bool:
    """Say whether the function returns a future, by our decorator or torch's."""
    return getattr(fn, "_rpc_ext_async_execution", False) or hasattr(fn, "_wrapped_async_rpc_function")


class _Threads(threading.local):
    server: Server | None = None  # whose call this thread runs


_threads = _Threads()


class Server:
    """Answers the calls that come to this worker."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        self.promises = Promises()
        self._num_threads = num_threads
        self._devices: dict[int, DeviceMap] = {}  # by caller
        self._lock = threading.Lock()  # guards what follows; a leaf
        self._begun = self._answered = self._blocked = 0
        self._later: dict[int, tuple[float, CUDAFuture[Answer]]] = {}  # of batched calls, until the caller asks again
        self._numbers = itertools.count()

    def set_devices(self, devices: dict[int, DeviceMap]) -> None:
        """Say which of the callers' devices the tensors of answers go to."""
        self._devices = devices

    @property
    def served(self) -> int:
        """Calls that were begun."""
        return self._begun

    @property
    def serving(self) -> int:
        """Calls that were begun and not answered yet."""
        return self._begun - self._answered

    def serve(self, payload: bytes, tensors: list[torch.Tensor], reply: _C.Reply) -> None:
        """Answer what has come; called by the agent, in one of its threads. Raises nothing."""
        outer, _threads.server = _threads.server, self
        try:
            kind = kind_of(payload)
            if kind == Kind.CALL:
                answer = self._answer(payload, tensors)
            elif kind == Kind.BATCH:
                answer = self._answer_batch(decode(payload, []), tensors)
            elif kind == Kind.KEEP:
                answer = self._keep(payload, tensors)
            else:
                answer = self._kept(decode(payload, []))
        except BaseException as e:
            answer = self._failed(e)
        finally:
            _threads.server = outer
        if isinstance(answer, CUDAFuture):
            answer.then(lambda done: reply.send(*done.value()))
        else:
            reply.send(*answer)

    # ---- one call

    def evaluate(self, payload: bytes, tensors: list[torch.Tensor]) -> CUDAFuture[Any]:
        """Run a call whose outcome stays here."""
        try:
            with self._in_this_thread(), _streams_of(payload):
                _, outcome, is_future = self._run(payload, tensors)
                return outcome if is_future else CUDAFuture.completed(outcome)
        except BaseException as e:
            return CUDAFuture.failed(e)

    def run(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CUDAFuture[Any]:
        """Run a function that torch has called."""
        try:
            with self._in_this_thread():
                _, outcome, is_future = _call((-1, fn, args, kwargs))
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

    def _keep(self, payload: bytes, tensors: list[torch.Tensor]) -> Answer:
        ticket, call = decode(payload, [])
        self.promises.keep(ticket, self.evaluate(call, tensors))
        return encode(Kind.VALUE, None).payload, []

    def _answer(self, payload: bytes, tensors: list[torch.Tensor]) -> Answer | CUDAFuture[Answer]:
        """Run a call and return what its caller gets, or a future of that."""
        with self._lock:
            self._begun += 1
        try:
            with _streams_of(payload):  # the answer's tensors are read on them, too
                caller, outcome, is_future = self._run(payload, tensors)
                return self._answer_with(outcome, is_future, caller)
        except BaseException as e:
            return self._answer_with(CUDAFuture.failed(e), True, -1)

    def _answer_with(self, outcome: Any, is_future: bool, caller: int) -> Answer | CUDAFuture[Answer]:
        answer: Answer | CUDAFuture[Answer]
        try:
            if is_future:
                answer = outcome.then_async(functools.partial(self._later_answer, caller))
            else:
                answer = self._packed(outcome, caller)
        except BaseException as e:
            answer = self._failed(e)
        if isinstance(answer, CUDAFuture):
            answer.add_done_callback(self._count_answer)
        else:
            self._count_answer()
        return answer

    def _run(self, payload: bytes, tensors: list[torch.Tensor]) -> tuple[int, Any, bool]:
        """Return the caller, and what the function has returned: a value, or a future."""
        if is_plain(payload):
            return _call(decode(payload, tensors))
        targets = targets_of(payload)
        if targets is not None:
            tensors = _staging.to_devices(tensors, targets)
        if not has_rrefs(payload):
            return _call(decode(payload, tensors))
        return self._run_when_confirmed(payload, tensors)

    def _run_when_confirmed(self, payload: bytes, tensors: list[torch.Tensor]) -> tuple[int, Any, bool]:
        """Run a call with RRefs as arguments when their owners have confirmed them, which may be later."""
        _C.record_rrefs()
        try:
            call = decode(payload, tensors)
        except BaseException:
            _C.forget_rrefs()
            raise
        confirmed: CUDAFuture[None] = CUDAFuture()
        _C.when_rrefs_are_confirmed(lambda: confirmed.set_result(None))
        streams = current_streams(dict.fromkeys(tensor.device for tensor in tensors))

        def run(_: CUDAFuture[None]) -> CUDAFuture[Any]:
            outer, _threads.server = _threads.server, self
            try:
                with use_streams(*streams):
                    outcome, is_future = _call(call)[1:]
                    return outcome if is_future else CUDAFuture.completed(outcome)
            finally:
                _threads.server = outer

        caller: int = call[0]
        return caller, confirmed.then_async(run), True

    def _later_answer(self, caller: int, outcome: CUDAFuture[Any]) -> CUDAFuture[Answer]:
        try:
            answer = self._packed(outcome.value(), caller)
        except BaseException as e:
            answer = self._failed(e)
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
            answer.set_result(self._failed(error) if tensors is None else (encoded.payload, tensors))

        _staging.to_host(encoded.tensors, encoded.targets, 0, 0, staged)
        return answer

    def _failed(self, error: BaseException | None) -> Answer:
        assert error is not None
        return encode(Kind.FAILURE, tuple(_failure.describe(error, self.name))).payload, []

    def _count_answer(self, _: object = None) -> None:
        with self._lock:
            self._answered += 1

    # ---- batches

    def _answer_batch(self, message: Any, tensors: list[torch.Tensor]) -> Answer:
        """Run the calls of a message one after the other; for its form see _batching."""
        caller, table, calls = message
        functions: dict[int, Any] = {}
        answers: list[Any] = []
        at = 0
        for how, what in calls:
            if type(how) is int:
                answers.append(self._answer_direct(caller, functions, table, how, what))
            else:
                answers.append(self._answer(how, tensors[at : at + what] if what else []))
                at += what
        replied: list[torch.Tensor] = []
        for i, answer in enumerate(answers):
            if type(answer) in ATOMS:
                continue
            payload, part = self._now_or_later(answer) if isinstance(answer, CUDAFuture) else answer
            answers[i] = payload, len(part)
            replied += part
        return encode(Kind.BATCH, answers).payload, replied

    def _answer_direct(
        self, caller: int, functions: dict[int, Any], table: Mapping[int, bytes], place: int, args: tuple[Any, ...]
    ) -> Any:
        """Run a call of plain values; a plain value is its own answer."""
        with self._lock:
            self._begun += 1
        try:
            fn = functions.get(place)
            if fn is None:
                fn = functions[place] = decode(table[place], [])
            _, outcome, is_future = _call((caller, fn, args, {}))
            if type(outcome) in ATOMS:
                self._count_answer()
                return outcome
        except BaseException as e:
            outcome, is_future = CUDAFuture.failed(e), True
        return self._answer_with(outcome, is_future, caller)

    def _now_or_later(self, answer: CUDAFuture[Answer]) -> Answer:
        if answer.done() and not answer.devices:
            return answer.value()
        number, now = next(self._numbers), time.monotonic()
        with self._lock:
            self._later[number] = now, answer
            while now - next(iter(self._later.values()))[0] > _KEPT:  # the oldest
                del self._later[next(iter(self._later))]
        return encode(Kind.LATER, number).payload, []

    def _kept(self, number: int) -> CUDAFuture[Answer]:
        with self._lock:
            kept = self._later.pop(number, None)
        if kept is None:
            raise NotFoundError(f"no answer is kept under number {number}")
        return kept[1]

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


_NO_STREAMS = contextlib.nullcontext()


def _streams_of(payload: bytes) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a call runs: with streams of its own, where its tensors go to devices."""
    targets = None if is_plain(payload) else targets_of(payload)
    return _NO_STREAMS if targets is None else _staging.streams_for(targets)


def _call(call: Any) -> tuple[int, Any, bool]:
    """Return the caller, what the function has returned, and whether that is a future whose outcome is meant."""
    caller, fn, args, kwargs = call
    outcome = fn(*args, **kwargs)
    if not is_async(fn):
        return caller, outcome, False
    if isinstance(outcome, torch.futures.Future):
        outcome = CUDAFuture.from_torch(outcome)
    if not isinstance(outcome, CUDAFuture):
        name = getattr(fn, "__qualname__", None) or repr(fn)
        raise TypeError(f"{name} is decorated with async_execution and must return a CUDAFuture, not {outcome!r}")
    return caller, outcome, True


def is_serving() -> bool:
    """Say whether this thread runs a function that a worker has called."""
    return _threads.server is not None


def expect_free_thread(what: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which this thread may wait for an answer.

    An RPC worker thread may only if another is left for that.

    Raises:
        InvalidStateError: none is left.
    """
    server = _threads.server
    return contextlib.nullcontext() if server is None else server.blocking(what)
