"""A barrier between workers: all wait for the last one, and it fails for all when a worker does not come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cudafuture import InvalidStateError
from cudafuture.testing import World
from rpc_ext import barrier
from support.patience import PATIENCE
from support.rpc_callees import alone, working
from support.soak import soak_count

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("rpc-barrier")]

BRIEF = 0.2  # seconds that a worker which does not come is waited for


@pytest.mark.soak
@pytest.mark.world(3)
def test_barrier_waits_for_last_worker(world: World, tmp_path: Path) -> None:
    rounds = soak_count(1000)

    def run() -> list[int]:
        rank = dist.get_rank()
        with working(f"w{rank}", rank, 3, tmp_path / "file"):
            seen = []
            for i in range(rounds):
                (tmp_path / f"{rank}").write_text(str(i))
                barrier(timeout=PATIENCE).wait()
                seen.append(min(int((tmp_path / f"{other}").read_text()) for other in range(3)) - i)
                barrier(["w2", 0, "w1"], PATIENCE).wait()
            return seen

    assert world.run(run) == [[0] * rounds] * 3


@pytest.mark.world(3)
def test_some_workers_may_meet_alone(world: World, tmp_path: Path) -> None:
    def run() -> bool:
        rank = dist.get_rank()
        with working(f"w{rank}", rank, 3, tmp_path / "file"):
            if rank == 0:  # it comes to that of all workers last
                barrier([0, 2]).wait(timeout=PATIENCE)
                return barrier().wait(timeout=PATIENCE) is None
            everyone = barrier()
            if rank == 2:
                assert not everyone.done()
                barrier([2, 0]).wait(timeout=PATIENCE)
            return everyone.wait(timeout=PATIENCE) is None

    assert world.run(run) == [True] * 3


@pytest.mark.world(3)
def test_absent_worker_is_named_to_all(world: World, tmp_path: Path) -> None:
    def run() -> Any:
        rank = dist.get_rank()
        with working(f"w{rank}", rank, 3, tmp_path / "file"):
            if rank == 1:
                dist.barrier()  # the others have given up
            error = barrier(timeout=BRIEF).exception(timeout=PATIENCE)
            if rank != 1:
                dist.barrier()
            assert isinstance(error, TimeoutError)
            barrier(timeout=PATIENCE).wait()  # the next one is whole
            return str(error)

    assert world.run(run) == [f"worker 'w1' has not arrived at the barrier within {BRIEF:g} s"] * 3


def test_barrier_refuses_wrong_workers(tmp_path: Path) -> None:
    with alone(tmp_path / "store"):
        with pytest.raises(ValueError, match="there is no worker 'you'"):
            barrier(["me", "you"])
        with pytest.raises(TypeError, match="workers is a list of workers, not the str 'me'"):
            barrier("me")
        with pytest.raises(ValueError, match="worker 'me' is not a participant of a barrier of no workers"):
            barrier([])
        assert barrier(["me", 0]).wait(timeout=PATIENCE) is None
    with pytest.raises(InvalidStateError):
        barrier()
