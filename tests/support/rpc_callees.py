"""One worker that calls itself, or a few that call each other, and what is called there.

What ranks of a world call stands here and not in a test: the test's own module is another one in their processes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch.distributed import rpc as torch_rpc

import rpc_ext
from cudafuture import CUDAFuture, InvalidStateError, collect_all, submit
from rpc_ext import rpc_async, rpc_sync
from support.patience import PATIENCE

ME = "me"
SHARED_MEMORY = ("shm", "uv")
"""Transports of tests that show RPC over shared memory: `make test` has sockets for the others, which do not poll."""


@contextlib.contextmanager
def working(name: str, rank: int, world_size: int, file: Path | str, **options: Any) -> Iterator[rpc_ext.Session]:
    """Be a worker, over the loopback interface."""
    options = {"rpc_timeout": PATIENCE, **options}
    with (
        mock.patch.dict(os.environ, TP_SOCKET_IFNAME="lo"),
        rpc_ext.init_rpc(name, rank=rank, world_size=world_size, init_method=f"file://{file}", **options) as session,
    ):
        yield session


def alone(file: Path | str, **options: Any) -> contextlib.AbstractContextManager[rpc_ext.Session]:
    """Start RPC as the only worker, which calls itself."""
    return working(ME, 0, 1, file, **{"transports": SHARED_MEMORY, **options})


def thread_names() -> set[str]:
    """Return the names of the threads of this process."""
    names = set()
    for comm in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            names.add(comm.read_text().strip())
    return names


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until a condition holds that sends no notification."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0)


# ---- something that a test opens, and a function waits for


class Gate:
    """Pickled as a reference to the one of its name, so that caller and callee share it where they share a process."""

    _gates: dict[str, Gate] = {}  # noqa: RUF012

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached, self._open = threading.Event(), threading.Event()
        self.futures: list[CUDAFuture[Any]] = []
        self.seen: list[Any] = []
        Gate._gates[name] = self

    def __reduce__(self) -> Any:
        return Gate.by_name, (self.name,)

    @staticmethod
    def by_name(name: str) -> Gate:
        return Gate._gates.get(name) or Gate(name)

    def open(self) -> None:
        self._open.set()

    def make(self, value: Any) -> None:
        """Let ``pending`` give this value, and ``waits`` its own."""
        for future in self.futures:
            future.set_result(value)
        self.open()

    def wait(self) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE)


def waits(gate: Gate, value: Any = None) -> Any:
    gate.wait()
    return value


def sees(gate: Gate, value: Any) -> Any:
    gate.seen.append(value)
    return value


@rpc_ext.async_execution
def pending(gate: Gate) -> CUDAFuture[Any]:
    """Return a future that the test completes."""
    future: CUDAFuture[Any] = CUDAFuture()
    gate.futures.append(future)
    gate.reached.set()
    return future


# ---- functions


def same(value: Any) -> Any:
    return value


def add(a: Any, b: Any = 0, *, c: Any = 0) -> Any:
    return a + b + c


def rank_of_callee() -> int:
    return int(torch_rpc.get_worker_info().id)


def refusals(worker: str) -> int:
    """Return how many messages that claim to be a worker's were refused here."""
    return rpc_ext.statistics().refused.get(worker, 0)


def serving() -> int:
    """Return how many calls of others run here, this one included."""
    return rpc_ext.statistics().serving


def raises(error: BaseException) -> NoReturn:
    raise error


def collect_garbage() -> None:
    gc.collect()


class Adder:
    """Methods of every kind."""

    def __init__(self, start: Any) -> None:
        self.value = start

    def __call__(self, by: Any) -> Any:
        return self.value + by

    def add(self, by: Any) -> Any:
        self.value = self.value + by
        return self.value

    def get(self) -> Any:
        return self.value

    def fail(self) -> NoReturn:
        raise LookupError(f"at {self.value}")

    @classmethod
    def of(cls, start: Any) -> Adder:
        return cls(start)

    @staticmethod
    def double(value: Any) -> Any:
        return 2 * value

    @rpc_ext.async_execution
    def later(self, to: Any, by: Any) -> CUDAFuture[Any]:
        return rpc_async(to, add, (self.value, by))

    @staticmethod
    @rpc_ext.async_execution
    def static_later(to: Any, a: Any, b: Any) -> CUDAFuture[Any]:
        return rpc_async(to, add, (a, b))

    @rpc_ext.async_execution
    @staticmethod
    def static_above(to: Any, a: Any, b: Any) -> CUDAFuture[Any]:
        return rpc_async(to, add, (a, b))

    @classmethod
    @rpc_ext.async_execution
    def class_later(cls, to: Any, a: Any, b: Any) -> CUDAFuture[Any]:
        return rpc_async(to, cls.double, (a,)).then(lambda f: f.value() + b)

    @rpc_ext.async_execution
    @classmethod
    def class_above(cls, to: Any, a: Any, b: Any) -> CUDAFuture[Any]:
        return rpc_async(to, cls.double, (a,)).then(lambda f: f.value() + b)


# ---- functions that return futures


@rpc_ext.async_execution
def forward(to: Any, function: Callable[..., Any], *args: Any) -> CUDAFuture[Any]:
    return rpc_async(to, function, args)


@rpc_ext.async_execution
def chain(to: Any, value: Any, times: int) -> CUDAFuture[Any]:
    future = rpc_async(to, add, (value, 0))
    for _ in range(times):
        future = future.then(lambda f: f.value() + 1)
    return future


@rpc_ext.async_execution
def fan_out(to: Any, value: Any, times: int) -> CUDAFuture[Any]:
    parts = [rpc_async(to, add, (value, i)) for i in range(times)]
    return collect_all(parts).then(lambda f: sum(part.value() for part in f.value()))


@rpc_ext.async_execution
def make_by_hand(to: Any, a: Any, b: Any) -> CUDAFuture[Any]:
    future: CUDAFuture[Any] = CUDAFuture()
    rpc_async(to, add, (a, b)).add_done_callback(lambda f: future.set_result(f.value() + 1))
    return future


@rpc_ext.async_execution
def submit_add(a: Any, b: Any) -> CUDAFuture[Any]:
    return submit(add, a, b)


@rpc_ext.async_execution
def of_torch(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    threading.Thread(target=future.set_result, args=(value,)).start()
    return future


@rpc_ext.async_execution
def of_torch_failed() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(KeyError("expected"))
    return future


@torch_rpc.functions.async_execution  # type: ignore[untyped-decorator]
def by_torchs_decorator(value: Any) -> torch.futures.Future[Any]:
    return CUDAFuture.completed(value).to_torch()


@rpc_ext.async_execution
def around(path: list[int], at: int) -> CUDAFuture[list[int]]:
    """Call the next worker of a path, and say who was there."""
    here = rank_of_callee()
    if at == len(path):
        return CUDAFuture.completed([here])
    return rpc_async(path[at], around, (path, at + 1)).then(lambda f: [here, *f.value()])


@rpc_ext.async_execution
def fails_at_the_end(path: list[int], at: int) -> CUDAFuture[Any]:
    if at == len(path):
        raise LookupError("at the end")
    return rpc_async(path[at], fails_at_the_end, (path, at + 1))


def waits_for_another(to: Any, function: Callable[..., Any], *args: Any) -> Any:
    return rpc_sync(to, function, args)


def is_refused_to_wait(to: Any) -> str:
    try:
        return str(rpc_sync(to, add, (1, 1)))
    except InvalidStateError as e:
        return str(e)


# ---- references


class Watched:
    """Value whose destruction a test observes."""

    gone = threading.Event()

    def __init__(self) -> None:
        Watched.gone.clear()
        weakref.finalize(self, Watched.gone.set)

    def name(self) -> str:
        return type(self).__name__


def is_watched_gone() -> bool:
    return Watched.gone.is_set()


def add_of(rref: rpc_ext.RRef[Any], value: Any) -> Any:
    return rref.to_here() + value


def sum_of(*rrefs: rpc_ext.RRef[Any]) -> Any:
    first, *others = (rref.to_here() for rref in rrefs)
    return sum(others, first)


@rpc_ext.async_execution
def value_of(rref: rpc_ext.RRef[Any]) -> CUDAFuture[Any]:
    return rref.get_future()


def users_of_references() -> int:
    """Return how many users torch counts of the references that this worker owns."""
    counts: Any = torch_rpc._rref_context_get_debug_info()
    return int(counts["num_forks"])


_counted = itertools.count()


def count(_: object) -> int:
    """Return how many came before."""
    return next(_counted)


def is_confirmed(rref: rpc_ext.RRef[Any]) -> bool:
    return rref.confirmed_by_owner()


def make_on(to: Any, function: Callable[..., Any], *args: Any) -> rpc_ext.RRef[Any]:
    return rpc_ext.remote(to, function, args)


def pass_on(path: list[int], rref: rpc_ext.RRef[Any]) -> Any:
    return rpc_sync(path[0], pass_on, (path[1:], rref)) if path else rref.to_here()


def pass_on_after_deadline(path: list[int], rref: rpc_ext.RRef[Any]) -> Any:
    """Pass a reference on from worker to worker, at each after the time in which its value had to be made."""
    wait_for(lambda: rref._due < time.perf_counter())
    return rpc_sync(path[0], pass_on_after_deadline, (path[1:], rref)) if path else rref.to_here()


def references_to(values: list[Any]) -> list[rpc_ext.RRef[Any]]:
    return [rpc_ext.RRef(value) for value in values]


def local_value_of(rref: rpc_ext.RRef[Any]) -> Any:
    return rref.local_value()
