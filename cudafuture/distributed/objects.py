"""Collectives on Python objects, and the barrier that names the missing ranks; each has several steps.

They block while they run, so they run on library threads: object collectives on one, in call order, on a side group;
monitored barriers on another. Operations that are issued meanwhile do not interleave with their steps, and an object
collective that hangs does not delay a monitored barrier.

Objects are pickled: unpickling runs code that the other ranks choose, so every rank must be trusted. With
`weights_only=True` on every rank (torch 2.14), an object that `torch.load(weights_only=True)` refuses is an error.

An object that cannot be pickled fails the future of its rank with pickle's error; the other ranks wait until their
timeout.

The examples have a default group of one process.
"""

from __future__ import annotations

import inspect
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from cudafuture._arguments import shown
from cudafuture._C import CUDAFuture
from cudafuture.distributed._group import resolve
from cudafuture.distributed._issue import begin_in_queue, nothing
from cudafuture.distributed._monitored_barrier import Deadline
from cudafuture.distributed._operations import (
    ALL_GATHER_OBJECT,
    BROADCAST_OBJECT_LIST,
    GATHER_OBJECT,
    MONITORED_BARRIER,
    SCATTER_OBJECT_LIST,
    DistributedOperation,
)
from cudafuture.distributed._side_group import kind_of, timeout_of

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "monitored_barrier",
    "scatter_object_list",
]


def _issue(
    operation: DistributedOperation,
    group: Any,
    arguments: tuple[Any, ...],
    sent: object,
    rank: int | None = None,
    group_rank: int | None = None,
    **options: Any,
) -> CUDAFuture[Any]:
    """Issue the object collective of a row of the table, with the given root and options for torch's function.

    Args:
        sent: the argument that is pickled; where the root is a source, on that rank alone.

    Raises:
        TensorError: the storage of a tensor in `sent` was freed or shrunk.
    """
    begun = begin_in_queue(operation, group)
    if begun is None:
        return nothing()
    issue, process_group = begun
    is_root = operation.root is None or issue.choose_root(process_group, rank, group_rank, options)
    if is_root or operation.root != "src":
        issue.expect_storages(sent)
    has_output = is_root or operation.root == "src"
    value = arguments[operation.output] if has_output and operation.output is not None else None
    return issue.run_in_queue(process_group, partial(operation.function, *arguments, **options), value)


def safely(weights_only: bool) -> dict[str, Any]:
    """Return torch's option for `weights_only`, which needs torch 2.14; raise ValueError if torch lacks it."""
    if not weights_only:
        return {}
    if "weights_only" not in inspect.signature(dist.all_gather_object).parameters:
        raise ValueError(f"weights_only=True needs torch 2.14 or newer; this is torch {torch.__version__}")
    return {"weights_only": True}


def _expect_list(name: str, value: Any) -> None:
    """Raise TypeError unless the objects of the other ranks can be put into a value."""
    if not isinstance(value, list):
        raise TypeError(f"{name} is a list, which is filled, not {shown(value)}")


def all_gather_object(
    object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False
) -> CUDAFuture[list[Any]]:
    """Gather the `obj` of every rank into `object_list`, which has one entry per rank; the value is `object_list`.

    >>> all_gather_object([None], {"loss": 0.5}).wait()
    [{'loss': 0.5}]
    """
    _expect_list("object_list", object_list)
    process_group = resolve(group)
    if process_group is not None and len(object_list) < process_group.size():
        raise ValueError(
            f"object_list has {len(object_list)} entries for {process_group.size()} ranks: pass [None] * world size"
        )
    return _issue(ALL_GATHER_OBJECT, group, (object_list, obj), obj, **safely(weights_only))


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> CUDAFuture[list[Any]]:
    """Replace `object_list` by the list of rank `src` (default 0), of the same length; the value is `object_list`.

    `device`: carries the bytes, if the group has a backend other than NCCL for it; None: the host, if possible.

    >>> broadcast_object_list(["settings", 3], src=0).wait()
    ['settings', 3]
    """
    _expect_list("object_list", object_list)
    options = safely(weights_only)
    return _issue(BROADCAST_OBJECT_LIST, group, (object_list,), object_list, src, group_src, device=device, **options)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> CUDAFuture[list[Any]]:
    """Distribute the objects of rank `src` (default 0), one to each rank; the value is the output list.

    >>> scatter_object_list([None], [{"shard": 0}], src=0).wait()
    [{'shard': 0}]
    """
    lists = (scatter_object_output_list, scatter_object_input_list)
    return _issue(SCATTER_OBJECT_LIST, group, lists, lists[1], src, group_src, **safely(weights_only))


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> CUDAFuture[list[Any] | None]:
    """Gather the `obj` of every rank into the list of rank `dst` (default 0), where it is the value; elsewhere None.

    >>> gather_object({"loss": 0.5}, [None], dst=0).wait()
    [{'loss': 0.5}]
    """
    arguments = (obj, object_gather_list)
    return _issue(GATHER_OBJECT, group, arguments, obj, dst, group_dst, **safely(weights_only))


def monitored_barrier(
    group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> CUDAFuture[None]:
    """Complete when every rank has entered; fail on every rank that entered if some rank does not enter in time.

    Rank 0 fails with the first missing rank, in rank order. The ranks meet in the group's store: the timeout holds for
    the first call on a group too, and a failed barrier leaves the group usable. A rank that enters a failed barrier
    late fails at once. A rank that has died is missing when the timeout passes.

    `timeout`: a timedelta, or seconds, from the call; None: the group's timeout. `wait_all_ranks`: name every missing
    rank, not only the first one. Gloo only.

    Raises:
        ValueError: the group's backend is not Gloo, or the timeout is not a finite number of seconds.

    >>> monitored_barrier(timeout=timedelta(seconds=5)).wait()
    """
    issued = begin_in_queue(MONITORED_BARRIER, group)
    if issued is None:
        return nothing()
    issue, pg = issued
    if kind_of(pg, torch.device("cpu")) != "gloo":
        raise ValueError(f"monitored_barrier() needs Gloo, but the group's backend is {dist.get_backend(pg)}")
    limit: timedelta
    if timeout is None:
        limit = timeout_of(pg)
    elif isinstance(timeout, timedelta):
        limit = timeout
    else:
        try:
            limit = timedelta(seconds=timeout)
        except (OverflowError, ValueError) as e:
            raise ValueError(f"timeout must be a timedelta, a number of seconds, or None, not {timeout!r}") from e
    return issue.run_monitored_barrier(pg, Deadline(limit), wait_all_ranks)
