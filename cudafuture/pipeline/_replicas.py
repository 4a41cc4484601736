"""Replicas of a pipeline: the same stages in other processes, for other samples, with one average of the gradients.

::

    cells ──► last backward cell of a stage ──► all_reduce of its gradients ──┐
    cells of the other stages ────────────────────────────────────────────────┴──► parameter.grad = sum / replicas

The replicas agree on the end of each step as the ranks of a pipeline do: it ends well on all, or raises on all. One
whose step fails reduces zeros for what is left, so that the collectives of the next step meet those of the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from cudafuture._C import CUDAFuture
from cudafuture.distributed import all_reduce, broadcast
from cudafuture.errors import WorkerLostError
from cudafuture.pipeline._ranks import Ranks, SharedStep
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

    def step(self, stages: Collection[Stage]) -> AbstractContextManager[GradientReduction]:
        """Return the scope of a step."""
        return nullcontext(GradientReduction())

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
            sent = [broadcast(tensor, group=self._group, group_src=0) for tensor in copies]
            for tensor, future in zip(tensors, sent, strict=True):
                tensor.copy_(future.wait(non_blocking=True))

    @contextmanager
    def step(self, stages: Collection[Stage]) -> Iterator[GradientReduction]:
        """Return the scope of a step, which all replicas enter."""
        with self._ranks.step("step", None) as shared:
            reduction = _GroupReduction(self._group, self.size, stages, shared)
            try:
                yield reduction
            except (TimeoutError, WorkerLostError):  # the replicas cannot go on together
                raise
            except BaseException:
                reduction.give_up()
                raise

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

    def __init__(self, group: Any, size: int, stages: Collection[Stage], shared: SharedStep) -> None:
        self._group, self._size, self._shared = group, size, shared
        self._left = {stage.index: _buckets(stage) for stage in stages}
        self._sent: list[_GradientBucket] = []
        shared.describe = lambda: "runs the cells of its step, or waits for the gradients of the other replicas"

    def limit(self, timeout: float | None) -> None:
        self._shared.limit(timeout)

    def begin(self, stage: Stage) -> None:
        left = self._left[stage.index]
        while left:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in left[0]]
            if any(gradient.layout != torch.strided for gradient in gradients):
                raise TypeError(f"stage {stage.index} has a sparse gradient, which replicas cannot average")
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._sent.append(_GradientBucket(left[0], all_reduce(flat, group=self._group)))
            del left[0]

    def finish(self) -> None:
        for parameters, sums in self._sent:
            average = self._shared.wait(sums).div_(self._size)
            parts = average.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part.view(parameter.shape))

    def give_up(self) -> None:
        """Add zeros to the sums that have not begun."""
        with contextlib.suppress(Exception):  # of a group that is lost
            for _, left in sorted(self._left.items(), reverse=True):
                for parameters in left:
                    size = sum(parameter.numel() for parameter in parameters)
                    all_reduce(
                        torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device), group=self._group
                    )


def _buckets(stage: Stage) -> list[list[nn.Parameter]]:
    """Return the trained parameters of a stage in the buckets in which their gradients are added up."""
    buckets: list[list[nn.Parameter]] = []
    last: dict[torch.dtype, int] = {}  # the bucket that has room
    sizes: list[int] = []
    for parameter in stage.module.parameters():
        if not parameter.requires_grad:
            continue
        nbytes = parameter.numel() * parameter.element_size()
        i = last.get(parameter.dtype)
        if i is None or sizes[i] + nbytes > _BUCKET:
            i = last[parameter.dtype] = len(buckets)
            buckets.append([])
            sizes.append(0)
        buckets[i].append(parameter)
        sizes[i] += nbytes
    return buckets
