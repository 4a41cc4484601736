"""Program of the fork server: ``python -m cudafuture.testing._fork_server SOCKET TEST`` forks workers on request.

The server imports torch once. SOCKET is a socket to the test, TEST a pidfd of the test's process. The server reports
how each worker ended. It kills the workers when the test closes the socket or ends. It ends before its first reply if
it cannot fork, because it has several threads or has initialised CUDA.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cudafuture.testing import _worker
from cudafuture.testing._message_socket import MessageSocket
from cudafuture.testing._worker_job import EXIT_CODE, WorkerRequest

__all__: list[str] = []

_MOST_DESCRIPTORS = 8  # of one message


class _WorkerFiles(NamedTuple):
    """Descriptors that come with a request, in the order in which the test sends them."""

    connection: int  # socket to the test
    output: int  # stdout and stderr
    folder: int  # the working directory
    exit_code: int  # pipe for the exit code, which the server writes


@dataclass(frozen=True)
class _ForkedWorker:
    """Worker that runs."""

    pid: int
    exit_code: int


class _Requests:
    """Requests of a test, and the workers that were forked for them."""

    def __init__(self, end: socket.socket, test: int) -> None:
        self._end, self._test = end, test
        self._connection = MessageSocket(end)
        self._workers: dict[int, _ForkedWorker] = {}  # by pidfd

    def serve(self) -> tuple[WorkerRequest, _WorkerFiles] | None:
        """Fork workers until the test ends. Return the request in a worker, None in the server."""
        ready = select.poll()
        ready.register(self._end, select.POLLIN)
        ready.register(self._test, select.POLLIN)
        while True:
            for descriptor, _ in ready.poll():
                if descriptor in self._workers:
                    ready.unregister(descriptor)
                    self._report(descriptor)
                elif descriptor == self._test:
                    return None
                else:
                    try:
                        request, files = self._receive()
                        pidfd = self._fork(files)
                    except EOFError:
                        return None
                    except OSError:  # no more processes or descriptors
                        self._refuse()
                        continue
                    if pidfd is None:
                        return request, files
                    ready.register(pidfd, select.POLLIN)

    def end(self) -> None:
        """Kill all workers, and report how they ended."""
        for worker in self._workers.values():
            os.kill(worker.pid, signal.SIGKILL)
        for pidfd in list(self._workers):
            self._report(pidfd)

    def _receive(self) -> tuple[WorkerRequest, _WorkerFiles]:
        """Receive a request; raise EOFError if the test has closed the socket, OSError if its files did not come."""
        flags = socket.MSG_CMSG_CLOEXEC
        first, descriptors, _, _ = socket.recv_fds(self._end, 1, _MOST_DESCRIPTORS, flags)
        if not first:
            raise EOFError("the test has closed the socket")
        request = pickle.loads(self._connection.receive())
        if len(descriptors) != len(_WorkerFiles._fields):
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(errno.EMFILE, "the server has no more descriptors")
        return request, _WorkerFiles(*descriptors)

    def _refuse(self) -> None:
        """Send the reply that no worker was forked."""
        with contextlib.suppress(OSError):  # the test has ended
            self._end.sendall(b"\0")
            self._connection.send(b"0")

    def _fork(self, files: _WorkerFiles) -> int | None:
        """Fork a worker and reply with its pid and its pidfd. Return the pidfd in the server, None in the worker."""
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            for descriptor in files:
                os.close(descriptor)
            raise
        if pid == 0:
            _worker.follow_parent()
            if os.getppid() != server:  # it has died before the worker could follow it
                os._exit(1)
            self._forget()
            os.close(files.exit_code)  # only the server's end may be open: the test reads until it is closed
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            for descriptor in files:
                os.close(descriptor)
            raise
        self._workers[pidfd] = _ForkedWorker(pid, files.exit_code)
        for descriptor in (files.connection, files.output, files.folder):
            os.close(descriptor)
        with contextlib.suppress(OSError):  # the test has ended
            socket.send_fds(self._end, [b"\0"], [pidfd])
            self._connection.send(str(pid).encode())
        return pidfd

    def _forget(self) -> None:
        """Close, in a worker, the descriptors of the server."""
        for pidfd, worker in self._workers.items():
            os.close(pidfd)
            os.close(worker.exit_code)
        self._end.close()
        os.close(self._test)

    def _report(self, pidfd: int) -> None:
        """Wait for a worker that ends, and write its exit code."""
        worker = self._workers.pop(pidfd)
        _, status = os.waitpid(worker.pid, 0)
        with contextlib.suppress(OSError):  # the test has closed its end
            os.write(worker.exit_code, EXIT_CODE.pack(os.waitstatus_to_exitcode(status)))
        os.close(worker.exit_code)
        os.close(pidfd)


def _can_fork() -> bool:
    """Return whether a fork of this process is a whole process, which can use torch."""
    import torch

    return len(list(Path("/proc/self/task").iterdir())) == 1 and not torch.cuda.is_initialized()


def _prepare_worker(request: WorkerRequest, files: _WorkerFiles) -> None:
    """Give a forked process what a new interpreter would have from its start."""
    os.setsid()
    os.dup2(files.output, 1)
    os.dup2(files.output, 2)
    os.close(files.output)
    os.fchdir(files.folder)
    os.close(files.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    request.limits.apply()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # otherwise all workers would draw the same numbers


def main(descriptor: int, test: int) -> None:
    """Fork workers until the test ends; in a worker, take jobs."""
    _worker.import_libraries()
    if not _can_fork():
        return
    requests = _Requests(socket.socket(fileno=descriptor), test)
    accepted = requests.serve()
    if accepted is None:
        requests.end()
        os._exit(0)
    request, files = accepted
    _prepare_worker(request, files)
    _worker.main(files.connection, request.stacks)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
