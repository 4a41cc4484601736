"""Many clients of two servers against a model, while clients are killed: no wrong byte, nothing leaked, flat memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from remote_store.clients import MEMORY, SERVERS, Plan, be_one_of_all
from remote_store.contents import MIB
from remote_store.history import History
from support.ranks import run_ranks
from support.soak import SOAK, soak_count

pytestmark = pytest.mark.world

CLIENTS, VICTIMS, OPERATIONS = 8, 4, 10_000
FLAT = 32 * MIB  # bytes of a server's memory: two requests of the largest, all that a heap full of holes may cost
LIMIT = 110 if not SOAK else 3000  # seconds until all of that counts as hanging


def plan_of(seed: int, operations: int) -> Plan:
    """Return the plan of a run in which the given number of operations ends."""
    numbers = random.Random(seed)
    share = operations // CLIENTS // 2  # of a client, in each half
    victims = {
        client: (i % 2, numbers.randrange(1, share)) for i, client in enumerate(numbers.sample(range(CLIENTS), VICTIMS))
    }
    by_victims = sum(count for _, count in victims.values())
    by_each = -(-(operations - by_victims) // (CLIENTS - VICTIMS) // 2)
    return Plan(seed, CLIENTS, victims, by_each)


@pytest.mark.soak
@pytest.mark.slow
def test_killed_clients_leave_store_consistent(tmp_path: Path) -> None:
    operations = soak_count(OPERATIONS)
    plan = plan_of(1, operations)
    lost = [len(SERVERS) + client for client in plan.victims]
    arguments = (str(tmp_path / "store"), str(tmp_path), plan)
    served = run_ranks(len(SERVERS) + CLIENTS, be_one_of_all, *arguments, lost=lost, patience=LIMIT)[: len(SERVERS)]
    history = History.of(tmp_path.glob("*.journal"))
    assert history.outcomes["acknowledged"] + history.outcomes["failed"] >= operations
    assert len(history.sights) > operations // 4
    history.expect_one_store()
    for seen in served:
        assert seen["refused"] == 0
        assert seen["most_in_flight"] <= MEMORY
        assert seen["grown"] <= FLAT
    assert sum(seen["written"] for seen in served) > 2 * FLAT
