"""Replicas of a pipeline: the same stages in other processes, for other samples, with one average of the gradients.

::

    cells ──► last backward cell of a stage ──► all_reduce of its gradients ──┐
    cells of the other stages ────────────────────────────────────────────────┴──► parameter.grad = sum

The replicas agree on the end of each step as the ranks of a pipeline do: it ends well on all, or raises on all. One
whose step fails reduces zeros for what is left, so that the collectives of the next step meet those of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from cudafuture._C import CUDAFuture
from cudafuture.distributed import all_reduce, broadcast
from cudafuture.errors import CollectiveError, InvalidStateError
from cudafuture.pipeline._ranks import Ranks, RankStep, SharedStep
from cudafuture.pipeline._stage import Stage

__all__ = ["GradientReduction", "OneReplica", "Replicas"]

_BUCKET = 25 << 20  # bytes of gradients in a collective, as in DistributedDataParallel


class GradientReduction:
    """Average of the gradients of one step over the replicas; here there is one."""

    is_needed = False

    def limit(self, timeout: float | None) -> None:
        """Set the timeout of the step, unless it is None."""

    def begin(self, stage: Stage) -> None:
        """Begin to add up the gradients of a stage, all cells of which have run."""

    def abandon(self, error: BaseException) -> None:
        """Let no replica wait for this one any more."""

    def finish(self) -> None:
        """Wait for the sums, and turn the gradients into the averages."""


class OneReplica:
    """Pipeline without replicas."""

    size = 1

    def making(self) -> AbstractContextManager[SharedStep | None]:
        """Return the scope in which the replicas are made."""
        return nullcontext()

    def copy_first(self, stages: Sequence[nn.Module]) -> None:
        """Replace parameters and buffers by those of the first replica."""

    broken = None

    def step(self, stages: Collection[Stage], number: int) -> AbstractContextManager[GradientReduction]:
        """Return the scope of a step."""
        return nullcontext(GradientReduction())

    def abandon(self, error: BaseException) -> None:
        """Let no replica wait for this one any more, of which there are none."""

    def close(self) -> None:
        """Close the connections to the others, of which there are none."""

    leave = close


class Replicas:
    """Replicas of the stages of this process, one on each rank of a group."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._ranks = Ranks(group, "replica")
        self.size = self._ranks.size

    def making(self) -> AbstractContextManager[SharedStep]:
        """Return the scope in which all replicas are made, or none."""
        return self._ranks.making()

    def copy_first(self, stages: Sequence[nn.Module]) -> None:
        """Replace parameters and buffers by those of the first replica."""
        tensors = [tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())]
        with torch.no_grad():
            copies = [tensor.detach().contiguous() for tensor in tensors]
            bytes_of = [each.reshape(-1).view(torch.uint8) for each in copies]
            sent = [broadcast(each, group=self._group, group_src=0) for each in bytes_of]
            for tensor, each, future in zip(tensors, copies, sent, strict=True):
                future.wait(non_blocking=True)
                if each.data_ptr() != tensor.data_ptr():
                    tensor.copy_(each)

    @contextmanager
    def step(self, stages: Collection[Stage], number: int) -> Iterator[GradientReduction]:
        """Return the scope of a step, which all replicas enter; `number`: of the steps of this one so far."""
        with self._ranks.step("step", None) as shared:
            shared.settings = f"the average of its step {number}"
            reduction = _GroupReduction(self._ranks, self._group, stages, shared)
            try:
                yield reduction
            except BaseException:
                if self._ranks.broken is None:
                    reduction.give_up()
                raise

    @property
    def broken(self) -> BaseException | None:
        """The reason that the replicas cannot go on together; None: they can."""
        return self._ranks.broken

    def abandon(self, error: BaseException) -> None:
        """Let no replica wait for this one any more."""
        self._ranks.abandon(error)

    def close(self) -> None:
        """Close this replica: it takes part in no further step."""
        self._ranks.close()

    def leave(self) -> None:
        """Close this replica without blocking."""
        self._ranks.leave()


class _GradientBucket(NamedTuple):
    """Gradients of one dtype on their way."""

    parameters: list[nn.Parameter]
    sums: CUDAFuture[torch.Tensor]
    """Of all elements, one parameter behind the other."""


class _GroupReduction(GradientReduction):
    """Average of the gradients of one step over the ranks of a group."""

    is_needed = True

    def __init__(self, ranks: Ranks, group: Any, stages: Collection[Stage], shared: RankStep) -> None:
        self._ranks, self._group, self._shared = ranks, group, shared
        self._left = {stage.index: _buckets(stage) for stage in stages}
        self._sent: list[_GradientBucket] = []
        self._is_sending = False  # a bucket whose collective may have begun
        shared.describe = lambda: "runs the cells of its step, or waits for the gradients of the other replicas"

    def limit(self, timeout: float | None) -> None:
        self._shared.limit(timeout)

    def begin(self, stage: Stage) -> None:
        left = self._left[stage.index]
        while left:
            gradients = [torch.zeros_like(p, dtype=_gradient_dtype(p)) if p.grad is None else p.grad for p in left[0]]
            if any(gradient.layout != torch.strided for gradient in gradients):
                raise TypeError(f"stage {stage.index} has a sparse gradient, which replicas cannot average")
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(self._ranks.size)
            self._is_sending = True
            self._sent.append(_GradientBucket(left.pop(0), all_reduce(flat, group=self._group)))
            self._is_sending = False

    def abandon(self, error: BaseException) -> None:
        self._ranks.abandon(error)

    def finish(self) -> None:
        while self._sent:
            try:
                average = self._shared.wait_unless_over(self._sent[0].sums)
            except CollectiveError as error:  # those of the next step would not meet
                self.abandon(error)
                raise
            parameters = self._sent.pop(0).parameters
            parts = average.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter, dtype=_gradient_dtype(parameter))
                parameter.grad.copy_(part.view(parameter.shape))

    def give_up(self) -> None:
        """Add zeros to the sums that have not begun; if that is not possible, abandon the step."""
        try:
            if self._is_sending:
                raise InvalidStateError("the step ended while a collective began")
            for _, left in sorted(self._left.items(), reverse=True):
                for first, *others in left:
                    size = sum(parameter.numel() for parameter in (first, *others))
                    all_reduce(torch.zeros(size, dtype=_gradient_dtype(first), device=first.device), group=self._group)
        except BaseException as error:
            self.abandon(error)


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's gradients, which newer versions of torch let differ from its own."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _buckets(stage: Stage) -> list[list[nn.Parameter]]:
    """Return the trained parameters of a stage in the buckets in which their gradients are added up."""
    buckets: list[list[nn.Parameter]] = []
    last: dict[torch.dtype, int] = {}  # the bucket that has room
    sizes: list[int] = []
    for parameter in stage.module.parameters():
        if not parameter.requires_grad:
            continue
        nbytes = parameter.numel() * parameter.element_size()
        dtype = _gradient_dtype(parameter)
        i = last.get(dtype)
        if i is None or sizes[i] + nbytes > _BUCKET:
            i = last[dtype] = len(buckets)
            buckets.append([])
            sizes.append(0)
        buckets[i].append(parameter)
        sizes[i] += nbytes
    return buckets
