"""Python process of a test, which reports its progress on one pipe and reads commands from another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from support.patience import PATIENCE
from support.script_server import REQUEST

TESTS = Path(__file__).resolve().parents[1]
# From Python 3.12 on, a fork of a process with several threads warns; what happens then is what these tests are about.
FORK_WARNING = "ignore:This process:DeprecationWarning"

_SERVER = """
__import__("torch.distributed")
exec(compile(__import__("support.script_server").script_server.next_script({number}), "<string>", "exec"))
"""


def search_path() -> str:
    """Return a PYTHONPATH with the tests, and with what it has already: fakecuda adds to it."""
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


class Process:
    """Process of a script.

    Attributes:
        pid: its ID, which is also that of its process group.
    """

    def __init__(self, server: _Server, pid: int) -> None:
        self._server, self.pid = server, pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None if the process is running."""
        return self._server.code(self.pid, 0)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait for the end of the process, and return its exit code.

        Raises:
            TimeoutError: it is still running after `timeout` seconds.
        """
        code = self._server.code(self.pid, timeout)
        if code is None:
            raise TimeoutError("the child does not end")
        return code

    def send(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)


class _Server:
    """Forks the processes of scripts; see ``support.script_server``."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()  # guards what follows
        self._codes: dict[int, int] = {}  # of processes that have ended
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-W", FORK_WARNING, "-c", _SERVER.format(number=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": search_path()},
                start_new_session=True,
            )

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.process.wait(PATIENCE)

    def start(
        self, script: str, arguments: tuple[str, ...], environment: Mapping[str, str], descriptors: list[int]
    ) -> Process:
        """Start a script; `descriptors` are for its stdout, its stderr, and the pipes of `say` and `hear`."""
        request = {
            "script": script,
            "arguments": arguments,
            "environment": {**os.environ, "PYTHONPATH": search_path(), **environment},
            "folder": str(Path.cwd()),
        }
        message = json.dumps(request).encode()
        assert len(message) <= REQUEST
        with self._lock:
            try:
                socket.send_fds(self._socket, [message], descriptors)
                while True:
                    pid, code = self._answer()
                    if code is None:
                        self._codes.pop(pid, None)  # of an earlier process with this ID
                        return Process(self, pid)
                    self._codes[pid] = code
            except BaseException:  # an interrupt: the answer would be taken for that of the next script
                self.end()
                raise

    def code(self, pid: int, timeout: float) -> int | None:
        """Return the exit code of a process, or None if it is still running after `timeout` seconds."""
        end = time.monotonic() + timeout
        with self._lock:
            while pid not in self._codes:
                if not select.select([self._socket], [], [], max(0.0, end - time.monotonic()))[0]:
                    return None
                ended, code = self._answer()
                assert code is not None
                self._codes[ended] = code
            return self._codes[pid]

    def _answer(self) -> tuple[int, int | None]:
        message = self._socket.recv(REQUEST)
        if not message:
            raise EOFError(f"the server of scripts is gone, with code {self.process.wait()}")
        pid, code = json.loads(message)
        return pid, code


_servers: dict[str, _Server] = {}  # by the libraries that stand between a script and libc


def _server() -> _Server:
    preloaded = os.environ.get("LD_PRELOAD", "")
    server = _servers.get(preloaded)
    if server is None or server.process.poll() is not None:
        for other in [key for key in _servers if key]:
            _servers.pop(other).end()  # a library is of one test
        server = _servers[preloaded] = _Server()
    return server


def run_script(
    code: str, *arguments: str, environment: Mapping[str, str] | None = None, patience: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, as `Child` does; return its exit code and what it wrote to stdout and stderr."""
    with Child(code, *arguments, environment=environment) as child:
        return subprocess.CompletedProcess(arguments, child.end(patience), child.output(), child.errors())


RUN_PYTEST = "import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))"


def _state_of(thread: Path) -> str:
    """Return the letter of proc(5) for the state of a thread."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


class Child:
    """Script in another process. Leaving the scope kills it if it is still there.

    Args:
        code: the script. It finds `say(line)` and `hear()` defined, which speak to the test over pipes; its stdout
            and stderr are collected apart. Torch has been imported before it begins, and nothing of this project.
        arguments: go into its sys.argv.
        environment: variables that are set for it beside those of this process, after torch was imported.
    """

    def __init__(self, code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._from_child, to_test = os.pipe()
        from_test, self._to_child = os.pipe()
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._heard = b""
        try:
            descriptors = [self._output.fileno(), self._errors.fileno(), to_test, from_test]
            self.process = _server().start(code, arguments, environment or {}, descriptors)
        finally:
            os.close(to_test)
            os.close(from_test)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            if error is not None and hasattr(error, "add_note"):
                error.add_note(f"the child wrote to stderr: {self.errors()!r}")
        finally:
            os.close(self._from_child)
            os.close(self._to_child)
            self._output.close()
            self._errors.close()

    def hear(self, patience: float = PATIENCE) -> str:
        """Return the next line that the child says. TimeoutError when it is silent, EOFError when it is gone."""
        end = time.monotonic() + patience
        while b"\n" not in self._heard:
            readable, _, _ = select.select([self._from_child], [], [], max(0.0, end - time.monotonic()))
            if not readable:
                raise TimeoutError("the child hangs")
            piece = os.read(self._from_child, 65536)
            if not piece:
                raise EOFError(f"the child is gone, with code {self.end()}")
            self._heard += piece
        line, self._heard = self._heard.split(b"\n", 1)
        return line.decode()

    def say(self, line: str) -> None:
        """Send the child a line, which its next `hear()` returns."""
        os.write(self._to_child, line.encode() + b"\n")

    def send(self, number: signal.Signals) -> None:
        self.process.send(number)

    def stop(self) -> None:
        """Stop the process with SIGSTOP, which takes effect later, and return when all of its threads have stopped."""
        self.send(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        while any(_state_of(thread) != "T" for thread in threads.iterdir()):
            time.sleep(0.001)

    def end(self, patience: float = PATIENCE) -> int:
        """Wait until the process has ended; return its exit code, negative for a signal."""
        return self.process.wait(patience)

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def errors(self) -> str:
        """Return what the process has written to stderr, without what CUDAFUTURE_TRACE logs of a full ring."""
        self._errors.seek(0)
        return "".join(line for line in self._errors if not re.match("the trace in .* lacks .* events", line))
