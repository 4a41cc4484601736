"""Registration of the c10d backend "cudafuture", which torch calls when it is imported.

It is a package of its own, so that ``import torch`` does not import cudafuture: the first group with the backend does.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register() -> None:
    """Make ``init_process_group("cudafuture")`` known to torch.distributed, where torch has it."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or "CUDAFUTURE" in dist.Backend._plugins:
        return
    # Devices for which torch has a backend already: the default backend of each stays what it is. A device that this
    # build of torch does not have would be taken for the group's own by code that prefers accelerators.
    devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
    dist.Backend.register_backend("cudafuture", _create, extended_api=True, devices=devices)


def _create(wanted: Any, options: Any) -> Any:
    from cudafuture.distributed._backend import create

    return create(wanted, options)
