"""A server that stalls and continues: operations that timed out undo no later acknowledged change."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cudafuture import CUDAFuture, executors
from cudafuture.errors import NotFoundError
from cudafuture.testing import World
from remote_store.seams import Arrivals, Departures, count_requests, late_requests, set_timeout
from rpc_ext import RemoteStore, rpc_sync, serve_store
from rpc_ext.store._wire import LONGEST_KEY
from support.patience import PATIENCE
from support.rpc_callees import working
from support.soak import soak_count

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.soak, pytest.mark.xdist_group("remote-store-stalls")]

BRIEF = 0.1  # seconds that an operation has which is to time out


@pytest.mark.world(2)
@pytest.mark.parametrize("second", ["the same client", "another client"])
@pytest.mark.parametrize("first", ["write", "write of parts", "delete"])
def test_timed_out_change_undoes_no_later_one(world: World, tmp_path: Path, first: str, second: str) -> None:
    """The server is stopped while the first change is on its way, and runs again when that has timed out.

    The service knows that by the order of one client's requests, and by their deadlines.
    """
    times = soak_count(100)

    def run() -> int:
        rank = dist.get_rank()
        with working(f"w{rank}", rank, 2, tmp_path / "file"):
            if rank == 0:
                with Arrivals(), serve_store(tmp_path / "served"):
                    dist.barrier()
                    dist.barrier()
                return 0
            dist.barrier()
            server, undone = rpc_sync("w0", os.getpid), 0
            with Departures() as departures, open_patient() as remote, open_patient() as other:
                for i in range(times):
                    size = 5_000_000 if first == "write of parts" else 10
                    other.write("x", torch.full((10,), -1.0)).wait(timeout=PATIENCE)
                    stop(server)
                    set_timeout(remote, BRIEF)
                    try:
                        late = remote.delete("x") if first == "delete" else remote.write("x", torch.zeros(size))
                        assert isinstance(late.exception(timeout=PATIENCE), TimeoutError)
                        if second == "another client":  # the first change is past its deadline by as much again
                            assert isinstance(remote.read("y").exception(timeout=PATIENCE), TimeoutError)
                        set_timeout(remote, PATIENCE)
                        writer = remote if second == "the same client" else other
                        later = writer.write("x", torch.full((10,), float(i)))
                    finally:
                        os.kill(server, signal.SIGCONT)
                    later.wait(timeout=PATIENCE)
                    while rpc_sync("w0", count_requests) < departures.sent:  # late requests may still be on their way
                        pass
                    undone += other.read("x").wait(timeout=PATIENCE).tolist() != [float(i)] * 10
            too_late = rpc_sync("w0", late_requests)
            dist.barrier()
            assert second == "the same client" or too_late >= times, too_late
            return undone

    assert world.run(run)[1] == 0


@pytest.mark.world(2)
def test_blocked_server_callback_stalls_no_client(world: World, tmp_path: Path) -> None:
    """The program of the server holds up the callback thread. The service has a thread of its own."""
    sizes = {"small": 10, "parts": 5_000_000, "k" * LONGEST_KEY: 10}

    def run() -> None:
        rank = dist.get_rank()
        with working(f"w{rank}", rank, 2, tmp_path / "file"):
            if rank == 0:
                with serve_store(tmp_path / "served"):
                    go_on = threading.Event()
                    blocked = CUDAFuture.completed(None)
                    blocked.add_done_callback(lambda _: go_on.wait(PATIENCE), executor=executors.callback_thread)
                    dist.barrier()
                    dist.barrier()
                    go_on.set()
                return
            dist.barrier()
            with open_patient() as remote:
                for _ in range(2):  # new keys, and what is replaced
                    remote.writev({key: torch.full((n,), float(n)) for key, n in sizes.items()}).wait(timeout=PATIENCE)
                read = remote.readv([*sizes]).wait(timeout=PATIENCE)
                assert all(t.tolist() == [float(n)] * n for t, n in zip(read, sizes.values(), strict=True))
                assert isinstance(remote.readv(["small", "none"]).exception(timeout=PATIENCE), NotFoundError)
                remote.deletev([*sizes]).wait(timeout=PATIENCE)
                assert remote.keys() == []
            dist.barrier()

    world.run(run)


def open_patient() -> RemoteStore:
    return RemoteStore("w0", namespace="kept", timeout=PATIENCE)


def stop(process: int) -> None:
    """Stop a process, and wait until all of its threads have stopped."""
    os.kill(process, signal.SIGSTOP)
    for thread in Path(f"/proc/{process}/task").iterdir():
        while (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass
