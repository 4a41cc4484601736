"""Questions to another process: what is pending there, or why it cannot say.

::

    ask(process, folder)
        FOLDER/PID.socket      answers with the walk of core/pending.h, as JSON (core/debug_socket.h)
        FOLDER/PID.progress    how far it came in each group, if it is stopped or dead (core/progress.h)
        /proc/PID              whether it lives, is stopped, and whose it is
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudafuture._arguments import expect_int
from cudafuture._progress import ProcessProgress, is_alive, read_progress
from cudafuture.config import config, debug_dir
from cudafuture.debug._trees import Pending, trees_of

__all__ = ["PATIENCE", "ProcessReport", "ask"]

PATIENCE = 4.0  # seconds for an answer
_PROTOCOL = 1
_LARGEST = 256 << 20  # bytes of an answer


@dataclass(frozen=True, repr=False)
class ProcessReport:
    """Report of one process."""

    process: int
    problem: str
    """Reason why it did not answer; empty: it did."""
    pending: Pending | None
    """Pending futures there; None: it did not answer."""
    progress: ProcessProgress | None
    """Progress in each process group; None: it is not known."""
    version: str = ""

    def __repr__(self) -> str:
        return f"<ProcessReport of {self.title}{', ' + self.problem if self.problem else ''}>"

    @property
    def rank(self) -> int | None:
        """Its rank in the job; None: it is not known."""
        rank = -1 if self.progress is None else self.progress.rank
        return rank if rank >= 0 else None

    @property
    def worker(self) -> str:
        """Its name as an RPC worker; empty: it is none."""
        return "" if self.progress is None else self.progress.worker

    @property
    def title(self) -> str:
        """The rank, or the worker's name, and the number of the process."""
        names = [f"rank {self.rank}"] if self.rank is not None else []
        names += [f"worker '{self.worker}'"] if self.worker else []
        return f"{', '.join(names)} (process {self.process})" if names else f"process {self.process}"


def ask(process: int, folder: Path | None = None, patience: float = PATIENCE) -> ProcessReport:
    """Ask a process what is pending there. Send it no signal.

    Args:
        process: its number.
        folder: of its socket; None: that which its environment names.
        patience: seconds to wait for the answer.

    >>> ask(0).problem
    'there is no process 0'
    """
    process = expect_int("process", process)
    end = time.monotonic() + patience
    found = Path(folder or _folder_of(process) or os.devnull)
    progress = progress_of(process, found)
    gone = "it is dead" if progress is not None else f"there is no process {process}"
    state = _state_of(process)
    if state is None:
        return ProcessReport(process, gone, None, progress)
    try:
        answer = _answer(found / f"{process}.socket", Path(f"/proc/{process}").stat().st_uid, end)
    except OSError as error:
        return ProcessReport(process, _why(process, found, _state_of(process) or "X", error), None, progress)
    return _report(process, answer, progress, state)


def progress_of(process: int, folder: Path | None = None) -> ProcessProgress | None:
    """Return the progress that a process has written; None: it has written none."""
    progress = read_progress(Path(folder or _folder_of(process)) / f"{process}.progress")
    return progress if progress is not None and progress.process == process else None


def _report(process: int, answer: bytes, progress: ProcessProgress | None, state: str) -> ProcessReport:
    if not answer:
        owner = _owner_of(process)
        if os.geteuid() == 0 or owner == _name_of(os.geteuid()):
            return ProcessReport(process, "it is ending", None, progress)
        return ProcessReport(process, f"it refused to answer: only its user, {owner}, and root may ask", None, progress)
    try:
        told: dict[str, Any] = json.loads(answer.decode(errors="replace"))
        protocol, version = told["protocol"], str(told["version"])
        if protocol == _PROTOCOL and told["process"] == process and not told["forked_from"]:
            if progress is None:  # it is in no group
                progress = ProcessProgress(process, told["rank"], told["world_size"], told["worker"], ())
            return ProcessReport(process, "", trees_of(told["pending"]), progress, version)
    except (ValueError, LookupError, TypeError, RecursionError):
        return ProcessReport(process, "its answer is cut short or is none of this library", None, progress)
    if protocol != _PROTOCOL:
        what = f"it runs cudafuture {version}, which answers with protocol {protocol}: run `ps` of that version"
        return ProcessReport(process, what, None, progress, version)
    if told["process"] != process:
        return ProcessReport(process, f"process {told['process']} answered in its place", None, progress, version)
    what = f"it was forked from process {told['forked_from']}, which had used the library: it has no futures"
    return ProcessReport(process, what, None, None, version)


def _answer(path: Path, owner: int, end: float) -> bytes:
    """Return what the socket of a user's process answers.

    Raise TimeoutError at the end, and another OSError without a listener.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            if os.fstat(folder).st_uid not in (os.geteuid(), owner):
                raise PermissionError(f"{path.parent} belongs to another user")
            client.settimeout(max(0.001, end - time.monotonic()))
            client.connect(f"/proc/self/fd/{folder}/{path.name}")  # the path may be longer than an address
        finally:
            os.close(folder)
        client.sendall(b"pending\n")
        chunks: list[bytes] = []
        while sum(map(len, chunks)) < _LARGEST:
            client.settimeout(max(0.001, end - time.monotonic()))
            chunk = client.recv(1 << 20)
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
        raise OSError("the answer has no end")


def _why(process: int, folder: Path, state: str, error: OSError) -> str:
    """Return the reason why a living process did not answer."""
    owner = _owner_of(process)
    is_foreign = owner != _name_of(os.geteuid()) and os.geteuid() != 0
    if state in "Tt":
        return "it is stopped (SIGSTOP, or a debugger): `kill -CONT` lets it go on"
    if state in "ZX":
        return "it is dead, and its parent has not noticed"
    if isinstance(error, PermissionError) or is_foreign:
        return f"it belongs to {owner}: only its user and root may ask"
    if isinstance(error, (TimeoutError, socket.timeout, BlockingIOError)):
        return f"it has not answered in time: the machine is busy, or the process cannot run (state {state})"
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        if (folder / f"{process}.progress").exists():
            return "it is ending: it has closed its socket"
        return f"it has not used an engine of cudafuture, or not with this folder of sockets: {folder}"
    return f"it did not answer: {error}"


def _folder_of(process: int) -> str:
    """Return the folder that the environment of a process names; that of this process where it may not be read."""
    try:
        pairs = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        owner = Path(f"/proc/{process}").stat().st_uid
    except OSError:
        return config.debug_dir
    environ = dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs if b"=" in pair)
    if environ.get("CUDAFUTURE_DEBUG_DIR") or environ.get("XDG_RUNTIME_DIR"):
        return debug_dir(environ)
    return f"/tmp/cudafuture-{owner}"


def _state_of(process: int) -> str | None:
    """Return the letter of the process's state; None: there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return "?" if process > 0 and is_alive(process) else None
    return text.rpartition(")")[2].split()[0]


def _owner_of(process: int) -> str:
    try:
        return _name_of(Path(f"/proc/{process}").stat().st_uid)
    except OSError:
        return "another user"


def _name_of(user: int) -> str:
    try:
        return f"user '{pwd.getpwuid(user).pw_name}'"
    except KeyError:
        return f"user {user}"
