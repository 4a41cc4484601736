"""Processes of a job with two store servers and many clients, some of which are killed during the run."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import rpc_ext
from cudafuture import CUDAFuture
from cudafuture.errors import NotFoundError, QuotaError, WorkerLostError
from remote_store.contents import KEYS, MIB, SIZES, content_of, size_of, version_of
from remote_store.history import Journal, Version, now
from rpc_ext import RemoteStore, StoreService, rpc_sync, serve_store
from support.rpc_workers import LONG, SECRET

SERVERS = ("server0", "server1")
CAPACITY = 512 * MIB  # of a namespace
MEMORY = 1024 * MIB  # of a service
SESSIONS = 2  # of each client with each server
WEIGHTS = {"zero": 2, "small": 8, "page": 4, "meg": 3, "large": 0.5, "any": 3}


@dataclass(frozen=True)
class Plan:
    """The number of operations of each client, and the clients that are killed."""

    seed: int
    clients: int
    victims: Mapping[int, tuple[int, int]]
    """by their numbers: the half of the run in which they are killed, and when so much of that is done"""
    operations: int
    """of each other client, in each half"""

    def alive(self, half: int) -> int:
        """Return the number of clients that are alive at the end of a half."""
        return self.clients - sum(when <= half for when, _ in self.victims.values())


def be_one_of_all(rank: int, store: str, folder: str, plan: Plan) -> dict[str, int]:
    """Run a server or a client, by rank."""
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    number = rank - len(SERVERS)
    rpc_ext.init_rpc(
        SERVERS[rank] if number < 0 else f"client{number}",
        rank=rank,
        world_size=len(SERVERS) + plan.clients,
        init_method=f"file://{store}",
        secret=SECRET,
        num_worker_threads=4,
        rpc_timeout=LONG,
        start_timeout=LONG,
    )
    seen: dict[str, int] = {}
    if number < 0:
        seen = be_server(SERVERS[rank], Path(folder), plan)
    else:
        be_client(number, Path(folder), plan)
    with contextlib.suppress(WorkerLostError):  # the first server has gone: it was the last to come
        meet("gone", plan, 1)
    rpc_ext.shutdown(graceful=False)
    return seen


# ---- a barrier of the processes that are alive

_lock = threading.Lock()
_waiting: dict[str, list[CUDAFuture[None]]] = collections.defaultdict(list)  # on the first server


@rpc_ext.async_execution
def _arrive(moment: str, expected: int) -> CUDAFuture[None]:
    future: CUDAFuture[None] = CUDAFuture()
    with _lock:
        _waiting[moment].append(future)
        arrived = _waiting[moment][:]
    if len(arrived) == expected:
        for one in arrived:
            one.set_result(None)
    return future


def meet(moment: str, plan: Plan, half: int = -1) -> None:
    """Wait until all processes that are alive at the end of a half have arrived."""
    rpc_sync(SERVERS[0], _arrive, (moment, len(SERVERS) + plan.alive(half)), timeout=math.inf)


# ---- a client


class Batch(NamedTuple):
    """Pending reads."""

    number: int
    begin: int
    place: str
    keys: list[str]
    future: CUDAFuture[Any]


class Client:
    """A client that writes, reads and deletes keys at random, and records all of it."""

    def __init__(self, number: int, folder: Path, plan: Plan) -> None:
        self._journal = Journal(folder / f"client{number}.journal")
        self._numbers = random.Random(f"{plan.seed} {number}")
        self._plan = plan
        self._first = (number + 1) << 20  # versions of its own
        self._stores = {f"{server}/": RemoteStore(server, namespace="shared") for server in SERVERS}
        self._stores |= {f"{server}/{number}/": RemoteStore(server) for server in SERVERS}
        self._in_flight: collections.deque[Batch] = collections.deque()
        self._lock = threading.Lock()
        self._left: int | None = None  # until it is killed
        self._ends: dict[int, int] = {}  # when reads have ended

    def work(self, operations: int, window: int) -> None:
        """Run the given number of operations, at most `window` at a time, and wait for all."""
        for _ in range(operations):
            self._begin()
            while len(self._in_flight) >= window:
                self._record_outcome(self._in_flight.popleft())
        while self._in_flight:
            self._record_outcome(self._in_flight.popleft())

    def die_after(self, operations: int, window: int) -> None:
        """Work until the given number of operations has ended, and be killed then."""
        self._left = operations
        self.work(operations + 2 * window, window)
        raise AssertionError("it should be dead")

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def _begin(self) -> None:
        place = self._numbers.choice([*self._stores])
        store = self._stores[place]
        (kind,) = self._numbers.choices([self._write, self._read, self._delete], weights=[9, 8, 2])
        count = self._numbers.choice([1, 1, 1, 2, 5])
        keys = [self._key() for _ in range(count)]
        if sum(key.startswith(("large", "any")) for key in keys) > 1:  # few of these
            keys = keys[:1]
        kind(store, place, list(dict.fromkeys(keys)))

    def _key(self) -> str:
        return self._numbers.choices(KEYS, weights=[WEIGHTS[key.split()[0]] for key in KEYS])[0]

    def _write(self, store: RemoteStore, place: str, keys: list[str]) -> None:
        self._first += 1
        contents = {key: content_of(key, self._first) for key in keys}
        number = self._journal.record_begin({place + key: self._first for key in keys})
        if len(keys) == 1:
            self._follow(number, place, [], store.write(keys[0], contents[keys[0]]))
        else:
            self._follow(number, place, [], store.writev(contents))

    def _read(self, store: RemoteStore, place: str, keys: list[str]) -> None:
        number = self._journal.record_begin({})
        fixed = all(key.split()[0] in SIZES and not key.startswith("zero") for key in keys)
        outs = None
        if fixed and self._numbers.random() < 0.4:
            outs = [torch.full((size_of(key, 0),), 255, dtype=torch.uint8) for key in keys]
        begin = now()
        if len(keys) == 1:
            future: CUDAFuture[Any] = store.read(keys[0], None if outs is None else outs[0])
            future = future.then(lambda done: [done.value()])
        else:
            future = store.readv(keys, outs)
        self._follow(number, place, keys, future, begin)

    def _delete(self, store: RemoteStore, place: str, keys: list[str]) -> None:
        number = self._journal.record_begin({place + keys[0]: None})
        self._follow(number, place, keys[:1], store.delete(keys[0]))

    def _follow(self, number: int, place: str, keys: list[str], future: CUDAFuture[Any], begin: int = 0) -> None:
        future.add_done_callback(partial(self._record_end, number))
        self._in_flight.append(Batch(number, begin or now(), place, keys, future))

    def _record_end(self, number: int, future: CUDAFuture[Any]) -> None:
        """Record the end of an operation at once; kill this process if it was the last one."""
        error = future.exception()
        is_known = error is None or isinstance(error, NotFoundError)
        self._ends[number] = self._journal.record_end(number, error is None) if is_known else now()
        with self._lock:
            if self._left is not None:
                self._left -= 1
                if self._left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _record_outcome(self, batch: Batch) -> None:
        """Record the outcome of an operation."""
        error = batch.future.exception(timeout=LONG)
        seen: dict[str, Version] = {}
        if isinstance(error, NotFoundError):
            seen = {batch.place + key: None for key in batch.keys if repr(key) in str(error)}
            assert seen, error
        elif error is not None:
            raise error
        elif isinstance(batch.future.value(), list):
            contents = zip(batch.keys, batch.future.value(), strict=True)
            seen = {batch.place + key: version_of(key, content) for key, content in contents}
        while batch.number not in self._ends:  # the callback is about to run
            os.sched_yield()
        self._journal.record_read(batch.begin, self._ends.pop(batch.number), seen)


def be_client(number: int, folder: Path, plan: Plan) -> None:
    meet("served", plan)
    client = Client(number, folder, plan)
    window = 1 + 5 * (number % 3)
    when, count = plan.victims.get(number, (2, 0))
    for half in range(2):
        if half == when:
            client.die_after(count, window)
        client.work(plan.operations, window)
        if half == 0:
            meet("half", plan, 0)
            meet("looked", plan, 0)
    client.close()
    meet("over", plan, 1)


# ---- a server


def be_server(name: str, folder: Path, plan: Plan) -> dict[str, int]:
    with serve_store(
        folder / name,
        namespace_capacity=CAPACITY,
        memory=MEMORY,
        clients=SESSIONS * plan.clients + 1,
    ) as service:
        meet("served", plan)
        meet("half", plan, 0)
        wait_for(service, lambda: service.statistics().clients == SESSIONS * plan.alive(0))
        at_half = resident_bytes()
        written = service.statistics().bytes_written
        meet("looked", plan, 0)
        meet("over", plan, 1)
        wait_for(service, lambda: service.statistics().clients == 0)
        at_end = resident_bytes()
        statistics = service.statistics()
        take_all(name, service, Journal(folder / f"{name}.journal"))
        return {
            "grown": at_end - at_half,
            "written": statistics.bytes_written - written,
            "most_in_flight": statistics.most_in_flight,
            "refused": statistics.refused,
        }


def wait_for(service: StoreService, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds and the service is idle: it frees the state of dead clients without notice."""
    end = time.monotonic() + LONG
    while not condition() or service.statistics().in_flight:
        assert time.monotonic() < end, service.statistics()
        service.store.flush().exception(timeout=LONG)


def look_at_all(name: str, remote: RemoteStore, journal: Journal) -> list[str]:
    """Record the versions of the shared keys of a server, and return the existing keys."""
    begin, keys = now(), remote.keys()
    contents = remote.readv(keys).wait(timeout=LONG)
    seen: dict[str, Version] = dict.fromkeys(KEYS)
    seen |= {key: version_of(key, content) for key, content in zip(keys, contents, strict=True)}
    journal.record_read(begin, now(), {f"{name}/{key}": version for key, version in seen.items()})
    return keys


def take_all(name: str, service: StoreService, journal: Journal) -> None:
    """Record the versions of the shared keys, delete all, and check that the store is empty."""
    with RemoteStore(name, namespace="shared") as remote:
        keys = look_at_all(name, remote, journal)
        remote.deletev(keys).wait(timeout=LONG)
        wait_for(service, lambda: len(service.store) == 0)  # removed names have no future
        error = remote.write("more than there is", torch.empty(CAPACITY + 1, dtype=torch.uint8)).exception(timeout=LONG)
        assert isinstance(error, QuotaError), error
        assert f": 0 of {CAPACITY} are in use" in str(error)
    wait_for(service, lambda: service.statistics().clients == len(service.store) == 0)
    assert service.store.statistics().used == 0
    service.store.trim()
    assert service.store.statistics().slab_bytes == 0


def resident_bytes() -> int:
    """Return the resident memory of this process, without the memory that malloc has free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
