"""Pending operations and futures, and the threads and ranks that wait for them: in this process, and in others.

::

    pending()                      the trees of this process
    python -m cudafuture ps PID    the trees of others, merged over ranks (processes, job)
    record_origins()               from now on each future knows the line that made it
    register(future, place)        an operation of an engine of your own
"""

from __future__ import annotations

import os
from typing import Any

from cudafuture import _C, _frames
from cudafuture._arguments import expect_bool, expect_int, expect_str, shown
from cudafuture.config import config
from cudafuture.debug._job import JobReport, look_at
from cudafuture.debug._processes import ProcessReport, ask
from cudafuture.debug._trees import Pending, PendingFuture, ThreadReport, pending
from cudafuture.graph_breaks import break_graphs

__all__ = [
    "JobReport",
    "OperationPlace",
    "Pending",
    "PendingFuture",
    "ProcessReport",
    "ThreadReport",
    "ask",
    "look_at",
    "name_process",
    "pending",
    "record_origins",
    "register",
]

OperationPlace = _C.OperationPlace


def record_origins(record: bool = True) -> None:
    """Let each future that is made from now on know the line of the program that made it, as CUDAFUTURE_DEBUG=origin.

    It costs about a microsecond for each future. The line is in the repr, in errors of waits and in what ``pending``
    shows.

    >>> record_origins()
    >>> print(pending(_C.CUDAFuture(name="read")))
    future 'read', ...s old, made at ... in ...() (no known operation)
    >>> record_origins(False)
    """
    expect_bool("record", record)
    _C.keep_sites(record)


def register(
    future: _C.CUDAFuture[Any],
    place: _C.OperationPlace | None = None,
    *,
    number: int | None = None,
    nbytes: int | None = None,
) -> None:
    """Register a future as an operation of an engine until it is done, as the library's own engines do.

    ``pending`` and ``ps`` then show it although no thread waits for it, and name it as what holds up others. Call it
    before another thread can complete the future. It has no effect on a future that is done or registered.

    Args:
        future: its name is the name of the operation.
        place: where the operation takes place; ``OperationPlace.find("worker", "w1", "on")``.
        number: in the order of the place, from 0.
        nbytes: bytes that it transfers.

    >>> future = _C.CUDAFuture(name="upload")
    >>> register(future, OperationPlace.find("bucket", "checkpoints", "to"), nbytes=1 << 20)
    >>> print(pending(future))
    upload to bucket 'checkpoints' (1 MiB), ...s old...
    """
    if place is not None and not isinstance(place, _C.OperationPlace):
        raise TypeError(f"place is what OperationPlace.find() returns, not {shown(place)}")
    number = -1 if number is None else expect_int("number", number)
    _C.register(future, place, number, -1 if nbytes is None else expect_int("nbytes", nbytes))


def name_process(*, rank: int | None = None, world_size: int | None = None, worker: str | None = None) -> None:
    """Name this process for those who ask about it: its rank in the job, or its name as a worker.

    ``cudafuture.distributed`` and ``rpc_ext`` do so.

    >>> name_process(worker="loader 3")
    >>> name_process(worker="")
    """
    if rank is not None:
        size = -1 if world_size is None else expect_int("world_size", world_size)
        _C.set_rank(expect_int("rank", rank), size)
    if worker is not None:
        expect_str("worker", worker)
        _C.set_worker(worker)


break_graphs(*map(globals().get, __all__))
_C.keep_sites(config.debug_origin)
_C.set_library_folders(list(_frames.LIBRARY))
os.register_at_fork(after_in_child=_C.restart_debug_socket)
