"""Client and server processes that may be stopped or killed at any time, and the thread that does so.

Clients report each operation that ends through a pipe. The disturber counts these reports, and stops, continues and
kills processes at operation counts that a seed determines.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

import rpc_ext
from cudafuture import CUDAFuture
from cudafuture.errors import NotFoundError, WorkerLostError
from remote_store.contents import SIZES, content_of, size_of, version_of
from remote_store.history import Journal, Version, now
from rpc_ext import RemoteStore, serve_store
from support.rpc_workers import LONG, SECRET

SERVERS = ("server0", "server1")
NAMESPACE = "shared"
TIMEOUT = 1.0  # seconds of each operation
WEIGHTS = {"zero": 2, "small": 8, "page": 4, "meg": 2, "large": 0.3, "any": 3}
SHARED_KEYS = ("zero", "small a", "small b", "page a", "meg", "large", "any a", "any b")
REPORT = struct.Struct("<BBq")
STARTED, ENDED, FINISHED, OVER = range(4)


class Disturbance(NamedTuple):
    """A signal to one process when a given number of operations has ended."""

    at: int
    kind: Literal["kill", "stop"]
    rank: int
    operations: int = 0  # after which a stopped process continues


@dataclass(frozen=True)
class Plan:
    """The work of the clients and the disturbances of one run."""

    seed: int
    clients: int
    operations: int  # of each client
    disturbances: tuple[Disturbance, ...]

    @property
    def victims(self) -> set[int]:
        """The ranks of the processes that are killed."""
        return {each.rank for each in self.disturbances if each.kind == "kill"}

    @staticmethod
    def of(seed: int, clients: int, operations: int, kills: int, stops: int) -> Plan:
        """Return the plan of a seed: the total of operations, the killed clients and the stops of processes."""
        numbers = random.Random(seed)
        ranks = range(len(SERVERS) + clients)
        victims = numbers.sample(ranks[len(SERVERS) :], kills)
        survivors = clients - kills
        last = operations * survivors // clients  # the survivors alone do so many, and more
        made = [Disturbance(numbers.randrange(1, last * 9 // 10), "kill", rank) for rank in victims]
        made.append(Disturbance(last * numbers.randrange(60, 90) // 100, "kill", len(SERVERS) - 1))
        for i in range(stops):
            rank = numbers.choice(ranks[: len(SERVERS)] if i % 2 else ranks[len(SERVERS) :])
            length = numbers.randrange(10, 60)
            made.append(Disturbance(numbers.randrange(1, last * 9 // 10), "stop", rank, length))
        return Plan(seed, clients, -(-operations // clients), tuple(sorted(made)))


# ---- the disturber


class Disturber(threading.Thread):
    """The thread that counts the reports of the clients and sends signals."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        super().__init__(name="disturber")
        self._plan, self._folder = plan, folder
        self._size = len(SERVERS) + plan.clients
        os.mkfifo(folder / "reports")
        self._reports = os.open(folder / "reports", os.O_RDWR)
        for rank in range(self._size):
            os.mkfifo(folder / f"go {rank}")
        self._go = [os.open(folder / f"go {rank}", os.O_RDWR) for rank in range(self._size)]
        self._processes: dict[int, int] = {}
        self._stopped: dict[int, int] = {}  # and at which count they continue
        self._killed: set[int] = set()
        self._finished: set[int] = set()
        self._count = 0
        self._waiting = collections.deque(plan.disturbances)
        self.done: list[str] = []
        """events in order, for the message of a failure"""
        self._begin = time.monotonic()

    def end(self) -> None:
        """End the thread, also if the clients have not finished."""
        os.write(self._reports, REPORT.pack(OVER, 0, 0))
        self.join()
        for descriptor in (self._reports, *self._go):
            os.close(descriptor)

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self._reports], [], [], 2 * TIMEOUT)
            if not ready:  # no client makes progress
                if self._stopped:
                    self._note("no progress")
                self._continue(all_of_them=True)
                continue
            kind, rank, value = REPORT.unpack(os.read(self._reports, REPORT.size))
            if kind == OVER:
                self._note("all processes ended")
                return
            if kind == STARTED:
                self._processes[rank] = value
                if len(self._processes) == self._size:
                    self._say_go()
            elif kind == ENDED:
                self._count += 1
            else:
                self._finished.add(rank)
            self._continue()
            while self._waiting and self._waiting[0].at <= self._count:
                self._disturb(self._waiting.popleft())
            if len(self._finished) == self._plan.clients - len(self._plan.victims) + 1:
                self._finish_work()

    def _note(self, event: str) -> None:
        self.done.append(f"{time.monotonic() - self._begin:5.1f} s, {self._count} operations: {event}")

    def _say_go(self) -> None:
        self._note("processes go on")
        for pipe in self._go:
            os.write(pipe, b"!")

    def _finish_work(self) -> None:
        """Let the survivors, which have finished, read everything once more without disturbances."""
        for each in self._waiting:
            if each.kind == "kill":
                self._disturb(each)
        self._waiting.clear()
        self._continue(all_of_them=True)
        self._finished.clear()
        self._say_go()

    def _disturb(self, each: Disturbance) -> None:
        if each.rank in self._killed or (each.kind == "stop" and each.rank in self._stopped):
            return
        self._note(f"{each.kind} of rank {each.rank}")
        if each.kind == "kill":
            self._killed.add(each.rank)
            self._stopped.pop(each.rank, None)
            os.kill(self._processes[each.rank], signal.SIGKILL)
        else:
            self._stopped[each.rank] = self._count + each.operations
            os.kill(self._processes[each.rank], signal.SIGSTOP)

    def _continue(self, all_of_them: bool = False) -> None:
        for rank, until in [*self._stopped.items()]:
            if all_of_them or self._count >= until:
                del self._stopped[rank]
                os.kill(self._processes[rank], signal.SIGCONT)


# ---- what the processes have in common


class Reporter:
    """The end of the pipes in one of the processes."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._reports = os.open(folder / "reports", os.O_WRONLY)
        self._go = os.open(folder / f"go {rank}", os.O_RDONLY)

    def report(self, kind: int, value: int = 0) -> None:
        os.write(self._reports, REPORT.pack(kind, self._rank, value))  # short enough not to mix with others

    def wait(self) -> None:
        """Block until the disturber lets the processes go on."""
        assert os.read(self._go, 1) == b"!"


def be_process(rank: int, rendezvous: str, folder: str, plan: Plan) -> None:
    """Run a server or a client, by rank."""
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    number = rank - len(SERVERS)
    reporter = Reporter(Path(folder), rank)
    name = SERVERS[rank] if number < 0 else f"client{number}"
    with contextlib.ExitStack() as stack:
        if number < 0:  # a service that begins before RPC is there for every client
            folder_of_server = Path(folder) / name
            stack.enter_context(serve_store(folder_of_server, durable=True, clients=2 * plan.clients))
        rpc_ext.init_rpc(
            name,
            rank=rank,
            world_size=len(SERVERS) + plan.clients,
            init_method=f"file://{rendezvous}",
            secret=SECRET,
            num_worker_threads=4,
            rpc_timeout=LONG,
            start_timeout=LONG,
        )
        if number < 0:
            reporter.report(STARTED, os.getpid())
            for _ in ("start", "end of the work", "end of the last reads"):
                reporter.wait()
        else:
            be_client(number, Path(folder), plan, reporter)
    rpc_ext.shutdown(graceful=False)


def be_client(number: int, folder: Path, plan: Plan, reporter: Reporter) -> None:
    client = Client(number, folder, plan, reporter)
    reporter.report(STARTED, os.getpid())
    reporter.wait()
    client.work()
    if len(SERVERS) + number in plan.victims:
        signal.pause()
    reporter.report(FINISHED)
    reporter.wait()
    client.read_everything()
    client.close()
    reporter.report(FINISHED)
    reporter.wait()


# ---- a client


class Batch(NamedTuple):
    """An operation in flight."""

    number: int
    begin: int
    server: str
    keys: list[str]  # that are read or deleted
    future: CUDAFuture[Any]


class Client:
    """A client of both servers that writes, reads and deletes keys at random and records it.

    Some keys are shared with the other clients; of others each client writes its own, and all read them.
    """

    def __init__(self, number: int, folder: Path, plan: Plan, reporter: Reporter) -> None:
        self._journal = Journal(folder / f"client{number}.journal")
        self._random = random.Random(f"{plan.seed} {number}")
        self._plan, self._reporter = plan, reporter
        self._version = (number + 1) << 20  # the client and its sequence number, unique among all clients
        self._window = 1 + 3 * (number % 3)
        self._own = [f"small of {number}", f"page of {number}", f"any of {number}"]
        self._others = [key.replace(f" {number}", f" {i}") for key in self._own for i in range(plan.clients)]
        self._stores = {server: repeat_until_done(partial(open_store, server)) for server in SERVERS}
        self._in_flight: collections.deque[Batch] = collections.deque()
        self._ends: dict[int, int] = {}  # when operations ended

    def work(self) -> None:
        """Do as many operations as planned, some at a time, and wait until all have ended."""
        for _ in range(self._plan.operations):
            self._begin()
            while len(self._in_flight) >= self._window:
                self._end(self._in_flight.popleft())
        while self._in_flight:
            self._end(self._in_flight.popleft())

    def read_everything(self) -> None:
        """Record all keys of the servers that are left."""
        for server, store in [*self._stores.items()]:
            read_all(server, store, [*SHARED_KEYS, *self._others], self._journal)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def _begin(self) -> None:
        server = self._random.choice([*self._stores])
        kind = self._random.choices(["write", "read", "delete"], weights=[9, 8, 2])[0]
        keys = [self._key(kind == "read") for _ in range(self._random.choice([1, 1, 1, 2, 4]))]
        if sum(key.startswith(("large", "any", "meg")) for key in keys) > 1:
            keys = keys[:1]
        keys = [*dict.fromkeys(keys)]
        {"write": self._write, "read": self._read, "delete": self._delete}[kind](server, keys)

    def _key(self, is_read: bool) -> str:
        if self._random.random() < 0.5:
            return self._random.choice(self._others if is_read else self._own)
        return self._random.choices(SHARED_KEYS, weights=[WEIGHTS[key.split()[0]] for key in SHARED_KEYS])[0]

    def _write(self, server: str, keys: list[str]) -> None:
        self._version += 1
        contents = {key: content_of(key, self._version) for key in keys}
        number = self._journal.record_begin({f"{server}/{key}": self._version for key in keys})
        store = self._stores[server]
        self._follow(number, server, [], store.writev(contents) if len(keys) > 1 else store.write(*contents.popitem()))

    def _read(self, server: str, keys: list[str]) -> None:
        number = self._journal.record_begin({})
        outs = None
        if all(key.split()[0] in SIZES and not key.startswith("zero") for key in keys) and self._random.random() < 0.4:
            outs = [torch.full((size_of(key, 0),), 255, dtype=torch.uint8) for key in keys]
        begin = now()
        self._follow(number, server, keys, self._stores[server].readv(keys, outs), begin)

    def _delete(self, server: str, keys: list[str]) -> None:
        number = self._journal.record_begin({f"{server}/{keys[0]}": None})
        self._follow(number, server, keys[:1], self._stores[server].delete(keys[0]))

    def _follow(self, number: int, server: str, keys: list[str], future: CUDAFuture[Any], begin: int = 0) -> None:
        future.add_done_callback(partial(self._record_end, number))
        self._journal.record_limit(number, TIMEOUT)
        self._in_flight.append(Batch(number, begin or now(), server, keys, future))

    def _record_end(self, number: int, future: CUDAFuture[Any]) -> None:
        """Record the outcome at once, unless it is unknown, and report progress."""
        error = future.exception()
        is_known = error is None or isinstance(error, NotFoundError)
        self._ends[number] = self._journal.record_end(number, error is None) if is_known else now()
        self._reporter.report(ENDED)

    def _end(self, batch: Batch) -> None:
        """Wait for an operation, and record the versions that it has read."""
        error = batch.future.exception(timeout=LONG)
        seen: dict[str, Version] = {}
        if isinstance(error, NotFoundError):
            seen = {key: None for key in batch.keys if repr(key) in str(error)}
            assert seen, error
        elif isinstance(error, WorkerLostError):
            assert error.worker == SERVERS[-1], error
            self._stores.pop(batch.server, None)
        elif isinstance(error, TimeoutError):
            pass
        elif error is not None:
            raise error
        elif isinstance(batch.future.value(), list):
            contents = zip(batch.keys, batch.future.value(), strict=True)
            seen = {key: version_of(key, content) for key, content in contents}
        while batch.number not in self._ends:  # the callback is about to run
            os.sched_yield()
        end = self._ends.pop(batch.number)
        self._journal.record_read(batch.begin, end, {f"{batch.server}/{key}": version for key, version in seen.items()})


def open_store(server: str) -> RemoteStore:
    return RemoteStore(server, namespace=NAMESPACE, timeout=TIMEOUT)


def repeat_until_done(call: Callable[[], Any]) -> Any:
    """Repeat a call until it does not time out."""
    while True:
        with contextlib.suppress(TimeoutError):
            return call()


def read_all(server: str, store: RemoteStore, keys: Sequence[str], journal: Journal) -> None:
    """Read each of the keys, and record the versions."""
    first = now()
    reads = {key: store.read(key) for key in keys}
    for key, read in reads.items():
        begin = first
        error = read.exception(timeout=LONG)
        while isinstance(error, (TimeoutError, BlockingIOError)):  # earlier reads that timed out may still be in flight
            begin = now()
            read = store.read(key)
            error = read.exception(timeout=LONG)
        if isinstance(error, WorkerLostError) and error.worker == SERVERS[-1]:
            continue
        if error is not None and not isinstance(error, NotFoundError):
            raise error
        version = None if error is not None else version_of(key, read.value())
        journal.record_read(begin, now(), {f"{server}/{key}": version})
