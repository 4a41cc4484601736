"""torch.distributed's collectives on tensors, each returning a CUDAFuture.

The arguments are torch's, without ``async_op``. `group` is a torch process group, a
:class:`~cudafuture.distributed.ProcessGroup`, or None for the default one. Tensors belong to the collective from the
call until the future is complete. The value is the output: the same tensor, or list, that was passed in. It is None on
a rank without output (``reduce`` and ``gather`` on other ranks than `dst`, ``barrier``, any rank outside the group).

Tensors may be on any device that has streams: tensors that the group's backend does not carry go through pinned host
memory, in the order of the calls. All ranks give device tensors, or all give host tensors. No call blocks.

Raises, at the call:
    TypeError, ValueError: wrong arguments, as torch raises them; tensors on the host and on a device in one call.
    InvalidStateError: issued in a callback that runs in another order on every rank.

A collective that fails later, or that the backend refuses, fails the future with CollectiveError.

The examples have a default group of one process.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import has_torch_function_unary

from cudafuture._C import CUDAFuture
from cudafuture.distributed._backends import unwrapped
from cudafuture.distributed._issue import begin, keep_until_ready, nothing

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
]

Tensor = torch.Tensor
_Tensors = list[torch.Tensor]
_SUM: Any = dist.ReduceOp.SUM

# torch 2.13 has new names for these two, and warns about the old ones.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_NOT_OF_NCCL = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def _on(function: Any, group: Any, *tensors: Any, **options: Any) -> Any:
    """Call one of torch's functions on a group."""
    return function(*tensors, group=group, async_op=True, **options)


def all_reduce(tensor: Tensor, op: Any = _SUM, group: Any = None) -> CUDAFuture[Tensor]:
    """Reduce `tensor` over all ranks, in place; the value is `tensor`, the same on every rank.

    >>> all_reduce(torch.ones(2)).wait()
    tensor([1., 1.])
    """
    issued = begin("all_reduce", group, (tensor,))
    if issued is None:
        return nothing()
    issue, pg = issued
    plain = op is _SUM and isinstance(tensor, Tensor) and not (has_torch_function_unary(tensor) or tensor.is_complex())
    if not plain or issue.detour is not None or issue.group.is_broken:
        return issue.run(pg, partial(_on, dist.all_reduce, op=op), tensor, (tensor,), "x")
    # torch's own function checks and converts for longer than the rest of this path takes. Each Python call is slow too
    # in a process that has just slept, so this path does not call run().
    try:
        work = (issue.issuer.process_group or pg).allreduce([tensor], _SUM_OPTIONS)
    except BaseException as e:
        return issue.refused(e)
    return issue.follow(pg, work, tensor)


_SUM_OPTIONS = dist.AllreduceOptions()
_SUM_OPTIONS.reduceOp = _SUM
_SUM_OPTIONS.asyncOp = True


def all_reduce_coalesced(tensors: _Tensors, op: Any = _SUM, group: Any = None) -> CUDAFuture[_Tensors]:
    """Reduce each of `tensors` over all ranks, in place and in one message; the value is the list.

    >>> all_reduce_coalesced([torch.ones(1), torch.zeros(2)]).wait()
    [tensor([1.]), tensor([0., 0.])]
    """
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    dist.distributed_c10d._check_tensor_list(tensors, "tensors")
    dist.distributed_c10d._ensure_all_tensors_same_dtype(tensors)
    if any(t.is_complex() for t in tensors) and not dist.distributed_c10d.supports_complex(op):
        raise ValueError(f"all_reduce_coalesced does not support {op} on complex tensors")
    issued = begin("all_reduce_coalesced", group, (tensors,))
    if issued is None:
        return nothing()
    issue, pg = issued
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op
    options.asyncOp = True

    def call(g: Any, tensors: _Tensors) -> Any:
        return g.allreduce_coalesced([torch.view_as_real(t) if t.is_complex() else t for t in tensors], options)

    return issue.run(pg, call, tensors, (tensors,), "x")


def broadcast(
    tensor: Tensor, src: int | None = None, group: Any = None, group_src: int | None = None
) -> CUDAFuture[Tensor]:
    """Copy `tensor` from one rank into the `tensor` of all others; the value is `tensor`.

    `src` is a global rank, `group_src` a rank in the group: give exactly one of them.

    >>> broadcast(torch.arange(3), src=0).wait()
    tensor([0, 1, 2])
    """
    issued = begin("broadcast", group, (tensor,))
    if issued is None:
        return nothing()
    issue, pg = issued
    root = issue.rank(pg, src, group_src, "src")
    role = "r" if root == pg.rank() else "w"
    return issue.run(pg, partial(_on, dist.broadcast, group_src=root), tensor, (tensor,), role)


def reduce(
    tensor: Tensor, dst: int | None = None, op: Any = _SUM, group: Any = None, group_dst: int | None = None
) -> CUDAFuture[Tensor | None]:
    """Reduce `tensor` over all ranks into the `tensor` of rank `dst`, where it is the value; elsewhere None.

    On other ranks the contents of `tensor` are undefined afterwards.

    >>> reduce(torch.ones(2), dst=0).wait()
    tensor([1., 1.])
    """
    issued = begin("reduce", group, (tensor,))
    if issued is None:
        return nothing()
    issue, pg = issued
    root = issue.rank(pg, dst, group_dst, "dst")
    value, role = (tensor, "x") if root == pg.rank() else (None, "r")
    return issue.run(pg, partial(_on, dist.reduce, op=op, group_dst=root), value, (tensor,), role)


def all_gather(tensor_list: _Tensors, tensor: Tensor, group: Any = None) -> CUDAFuture[_Tensors]:
    """Gather the `tensor` of every rank into `tensor_list`, in the order of ranks; the value is `tensor_list`.

    >>> all_gather([torch.empty(2)], torch.ones(2)).wait()
    [tensor([1., 1.])]
    """
    issued = begin("all_gather", group, (tensor_list, tensor))
    if issued is None:
        return nothing()
    issue, pg = issued
    return issue.run(pg, partial(_on, dist.all_gather), tensor_list, (tensor_list, tensor), "wr")


def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, group: Any = None) -> CUDAFuture[Tensor]:
    """Gather the `input_tensor` of every rank into one tensor, joined or stacked; the value is `output_tensor`.

    >>> all_gather_into_tensor(torch.empty(2), torch.ones(2)).wait()
    tensor([1., 1.])
    """
    issued = begin("all_gather_into_tensor", group, (output_tensor, input_tensor))
    if issued is None:
        return nothing()
    issue, pg = issued
    return issue.run(pg, partial(_on, _all_gather_single), output_tensor, (output_tensor, input_tensor), "wr")


def gather(
    tensor: Tensor,
    gather_list: _Tensors | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> CUDAFuture[_Tensors | None]:
    """Gather the `tensor` of every rank into the `gather_list` of rank `dst` (default 0), where it is the value.

    >>> gather(torch.ones(2), [torch.empty(2)], dst=0).wait()
    [tensor([1., 1.])]
    """
    issued = begin("gather", group, (tensor, gather_list))
    if issued is None:
        return nothing()
    issue, pg = issued
    root = issue.rank(pg, dst, group_dst, "dst", 0)
    value = gather_list if root == pg.rank() else None
    gathered = issue.run(pg, partial(_on, dist.gather, group_dst=root), value, (tensor, gather_list), "rw")
    return gathered if value is not None else keep_until_ready(gathered, tensor)


def scatter(
    tensor: Tensor,
    scatter_list: _Tensors | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> CUDAFuture[Tensor]:
    """Distribute the tensors of rank `src` (default 0), one to each rank, into `tensor`, which is the value.

    >>> scatter(torch.empty(2), [torch.ones(2)], src=0).wait()
    tensor([1., 1.])
    """
    issued = begin("scatter", group, (tensor, scatter_list))
    if issued is None:
        return nothing()
    issue, pg = issued
    root = issue.rank(pg, src, group_src, "src", 0)
    return issue.run(pg, partial(_on, dist.scatter, group_src=root), tensor, (tensor, scatter_list), "wr")


def reduce_scatter(output: Tensor, input_list: _Tensors, op: Any = _SUM, group: Any = None) -> CUDAFuture[Tensor]:
    """Reduce `input_list` over all ranks and give each rank its part, in `output`, which is the value.

    >>> reduce_scatter(torch.empty(2), [torch.ones(2)]).wait()
    tensor([1., 1.])
    """
    issued = begin("reduce_scatter", group, (output, input_list))
    if issued is None:
        return nothing()
    issue, pg = issued
    return issue.run(pg, partial(_on, dist.reduce_scatter, op=op), output, (output, input_list), "wr")


def reduce_scatter_tensor(output: Tensor, input: Tensor, op: Any = _SUM, group: Any = None) -> CUDAFuture[Tensor]:
    """Reduce `input` over all ranks and give each rank an equal part of it, in `output`, which is the value.

    >>> reduce_scatter_tensor(torch.empty(2), torch.ones(2)).wait()
    tensor([1., 1.])
    """
    issued = begin("reduce_scatter_tensor", group, (output, input))
    if issued is None:
        return nothing()
    issue, pg = issued
    return issue.run(pg, partial(_on, _reduce_scatter_single, op=op), output, (output, input), "wr")


def all_to_all(output_tensor_list: _Tensors, input_tensor_list: _Tensors, group: Any = None) -> CUDAFuture[_Tensors]:
    """Send one tensor to each rank and receive one from each; the value is `output_tensor_list`.

    >>> all_to_all([torch.empty(2)], [torch.ones(2)]).wait()
    [tensor([1., 1.])]
    """
    issued = begin("all_to_all", group, (output_tensor_list, input_tensor_list))
    if issued is None:
        return nothing()
    issue, pg = issued
    lists = (output_tensor_list, input_tensor_list)
    return issue.run(pg, partial(_on, _all_to_all), output_tensor_list, lists, "wr")


def _all_to_all(outputs: Any, inputs: Any, group: Any, **options: Any) -> Any:
    """Call torch's function, but refuse dtypes that NCCL does not have before torch does.

    If torch raises, NCCL launches no later collective of the thread, and their futures succeed with unchanged
    tensors: torch seems to leave the group call open that it began (ncclGroupStart).
    """
    both = [tensors for tensors in (outputs, inputs) if isinstance(tensors, (list, tuple))]
    for tensor in (tensor for tensors in both for tensor in tensors):
        if isinstance(tensor, Tensor) and tensor.is_cuda and tensor.dtype in _NOT_OF_NCCL:
            backend = unwrapped(group._get_backend(tensor.device))
            if dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL):
                raise RuntimeError(f"NCCL has no type for {tensor.dtype}; send the bytes, as tensor.view(torch.uint8)")
    return dist.all_to_all(outputs, inputs, group=group, **options)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
) -> CUDAFuture[Tensor]:
    """Send a part of `input` to each rank and receive a part of `output` from each; the value is `output`.

    The split sizes are rows for each rank; None: equal parts.

    >>> all_to_all_single(torch.empty(3), torch.ones(3), [3], [3]).wait()
    tensor([1., 1., 1.])
    """
    issued = begin("all_to_all_single", group, (output, input))
    if issued is None:
        return nothing()
    issue, pg = issued
    sizes = {"output_split_sizes": output_split_sizes, "input_split_sizes": input_split_sizes}
    return issue.run(pg, partial(_on, dist.all_to_all_single, **sizes), output, (output, input), "wr")


def barrier(
    group: Any = None, device_ids: list[int] | None = None, timeout: timedelta | None = None
) -> CUDAFuture[None]:
    """Complete when every rank has arrived. `timeout`: needs torch 2.13; None: the group's timeout.

    >>> barrier().wait()
    """
    issued = begin("barrier", group, (), on_device=None if device_ids is None else True)
    if issued is None:
        return nothing()
    issue, pg = issued
    more = {} if timeout is None else {"timeout": timeout}
    return issue.run(pg, lambda g: dist.barrier(g, async_op=True, device_ids=device_ids, **more), None)
