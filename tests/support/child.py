"""A Python process of a test's own, which says on a pipe how far it is and is told on another to go on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

TESTS = Path(__file__).resolve().parents[1]
SILENCE = 20.0  # seconds after which a silent child counts as hung; nothing waits that long unless it is broken
# From Python 3.12 on, a fork of a process with several threads warns; what happens then is what these tests are about.
FORK_WARNING = "ignore:This process:DeprecationWarning"


class Child:
    """Runs a script in another interpreter. Leaving the scope kills it if it is still there.

    Args:
        code: the script. It finds `say(line)` and `hear()` defined, which speak to the test over pipes; its stdout
            and stderr are collected apart.
        arguments: go into its sys.argv.
    """

    def __init__(self, code: str, *arguments: str) -> None:
        from_child, to_test = os.pipe()
        from_test, to_child = os.pipe()
        talk = TALK.format(to_test=to_test, from_test=from_test)
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-W", FORK_WARNING, "-c", talk + code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            pass_fds=(to_test, from_test),
            env=os.environ | {"PYTHONPATH": str(TESTS)},
            start_new_session=True,  # a Ctrl-C in the terminal is the test's own affair
        )
        os.close(to_test)
        os.close(from_test)
        self._from_child = from_child
        self._to_child = to_child
        self._heard = b""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._from_child)
        os.close(self._to_child)
        if error is not None and hasattr(error, "add_note"):
            error.add_note(f"the child wrote to stderr: {self.errors()!r}")
        self._output.close()
        self._errors.close()

    def hear(self, patience: float = SILENCE) -> str:
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
        os.kill(self.process.pid, number)

    def end(self, patience: float = SILENCE) -> int:
        """Wait until the process has ended; return its exit code, negative for a signal."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise TimeoutError("the child does not end") from None

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()


# The line is written with one call, so that lines of several threads and forked children do not mix.
TALK = """
def say(line, _pipe={to_test}):
    import os
    os.write(_pipe, str(line).encode() + b"\\n")

def hear(_pipe={from_test}):
    import os
    line = b""
    while not line.endswith(b"\\n"):
        piece = os.read(_pipe, 1)
        if not piece:
            os._exit(99)  # the test is gone
        line += piece
    return line[:-1].decode()
"""
