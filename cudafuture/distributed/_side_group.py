"""Side groups: groups with the same ranks and their own connections, for tensors and objects on the host.

NCCL groups have no side groups over NCCL: several communicators on one device need one order of execution on all ranks.
A group that has no other backend gets a side group over Gloo.

A side group is created without a collective: the ranks meet in the group's store under a name that every rank derives
in the same way. The thread that first needs the side group creates it, and blocks until the other ranks arrive. torch's
``new_group`` does not work here: it derives names from the number of groups created so far, which differs between ranks
while their callbacks run.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions
from torch.distributed import distributed_c10d as c10d

from cudafuture.distributed._backends import backend_for
from cudafuture.errors import CollectiveError

__all__ = ["kind_of", "make_by_plugin", "make_side_group", "store_of", "timeout_of"]


def make_side_group(group: dist.ProcessGroup, name: str, *, lives_with_group: bool = True) -> dist.ProcessGroup:
    """Return a process group of the same ranks, unknown to torch's registry; every rank must ask for `name`.

    `lives_with_group`: keep it until `group` is gone; False: until the caller drops it.

    Raises:
        CollectiveError: the other ranks did not arrive within the group's timeout, or its backend cannot be recreated.
    """
    rank, size = group.rank(), group.size()
    made: dict[int, Any] = {}
    try:
        store = store_of(group, f"side_group/{name}")
        side_group = dist.ProcessGroup(store, rank, size)
        for device, backend in _copied_backends(group):
            if id(backend) not in made:
                made[id(backend)] = _like(backend, PrefixStore(f"{device.type}/", store), rank, size, timeout_of(group))
            kind = _kind_of(backend)
            if len(made) == 1:
                side_group._set_default_backend(kind)
            side_group._register_backend(device, kind, made[id(backend)])
    except (RuntimeError, KeyError) as e:
        raise CollectiveError(
            f"rank {rank} could not create the side group '{name}' of group '{group.group_name}', on which its "
            f"callbacks issue collectives: {e}. Check that all {size} ranks issue the same collectives in the same "
            "callbacks",
            group=group.group_name,
            rank=rank,
        ) from e
    full_name: Any = f"{group.group_name}/{name}"
    side_group._set_group_name(full_name)
    side_group._set_group_desc(f"callbacks of {group.group_name}")
    if lives_with_group:
        weakref.finalize(group, side_group.shutdown).atexit = False  # a process that exits does not need the shutdown
    return side_group


def store_of(group: dist.ProcessGroup, prefix: str) -> Store:
    """Return the group's store, on its own connection, so that a blocking call delays no other caller."""
    store: Any = c10d._get_process_group_store(group)
    with contextlib.suppress(RuntimeError):  # some stores cannot be cloned, such as those written in Python
        store = store.clone()
        store.set_timeout(timeout_of(group))
    return PrefixStore(f"cudafuture/{prefix}/", store)


def timeout_of(group: dist.ProcessGroup) -> Any:
    """Return the group's timeout, a ``datetime.timedelta``."""
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            options = getattr(backend_for(group, device), "options", None)
            if options is not None:
                return options._timeout
    return c10d.default_pg_timeout


def kind_of(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return the name of the group's backend for a type of device, such as "gloo"; None if it has none."""
    try:
        name: str = backend_for(group, device).name()
    except RuntimeError:
        return None
    return name.lower()


def _copied_backends(group: dist.ProcessGroup) -> list[tuple[torch.device, Any]]:
    """Return the devices and backends of a side group; None stands for Gloo, if the group has NCCL only."""
    kinds = [(device, kind_of(group, device)) for device in group._device_types]
    copied = [(device, backend_for(group, device)) for device, kind in kinds if kind not in (None, "nccl")]
    return copied or [(torch.device("cpu"), None)]


def _name_of(backend: Any) -> str:
    return "gloo" if backend is None else str(backend.name()).lower()


def _kind_of(backend: Any) -> Any:
    return dist.Backend.backend_type_map.get(_name_of(backend), dist.ProcessGroup.BackendType.CUSTOM)


def _like(backend: Any, store: Store, rank: int, size: int, timeout: Any) -> Any:
    name = _name_of(backend)
    if name == "gloo":
        if not dist.is_gloo_available():
            raise RuntimeError("it needs the Gloo backend, which this build of torch does not have")
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    wanted = _DistributedBackendOptions()
    wanted.store, wanted.group_rank, wanted.group_size, wanted.timeout = store, rank, size, timeout
    wanted.group_id = f"cudafuture/{name}"
    wanted.global_ranks_in_group = list(range(size))
    return make_by_plugin(name, wanted, None)


def make_by_plugin(name: str, wanted: Any, options: Any) -> Any:
    """Return a backend made by the extension that registered `name` with torch.

    `wanted` describes the group, as torch does; `options` are the backend's own, or None.
    """
    plugin = dist.Backend._plugins[name.upper()]
    if plugin.extended_api:
        return plugin.creator_fn(wanted, options)
    return plugin.creator_fn(wanted.store, wanted.group_rank, wanted.group_size, wanted.timeout)
