"""Options of NCCL groups that only their own members create.

After ``init_process_group(device_id=...)`` torch sets ``split_from`` in the options of every new NCCL group, so that
NCCL splits the new communicator from the default group's. A split blocks until every rank of the default group takes
part in it. A group that only its members create must therefore connect through the store.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from cudafuture.distributed._backend_options import BackendOptions, name_of

__all__ = ["options_without_split"]


def options_without_split(backend: str | None, given: Any = None) -> Any:
    """Return options of NCCL that ignore ``split_from``, with the settings of `given`.

    Return `given` unless the default group is bound to a device and `backend` includes NCCL. None: the default group's.
    """
    default = dist.group.WORLD
    if default is None or default.bound_device_id is None or not dist.is_nccl_available():
        return given
    if backend is None:
        backend = dist.distributed_c10d._world.pg_backend_config[default]
    names = set(dist.distributed_c10d.BackendConfig(dist.Backend(backend)).device_backend_map.values())
    if dist.Backend.NCCL in names:
        return _without_split(given)
    if "cudafuture" in names:
        choices = BackendOptions.of(given).choices
        return BackendOptions(**{device: _unsplit(choice) for device, choice in choices.items()})
    return given


def _unsplit(choice: Any) -> Any:
    if name_of(choice) != dist.Backend.NCCL:
        return choice
    return _without_split(None if isinstance(choice, str) else choice)


def _without_split(given: Any) -> Any:
    class UnsplitOptions(dist.ProcessGroupNCCL.Options):
        # A property hides the field of the base class, which is what the backend reads.
        split_from = property(lambda self: None, lambda self, value: None)

    options = UnsplitOptions()
    options.is_high_priority_stream = False if given is None else given.is_high_priority_stream
    if given is not None:
        options.config = given.config
    return options
