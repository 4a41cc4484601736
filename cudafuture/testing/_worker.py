"""Program of a worker: ``python -m cudafuture.testing._worker SOCKET STACKS`` takes jobs until the socket closes.

A job is a function with its world. The worker answers with the outcome, waits until all ranks have answered, leaves the
world, and is ready for the next job. After a failure it is not used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from cudafuture.testing._message_socket import MessageSocket
from cudafuture.testing._worker_job import DUMP, FORKED, IDLE, READY, Outcome, WorkerJob

__all__: list[str] = []

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # live as long as their process


def perform(job: WorkerJob) -> Outcome:
    """Join the world and call the function in it."""
    import cloudpickle
    import torch.distributed as dist

    sys.path[:] = job.path
    pid = os.getpid()
    try:
        dist.init_process_group(
            job.backend,
            init_method=f"file://{job.store}",
            rank=job.rank,
            world_size=job.size,
            timeout=dt.timedelta(seconds=job.timeout),
        )
        function, args, kwargs = pickle.loads(job.call)
        outcome = Outcome(value=cloudpickle.dumps(function(*args, **kwargs)))
    except BaseException as e:
        outcome = _failure(e)
    if os.getpid() != pid:
        os._exit(FORKED)  # a forked child, which must not answer instead of its parent
    outcome.left = _left_behind()
    return outcome


def _failure(error: BaseException) -> Outcome:
    import cloudpickle

    own = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the frame of perform()
    outcome = Outcome(traceback="".join(traceback.format_exception(type(error), error, own)))
    if "_pytest.outcomes" in sys.modules and isinstance(error, sys.modules["_pytest.outcomes"].Skipped):
        outcome.skipped = str(error)
        return outcome
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)
        outcome.error = pickled
    return outcome


def _left_behind() -> list[str]:
    """Describe the processes that descend from this one. Orphans among them have become its children."""
    import psutil

    left = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                if child.ppid() == os.getpid() and child.wait() == FORKED:
                    left.append("a forked child returned from the function; end it with os._exit()")
                continue
            command = " ".join(child.cmdline())
            if not any(helper in command for helper in _HELPERS):
                left.append(f"process {child.pid}: {command[:200]}")
    return left


def _leave_world() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def follow_parent() -> None:
    """Let this process die with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def import_libraries() -> None:
    """Import what jobs need, so that they do not wait for it."""
    import cloudpickle  # noqa: F401
    import psutil  # noqa: F401
    import torch.distributed  # noqa: F401


def main(descriptor: int, stacks: str) -> None:
    """Take jobs until the test closes the socket."""
    follow_parent()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    faulthandler.enable()
    faulthandler.register(DUMP, file=Path(stacks).open("w"), all_threads=True)  # noqa: SIM115
    end = socket.socket(fileno=descriptor)
    os.register_at_fork(after_in_child=end.close)  # otherwise the test could not detect that the worker has died
    connection = MessageSocket(end)

    import_libraries()
    import torch

    torch.set_num_threads(1)
    connection.send(READY)
    while True:
        try:
            job: Any = pickle.loads(connection.receive())
        except EOFError:
            return
        outcome = perform(job)
        sys.stdout.flush()  # after a failure this process is killed
        sys.stderr.flush()
        connection.send(pickle.dumps(outcome))
        try:
            connection.receive()
        except EOFError:
            os._exit(0)
        _leave_world()
        connection.send(IDLE)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
