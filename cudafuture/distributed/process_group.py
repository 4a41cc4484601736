"""Process group whose operations return futures."""
# ruff: noqa: D102 (the methods get the docstrings of the functions that they call)

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cudafuture import _C
from cudafuture._arguments import listed
from cudafuture._C import CUDAFuture
from cudafuture.distributed import collectives, object_messages, objects, point_to_point
from cudafuture.distributed._group import group_of, make_group, require_program, resolve
from cudafuture.distributed._nccl_options import options_without_split
from cudafuture.distributed.point_to_point import Received

__all__ = ["ProcessGroup", "new_group"]

Tensor = torch.Tensor
_Tensors = list[torch.Tensor]


class ProcessGroup:
    """Torch process group, with the functions of :mod:`cudafuture.distributed` as methods.

    Args:
        group: a torch process group; None: the default one; ``GroupMember.NON_GROUP_MEMBER``: one that this rank is not
            in, whose methods return futures completed with None.

    It adds only these names to the group. Any number of them may stand for one group, they share its order, and every
    `group` argument accepts them.

    Raises:
        ValueError: `group` is None and ``init_process_group`` has not been called.
        TypeError: `group` is not a process group.

    >>> pg = ProcessGroup()
    >>> pg.all_reduce(torch.ones(2)).then(lambda f: f.value() / pg.size()).wait()
    tensor([1., 1.])
    """

    def __init__(self, group: Any = None) -> None:
        resolved = resolve(group)
        self.group: Any = dist.GroupMember.NON_GROUP_MEMBER if resolved is None else resolved
        """The torch process group."""

    def __repr__(self) -> str:
        if self.rank() < 0:
            return "<ProcessGroup without this rank>"
        return f"<ProcessGroup '{self.group.group_name}', rank {self.rank()} of {self.size()}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessGroup) and self.group is other.group

    def __hash__(self) -> int:
        return hash(self.group)

    # ---- facts

    def rank(self) -> int:
        """Return this process's rank in the group; -1 if it is not in the group.

        >>> ProcessGroup().rank()
        0
        """
        group = resolve(self.group)
        return -1 if group is None else group.rank()

    def size(self) -> int:
        """Return the number of ranks in the group; -1 if this rank is not in the group.

        >>> ProcessGroup().size()
        1
        """
        group = resolve(self.group)
        return -1 if group is None else group.size()

    def ranks(self) -> list[int]:
        """Return the global ranks, in the order of the group; an empty list if this rank is not in the group.

        >>> ProcessGroup().ranks()
        [0]
        """
        group = resolve(self.group)
        return [] if group is None else dist.get_process_group_ranks(group)

    @property
    def queue(self) -> _C.HostExecutor:
        """Executor that runs callbacks of this group's futures, in the order in which they were attached.

        These futures use it by default. Give it as ``executor=`` to ``then()`` of any other future (such as a read
        from disk) whose callback issues collectives on this group.

        Raises:
            ValueError: this rank is not in the group.
        """
        group = resolve(self.group)
        if group is None:
            raise ValueError("this rank is not in the group, so the group has no callbacks here")
        return group_of(group).callbacks

    # ---- groups of this one's ranks

    def new_group(self, ranks: Sequence[int] | None = None, timeout: timedelta | None = None) -> ProcessGroup:
        """Create a group of some ranks of this one (ranks in this group; None: all); only those ranks call it.

        It has this group's backend, and its device if ``init_process_group(device_id=...)`` gave one: then it connects
        at once. `timeout`: None: this group's. After a failure, only the survivors call it: the ranks that died take
        no part.

        Raises:
            CollectiveError: the other ranks did not arrive.
            ValueError: this rank is not one of `ranks`, or a rank is not in the group.

        >>> ProcessGroup().new_group([0]).ranks()
        [0]
        """
        mine = self.ranks()
        members = list(range(len(mine))) if ranks is None else listed("ranks", ranks, "ranks")
        if any(not 0 <= r < len(mine) for r in members) or len(set(members)) != len(members):
            raise ValueError(
                f"the group has the ranks 0 to {len(mine) - 1}, each of which may be given once, but new_group() was "
                f"given {members}"
            )
        if self.rank() not in members:
            raise ValueError(f"rank {self.rank()} calls new_group() for {members}: only those ranks call it")
        require_program("ProcessGroup.new_group()")
        return ProcessGroup(make_group(self.group, tuple(sorted(mine[r] for r in members)), timeout))

    def split(self, split_ranks: Sequence[Sequence[int]], timeout: timedelta | None = None) -> ProcessGroup:
        """Create several groups at once, and return the group that contains this rank.

        Args:
            split_ranks: ranks in this group, for each new group; no rank in two of them. The same on every rank.
            timeout: of the new groups; None: this group's.

        A rank that is in none of them gets a group whose methods return futures completed with None.

        Raises:
            CollectiveError: the other ranks of this rank's new group did not arrive.
            ValueError: a rank is in two of the new groups, or is not in this group.

        >>> ProcessGroup().split([[0]]).ranks()
        [0]
        """
        given = [
            r
            for part in listed("split_ranks", split_ranks, "lists")
            for r in listed("each of split_ranks", part, "ranks")
        ]
        if len(set(given)) != len(given):
            raise ValueError(f"split() puts every rank into one group at most, but was given {list(split_ranks)}")
        size = self.size()
        if size >= 0 and any(not 0 <= r < size for r in given):
            raise ValueError(f"the group has the ranks 0 to {size - 1}, but split() was given {list(split_ranks)}")
        for part in split_ranks:
            if self.rank() in part:
                return self.new_group(part, timeout)
        return ProcessGroup(dist.GroupMember.NON_GROUP_MEMBER)

    # ---- collectives

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> CUDAFuture[Tensor]:
        return collectives.all_reduce(tensor, op, self.group)

    def all_reduce_coalesced(self, tensors: _Tensors, op: Any = dist.ReduceOp.SUM) -> CUDAFuture[_Tensors]:
        return collectives.all_reduce_coalesced(tensors, op, self.group)

    def broadcast(self, tensor: Tensor, src: int | None = None, group_src: int | None = None) -> CUDAFuture[Tensor]:
        return collectives.broadcast(tensor, src, self.group, group_src)

    def reduce(
        self, tensor: Tensor, dst: int | None = None, op: Any = dist.ReduceOp.SUM, group_dst: int | None = None
    ) -> CUDAFuture[Tensor | None]:
        return collectives.reduce(tensor, dst, op, self.group, group_dst)

    def all_gather(self, tensor_list: _Tensors, tensor: Tensor) -> CUDAFuture[_Tensors]:
        return collectives.all_gather(tensor_list, tensor, self.group)

    def all_gather_coalesced(
        self, output_tensor_lists: list[_Tensors], input_tensor_list: _Tensors
    ) -> CUDAFuture[list[_Tensors]]:
        return collectives.all_gather_coalesced(output_tensor_lists, input_tensor_list, self.group)

    def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor) -> CUDAFuture[Tensor]:
        return collectives.all_gather_into_tensor(output_tensor, input_tensor, self.group)

    all_gather_single = all_gather_into_tensor

    def gather(
        self,
        tensor: Tensor,
        gather_list: _Tensors | None = None,
        dst: int | None = None,
        group_dst: int | None = None,
    ) -> CUDAFuture[_Tensors | None]:
        return collectives.gather(tensor, gather_list, dst, self.group, group_dst)

    def gather_single(
        self,
        tensor: Tensor,
        gather_tensor: Tensor | None = None,
        dst: int | None = None,
        group_dst: int | None = None,
    ) -> CUDAFuture[Tensor | None]:
        return collectives.gather_single(tensor, gather_tensor, dst, self.group, group_dst)

    gather_into_tensor = gather_single

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: _Tensors | None = None,
        src: int | None = None,
        group_src: int | None = None,
    ) -> CUDAFuture[Tensor]:
        return collectives.scatter(tensor, scatter_list, src, self.group, group_src)

    def reduce_scatter(self, output: Tensor, input_list: _Tensors, op: Any = dist.ReduceOp.SUM) -> CUDAFuture[Tensor]:
        return collectives.reduce_scatter(output, input_list, op, self.group)

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM) -> CUDAFuture[Tensor]:
        return collectives.reduce_scatter_tensor(output, input, op, self.group)

    reduce_scatter_single = reduce_scatter_tensor

    def all_to_all(self, output_tensor_list: _Tensors, input_tensor_list: _Tensors) -> CUDAFuture[_Tensors]:
        return collectives.all_to_all(output_tensor_list, input_tensor_list, self.group)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
    ) -> CUDAFuture[Tensor]:
        return collectives.all_to_all_single(output, input, output_split_sizes, input_split_sizes, self.group)

    def barrier(self, device_ids: list[int] | None = None, timeout: timedelta | None = None) -> CUDAFuture[None]:
        return collectives.barrier(self.group, device_ids, timeout)

    # ---- point to point

    def send(
        self, tensor: Tensor, dst: int | None = None, tag: int = 0, group_dst: int | None = None
    ) -> CUDAFuture[None]:
        return point_to_point.send(tensor, dst, self.group, tag, group_dst)

    def recv(
        self, tensor: Tensor, src: int | None = None, tag: int = 0, group_src: int | None = None
    ) -> CUDAFuture[Received]:
        return point_to_point.recv(tensor, src, self.group, tag, group_src)

    isend = send
    irecv = recv

    def batch_isend_irecv(self, p2p_op_list: Sequence[dist.P2POp]) -> CUDAFuture[list[Received | None]]:
        return point_to_point.batch_isend_irecv(p2p_op_list)

    # ---- objects

    def send_object_list(
        self,
        object_list: list[Any],
        dst: int | None = None,
        device: torch.device | None = None,
        group_dst: int | None = None,
        use_batch: bool = False,
        weights_only: bool = False,
    ) -> CUDAFuture[None]:
        return object_messages.send_object_list(
            object_list, dst, self.group, device, group_dst, use_batch, weights_only
        )

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        device: torch.device | None = None,
        group_src: int | None = None,
        use_batch: bool = False,
        weights_only: bool = False,
    ) -> CUDAFuture[int]:
        return object_messages.recv_object_list(
            object_list, src, self.group, device, group_src, use_batch, weights_only
        )

    def all_gather_object(self, object_list: list[Any], obj: Any, weights_only: bool = False) -> CUDAFuture[list[Any]]:
        return objects.all_gather_object(object_list, obj, self.group, weights_only)

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        device: torch.device | None = None,
        group_src: int | None = None,
        weights_only: bool = False,
    ) -> CUDAFuture[list[Any]]:
        return objects.broadcast_object_list(object_list, src, self.group, device, group_src, weights_only)

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group_src: int | None = None,
        weights_only: bool = False,
    ) -> CUDAFuture[list[Any]]:
        return objects.scatter_object_list(
            scatter_object_output_list, scatter_object_input_list, src, self.group, group_src, weights_only
        )

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group_dst: int | None = None,
        weights_only: bool = False,
    ) -> CUDAFuture[list[Any] | None]:
        return objects.gather_object(obj, object_gather_list, dst, self.group, group_dst, weights_only)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> CUDAFuture[None]:
        return objects.monitored_barrier(self.group, timeout, wait_all_ranks)


def _share_docstrings() -> None:
    for module in (collectives, point_to_point, object_messages, objects):
        for name in module.__all__:
            method = ProcessGroup.__dict__.get(name)
            if method is not None and method.__doc__ is None:
                method.__doc__ = getattr(module, name).__doc__


_share_docstrings()


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> ProcessGroup:
    """Create a group, as ``torch.distributed.new_group`` does, and return it as a :class:`ProcessGroup`.

    Every rank of the default group calls it, in the same order; with `use_local_synchronization` only `ranks` call it.
    In a callback it raises InvalidStateError.
    A rank that is not in `ranks` gets a group whose methods return futures completed with None. `sort_ranks`: False
    (needs torch 2.13): the group has the ranks in the given order.

    >>> new_group([0]).ranks()
    [0]
    """
    more: dict[str, Any] = {} if sort_ranks else {"sort_ranks": False}
    require_program("new_group()")
    members = None if ranks is None else listed("ranks", ranks, "ranks")
    if members == []:
        raise ValueError("ranks is empty: pass at least one rank, or None for all")
    if use_local_synchronization:
        pg_options = options_without_split(backend, pg_options)
    group = dist.new_group(
        members,
        timeout,
        backend,
        pg_options,
        use_local_synchronization,
        group_desc,
        device_id,
        **more,
    )
    return ProcessGroup(dist.GroupMember.NON_GROUP_MEMBER if group is None else group)
