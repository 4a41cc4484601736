"""A test of a program of several processes: a ring in which every rank adds its part.

    pip install --no-build-isolation ".[testing]"
    pytest examples/test_ring.py

The functions run in processes that the fixture ``world`` starts and uses again; pytest's assertions work inside them.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cudafuture.testing import World, WorldError


def ring_sum(mine: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks: each sends what it has got to the next rank, world size - 1 times."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, passing = mine.clone(), mine.clone()
    for _ in range(size - 1):
        arriving = torch.empty_like(passing)
        sending = dist.isend(passing, (rank + 1) % size)
        dist.recv(arriving, (rank - 1) % size)
        assert sending is not None
        sending.wait()
        total += arriving
        passing = arriving
    return total


@pytest.mark.world(3)
def test_every_rank_gets_sum(world: World) -> None:
    def check() -> list[float]:
        mine = torch.arange(4.0) * dist.get_rank()
        total = ring_sum(mine)
        dist.all_reduce(mine)
        assert torch.equal(total, mine)
        return total.tolist()

    assert world.run(check) == [[0.0, 3.0, 6.0, 9.0]] * 3


@pytest.mark.world(2, timeout=20)
def test_failing_rank_is_named(world: World) -> None:
    def fail_on_the_second() -> None:
        assert dist.get_rank() != 1, "what rank 1 has to say"

    with pytest.raises(WorldError, match="rank 1 of 2 failed"):
        world.run(fail_on_the_second)
