"""Programs that call only torch.distributed: what a trace has of their collectives on the backend "cudafuture"."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cudafuture.distributed as cfd
from cudafuture import debug, trace
from cudafuture.testing import World
from support.operations import issue_each
from support.patience import PATIENCE

pytestmark = [
    pytest.mark.world(2, backend="cudafuture"),
    pytest.mark.slow,
    pytest.mark.usefixtures("on_the_host"),
    pytest.mark.xdist_group("world"),
]


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def signal_when_pending(key: str) -> None:
    """Set a key of the store when a thread of this process waits."""
    while not any(tree.threads for tree in debug.pending().trees):
        pass
    store().set(key, "")


def ranks_of(folder: Path) -> list[trace.RankTrace]:
    return sorted(trace.load(folder).ranks, key=lambda rank: rank.rank or 0)


def named(rank: trace.RankTrace, name: str) -> list[trace.TracedFuture]:
    return [future for future in rank.operations() if future.name == name]


def test_each_collective_is_recorded_once(world: World, tmp_path: Path) -> None:
    """Waits for the Work, requests for its future, and functions of cfd add no second operation."""

    def run() -> list[str]:
        with trace.record(tmp_path):
            works = issue_each(dist.get_rank())
            names = list(works)
            works.pop("barrier")[0].future.wait(timeout=PATIENCE)
            for work, _ in works.values():
                work.wait()
            cfd.all_reduce(torch.ones(2)).wait(timeout=PATIENCE)
        return [*names, "all_reduce"]

    for issued, rank in zip(world.run(run), ranks_of(tmp_path), strict=True):
        recorded = list(rank.operations())
        assert sorted(future.name for future in recorded) == sorted(issued)
        assert all(future.state == "completed" for future in recorded)


def test_collectives_of_ddp_are_recorded_though_no_work_is_waited_for(world: World, tmp_path: Path) -> None:
    def run() -> int:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)]))
        with trace.record(tmp_path):
            model(torch.ones(2, 64)).sum().backward()
            while debug.pending().trees:  # DDP goes on just before the futures are done
                pass
        return sum(p.numel() * p.element_size() for p in model.parameters())

    for nbytes, rank in zip(world.run(run), ranks_of(tmp_path), strict=True):
        buckets = named(rank, "all_reduce")
        assert sum(bucket.nbytes for bucket in buckets) == nbytes
        assert all(bucket.state == "completed" for bucket in buckets)


def test_wait_for_a_work_is_a_wait_for_its_future(world: World, tmp_path: Path) -> None:
    def run() -> None:
        with trace.record(tmp_path):
            work = dist.all_reduce(torch.ones(1), async_op=True) if dist.get_rank() == 0 else None
            if work is None:
                store().wait(["waits"])
                dist.all_reduce(torch.ones(1))
            else:
                signal = threading.Thread(target=signal_when_pending, args=("waits",))
                signal.start()
                work.wait()
                signal.join()

    world.run(run)
    rank = ranks_of(tmp_path)[0]
    (reduced,) = named(rank, "all_reduce")
    waits = [part for part in rank.slices if part.kind == "wait" and part.future is reduced]
    assert ["test_backend_works.py" in wait.text for wait in waits] == [True]


def test_interrupts_are_not_lost(world: World, tmp_path: Path) -> None:
    """A handler of a signal may run while the library makes the future of a Work."""

    def run() -> tuple[int, int]:
        raised = seen = 0

        def interrupt(*_: object) -> None:
            nonlocal raised
            raised += 1
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, interrupt)
        group = dist.new_group([dist.get_rank()], backend="cudafuture", use_local_synchronization=True)
        with trace.record(tmp_path):
            for number in range(100):
                sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
                try:
                    sender.start()
                    while raised == number:
                        dist.all_reduce(torch.ones(1), group=group, async_op=True)
                except KeyboardInterrupt:
                    seen += 1
                sender.join()
        signal.signal(signal.SIGUSR1, before)
        return raised, seen

    assert world.run(run) == [(100, 100)] * 2


def test_failure_that_the_work_raises_is_not_logged_as_unseen(world: World, tmp_path: Path) -> None:
    def run() -> list[str]:
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("cudafuture.future").addHandler(handler)
        group = dist.new_group(timeout=timedelta(seconds=1), backend="cudafuture")
        if dist.get_rank() == 0:
            with trace.record(tmp_path):
                work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
                with pytest.raises(RuntimeError):
                    work.wait()
                del work
            gc.collect()
        dist.barrier()
        return heard

    assert world.run(run) == [[], []]
    assert [future.state for future in named(ranks_of(tmp_path)[0], "all_reduce")] == ["failed"]
