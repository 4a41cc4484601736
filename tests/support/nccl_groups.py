"""Functions of ranks over NCCL that create groups after ``init_process_group(device_id=...)``."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture.distributed import CollectiveError
from support.nccl_ranks import LONG, meet, ones

MEMBERS = [0, 2]


def create(way: str) -> cfd.ProcessGroup:
    """Create a group of the members in one of the ways in which only they call."""
    if way == "new_group":
        return cfd.ProcessGroup().new_group(MEMBERS)
    if way == "split":
        return cfd.ProcessGroup().split([MEMBERS])
    if way == "new_group of a subgroup":
        return cfd.ProcessGroup().new_group(MEMBERS).new_group()
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if "options" in way else None
    return cfd.new_group(MEMBERS, use_local_synchronization=True, pg_options=options)


def create_without_the_others(rank: int, size: int, way: str) -> tuple[float, list[int], str, str, bool] | None:
    """Create a group while the rank that is not in it waits, and use all that a group offers."""
    default = dist.group.WORLD
    assert default is not None
    assert default.bound_device_id == torch.device("cuda", rank)
    if rank not in MEMBERS:
        meet("used", rank, range(size))
        return None
    group = create(way)
    total = group.all_reduce(ones()).wait(timeout=LONG)[0].item()
    objects: list[Any] = [None] * group.size()
    group.all_gather_object(objects, rank).wait(timeout=LONG)  # over a side group
    again = group.all_reduce(ones()).then_async(lambda f: group.all_reduce(f.value().clone()))  # over the group
    assert again.wait(timeout=LONG)[0].item() == 4.0
    group.barrier().wait(timeout=LONG)
    torch.cuda.synchronize()
    meet("used", rank, range(size))
    options: Any = group.group._get_backend(torch.device("cuda")).options
    return total, objects, str(group.group.bound_device_id), options.group_name, options.is_high_priority_stream


def create_with_the_others(rank: int, size: int) -> float | None:
    """Create a group as torch does, where all ranks call."""
    group = cfd.new_group(MEMBERS)
    if group.rank() < 0:
        return None
    total: float = group.all_reduce(ones()).wait(timeout=LONG)[0].item()
    return total


def registry() -> dict[str, int]:
    """Return the number of entries in each table of torch's registry of groups."""
    world = dist.distributed_c10d._world
    tables = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    return {name: len(getattr(world, name)) for name in tables} | {
        "by tag": sum(map(len, world.tags_to_pg.values())),
    }


def fail_to_create(rank: int, size: int) -> tuple[bool, float] | None:
    """Create a group without its first rank, which fails; then a group of those that are there."""
    if rank == 0:
        meet("used", rank, range(size))
        return None
    before = registry()
    store: Any = dist.distributed_c10d._get_default_store()
    patience = store.timeout
    store.set_timeout(dt.timedelta(seconds=2))
    with pytest.raises(CollectiveError, match=r"could not create the group of ranks \[0, 1, 2\]"):
        cfd.ProcessGroup().new_group([0, 1, 2])
    store.set_timeout(patience)
    is_clean = registry() == before
    total: float = cfd.ProcessGroup().new_group([1, 2]).all_reduce(ones()).wait(timeout=LONG)[0].item()
    meet("used", rank, range(size))
    return is_clean, total
