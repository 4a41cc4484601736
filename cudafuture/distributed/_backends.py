"""Backends of process groups that report a failure after an operation was enqueued, such as NCCL."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from cudafuture import _C
from cudafuture._c10d import FutureBackend

__all__ = ["backend_for", "of_all_groups", "of_group"]


def backend_for(group: Any, device: torch.device) -> Any:
    """Return the group's backend for a type of devices: the one that carries the tensors, behind all wrappers.

    The wrappers are the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL and the backend "cudafuture".

    Raises:
        RuntimeError: it has none.
    """
    backend = group._get_backend(device)
    while True:
        if isinstance(backend, FutureBackend):
            backend = backend.inner(device.type)
        elif (checked := getattr(backend, "wrapped_pg", None)) is not None:
            backend = checked
        else:
            return backend


def of_group(group: dist.ProcessGroup) -> _C.Backends | None:
    """Return the group's backends that report failures; None if it has none."""
    return _C.backends(_backends(group), own=True)


def of_all_groups() -> _C.Backends | None:
    """Return the backends of all groups of this process; None if none of them reports failures."""
    return _C.backends([backend for group in list(c10d._world.pg_map) for backend in _backends(group)], own=False)


def _backends(group: Any) -> list[Any]:
    found = {}
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # the backend "cudafuture" wraps none for it
            backend = backend_for(group, device)
            if backend.name() != "gloo":  # it reports none: the question raises an error, which torch may symbolize
                found[id(backend)] = backend
    return list(found.values())
