"""Table of the operations: what the library knows about each function of torch.distributed that it issues.

Everything that differs between two collectives, apart from their signatures and docstrings, is in this table::

    collectives.broadcast(t, src=0)
        _issue(BROADCAST, group, (t,), 0, None)      the value, and the roles on this rank
            begin(BROADCAST, group, (t,))            the checks, the place in the order    (_issue.py)
            BROADCAST.function(t, group=..., ...)    torch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d as c10d

from cudafuture.distributed._backends import backend_for
from cudafuture.distributed._side_group import kind_of

__all__ = ["DistributedOperation", "Layout"]


class Layout(Enum):
    """Strides that an operation accepts."""

    CONTIGUOUS = auto()
    # The operation works on memory, element by element: it needs the same strides on every rank, and no gaps.
    DENSE = auto()
    # Gloo transfers contiguous copies of its own, and ranks may differ. Other backends need contiguous tensors.
    ANY_OVER_GLOO = auto()


@dataclass(frozen=True, eq=False, slots=True)
class DistributedOperation:
    """One row of the table."""

    name: str
    function: Callable[..., Any]
    """Function of torch, as it was on import: takes the arguments, then ``group`` and options by keyword."""
    roles: str = ""
    """One letter for each argument with tensors: "r" for read, "w" for written, "x" for both."""
    output: int | None = 0
    """Index of the argument that is the value of the future; None: the value is None."""
    root: Literal["src", "dst"] | None = None
    """Name of the argument for the rank that has the input (src), or the only rank that has an output (dst)."""
    default_root: int | None = None
    """Global rank of the root if the caller gives none; None: the caller must give one."""
    roles_elsewhere: str = ""
    """The roles on ranks other than the root, if they differ."""
    layout: Layout = Layout.CONTIGUOUS
    has_same_tensors: bool = True
    """All ranks give tensors of the same sizes and dtypes in every argument."""
    has_same_count: bool = False
    """All ranks give the same number of objects in the first argument."""
    split_roles: str = ""
    """Letters of `roles`: the parts of these tensors belong to the ranks."""
    gloo_copies_cuda: bool = False
    """torch's Gloo copies CUDA tensors to the host itself. False: this library does."""
    is_matched_by_peer: bool = False
    """The backend pairs operations by peer and tag, not by the order of issue."""


def _all_reduce_coalesced(tensors: list[torch.Tensor], op: Any, group: Any, async_op: bool) -> Any:
    """Call the group: torch's own function returns a future of torch, and no Work."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op
    options.asyncOp = async_op
    return group.allreduce_coalesced(_as_real(tensors), options)


def _all_gather_coalesced(
    outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], group: Any, async_op: bool
) -> Any:
    """Call the group: torch's own function returns a future of torch, and no Work."""
    options = AllgatherOptions()
    options.asyncOp = async_op
    return group.allgather_coalesced([_as_real(tensors) for tensors in outputs], _as_real(inputs), options)


def _as_real(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


_NOT_OF_NCCL = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def _all_to_all(outputs: Any, inputs: Any, group: Any, **options: Any) -> Any:
    """Call torch's function, but refuse dtypes that NCCL does not have before torch does.

    If torch raises, NCCL launches no later collective of the thread, and their futures succeed with unchanged
    tensors: torch seems to leave the group call open that it began (ncclGroupStart).
    """
    both = [tensors for tensors in (outputs, inputs) if isinstance(tensors, (list, tuple))]
    for tensor in (tensor for tensors in both for tensor in tensors):
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.dtype in _NOT_OF_NCCL:
            backend = backend_for(group, tensor.device)
            if dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL):
                raise RuntimeError(f"NCCL has no type for {tensor.dtype}; send the bytes, as tensor.view(torch.uint8)")
    return dist.all_to_all(outputs, inputs, group=group, **options)


def _gather_single(tensor: torch.Tensor, gather_tensor: Any, group: Any, group_dst: int, async_op: bool) -> Any:
    """Gather into the parts of `gather_tensor`; torch has this function from 2.14 on."""
    c10d._check_single_tensor(tensor, "tensor")
    parts = None
    if group.rank() != group_dst:
        if gather_tensor is not None:
            raise ValueError(f"gather_tensor is for the output, which only rank {group_dst} of the group has")
    else:
        c10d._check_single_tensor(gather_tensor, "gather_tensor")
        if gather_tensor.numel() != group.size() * tensor.numel():
            raise ValueError(
                f"gather_tensor has {gather_tensor.numel()} elements, but needs {tensor.numel()} of each of "
                f"{group.size()} ranks"
            )
        parts = list(gather_tensor.view(group.size(), *tensor.shape))
    return dist.gather(tensor, parts, group=group, group_dst=group_dst, async_op=async_op)


# torch 2.13 has new names for these two, and warns about the old ones.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ---- collectives on tensors

ALL_REDUCE = DistributedOperation("all_reduce", dist.all_reduce, "x", layout=Layout.DENSE, gloo_copies_cuda=True)
ALL_REDUCE_COALESCED = DistributedOperation("all_reduce_coalesced", _all_reduce_coalesced, "x", layout=Layout.DENSE)
BROADCAST = DistributedOperation(
    "broadcast",
    dist.broadcast,
    "r",
    root="src",
    roles_elsewhere="w",
    layout=Layout.DENSE,
    gloo_copies_cuda=True,
)
REDUCE = DistributedOperation(
    "reduce",
    dist.reduce,
    "x",
    root="dst",
    roles_elsewhere="r",
    layout=Layout.DENSE,
    gloo_copies_cuda=True,
)
ALL_GATHER = DistributedOperation(
    "all_gather",
    dist.all_gather,
    "wr",
    layout=Layout.ANY_OVER_GLOO,
    has_same_tensors=False,
    gloo_copies_cuda=True,
)
ALL_GATHER_COALESCED = DistributedOperation(
    "all_gather_coalesced", _all_gather_coalesced, "wr", layout=Layout.ANY_OVER_GLOO
)
ALL_GATHER_INTO_TENSOR = DistributedOperation("all_gather_into_tensor", _all_gather_single, "wr")
GATHER = DistributedOperation(
    "gather",
    dist.gather,
    "rw",
    output=1,
    root="dst",
    default_root=0,
    layout=Layout.ANY_OVER_GLOO,
    has_same_tensors=False,
    gloo_copies_cuda=True,
)
GATHER_SINGLE = DistributedOperation(
    "gather_single",
    _gather_single,
    "rw",
    output=1,
    root="dst",
    default_root=0,
    roles_elsewhere="r-",
    has_same_tensors=False,
    split_roles="w",
    gloo_copies_cuda=True,
)
SCATTER = DistributedOperation(
    "scatter",
    dist.scatter,
    "wr",
    root="src",
    default_root=0,
    has_same_tensors=False,
    gloo_copies_cuda=True,
)
REDUCE_SCATTER = DistributedOperation("reduce_scatter", dist.reduce_scatter, "wr", has_same_tensors=False)
REDUCE_SCATTER_TENSOR = DistributedOperation("reduce_scatter_tensor", _reduce_scatter_single, "wr")
ALL_TO_ALL = DistributedOperation("all_to_all", _all_to_all, "wr", has_same_tensors=False)
ALL_TO_ALL_SINGLE = DistributedOperation(
    "all_to_all_single",
    dist.all_to_all_single,
    "wr",
    has_same_tensors=False,
    split_roles="wr",
    gloo_copies_cuda=True,
)
BARRIER = DistributedOperation("barrier", dist.barrier, output=None)

# ---- point to point, with the values that point_to_point.py gives them

SEND = DistributedOperation("send", dist.isend, is_matched_by_peer=True)
RECV = DistributedOperation("recv", dist.irecv, is_matched_by_peer=True)
BATCH_ISEND_IRECV = DistributedOperation("batch_isend_irecv", dist.batch_isend_irecv, is_matched_by_peer=True)

SEND_OBJECT_LIST = DistributedOperation("send_object_list", dist.send_object_list, is_matched_by_peer=True)
RECV_OBJECT_LIST = DistributedOperation("recv_object_list", dist.recv_object_list, is_matched_by_peer=True)

# ---- operations that block, in serial queues of their own


def _broadcast_object_list(objects: list[Any], group: Any, device: torch.device | None, **options: Any) -> None:
    """Call torch's function, with the device only if the group has a backend for it."""
    carries = device is not None and kind_of(group, device) is not None
    dist.broadcast_object_list(objects, group=group, device=device if carries else None, **options)


ALL_GATHER_OBJECT = DistributedOperation("all_gather_object", dist.all_gather_object)
BROADCAST_OBJECT_LIST = DistributedOperation(
    "broadcast_object_list", _broadcast_object_list, root="src", default_root=0, has_same_count=True
)
SCATTER_OBJECT_LIST = DistributedOperation("scatter_object_list", dist.scatter_object_list, root="src", default_root=0)
GATHER_OBJECT = DistributedOperation("gather_object", dist.gather_object, output=1, root="dst", default_root=0)
# The library has its own implementation of this one.
MONITORED_BARRIER = DistributedOperation("monitored_barrier", dist.monitored_barrier, output=None)
