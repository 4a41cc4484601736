"""State of one process group: its serial queues, its side groups and its counters.

::

    program ────────────────────────────────► the group itself           all_reduce #0, #1, #2 ...
    callback in serial queue "g.0" ─────────► side group "g/g.0"         only operations of that queue
      the same, over NCCL ──────────────────► the group itself           in issue order
    object collective, in a serial queue ───► side group "g/g/objects.0" only operations of that queue
    monitored barrier, in a serial queue ───► keys in the group's store  the barriers of that queue
    staged collective, in a serial queue ───► side group "g/g/staged.0"  only operations of that queue

Backends pair the operations that ranks issue on a group by the order of issue. Each serial queue that issues
concurrently with the program, in its own order, therefore has a side group with the same ranks.

NCCL is different. Several communicators on one device need one order of execution on all ranks, so there are no side
groups: a callback issues on the group itself, at its place in the issue order (``core/issue_order.h``).
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import uuid
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from cudafuture import _C
from cudafuture._arguments import expect_int
from cudafuture.distributed import _backends
from cudafuture.distributed._monitored_barrier import MonitoredBarrier
from cudafuture.distributed._nccl_options import options_without_split
from cudafuture.distributed._side_group import kind_of, make_side_group, timeout_of
from cudafuture.errors import CollectiveError, InvalidStateError

__all__ = ["Group", "GroupFacts", "Issuer", "group_of", "groups", "make_group", "rank_in", "require_program", "resolve"]

_DEEPEST = 32  # steps of a chain that issue; each has its own connections and threads


class Issuer:
    """Issuer of operations on one communicator in one order: the program, or one serial queue of callbacks."""

    __slots__ = ("comparison", "issued", "lost", "place", "process_group", "queue")

    def __init__(
        self, process_group: dist.ProcessGroup | None, queue: str | None, place: _C.OperationPlace | None = None
    ) -> None:
        # None: the group itself, which an Issuer does not keep alive; or a side group that no operation has needed yet.
        self.process_group = process_group
        self.queue = queue
        self.place = place  # of its operations, among those that are pending
        self.issued = 0
        self.comparison: object = None  # of _order.py, with CUDAFUTURE_DEBUG=order
        self.lost: BaseException | None = (
            None  # why a staged operation was not issued here: the next one would take its place
        )


class GroupFacts(NamedTuple):
    """Facts about a group that outlive its state."""

    name: str
    id: str  # the same on all ranks; empty: the ranks could not agree
    timeout: float  # seconds
    has_nccl: bool


class Group:
    """State of one process group, which it does not keep alive."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.name: str = process_group.group_name
        self.rank = process_group.rank()
        self.size = process_group.size()
        self.timeout = timeout_of(process_group).total_seconds()
        kinds = {device.type: kind_of(process_group, device) for device in process_group._device_types}
        self.nccl_devices = frozenset(device for device, kind in kinds.items() if kind == "nccl")  # their types
        self.has_nccl = bool(self.nccl_devices)
        self.has_nccl_only = len(self.nccl_devices) == len(kinds)
        self.backends = _backends.of_group(process_group)  # async error sources
        self.callbacks = _C.ordered_executor(self.name, in_issue_order=self.has_nccl)
        self.objects = _C.ordered_executor(f"{self.name}/objects")
        self.barriers = _C.ordered_executor(f"{self.name}/barriers")
        self.staged = _C.ordered_executor(f"{self.name}/staged")
        self.sends = _C.ordered_executor(f"{self.name}/sends")
        self.sends_waiting = 0  # in the queue `sends`; guarded by _lock
        self.payloads = itertools.count()  # of send_object_list()
        self.id = _common_id(process_group)
        self.facts = GroupFacts(self.name, self.id, self.timeout, self.has_nccl)
        if dist.is_initialized():
            _C.set_rank(dist.get_rank(), dist.get_world_size())
        self.program = Issuer(None, None, self._place(None))
        assert self.program.place is not None
        self.messages = self.program.place._uncounted()
        self.beside = Issuer(None, None, _C.OperationPlace.find("group", self.name))  # in no order
        self.ranks = frozenset(dist.get_process_group_ranks(process_group))
        self.mailboxes = itertools.count()  # their numbers
        self.made: Counter[tuple[int, ...]] = Counter()  # groups of these ranks, from ProcessGroup.new_group()
        self.staged_kinds: dict[tuple[str, str], bool] = {}  # per operation and type of device
        self.is_broken = False  # its Gloo thread has ended: calls into the group may never return
        self._works: _C.OperationPlace | None = None
        self._side_groups: dict[str, Issuer] = {}
        self._queues_in_issue_order: set[str] = set()
        self._barriers: dict[str, MonitoredBarrier] = {}  # by serial queue, each used by the queue's thread only
        self._lock = threading.Lock()  # guards _side_groups and sends_waiting

    def issuer(
        self,
        process_group: dist.ProcessGroup,
        operation: str,
        queue: str | None,
        *,
        over_nccl: bool,
        connected: bool = True,
    ) -> Issuer:
        """Return the issuer for this thread, which runs callbacks of `queue` (None: the program).

        Over NCCL it is the program, after the callbacks before this point. `connected`: as in `side_group`.

        Raises:
            CollectiveError, InvalidStateError: as `wait_for_issue_order` and `side_group` raise them.
        """
        if over_nccl:
            self.wait_for_issue_order(operation, queue)
        elif queue is not None:
            return self.side_group(process_group, queue, connected=connected)
        return self.program

    def side_group(self, process_group: dist.ProcessGroup, queue: str, *, connected: bool = True) -> Issuer:
        """Return the issuer for the callbacks of a serial queue; only the thread that runs them calls this.

        `connected`: create its side group too, if that does not exist yet.

        Raises:
            InvalidStateError: some rank of this group has no such queue.
        """
        with self._lock:
            issuer = self._side_groups.get(queue)
        if issuer is None:  # only this thread uses this queue's entry
            self._require_everywhere(queue)
            issuer = Issuer(None, queue, self._place(queue))
        if connected and issuer.process_group is None:
            _C.set_leavable(True)  # creation blocks until the other ranks arrive, and cannot be interrupted
            try:
                issuer.process_group = make_side_group(process_group, queue)
            finally:
                _C.set_leavable(False)
        with self._lock:
            self._side_groups[queue] = issuer
        return issuer

    def _place(self, queue: str | None) -> _C.OperationPlace:
        name, id_ = self.name, self.id
        if queue is not None:
            name += f"/{queue}"
            id_ = id_ and f"{id_}/{hashlib.blake2s(queue.encode(), digest_size=8).hexdigest()}"
        return _C.OperationPlace._of_group(name, id_, self.rank, self.size)

    def works(self, is_counted: bool = True) -> _C.OperationPlace:
        """Return the place of the Works of the c10d backend, which counts them: torch issues them in their own order.

        `is_counted`: False: their numbers differ between ranks, which may have wrapped the group at different points.
        The first call decides.
        """
        if self._works is None:
            id_ = f"{self.id}/works" if self.id and is_counted else ""
            self._works = _C.OperationPlace._of_group(self.name, id_, self.rank, self.size)._uncounted()
        return self._works

    def wait_for_issue_order(self, operation: str, queue: str | None) -> None:
        """Wait until every operation before this point has been issued, to issue on the group over NCCL.

        Raises:
            InvalidStateError: a callback issues, and some rank of this group has no such callback, or the callback has
                no place in the issue order.
            CollectiveError: the callbacks before this point have not run within the group's timeout.
        """
        if queue is not None and queue not in self._queues_in_issue_order:
            self._require_everywhere(queue)
            self._require_issue_order(queue)
            self._queues_in_issue_order.add(queue)
        if not _C.wait_for_issue_order(self.timeout):
            raise CollectiveError(
                f"{operation} on group '{self.name}', rank {self.rank}: over NCCL it runs after the callbacks that "
                f"were attached before it, and these have not run within the group's timeout of {self.timeout:g} s. "
                "Attach callbacks whose future completes late, or that wait for the program, after it",
                operation=operation,
                group=self.name,
                rank=self.rank,
            )

    def monitored_barrier(self, process_group: dist.ProcessGroup, queue: str) -> MonitoredBarrier:
        """Return the monitored barriers of a serial queue; only the thread that runs the queue calls this.

        Raises:
            InvalidStateError: some rank of this group has no such queue.
        """
        if queue not in self._barriers:
            self._require_everywhere(queue)
            self._barriers[queue] = MonitoredBarrier(process_group, queue)
        return self._barriers[queue]

    def side_groups(self) -> list[dist.ProcessGroup]:
        """Return the side groups that exist so far."""
        with self._lock:
            return [i.process_group for i in self._side_groups.values() if i.process_group is not None]

    def count_sends(self, change: int) -> None:
        """Add to the number of sends that wait in the queue `sends`."""
        with self._lock:
            self.sends_waiting += change

    def _require_issue_order(self, queue: str) -> None:
        of_name = {state.name: state for _, state in list(groups.values())}
        for name in _queue_names(queue):
            if name not in of_name or not of_name[name].has_nccl:
                raise InvalidStateError(
                    f"a callback of '{name}' issues a collective over NCCL on group '{self.name}': such a callback has "
                    "no place among the operations on the device, and the ranks would execute them in different "
                    f"orders. Give then() executor=ProcessGroup(group).queue of the group '{self.name}'"
                )

    def _require_everywhere(self, queue: str) -> None:
        attachers = [
            name.removesuffix("/objects").removesuffix("/barriers").removesuffix("/staged")
            for name in _queue_names(queue)
        ]
        of_name = {state.name: state for _, state in list(groups.values())}
        for name in attachers:
            if name != self.name and not (name in of_name and self.ranks <= of_name[name].ranks):
                raise InvalidStateError(
                    f"a callback of group '{name}' issues a collective on group '{self.name}', which has ranks that "
                    "have no such callback, or another group's callback in its place, so that their collectives cannot "
                    f"be paired. Give then() executor=ProcessGroup(group).queue of the group '{self.name}'"
                )
        depth = sum(1 + int(step.rpartition(".")[2]) for step in queue.split(">"))
        if depth > _DEEPEST:
            raise InvalidStateError(
                f"a chain has more than {_DEEPEST} steps that issue collectives: each step has its own connections; "
                "write a loop in the program, or in one callback, which may wait for each collective"
            )


def _common_id(process_group: dist.ProcessGroup) -> str:
    """Return a text that all ranks of the group have in common, and no other group has; empty: they cannot agree.

    `cudafuture.debug` compares the progress of ranks by it. Names of groups are used again, and by other jobs.
    """
    try:
        store: Any = c10d._world.pg_map[process_group][1]
        ranks = "_".join(map(str, dist.get_process_group_ranks(process_group)))  # the parts of a split share a store
        agreed: bytes = store.compare_set(f"cudafuture/id/{ranks}", "", uuid.uuid4().hex[:16])
    except (KeyError, RuntimeError, NotImplementedError):  # a store that compares nothing, or is gone
        return ""
    return agreed.decode(errors="replace")


def _queue_names(queue: str) -> list[str]:
    """Return the names of the groups, or of their queues, whose callbacks attach to the queue; its own is last."""
    return [step.rpartition(".")[0] for step in queue.split(">")]


groups: dict[int, tuple[weakref.ref[Any], Group]] = {}  # by id(), for lookup on every collective


def group_of(process_group: dist.ProcessGroup) -> Group:
    """Return the state of `process_group`; the first call creates it."""
    key = id(process_group)
    known = groups.get(key)
    if known is not None:
        return known[1]
    ref = weakref.ref(process_group, lambda _: groups.pop(key, None))
    return groups.setdefault(key, (ref, Group(process_group)))[1]


def resolve(group: Any) -> dist.ProcessGroup | None:
    """Return the process group that `group` stands for; None if this rank is not in it.

    Raises:
        ValueError: no group is given and ``init_process_group`` has not been called.
    """
    if group is None:
        default = dist.group.WORLD
        if default is None:
            raise ValueError("torch.distributed has no default process group yet: call init_process_group() first")
        return default
    if type(group) is dist.ProcessGroup:
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    inner = getattr(group, "group", group)  # a ProcessGroup of ours
    if inner is group:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group is a process group or None, not {group!r}")
        return group
    return resolve(inner)


def rank_in(
    group: dist.ProcessGroup, rank: int | None, group_rank: int | None, name: str, default: int | None = None
) -> int:
    """Return the rank in the group, from a global rank or from a rank in the group.

    Raises:
        TypeError: the rank is not an integer.
        ValueError: both or none of the ranks is given, or the group has no such rank.
    """
    if rank is not None and type(rank) is not int:
        rank = expect_int(name, rank)
    if group_rank is not None and type(group_rank) is not int:
        group_rank = expect_int(f"group_{name}", group_rank)
    if group_rank is not None and rank is not None:
        raise ValueError(f"give {name}, a global rank, or group_{name}, a rank in the group, not both")
    if group_rank is None:
        if rank is None:
            rank = default
        if rank is None:
            raise ValueError(f"give {name}, a global rank, or group_{name}, a rank in the group")
        group_rank = dist.get_group_rank(group, rank)
    if not 0 <= group_rank < group.size():  # Gloo would search for a connection to it
        raise ValueError(f"{name} is {group_rank}, but the group has the ranks 0 to {group.size() - 1}")
    return group_rank


def require_program(what: str) -> None:
    """Raise in callbacks, which must not create groups: torch names groups by a counter, and ranks would differ.

    Raises:
        InvalidStateError: called in a callback.
    """
    default = resolve(None)
    if default is not None and _C.issuing_serial_queue(group_of(default).callbacks) is not None:
        raise InvalidStateError(f"{what} creates groups in program order: call it in the program, not in a callback")


def make_group(parent: dist.ProcessGroup, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
    """Create a group of some ranks, all of which call this, on the backend of `parent`.

    torch's ``use_local_synchronization`` derives the name from the number of groups that this rank knows. Here the name
    counts the requests for these ranks, which is the same on all of them.

    Raises:
        CollectiveError: the other ranks did not arrive.
    """
    made = group_of(parent).made
    made[ranks] += 1
    name: Any = f"{parent.group_name}/{'_'.join(map(str, ranks))}/{made[ranks]}"
    world = c10d._world
    backend = dist.Backend(world.pg_backend_config[parent])
    try:
        group: dist.ProcessGroup = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            backend,
            c10d._get_default_store(),
            group_name=name,
            backend_options=options_without_split(backend),
            timeout=timeout or timeout_of(parent),
            device_id=parent.bound_device_id,  # torch connects at once, and barrier() uses this device
            group_desc=f"of {parent.group_name}",
        )[0]
    except RuntimeError as e:
        raise CollectiveError(
            f"rank {dist.get_rank()} could not create the group of ranks {list(ranks)} of '{parent.group_name}': {e}",
            group=parent.group_name,
            rank=parent.rank(),
        ) from e
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group
