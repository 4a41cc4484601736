"""Clients and servers that are stopped and killed at random: no acknowledged change is lost, undone or torn."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from remote_store.history import History, Journal
from remote_store.survival import NAMESPACE, SERVERS, SHARED_KEYS, Disturber, Plan, be_process, read_all
from rpc_ext import RemoteStore, serve_store
from support.ranks import run_ranks
from support.rpc_callees import ME, alone
from support.soak import SOAK

pytestmark = pytest.mark.world

CLIENTS = 8
OPERATIONS = CLIENTS * 10_000 if SOAK else 500  # of all clients
KILLS = 3
STOPS = 6 + OPERATIONS // 2000
LIMIT = 110 if not SOAK else 3000  # seconds after which a run counts as hanging


def seed_of_run() -> int:
    """Return the seed: that of CUDAFUTURE_SURVIVAL_SEED, a random one under CUDAFUTURE_SOAK, or 1."""
    if given := os.environ.get("CUDAFUTURE_SURVIVAL_SEED"):
        return int(given)
    return random.SystemRandom().getrandbits(32) if SOAK else 1


@pytest.mark.soak
@pytest.mark.slow
def test_acknowledged_changes_survive_kills_and_stops(tmp_path: Path) -> None:
    """Both servers are durable. The one that is killed is served again at the end, from its folder."""
    seed = seed_of_run()
    print(f"to repeat: CUDAFUTURE_SURVIVAL_SEED={seed}")
    plan = Plan.of(seed, CLIENTS, OPERATIONS, KILLS, STOPS)
    disturber = Disturber(tmp_path, plan)
    disturber.start()
    try:
        arguments = (str(tmp_path / "rendezvous"), str(tmp_path), plan)
        run_ranks(len(SERVERS) + CLIENTS, be_process, *arguments, lost=plan.victims, patience=LIMIT)
    finally:
        disturber.end()
        print(*disturber.done, sep="\n")
    killed = SERVERS[-1]
    with (
        alone(tmp_path / "after"),
        serve_store(tmp_path / killed, durable=True),
        RemoteStore(ME, namespace=NAMESPACE) as remote,
    ):
        read_all(killed, remote, [*{*SHARED_KEYS, *remote.keys()}], Journal(tmp_path / "after.journal"))
    history = History.of(tmp_path.glob("*.journal"))
    print(dict(history.outcomes), len(history.sights), "reads")
    assert history.outcomes["acknowledged"] > OPERATIONS // 4
    assert history.outcomes["unknown"] > 0
    assert len(history.sights) > OPERATIONS // 8
    history.expect_one_store()
