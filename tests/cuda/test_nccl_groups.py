"""Groups that only their members create, after ``init_process_group(device_id=...)``."""

from __future__ import annotations

import pytest

from support import nccl_groups, nccl_ranks
from support.nccl_ranks import run_nccl

pytestmark = [pytest.mark.cuda, pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("nccl-groups")]

SIZE = 3


@pytest.mark.parametrize(
    "way",
    ["new_group", "split", "new_group of a subgroup", "local synchronization", "local synchronization with options"],
)
def test_only_members_create_group(way: str) -> None:
    results = run_nccl(SIZE, nccl_groups.create_without_the_others, SIZE, way, binds_device=True)
    for rank in nccl_groups.MEMBERS:
        total, objects, device, name, is_urgent = results[rank]
        assert (total, objects, device) == (2.0, nccl_groups.MEMBERS, f"cuda:{rank}")
        assert name
        assert is_urgent == ("options" in way)


def test_all_ranks_create_group_like_torch() -> None:
    assert run_nccl(SIZE, nccl_groups.create_with_the_others, SIZE, binds_device=True) == [2.0, None, 2.0]


def test_survivors_continue_in_own_group() -> None:
    assert run_nccl(SIZE, nccl_ranks.go_on_without, SIZE, 0, lost=[0], binds_device=True) == [None, 128.0, 128.0]


def test_failed_creation_leaves_registry_unchanged() -> None:
    # Over NCCL alone: Gloo would wait for the timeout of the group, not of the store.
    results = run_nccl(SIZE, nccl_groups.fail_to_create, SIZE, backend="nccl", binds_device=True)
    assert results == [None, (True, 2.0), (True, 2.0)]
