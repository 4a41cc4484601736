"""Ranks that may die or stop on the way: forked off one server that has imported torch, so that each costs little."""

from __future__ import annotations

import contextlib
import datetime as dt
import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from cudafuture._c10d import FutureBackend
from cudafuture.distributed import ProcessGroup, _issue, new_group
from support.backends import GLOO
from support.patience import PATIENCE

TIMEOUT = 3.0  # seconds, of the groups in which something goes wrong

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "cudafuture.distributed"])


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    lost: Collection[int] = (),
    patience: float = PATIENCE,
    backend: str = GLOO,
    environment: Mapping[str, str] | None = None,
    binds_device: bool = False,
) -> list[Any]:
    """Call ``function(rank, *args)`` on `size` ranks with a group, and return what it returns, by rank.

    `lost` ranks are meant not to come back: None stands for them. One that takes longer than `patience` seconds is a
    failure of the test. `environment` is set before the group is made. Over NCCL each rank has a GPU of its own, which
    `binds_device` passes to ``init_process_group`` as its `device_id`.
    """
    folder = tempfile.TemporaryDirectory(prefix="cudafuture-ranks-")
    pipes: dict[int, Connection] = {}
    processes = []
    results: list[Any] = [None] * size
    with folder:
        for rank in range(size):
            pipes[rank], theirs = _context.Pipe()
            group = (backend, str(Path(folder.name) / "store"), dict(environment or {}), binds_device)
            job = (rank, size, group, theirs, function, args)
            processes.append(_context.Process(target=_main, args=job))
            processes[-1].start()
            theirs.close()
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in pipes.items() if rank not in lost}
        try:
            while waiting:
                ready = wait(list(waiting), patience)
                assert ready, f"ranks {sorted(waiting.values())} have not come back"
                for pipe in cast("list[Connection]", ready):
                    rank = waiting.pop(pipe)
                    results[rank] = _outcome(pipe, rank, processes[rank])
        finally:
            for pipe in pipes.values():
                pipe.close()
            for process in processes:
                if process.pid is not None and (waiting or process.is_alive()):
                    process.join(0 if waiting or processes.index(process) in lost else PATIENCE)
                    process.kill()
                process.join()
    codes = [p.exitcode for rank, p in enumerate(processes) if rank not in lost]
    assert not any(codes), f"exit codes {codes}"
    return results


def _outcome(pipe: Connection, rank: int, process: Any) -> Any:
    try:
        value, failure = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(PATIENCE)
        raise AssertionError(f"rank {rank} ended with exit code {process.exitcode}") from None
    assert failure is None, f"rank {rank}:\n{failure}"
    return value


def short_group(seconds: float = TIMEOUT) -> ProcessGroup:
    """Make a group of all ranks with a short timeout; no rank leaves before all have it."""
    dist.barrier()
    group = new_group(timeout=dt.timedelta(seconds=seconds))
    dist.barrier()
    return group


@contextlib.contextmanager
def compare_order() -> Iterator[None]:
    """Compare the operations that the ranks issue, as CUDAFUTURE_DEBUG=order does."""
    _issue._compares_order = True
    FutureBackend._compare_order(True)
    try:
        yield
    finally:
        _issue._compares_order = False
        FutureBackend._compare_order(False)


def _main(rank: int, size: int, group: Any, pipe: Connection, function: Callable[..., Any], args: Any) -> None:
    backend, store, environment, binds_device = group
    torch.set_num_threads(1)
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend != "gloo" and rank < torch.cuda.device_count():
        torch.cuda.set_device(rank)
    timeout = dt.timedelta(seconds=10 * PATIENCE)  # nothing here is to wait for it
    device = torch.device("cuda", rank) if binds_device else None
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout, device_id=device
    )
    try:
        answer: tuple[Any, str | None] = (function(rank, *args), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    with contextlib.suppress(EOFError):  # after the last answer: no connection breaks before
        pipe.recv_bytes()
    if backend != "gloo" and rank < torch.cuda.device_count():
        os._exit(0)  # torch's watchdog may want the GIL after a failure, and an interpreter that ends has none to give
