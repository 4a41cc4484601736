"""Pool of worker processes for worlds, on the test's side; they are reused."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from cudafuture.testing._message_socket import MessageSocket
from cudafuture.testing._worker_job import DUMP, END, IDLE, READY, Outcome, WorkerJob
from cudafuture.testing._worker_launcher import WorkerLauncher

__all__ = ["Worker", "WorkerPool", "dump_stacks"]

_START = 120.0  # seconds for a worker to import what it needs
_PATIENCE = 5.0  # seconds for a worker to leave its world
_DUMP_PATIENCE = 10.0  # seconds for a process to write its stacks
_OUTERMOST = "in _run_module_as_main"  # the last line that faulthandler writes: the main thread comes last
_MOST_IDLE = 8  # workers that are kept for later
_TAIL = 4000  # characters of a worker's output that are shown


def dump_stacks(workers: Iterable[Worker]) -> list[str]:
    """Return the Python stacks of all threads of each worker."""
    asked = list(workers)
    for worker in asked:
        worker.signal(signal.SIGCONT)  # it may have been stopped
        worker.signal(DUMP)
    deadline = time.monotonic() + _DUMP_PATIENCE
    while time.monotonic() < deadline and not all(_OUTERMOST in worker.stacks() for worker in asked):
        time.sleep(0.02)
    return [worker.stacks() or "(it wrote no stacks)" for worker in asked]


class Worker:
    """Process that calls functions, from the test's side."""

    def __init__(self, launcher: WorkerLauncher) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="cudafuture-worker-"))
        ours, theirs = socket.socketpair()
        try:
            with theirs, (self._folder / "output").open("w") as output:
                self._process = launcher.launch(theirs.fileno(), output.fileno(), self._folder / "stacks")
        except BaseException:
            ours.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self.connection = MessageSocket(ours)
        self.process = self._process.pid
        self._started = False

    def wait_until_started(self) -> bool:
        """Wait until the worker accepts jobs; return False if it does not start."""
        if not self._started:
            self._started = self._receives(READY, _START)
        return self._started

    def begin(self, job: WorkerJob) -> None:
        with contextlib.suppress(OSError):  # the worker has died, which the wait for its answer reports
            self.connection.send(pickle.dumps(job))

    def answer(self) -> Outcome:
        outcome: Outcome = pickle.loads(self.connection.receive())
        return outcome

    def end(self) -> bool:
        """Make the worker leave the world; return False if it does not."""
        try:
            self.connection.send(END)
        except OSError:
            return False
        return self._receives(IDLE, _PATIENCE)

    def _receives(self, message: bytes, timeout: float) -> bool:
        with selectors.DefaultSelector() as selector, contextlib.suppress(EOFError):
            selector.register(self.connection, selectors.EVENT_READ)
            return bool(selector.select(timeout)) and self.connection.receive() == message
        return False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def way_of_dying(self) -> str:
        try:
            code = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"

    def output(self) -> str:
        return self._read("output")[-_TAIL:]

    def stacks(self) -> str:
        return self._read("stacks")

    def forget_output(self) -> None:
        """Discard the output so far, so that later output belongs to the next test."""
        for name in ("output", "stacks"):
            with contextlib.suppress(OSError):
                os.truncate(self._folder / name, 0)

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Kill the worker and all its descendants; its output stays readable."""
        import psutil

        if not self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # processes that remain in its session
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        """Kill the worker, and remove its files."""
        self.stop()
        self.connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(errors="replace").strip("\0")
        except OSError:
            return ""


class WorkerPool:
    """Workers that wait for their next function, each for its rank: some of torch's states outlive a group."""

    def __init__(self) -> None:
        self._idle: dict[int, list[Worker]] = {}
        self._launcher = WorkerLauncher()

    def take(self, rank: int) -> Worker:
        """Return an idle worker that had this rank before, or a new one."""
        idle = self._idle.get(rank, [])
        while idle:
            worker = idle.pop()
            if worker.is_alive:
                worker.forget_output()
                return worker
            worker.kill()
        return Worker(self._launcher)

    def give_back(self, workers: Iterable[Worker]) -> None:
        """Keep workers, given in rank order, for later, up to a limit."""
        for rank, worker in enumerate(workers):
            if sum(map(len, self._idle.values())) < _MOST_IDLE:
                self._idle.setdefault(rank, []).append(worker)
            else:
                worker.kill()

    def close(self) -> None:
        """Kill all idle workers, and end the server that forks them."""
        for worker in itertools.chain.from_iterable(self._idle.values()):
            worker.kill()
        self._idle.clear()
        self._launcher.close()
