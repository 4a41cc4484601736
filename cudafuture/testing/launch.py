"""Launch of a script, as ``torchrun`` does it, for a test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cudafuture._arguments import expect_int
from cudafuture.debug import look_at

__all__ = ["Finished", "torchrun"]

_DUMP_PATIENCE = 2.0  # seconds for aborted processes to write their stacks


@dataclass(frozen=True)
class Finished:
    """Output and exit code of a script."""

    returncode: int
    stdout: str
    stderr: str


def torchrun(
    script: str | Path,
    n: int,
    *args: str,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> Finished:
    r"""Run `script` in `n` processes of this machine through ``torch.distributed.run``, and wait for its end.

    Args:
        script: a Python file.
        n: the number of processes; each finds RANK and WORLD_SIZE in its environment.
        args: of the script.
        timeout: seconds, after which all processes write their stacks to stderr and are killed.
        env: variables in addition to those of this process.
        check: True (default): a returncode other than 0 is an error.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: `n` is less than 1.
        RuntimeError: the script failed, and `check` was set; the message has its output.
        TimeoutError: it did not end in time; the message has its output and stacks. None of its processes remains.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
    ...     _ = script.write("import os; print(os.environ['WORLD_SIZE'])")
    ...     script.flush()
    ...     torchrun(script.name, 1).stdout
    '1\n'
    """
    __tracebackhide__ = True
    expect_int("n", n, 1)
    if not Path(script).is_file():
        raise FileNotFoundError(f"there is no script {script}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), str(script)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **os.environ, **(env or {})}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [*command, *args], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        in_time, pending = True, ""
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            in_time = False
            pending = _pending_below(process)
        finally:
            _end_all(process)
        out.seek(0)
        err.seek(0)
        finished = Finished(process.returncode, out.read(), err.read())
    written = f"\n--- stdout\n{finished.stdout}\n--- stderr\n{finished.stderr}"
    if not in_time:
        raise TimeoutError(f"{script} with {n} processes did not end within {timeout:g} seconds{written}{pending}")
    if check and finished.returncode != 0:
        raise RuntimeError(f"{script} with {n} processes ended with code {finished.returncode}{written}")
    return finished


def _pending_below(process: subprocess.Popen[bytes]) -> str:
    """Return what is pending in the workers of a launcher, and who waits for whom."""
    import psutil

    with contextlib.suppress(psutil.Error):
        workers = psutil.Process(process.pid).children(recursive=True)
        return f"\n--- what is pending\n{look_at(worker.pid for worker in workers)}"
    return ""


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher with its workers, which are in their own sessions; make hanging ones write their stacks."""
    import psutil

    if process.poll() is not None:
        return
    family = [psutil.Process(process.pid)]
    family += family[0].children(recursive=True)
    for member in reversed(family[1:]):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGCONT)
            member.send_signal(signal.SIGABRT)
    psutil.wait_procs(family[1:], _DUMP_PATIENCE)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            for late in member.children(recursive=True):
                late.kill()
            member.kill()
    process.wait()
