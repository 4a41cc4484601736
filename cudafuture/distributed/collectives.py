"""torch.distributed's collectives on tensors, each returning a CUDAFuture.

The arguments are torch's, without ``async_op``. `group` is a torch process group, a
:class:`~cudafuture.distributed.process_group.ProcessGroup`, or None for the default one. Tensors belong to the
collective from the call until the future is complete. The value is the output: the same tensor, or list, that was
passed in. It is None on a rank without output (``reduce`` and ``gather`` on other ranks than `dst`, ``barrier``, any
rank outside the group).

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

from cudafuture._arguments import shown
from cudafuture._C import CUDAFuture
from cudafuture.distributed._issue import begin, nothing
from cudafuture.distributed._operations import (
    ALL_GATHER,
    ALL_GATHER_COALESCED,
    ALL_GATHER_INTO_TENSOR,
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    ALL_TO_ALL,
    ALL_TO_ALL_SINGLE,
    BARRIER,
    BROADCAST,
    GATHER,
    GATHER_SINGLE,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_TENSOR,
    SCATTER,
    DistributedOperation,
)

__all__ = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
]

Tensor = torch.Tensor
_Tensors = list[torch.Tensor]
_SUM: Any = dist.ReduceOp.SUM


def _issue(
    operation: DistributedOperation,
    group: Any,
    tensors: tuple[Any, ...],
    rank: int | None = None,
    group_rank: int | None = None,
    *,
    on_device: bool | None = None,
    **options: Any,
) -> CUDAFuture[Any]:
    """Issue the collective of a row of the table.

    Args:
        operation: the row.
        group: as in the public functions.
        tensors: the arguments that have a role in the row.
        rank, group_rank: the root, if the row has one: a global rank, or a rank in the group.
        on_device: True if a collective without tensors runs on a device; None: if the group has no host backend.
        options: the other arguments of torch's function.
    """
    begun = begin(operation, group, tensors, on_device)
    if begun is None:
        return nothing()
    issue, process_group = begun
    is_root = operation.root is None or issue.choose_root(process_group, rank, group_rank, options)
    has_output = is_root or operation.root == "src"
    value = tensors[operation.output] if has_output and operation.output is not None else None
    roles = operation.roles if is_root else operation.roles_elsewhere or operation.roles
    return issue.run(process_group, partial(operation.function, async_op=True, **options), value, tensors, roles)


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> CUDAFuture[Tensor]:
    """Reduce `tensor` over all ranks, in place; the value is `tensor`, the same on every rank.

    >>> all_reduce(torch.ones(2)).wait()
    tensor([1., 1.])
    """
    if op is not _SUM:
        _expect_op(op)
    issued = begin(ALL_REDUCE, group, (tensor,))
    if issued is None:
        return nothing()
    issue, pg = issued
    plain = op is _SUM and isinstance(tensor, Tensor) and not (has_torch_function_unary(tensor) or tensor.is_complex())
    if not plain or issue.is_staged or issue.group.is_broken:
        function = partial(ALL_REDUCE.function, op=op, async_op=True)
        return issue.run(pg, function, tensor, (tensor,), ALL_REDUCE.roles)
    # torch's own function checks and converts for longer than the rest of this path takes. Each Python call is slow too
    # in a process that has just slept, so this path does not call run().
    try:
        work = (issue.issuer.process_group or pg).allreduce([tensor], _SUM_OPTIONS)
    except BaseException as e:
        return issue.refused(e)
    return issue.follow(pg, work, tensor, tensor)


_SUM_OPTIONS = dist.AllreduceOptions()
_SUM_OPTIONS.reduceOp = _SUM
_SUM_OPTIONS.asyncOp = True


def all_reduce_coalesced(tensors: _Tensors, op: Any = dist.ReduceOp.SUM, group: Any = None) -> CUDAFuture[_Tensors]:
    """Reduce each of `tensors` over all ranks, in place and in one message; the value is the list.

    >>> all_reduce_coalesced([torch.ones(1), torch.zeros(2)]).wait()
    [tensor([1.]), tensor([0., 0.])]
    """
    _expect_op(op)
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    _check_same_dtype(tensors, "tensors")
    if any(t.is_complex() for t in tensors) and not dist.distributed_c10d.supports_complex(op):
        raise ValueError(f"all_reduce_coalesced does not support {op} on complex tensors")
    return _issue(ALL_REDUCE_COALESCED, group, (tensors,), op=op)


def _expect_op(op: Any) -> None:
    """Raise TypeError unless `op` is an operation of torch's reductions."""
    if not isinstance(op, dist.ReduceOp):
        raise TypeError(f"op is a torch.distributed.ReduceOp, such as ReduceOp.SUM, not {shown(op)}")


def _check_same_dtype(tensors: Any, name: str) -> None:
    """Raise TypeError or ValueError, as torch does, unless `tensors` is a list of tensors of one dtype."""
    dist.distributed_c10d._check_tensor_list(tensors, name)
    dist.distributed_c10d._ensure_all_tensors_same_dtype(tensors)


def broadcast(
    tensor: Tensor, src: int | None = None, group: Any = None, group_src: int | None = None
) -> CUDAFuture[Tensor]:
    """Copy `tensor` from one rank into the `tensor` of all others; the value is `tensor`.

    `src` is a global rank, `group_src` a rank in the group: give exactly one of them.

    >>> broadcast(torch.arange(3), src=0).wait()
    tensor([0, 1, 2])
    """
    return _issue(BROADCAST, group, (tensor,), src, group_src)


def reduce(
    tensor: Tensor, dst: int | None = None, op: Any = dist.ReduceOp.SUM, group: Any = None, group_dst: int | None = None
) -> CUDAFuture[Tensor | None]:
    """Reduce `tensor` over all ranks into the `tensor` of rank `dst`, where it is the value; elsewhere None.

    On other ranks the contents of `tensor` are undefined afterwards.

    >>> reduce(torch.ones(2), dst=0).wait()
    tensor([1., 1.])
    """
    _expect_op(op)
    return _issue(REDUCE, group, (tensor,), dst, group_dst, op=op)


def all_gather(tensor_list: _Tensors, tensor: Tensor, group: Any = None) -> CUDAFuture[_Tensors]:
    """Gather the `tensor` of every rank into `tensor_list`, in the order of ranks; the value is `tensor_list`.

    >>> all_gather([torch.empty(2)], torch.ones(2)).wait()
    [tensor([1., 1.])]
    """
    return _issue(ALL_GATHER, group, (tensor_list, tensor))


def all_gather_coalesced(
    output_tensor_lists: list[_Tensors], input_tensor_list: _Tensors, group: Any = None
) -> CUDAFuture[list[_Tensors]]:
    """Gather the `input_tensor_list` of every rank, in one message; the value is `output_tensor_lists`.

    The tensors of a list have one dtype and any shapes, the same on every rank. `output_tensor_lists` has one list for
    each rank, in the order of ranks. NCCL does not have this collective.

    >>> all_gather_coalesced([[torch.empty(1), torch.empty(2)]], [torch.zeros(1), torch.ones(2)]).wait()
    [[tensor([0.]), tensor([1., 1.])]]
    """
    _check_same_dtype(input_tensor_list, "input_tensor_list")
    if not isinstance(output_tensor_lists, list):
        raise TypeError(f"output_tensor_lists must be a list of lists of tensors, not {type(output_tensor_lists)}")
    for tensors in output_tensor_lists:
        _check_same_dtype(tensors, "output_tensor_lists")
    return _issue(ALL_GATHER_COALESCED, group, (output_tensor_lists, input_tensor_list))


def all_gather_into_tensor(output_tensor: Tensor, input_tensor: Tensor, group: Any = None) -> CUDAFuture[Tensor]:
    """Gather the `input_tensor` of every rank into one tensor, joined or stacked; the value is `output_tensor`.

    >>> all_gather_into_tensor(torch.empty(2), torch.ones(2)).wait()
    tensor([1., 1.])
    """
    return _issue(ALL_GATHER_INTO_TENSOR, group, (output_tensor, input_tensor))


all_gather_single = all_gather_into_tensor  # torch's name from 2.13 on


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
    return _issue(GATHER, group, (tensor, gather_list), dst, group_dst)


def gather_single(
    tensor: Tensor,
    gather_tensor: Tensor | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> CUDAFuture[Tensor | None]:
    """Gather the `tensor` of every rank into one tensor of rank `dst` (default 0), joined or stacked; its value there.

    The `tensor` of every rank has the same shape. Other ranks give no `gather_tensor`.

    >>> gather_single(torch.ones(2), torch.empty(2), dst=0).wait()
    tensor([1., 1.])
    """
    return _issue(GATHER_SINGLE, group, (tensor, gather_tensor), dst, group_dst)


gather_into_tensor = gather_single


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
    return _issue(SCATTER, group, (tensor, scatter_list), src, group_src)


def reduce_scatter(
    output: Tensor, input_list: _Tensors, op: Any = dist.ReduceOp.SUM, group: Any = None
) -> CUDAFuture[Tensor]:
    """Reduce `input_list` over all ranks and give each rank its part, in `output`, which is the value.

    >>> reduce_scatter(torch.empty(2), [torch.ones(2)]).wait()
    tensor([1., 1.])
    """
    _expect_op(op)
    return _issue(REDUCE_SCATTER, group, (output, input_list), op=op)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None
) -> CUDAFuture[Tensor]:
    """Reduce `input` over all ranks and give each rank an equal part of it, in `output`, which is the value.

    >>> reduce_scatter_tensor(torch.empty(2), torch.ones(2)).wait()
    tensor([1., 1.])
    """
    _expect_op(op)
    return _issue(REDUCE_SCATTER_TENSOR, group, (output, input), op=op)


reduce_scatter_single = reduce_scatter_tensor  # torch's name from 2.13 on


def all_to_all(output_tensor_list: _Tensors, input_tensor_list: _Tensors, group: Any = None) -> CUDAFuture[_Tensors]:
    """Send one tensor to each rank and receive one from each; the value is `output_tensor_list`.

    >>> all_to_all([torch.empty(2)], [torch.ones(2)]).wait()
    [tensor([1., 1.])]
    """
    return _issue(ALL_TO_ALL, group, (output_tensor_list, input_tensor_list))


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
    sizes: Any = {"output_split_sizes": output_split_sizes, "input_split_sizes": input_split_sizes}
    return _issue(ALL_TO_ALL_SINGLE, group, (output, input), **sizes)


def barrier(
    group: Any = None, device_ids: list[int] | None = None, timeout: timedelta | None = None
) -> CUDAFuture[None]:
    """Complete when every rank has arrived. `timeout`: needs torch 2.13; None: the group's timeout.

    >>> barrier().wait()
    """
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout is a datetime.timedelta, such as timedelta(seconds=5), not {shown(timeout)}")
    on_device = None if device_ids is None else True
    more: Any = {} if timeout is None else {"timeout": timeout}
    return _issue(BARRIER, group, (), on_device=on_device, device_ids=device_ids, **more)
