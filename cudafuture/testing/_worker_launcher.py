"""Launcher of workers, on the test's side: it has them forked by a server, or starts new interpreters."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from cudafuture.testing._message_socket import MessageSocket
from cudafuture.testing._worker_job import EXIT_CODE, ProcessLimits, WorkerRequest

__all__ = ["ForkServer", "ForkedProcess", "WorkerLauncher"]

_START = 120.0  # seconds for a server to import torch, and to reply
_PATIENCE = 5.0  # seconds for a server to end
_CURRENT_TEST = "PYTEST_CURRENT_TEST"  # changes with each test, and no import reads it


class ForkedProcess:
    """Process that a server has forked, with the part of ``subprocess.Popen`` that a worker uses."""

    def __init__(self, pid: int, pidfd: int, exit_code: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd  # a signal through it cannot reach another process with the same pid
        self._exit_code = exit_code  # the pipe into which the server writes

    def __del__(self) -> None:
        os.close(self._pidfd)
        os.close(self._exit_code)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        if self.returncode is None and _is_readable(self._exit_code, 0):
            self._finish()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended and its exit code is known; raise TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not _is_readable(self._exit_code, timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self._finish()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _finish(self) -> None:
        code = os.read(self._exit_code, EXIT_CODE.size)
        if code:
            (self.returncode,) = EXIT_CODE.unpack(code)
        else:  # the server has died, and its workers die with it
            self.kill()
            _is_readable(self._pidfd, _PATIENCE)
            self.returncode = -signal.SIGKILL


def _is_readable(descriptor: int, timeout: float | None) -> bool:
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(None if timeout is None else timeout * 1000))


class ForkServer:
    """Server process that has imported torch and forks workers, from the test's side.

    Raises:
        OSError: the system has no pidfds.
    """

    def __init__(self, interpreter: str, environment: dict[str, str]) -> None:
        test = os.pidfd_open(os.getpid())
        self._workers: list[ForkedProcess] = []
        self._has_replied = False
        self._end, theirs = socket.socketpair()
        self._end.settimeout(_START)
        self._connection = MessageSocket(self._end)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [interpreter, "-m", "cudafuture.testing._fork_server", str(theirs.fileno()), str(test)],
                    pass_fds=[theirs.fileno(), test],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
        finally:
            os.close(test)

    @property
    def has_workers(self) -> bool:
        """True while a worker of this server runs."""
        self._workers = [worker for worker in self._workers if worker.poll() is None]
        return bool(self._workers)

    def fork(self, request: WorkerRequest, connection: int, output: int) -> ForkedProcess | None:
        """Request a worker with its end of the connection, and a file for its output; None: the server refuses it.

        Raises:
            EOFError: the server has died, or cannot fork.
            OSError: the server has died, or does not reply in time.
        """
        self._workers = [worker for worker in self._workers if worker.poll() is None]
        folder = os.open(".", os.O_PATH)
        exit_code, servers_end = os.pipe()
        try:
            socket.send_fds(self._end, [b"\0"], [connection, output, folder, servers_end])
            self._connection.send(pickle.dumps(request))
        except BaseException:
            os.close(exit_code)
            raise
        finally:
            os.close(folder)
            os.close(servers_end)
        pidfds: list[int] = []
        try:
            reply, pidfds, _, _ = socket.recv_fds(self._end, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if not reply:
                raise EOFError("the fork server has died, or cannot fork")
            self._has_replied = True
            pid = int(self._connection.receive())
        except BaseException:
            os.close(exit_code)
            for pidfd in pidfds:
                os.close(pidfd)
            raise
        if not pidfds:
            os.close(exit_code)
            return None
        worker = ForkedProcess(pid, pidfds[0], exit_code)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        """End the server, which kills the workers that still run."""
        with contextlib.suppress(OSError):  # the server has died
            self._end.shutdown(socket.SHUT_RDWR)  # a forked child of the test may have a copy, too
        self._end.close()
        if not self._has_replied:
            self._process.kill()  # it has no workers, and may still import
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:  # it is stopped
            self._process.kill()
            self._process.wait()


class WorkerLauncher:
    """Launcher of workers that have the environment and the working directory of the moment.

    A server forks them, because ``import torch`` takes a second. Libraries read variables when they are imported, so a
    server forks only for the environment in which it was started, apart from pytest's name of the current test.
    A worker is a new interpreter where a fork is not safe: a library is preloaded, the server has more than one thread
    or has initialised CUDA, or the system has no pidfds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below, and the connections of the servers
        self._server: ForkServer | None = None
        self._served: tuple[str, dict[str, str]] | None = None  # interpreter and environment of the server
        self._unfit: list[tuple[str, dict[str, str]]] = []  # those of servers that could not fork
        self._retired: list[ForkServer] = []  # have workers, and fork no more

    def launch(self, connection: int, output: int, stacks: Path) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start a worker with its end of the connection, a file for its output, and the path of one for its stacks."""
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | os.environ
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        if hasattr(os, "pidfd_open") and "LD_PRELOAD" not in environment:
            forked = self._fork(
                WorkerRequest(environment, str(stacks), ProcessLimits.of_this_process()), connection, output
            )
            if forked is not None:
                return forked
        return subprocess.Popen(
            [sys.executable, "-m", "cudafuture.testing._worker", str(connection), str(stacks)],
            pass_fds=[connection],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the servers."""
        with self._lock:
            self._close_server()
            for server in self._retired:
                server.close()
            self._retired.clear()

    def _fork(self, request: WorkerRequest, connection: int, output: int) -> ForkedProcess | None:
        """Request a worker from the server; return None if no server can fork, or this one refuses."""
        environment = {name: value for name, value in request.environment.items() if name != _CURRENT_TEST}
        required = (sys.executable, environment)
        with self._lock:
            if required in self._unfit:
                return None
            if required != self._served:
                self._retire_server()
            self._close_unused()
            while True:
                is_new = self._server is None
                try:
                    if self._server is None:
                        self._server, self._served = ForkServer(*required), required
                    return self._server.fork(request, connection, output)
                except (OSError, EOFError):
                    self._close_server()
                    if is_new:
                        self._unfit.append(required)
                        return None
                except BaseException:
                    self._close_server()  # its late reply must not be taken for the next one
                    raise

    def _retire_server(self) -> None:
        if self._server is not None:
            self._retired.append(self._server)
            self._server = None

    def _close_unused(self) -> None:
        """End the retired servers whose workers have all ended."""
        unused = [server for server in self._retired if not server.has_workers]
        for server in unused:
            server.close()
            self._retired.remove(server)

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
