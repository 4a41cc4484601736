"""Buckets of gradients, and two loops over them: one that overlaps, and one with blocking calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import cudafuture.distributed as cfd
from _remote_state import Disk, RemoteState, update_blocking
from cudafuture import CUDAFuture, trace, wait_all


class Bucket:
    """Layers whose gradients travel together: flat values and gradients, one Adam, the future of the last update."""

    def __init__(self, index: int, layers: Mapping[str, nn.Module], learning_rate: float = 4e-3) -> None:
        self.index = index
        self.layers = layers
        self.parameters = [p for layer in layers.values() for p in layer.parameters()]
        self.values = nn.Parameter(torch.cat([p.detach().flatten() for p in self.parameters]))
        self.values.grad = self.gradients = torch.zeros_like(self.values, requires_grad=False)
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam([self.values], learning_rate)
        self.missing = 0  # gradients that this backward has still to bring
        self.updated: CUDAFuture[list[nn.Parameter]] | None = None
        # Every parameter and gradient is a view: nothing is ever copied to be sent, and Adam updates all at once.
        sizes = [p.numel() for p in self.parameters]
        views = zip(torch.split(self.values.detach(), sizes), torch.split(self.gradients, sizes), strict=True)
        for parameter, (value, gradient) in zip(self.parameters, views, strict=True):
            parameter.data = value.view_as(parameter)
            parameter.grad = gradient.view_as(parameter)

    @torch.no_grad()
    def update(self) -> None:
        """Make the sum of all ranks' gradients their mean, apply it, and clear the buffer for the next backward."""
        self.gradients.div_(dist.get_world_size())
        self.optimizer.step()
        self.gradients.zero_()


class Overlap:
    """Training loop that sends each bucket when backward has filled it; layers wait for the update on its arrival."""

    def __init__(self, buckets: Sequence[Bucket], disk: Disk | None = None, ahead: int = 3) -> None:
        self.buckets = buckets
        self.state = None if disk is None else RemoteState(disk.store, buckets, min(ahead, len(buckets)))
        self._next = 0  # the bucket to send next: every rank has to send them in the same order
        for bucket in buckets:
            for parameter in bucket.parameters:
                hook = partial(self._gradient_is_there, bucket)
                parameter.register_post_accumulate_grad_hook(hook)
            for layer in bucket.layers.values():
                layer.register_forward_pre_hook(partial(self._wait_for_update, bucket))

    def step(self, loss: Callable[[], Tensor]) -> None:
        """Compute a loss and the gradients; when this returns some buckets are still in flight."""
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        with trace.span("forward"):
            value = loss()
        with trace.span("backward"):
            value.backward()

    def wait(self) -> None:
        """Wait for the updates, writes and reads in flight; the next step goes on from there."""
        wait_all([bucket.updated for bucket in self.buckets if bucket.updated is not None])
        if self.state is not None:
            self.state.wait()

    def finish(self) -> None:
        """Wait for the last updates and writes, which no forward waits for."""
        self.wait()
        if self.state is not None:
            self.state.finish()

    def _gradient_is_there(self, bucket: Bucket, _parameter: Tensor) -> None:
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._send(self.buckets[self._next])
            self._next += 1

    def _send(self, bucket: Bucket) -> None:
        reduced = cfd.all_reduce(bucket.gradients)
        if self.state is None:
            bucket.updated = reduced.then(partial(self._update, bucket))  # on a thread of the group's, beside backward
        else:
            bucket.updated = self.state.update(bucket, reduced)

    def _update(self, bucket: Bucket, reduced: CUDAFuture[Tensor]) -> list[nn.Parameter]:
        reduced.value()  # raises what the all_reduce failed with
        bucket.update()
        return bucket.parameters  # so that on a device a waiter is ordered after the kernels that wrote them

    def _wait_for_update(self, bucket: Bucket, _layer: nn.Module, _inputs: Any) -> None:
        if bucket.updated is not None:
            bucket.updated.wait(non_blocking=True)


def blocking_step(buckets: Sequence[Bucket], disk: Disk | None, loss: Callable[[], Tensor]) -> None:
    """Do the work of an overlapped step with blocking calls: backward, then bucket after bucket."""
    loss().backward()
    for bucket in buckets:
        dist.all_reduce(bucket.gradients)
        if disk is None:
            bucket.update()
        else:
            update_blocking(disk.store, bucket)
