"""The last collectives of this process, in the format of torch's FlightRecorder.

::

    Issue.follow() ──► record_collective()  a row in a ring
    dump_flight_recorder("dumps/rank_")     dumps/rank_3, for torch.distributed.flight_recorder.fr_trace
"""

from __future__ import annotations

import json
import os
import pickle
from collections import deque
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

import torch.distributed as dist

from cudafuture import _C
from cudafuture._path import path_text
from cudafuture.distributed._group import Group, GroupFacts, Issuer, groups
from cudafuture.distributed._operations import DistributedOperation

__all__ = ["dump_flight_recorder", "record_collective"]

_VERSION = "2.10"  # of the format
_KEPT = 2000  # collectives, as torch's own recorder is often set to
# The names that FlightRecorder uses, where they differ.
_NAMES = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_coalesced": "ALLGATHER_coalesced",
    "gather_single": "gather",
}


class RecordedCollective(NamedTuple):
    """One collective as it was issued. It refers to neither the group nor the tensors."""

    operation: DistributedOperation
    roles: str
    group: GroupFacts
    sequence: int
    tensors: tuple[Any, ...]
    created: int  # nanoseconds since the epoch


_recent: deque[tuple[Any, ...]] = deque(maxlen=_KEPT)  # the fields of RecordedCollective


def record_collective(
    operation: DistributedOperation, roles: str, group: Group, issuer: Issuer, sequence: int, tensors: tuple[Any, ...]
) -> None:
    """Add a collective to the ring, when the program issues it."""
    if issuer.queue is None and not operation.is_matched_by_peer:  # the format names the peers of messages
        _recent.append((operation, roles, group.facts, sequence, tensors, time_ns()))


def dump_flight_recorder(prefix: str | os.PathLike[str]) -> Path:
    """Write the last 2,000 collectives of this process to a file, which torch's ``fr_trace`` reads; return its path.

    Every rank writes its file into one folder; ``python -m torch.distributed.flight_recorder.fr_trace FOLDER`` then
    names the first collective that ranks disagree about. Collectives that the program issued through
    ``cudafuture.distributed`` are in it, over every backend; those of callbacks and messages are not.

    Args:
        prefix: path of the file without the rank, which is added.

    Raises:
        ValueError: ``init_process_group`` has not been called.
        TypeError: `prefix` is not a path.

    >>> import tempfile
    >>> from cudafuture.distributed import all_reduce
    >>> all_reduce(torch.ones(2)).wait()
    tensor([1., 1.])
    >>> dump_flight_recorder(tempfile.mkdtemp() + "/rank_").name
    'rank_0'
    """
    prefix = path_text(prefix, "prefix")
    if not dist.is_initialized():
        raise ValueError("torch.distributed has no default process group: call init_process_group() first")
    graph = json.loads(_C.pending([]))
    pending = {
        (operation["group"], operation["number"])
        for operation in (future.get("operation", {}) for future in graph["futures"])
        if "group" in operation and "number" in operation
    }
    living = dist.distributed_c10d._world.pg_map
    known = [state for group, state in list(groups.values()) if group() in living]
    ids = {(state.name, state.id) for state in known}
    recorded = [RecordedCollective(*row) for row in list(_recent)]
    recent = [one for one in recorded if (one.group.name, one.group.id) in ids]  # not of groups that were destroyed
    dump = {
        "version": _VERSION,
        "pg_config": {
            state.name: {"name": state.name, "desc": _description(state.name), "ranks": str(sorted(state.ranks))}
            for state in known
        },
        "pg_status": {state.name: {"last_enqueued_collective": state.program.issued} for state in known},
        "entries": [_entry(number, one, (one.group.id, one.sequence) in pending) for number, one in enumerate(recent)],
    }
    path = Path(f"{os.fspath(prefix)}{dist.get_rank()}")
    path.write_bytes(pickle.dumps(dump))
    return path


def _description(group: str) -> str:
    return "default_pg" if dist.group.WORLD is not None and dist.group.WORLD.group_name == group else "undefined"


def _entry(number: int, one: RecordedCollective, is_pending: bool) -> dict[str, Any]:
    read = [facts for facts, role in zip(one.tensors, one.roles, strict=False) if role in "rx"]
    written = [facts for facts, role in zip(one.tensors, one.roles, strict=False) if role in "wx"]
    inputs, outputs = _flat(read), _flat(written)
    name = one.operation.name
    if name in ("broadcast", "reduce"):  # both, on every rank
        inputs = outputs = _flat(list(one.tensors))
    if name == "all_gather":  # one tensor with all parts
        outputs = _stacked(outputs)
    if name == "reduce_scatter":
        inputs = _stacked(inputs)
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": (one.group.name, _description(one.group.name)),
        "collective_seq_id": one.sequence + 1,  # from 1
        "p2p_seq_id": 0,
        "op_id": one.sequence + 1,
        "profiling_name": f"{'nccl' if one.group.has_nccl else 'gloo'}:{_NAMES.get(name, name)}",
        "time_created_ns": one.created,
        "input_sizes": [list(shape) for shape, _ in inputs],
        "input_dtypes": [_dtype(dtype) for _, dtype in inputs],
        "output_sizes": [list(shape) for shape, _ in outputs],
        "output_dtypes": [_dtype(dtype) for _, dtype in outputs],
        "state": "scheduled" if is_pending else "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": not is_pending,
        "timeout_ms": round(one.group.timeout * 1000),
        "is_p2p": False,
        "frames": [],
    }


def _flat(facts: list[Any]) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for one in facts:
        if isinstance(one, list):
            found += _flat(one)
        elif one is not None:
            found.append(one)
    return found


def _stacked(facts: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    return [((len(facts), *facts[0][0]), facts[0][1])] if facts else []


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.").capitalize()
