"""Many clients of two servers against a model, while clients are killed: no wrong byte, nothing leaked, flat memory."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from rpc_ext import RemoteOffloader, serve_offload
from soak import SOAK, soak_count
from world.offload_clients import MEMORY, SERVERS, Plan, be_one_of_all, look_at_all
from world.offload_history import KEYS, MIB, History, Journal, content_of, version_of
from world.ranks import run_ranks
from world.rpc_callees import ME, alone

CLIENTS, VICTIMS, OPERATIONS = 8, 4, 10_000
FLAT = 32 * MIB  # bytes of a server's memory: two requests of the largest, all that a heap full of holes may cost
PATIENCE = 110 if not SOAK else 3000  # seconds until all of that counts as hanging


def plan_of(seed: int, operations: int) -> Plan:
    """Return who does what, so that so many operations end in all."""
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
def test_clients_that_are_killed_leave_a_store_that_is_right(tmp_path: Path) -> None:
    operations = soak_count(OPERATIONS)
    plan = plan_of(1, operations)
    lost = [len(SERVERS) + client for client in plan.victims]
    arguments = (str(tmp_path / "store"), str(tmp_path), plan)
    served = run_ranks(len(SERVERS) + CLIENTS, be_one_of_all, *arguments, lost=lost, patience=PATIENCE)[: len(SERVERS)]
    history = History(tmp_path.glob("*.journal"))
    assert history.ended >= operations
    assert len(history.sights) > operations // 4
    history.expect_one_store()
    for seen in served:
        assert seen["refused"] == 0
        assert seen["most_under_way"] <= MEMORY
        assert seen["grown"] <= FLAT
    assert sum(seen["written"] for seen in served) > 2 * FLAT


@pytest.mark.soak
@pytest.mark.slow
def test_what_was_acknowledged_stays_while_clients_and_servers_stop_and_die(tmp_path: Path) -> None:
    """Operations time out at clients or servers that are stopped for a while; clients die, and a server in the end.

    The server is durable, so what it has acknowledged is there when its folder is served again.
    """
    operations = OPERATIONS if SOAK else 400
    plan = plan_of(2, operations)
    plan = replace(plan, stalls=1 + operations // 1000, killer=min({*range(CLIENTS)} - {*plan.victims}))
    lost = [len(SERVERS) + client for client in plan.victims] + [len(SERVERS) - 1]
    arguments = (str(tmp_path / "store"), str(tmp_path), plan)
    served = run_ranks(len(SERVERS) + CLIENTS, be_one_of_all, *arguments, lost=lost, patience=PATIENCE)
    with (
        alone(tmp_path / "rendezvous"),
        serve_offload(tmp_path / SERVERS[-1], durable=True),
        RemoteOffloader(ME, namespace="shared") as remote,
    ):
        look_at_all(SERVERS[-1], remote, Journal(tmp_path / "after.journal"))
    assert served[0]["refused"] == 0
    history = History(tmp_path.glob("*.journal"))
    assert len(history.sights) > operations // 8
    history.expect_one_store()


# ---- that the check sees what is wrong


def line(*what: object) -> str:
    return json.dumps(what)


WRITES = [
    line("begun", 1, 10, {"x": 1}),
    line("ended", 1, 20, True),
    line("begun", 2, 30, {"x": 2}),
    line("ended", 2, 40, True),
    line("begun", 3, 50, {"x": 3}),  # of which nobody knows the end
    line("begun", 4, 1e9, {"y": 1}),  # nor of this one, but its time was over before the next one of another client
    line("limit", 4, 2e9, None),
]
OTHERS = [line("begun", 1, 3e9, {"y": 2}), line("ended", 1, 4e9, True)]


@pytest.mark.parametrize(
    ("seen", "is_possible"),
    [
        ((0, 5, None), True),
        ((0, 5, 1), False),
        ((0, 15, 1), True),
        ((21, 25, None), False),
        ((21, 25, 2), False),
        ((25, 35, 1), True),
        ((25, 35, 2), True),
        ((41, 45, 1), False),
        ((41, 45, 3), False),
        ((60, 70, 2), True),
        ((60, 70, 3), True),
        ((60, 70, 1), False),
        ((60, 70, 4), False),
        ((int(2.5e9), int(2.6e9), ("y", 1)), True),
        ((int(3.5e9), int(3.6e9), ("y", 1)), True),  # it had begun, and the next one waits for it
        ((int(4.5e9), int(4.6e9), ("y", 1)), False),
        ((int(4.5e9), int(4.6e9), ("y", 2)), True),
    ],
)
def test_what_was_not_written_yet_or_no_more_there_is_found(
    tmp_path: Path, seen: tuple[int, int, int | tuple[str, int] | None], is_possible: bool
) -> None:
    key, version = seen[2] if isinstance(seen[2], tuple) else ("x", seen[2])
    (tmp_path / "one.journal").write_text("\n".join(WRITES))
    (tmp_path / "other.journal").write_text("\n".join([*OTHERS, line("seen", *seen[:2], {key: version})]))
    history = History(tmp_path.glob("*.journal"))
    with contextlib.nullcontext() if is_possible else pytest.raises(AssertionError, match=r"nobody has|replaced"):
        history.expect_one_store()


@pytest.mark.parametrize("key", KEYS)
def test_parts_of_two_versions_are_none(key: str) -> None:
    one, other = content_of(key, 5), content_of(key, 6)
    assert version_of(key, one) == 5
    if key == "zero" or one.shape != other.shape:
        return
    other[:8] = one[:8]
    with pytest.raises(AssertionError, match="never written"):
        version_of(key, other)
    one[-1] ^= 1
    with pytest.raises(AssertionError, match="never written"):
        version_of(key, one)
