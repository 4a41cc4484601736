"""Memory of operations over NCCL: it is kept while the device uses it, and no longer."""

from __future__ import annotations

import pytest

from cudafuture.distributed import _operations
from cudafuture.distributed._operations import DistributedOperation
from support.nccl_memory import (
    ISSUES,
    UNEVEN,
    ask_while_capturing,
    capture_each,
    drop_in_flight,
    follow_coalesced,
    issue_while_coalescing,
    meet_late,
    wait_for_each,
)
from support.nccl_ranks import run_nccl

pytestmark = [pytest.mark.cuda, pytest.mark.world, pytest.mark.slow]

BLOCKING_WAIT = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
# They take no tensors on the device, or NCCL does not have them.
WITHOUT_MEMORY = {
    "barrier",
    "all_gather_coalesced",
    "all_gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "gather_object",
    "monitored_barrier",
    "send_object_list",
    "recv_object_list",
}


def test_every_table_operation_is_covered() -> None:
    table = {row.name for row in vars(_operations).values() if isinstance(row, DistributedOperation)}
    assert {name.split()[0] for name in ISSUES} == table - WITHOUT_MEMORY


@pytest.mark.parametrize("environment", [{}, BLOCKING_WAIT], ids=["", "blocking wait"])
def test_dropped_future_keeps_memory_in_flight(environment: dict[str, str]) -> None:
    wrong, _ = run_nccl(2, drop_in_flight, environment=environment)
    assert wrong == {}


@pytest.mark.parametrize("environment", [{}, BLOCKING_WAIT], ids=["", "blocking wait"])
def test_finished_device_frees_memory(environment: dict[str, str]) -> None:
    assert run_nccl(2, wait_for_each, environment=environment) == [{}, {}]


def test_captured_memory_lives_until_consumer() -> None:
    assert run_nccl(2, capture_each) == [{}, {}]


def test_query_of_finished_operation_keeps_capture() -> None:
    assert run_nccl(2, ask_while_capturing) == [[], []]


def test_uneven_operations_wait_for_late_peer() -> None:
    ones = {name: [1.0] for name in UNEVEN}
    assert run_nccl(2, meet_late) == [ones, ones]


def test_coalesced_works_wait_for_late_peer() -> None:
    assert run_nccl(2, follow_coalesced) == [[3.0, 3.0, 2.0, 2.0], [3.0, 3.0, 2.0, 1.0]]


def test_torchs_coalescing_manager_is_refused() -> None:
    run_nccl(2, issue_while_coalescing)
