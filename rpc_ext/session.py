"""The RPC session of a process: its start, its shutdown and its statistics."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

from torch._C._distributed_rpc import WorkerInfo

from cudafuture import debug, openmetrics
from cudafuture.config import config
from cudafuture.errors import InvalidStateError
from rpc_ext import _engine, _listeners
from rpc_ext._agent import DEFAULT_RECEIVE_MEMORY, PATIENCE, Started, received_outside, start
from rpc_ext._destination import Destination
from rpc_ext._devices import DeviceMaps, as_json
from rpc_ext._options import LONGEST_TIMEOUT, RpcOptions, from_environment, limit, read_secret
from rpc_ext._serve import Server, is_serving
from rpc_ext._shutdown import leave
from rpc_ext._statistics import RpcStatistics

__all__ = ["Session", "call_at_end", "current", "init_rpc", "shutdown", "statistics"]

_logger = logging.getLogger("rpc_ext.session")
_lock = threading.Lock()  # guards what follows while it changes
_session: Session | None = None
_beginning: tuple[int, int] | None = None  # process and thread that are in init_rpc
_called_at_every_end: list[Callable[[], object]] = []  # see call_at_end; not under the lock

_ENDED_BY_TORCH = "torch.distributed.rpc.shutdown() has ended RPC; rpc_ext.shutdown() ends the rest of the session"


class Session:
    """The RPC session of this process, from ``init_rpc`` to ``shutdown``.

    A context manager that shuts RPC down at its end, gracefully unless the body raises.
    """

    def __init__(self, options: RpcOptions, started: Started, server: Server) -> None:
        self.name, self.rank, self.rpc_timeout = options.name, options.rank, options.rpc_timeout
        self.agent, self.server = started.agent, server
        self.destinations = [
            Destination(devices.peer, peer, devices, options.max_in_flight, options.max_bytes_in_flight)
            for peer, devices in enumerate(started.peers)
        ]
        self._handshake = started.handshake
        self.is_of_this_process = True  # False in a forked child
        self.is_ending = False
        self._end_lock = threading.Lock()  # guards _called_at_end; a leaf
        self._called_at_end: list[Callable[[], object]] | None = []  # None: they have been called
        openmetrics.add(self, "rpc", worker=self.name)
        self._by_key: dict[Any, Destination] = {key: d for d in self.destinations for key in (d.name, d.rank)}

    def __repr__(self) -> str:
        in_flight = sum(destination.in_flight for destination in self.destinations)
        calls = "no call" if in_flight == 0 else "1 call" if in_flight == 1 else f"{in_flight} calls"
        state = "ending" if self.is_ending else f"{calls} in flight"
        return f"<Session of {self.name!r}, worker {self.rank} of {len(self.destinations)}, {state}>"

    @property
    def workers(self) -> list[str]:
        """The names of all workers, by rank.

        >>> current().workers
        ['me']
        """
        return [destination.name for destination in self.destinations]

    def destination(self, to: Any) -> Destination:
        """Return the worker with a name, a rank or a WorkerInfo.

        Raises:
            ValueError: there is no such worker.
            TypeError: `to` has another type.
        """
        if isinstance(to, (str, int)) and not isinstance(to, bool):
            found = self._by_key.get(to)
            if found is not None:
                return found
            raise ValueError(f"there is no worker {to!r}; the workers are {', '.join(self.workers)}")
        if isinstance(to, WorkerInfo):
            return self.destination(to.name)
        raise TypeError(f"a worker is named by a str, an int (its rank) or a WorkerInfo, not by {to!r}")

    def timeout(self, timeout: float | None) -> float:
        """Return the seconds of a call with the argument `timeout`, 0 for no limit.

        Raises:
            ValueError: `timeout` is 0, negative or nan.
        """
        return self.rpc_timeout if timeout is None else limit(timeout, "timeout")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if _session is self:
            shutdown(graceful=error is None)

    def has_agent(self) -> bool:
        """Return whether the agent is still the agent of this process: torch's own ``shutdown`` removes it."""
        return _engine.is_current(self.agent)

    def call_at_end(self, fn: Callable[[], object]) -> None:
        """Register a function that is called once, when RPC of this process has ended and its agent has stopped.

        Functions are called in the order of their registration, after those of ``rpc_ext.session.call_at_end``, for
        every end of the session: by any ``shutdown()``, even if it fails, at exit, or after torch's own ``shutdown``.
        Exceptions are logged and do not prevent further calls.

        Raises:
            InvalidStateError: the session has ended.

        >>> ended = []
        >>> with init_rpc("me", rank=0, world_size=1, init_method="tcp://127.0.0.1:0") as session:
        ...     session.call_at_end(lambda: ended.append(session.name))
        >>> ended
        ['me']
        """
        with self._end_lock:
            if self._called_at_end is None:
                raise InvalidStateError("the session has ended, so nothing can be registered for its end")
            self._called_at_end.append(fn)

    def end(self, graceful: bool, timeout: float) -> None:
        """Leave the job; see ``shutdown``."""
        try:
            self._leave_and_stop(graceful, timeout)
        finally:
            with self._end_lock:
                functions, self._called_at_end = self._called_at_end or [], None
            with contextlib.ExitStack() as stack:  # calls all functions even if Ctrl-C interrupts one
                for fn in reversed([*_called_at_every_end, *functions]):
                    stack.callback(_call_and_log, fn)

    def _leave_and_stop(self, graceful: bool, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        try:
            if graceful:
                for destination in self.destinations:
                    destination.flush()
                    destination.wait_until_idle(max(0.0, deadline - time.monotonic()))
                leave(self.agent, self._handshake, deadline)
        finally:
            for destination in self.destinations:
                destination.close()
            self.server.close()
            if self.has_agent() and not _engine.finish(self.agent, PATIENCE):
                _logger.warning("functions that other workers have called are still running; RPC ends without them")
            for destination in self.destinations:
                destination.flush()  # calls that have not been sent fail

    def statistics(self) -> RpcStatistics:
        """Return the statistics of this session so far.

        >>> current().statistics().worker
        'me'
        """
        refused = {self.workers[sender] if sender >= 0 else "": n for sender, n in self.agent.refused().items()}
        return RpcStatistics(
            worker=self.name,
            destinations={d.name: d.statistics() for d in self.destinations},
            served=self.server.served,
            serving=self.server.serving,
            refused=refused,
            received_outside=received_outside(),
        )


def _call_and_log(fn: Callable[[], object]) -> None:
    try:
        fn()
    except Exception:
        _logger.exception("%r, a function registered for the end of RPC, has raised", fn)


def call_at_end(fn: Callable[[], object]) -> None:
    """Register a function that is called at the end of each session of this process, current or later.

    See ``Session.call_at_end``. Register a function once, for instance when its module is imported.

    >>> ends = []
    >>> call_at_end(lambda: ends.append("ended"))
    >>> with init_rpc("me", rank=0, world_size=1, init_method="tcp://127.0.0.1:0"):
    ...     ends
    []
    >>> ends
    ['ended']
    """
    _called_at_every_end.append(fn)


def current() -> Session:
    """Return this process's session.

    Raises:
        InvalidStateError: there is no session, a parent process began it, or torch's own ``shutdown`` has ended it.

    >>> current().name
    'me'
    """
    session = _begun()
    if not session.is_ending and not session.has_agent():
        raise InvalidStateError(_ENDED_BY_TORCH)
    return session


def _begun() -> Session:
    session = _session
    if session is None and _beginning is not None and _beginning != (os.getpid(), threading.get_ident()):
        session = _after_beginning()
    if session is None:
        raise InvalidStateError("RPC has not begun, or has ended: call rpc_ext.init_rpc() first")
    if not session.is_of_this_process:
        raise InvalidStateError("RPC was begun before this process was forked; begin it in the process that uses it")
    return session


def _after_beginning() -> Session | None:
    """Wait until ``init_rpc`` returns in another thread: workers whose ``init_rpc`` has returned may call this one."""
    beginning = _beginning
    if beginning is not None and beginning[0] == os.getpid():
        with _lock:
            return _session
    return None


def init_rpc(
    name: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    secret: str | bytes | None = None,
    seal: Literal["descriptions", "contents"] = "descriptions",
    device_maps: DeviceMaps | Literal["auto"] | None = "auto",
    num_worker_threads: int = _engine.DEFAULT_WORKER_THREADS,
    rpc_timeout: float = _engine.DEFAULT_RPC_TIMEOUT,
    init_method: str | None = None,
    max_in_flight: int = 4096,
    max_bytes_in_flight: int = 1 << 30,
    start_timeout: float = 300.0,
    transports: Sequence[str] | None = None,
    receive_memory: int = DEFAULT_RECEIVE_MEMORY,
) -> Session:
    """Begin RPC in this process, and wait until all workers of the job have begun it.

    Some defaults are environment variables of ``torchrun``. ``init_process_group`` may be used in the same process.

    Args:
        name: name of this worker, unique in the job: 1 to 127 letters and digits (ASCII), "-", "_" or ":". Default:
            ``worker{rank}``.
        rank: rank of this worker; default: RANK.
        world_size: number of workers; default: WORLD_SIZE.
        secret: at least 16 bytes that all workers share. Default: the content of the file that
            CUDAFUTURE_RPC_SECRET_FILE names. With a secret, workers prove to each other that they know it, and sign
            every message; see docs/security.md. Without one, every process that reaches the port can run code here.
        seal: the part of a message that the signature covers, the same on all workers. "descriptions" (default):
            everything but the numbers in tensors. "contents": everything, at the cost of one more pass over each tensor
            on both sides, and of copies of device tensors through the host. Without a secret it has no effect.
        device_maps: targets of tensors on devices. "auto" (default): the device of the same type and index, if the
            other worker has it. Or a dict by worker of dicts from devices here to devices there. None: no targets.
        num_worker_threads: threads of the agent, which run the functions of incoming calls and complete futures;
            default: 16.
        rpc_timeout: default timeout of a call in seconds; default: 60. inf: no limit.
        init_method: URL of the rendezvous, as for ``torch.distributed.init_process_group``; default: "env://".
        max_in_flight: most calls in flight to one worker; default: 4,096.
        max_bytes_in_flight: most bytes in flight to one worker; default: 1 GiB.
        start_timeout: seconds in which all workers have to arrive; default: 300. inf: no limit.
        transports: "shm" (memory shared within a machine), "ibv" (InfiniBand), "uv" (sockets); default: those of
            CUDAFUTURE_RPC_TRANSPORTS, or all. Two workers use the first in this order that both have; the last must be
            the same for all. "shm" polls and so takes a core of each process; with few cores, pass ``["uv"]``.
        receive_memory: bytes of the pool for tensors of 1 to 16 MiB from other workers; default: 512 MiB. The kernel
            provides them when they are first used. While the pool is exhausted, such tensors have new memory
            (``RpcStatistics.received_outside``). 0: no pool; torch allocates the memory of every tensor. A pool lives
            until the process ends, and later sessions with the same `receive_memory` reuse it.

    Returns:
        The session, a context manager that shuts RPC down at its end.

    Raises:
        InvalidStateError: this process has begun RPC, ours or torch's own.
        ValueError: rank or world size is missing; a transport is unknown; the name is invalid or not unique; a device
            map is invalid; the secret is too short; CUDAFUTURE_RPC_SECRET_FILE is empty or has changed since
            `import`; TP_SOCKET_IFNAME names no interface; or workers differ in version, `seal` or `transports`.
        RuntimeError: there is a secret, and the messages of this build of torch cannot be checked.
        AuthenticationError: a worker does not know the secret.
        TimeoutError: a worker has not arrived in time; the error names it.
        ConnectionError: the store cannot be created, for example because its port is in use.

    >>> with init_rpc("me", rank=0, world_size=1, init_method="tcp://127.0.0.1:0") as session:
    ...     session.workers
    ['me']
    """
    global _session, _beginning
    rank = from_environment("rank", rank, "RANK")
    options = RpcOptions(
        name=f"worker{rank}" if name is None else name,
        rank=rank,
        world_size=from_environment("world_size", world_size, "WORLD_SIZE"),
        secret=read_secret(secret),
        seal=seal,
        device_maps=as_json(device_maps),
        num_worker_threads=num_worker_threads,
        rpc_timeout=limit(rpc_timeout, "rpc_timeout"),
        init_method=init_method or "env://",
        max_in_flight=max_in_flight,
        max_bytes_in_flight=max_bytes_in_flight,
        start_timeout=limit(start_timeout, "start_timeout") or LONGEST_TIMEOUT,
        transports=config.rpc_transports if transports is None else transports,
        receive_memory=receive_memory,
    )
    with _lock:
        _expect_no_session()
        _beginning = os.getpid(), threading.get_ident()
        try:
            if options.secret is None:
                _listeners.warn_unless_loopback()
            server = Server(options.name, options.num_worker_threads, options.rpc_timeout)
            _session = Session(options, start(options, server), server)
            debug.name_process(worker=options.name)
            return _session
        finally:
            _beginning = None


def _expect_no_session() -> None:
    """Raise InvalidStateError if RPC has begun in this process. Called under the lock."""
    if _session is not None:
        current()
        raise InvalidStateError("RPC has begun in this process already; rpc_ext.shutdown() ends it")
    if _engine.has_agent():
        raise InvalidStateError("torch's own RPC has begun in this process; torch.distributed.rpc.shutdown() ends it")


def shutdown(graceful: bool = True, *, timeout: float = 300.0) -> None:
    """End RPC in this process.

    Args:
        graceful: True (default): first wait until the calls of this worker are done, all workers have called
            ``shutdown``, and no worker has calls in flight. False: fail the calls in flight, and wait at most five
            seconds for functions that other workers have called.
        timeout: seconds that a graceful shutdown waits for the other workers; default: 300. inf: no limit, for a worker
            that only serves others.

    At exit, a process shuts RPC down as with ``graceful=False``.

    Raises:
        TimeoutError: a worker has not replied to all calls or not called ``shutdown`` in time; RPC has ended here.
        WorkerLostError: the worker that hosts the store was lost; RPC has ended here.
        ValueError: `timeout` is 0, negative or nan.
        InvalidStateError: RPC has not begun; a function that another worker has called cannot end it; or torch's own
            ``shutdown`` has ended it, in which case the rest of the session has ended now.

    >>> session = init_rpc("me", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
    >>> shutdown()
    """
    global _session
    patience = limit(timeout, "timeout") or LONGEST_TIMEOUT
    if is_serving():  # the shutdown would wait for the reply to this call, which would wait for the shutdown
        raise InvalidStateError("RPC cannot be shut down by a function that it runs for a worker")
    session = _begun()
    with _lock:
        if session.is_ending:
            raise InvalidStateError("RPC is being shut down by another thread")
        lost = not session.has_agent()
        session.is_ending = True
    try:
        session.end(graceful and not lost, patience)
    finally:
        with _lock:
            _session = None
    if lost:
        raise InvalidStateError(_ENDED_BY_TORCH)


def statistics() -> RpcStatistics:
    """Return the statistics of the calls of this process since ``init_rpc``.

    Raises:
        InvalidStateError: RPC has not begun.

    >>> statistics().destinations["me"].in_flight
    0
    """
    return current().statistics()


def _note_fork() -> None:
    global _lock, _beginning
    _lock, _beginning = threading.Lock(), None  # another thread of the parent may have been in init_rpc or shutdown
    if _session is not None:
        _session.is_of_this_process = False


os.register_at_fork(after_in_child=_note_fork)


@atexit.register
def _end_at_exit() -> None:
    if _session is not None and _session.is_of_this_process and not _session.is_ending:
        with contextlib.suppress(InvalidStateError):  # torch's shutdown was first
            shutdown(graceful=False)
