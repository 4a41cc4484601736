"""Backends of process groups that report a failure after an operation was enqueued, such as NCCL."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from cudafuture import _C

__all__ = ["of_all_groups", "of_group", "unwrapped"]


def unwrapped(backend: Any) -> Any:
    """Return the backend behind the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    return getattr(backend, "wrapped_pg", backend)


def of_group(group: dist.ProcessGroup) -> _C.Backends | None:
    """Return the group's backends that report failures; None if it has none."""
    return _C.backends(_backends(group), own=True)


def of_all_groups() -> _C.Backends | None:
    """Return the backends of all groups of this process; None if none of them reports failures."""
    return _C.backends([backend for group in list(c10d._world.pg_map) for backend in _backends(group)], own=False)


def _backends(group: Any) -> list[Any]:
    found = {id(backend): backend for backend in (group._get_backend(device) for device in group._device_types)}
    return [unwrapped(backend) for backend in found.values()]
