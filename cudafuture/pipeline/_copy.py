"""Copies and waits between streams, as autograd functions whose backward pass does the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cudafuture import _C
from cudafuture._C import CUDAFuture
from cudafuture.pipeline._dependency import alias
from cudafuture.pipeline.stream import AbstractStream, get_device, record_stream, use_stream, wait_stream
from cudafuture.transfer import enqueued_work

__all__ = ["Handover", "copy", "depart", "wait"]


_Mark = CUDAFuture[None]
"""An event behind the work that is enqueued on a stream so far.

Not a torch.Event: destroying one while another device is current would create a context.
"""


@dataclass
class Handover:
    """Events between a stage's stream and the copies of its outputs, for one micro-batch.

    The copies' streams are not waited for as a whole: another thread may have enqueued later micro-batches there.
    """

    ready: _Mark | None = None
    """After the stage; None: its tensors are on the CPU."""
    arrived: list[_Mark | None] = field(default_factory=list)
    """After each copy of gradients that the stage has not waited for yet."""


def depart(stream: AbstractStream, handover: Handover, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, for ``copy`` with the same `handover`, which may be called in another thread.

    Args:
        stream: the tensors are ready on it. In the backward pass it waits for the copies of the gradients.
        handover: receives the events.
        tensors: of one device.
    """
    departed: tuple[Tensor, ...] = Depart.apply(stream, handover, *tensors)  # type: ignore[no-untyped-call]
    return departed


def copy(
    prev_stream: AbstractStream, next_stream: AbstractStream, *tensors: Tensor, handover: Handover | None = None
) -> tuple[Tensor, ...]:
    """Return copies of the tensors on the device of `next_stream`, concurrent with the work of both devices.

    Args:
        prev_stream: of the tensors' device. The copies, and the copies of the gradients, are enqueued on both streams.
        next_stream: of another device. The copies are ready, and have their memory, in the order of this stream.
        tensors: the result of ``depart``; without `handover`, ready in the order of `prev_stream`.
        handover: of ``depart``. Default: the caller orders the streams.
    """
    with use_stream(next_stream):  # autograd runs the backward pass in it too
        copies: tuple[Tensor, ...] = Copy.apply(prev_stream, next_stream, handover, *tensors)  # type: ignore[no-untyped-call]
    return copies


def wait(prev_stream: AbstractStream, next_stream: AbstractStream, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, for use on `next_stream`: it waits for `prev_stream`, and in the backward pass vice versa.

    Args:
        prev_stream: the tensors are ready on it, and their gradients are used on it.
        next_stream: of the same device.
        tensors: recorded on `next_stream`, as their gradients are on `prev_stream`.
    """
    waited: tuple[Tensor, ...] = Wait.apply(prev_stream, next_stream, *tensors)  # type: ignore[no-untyped-call]
    return waited


class Depart(torch.autograd.Function):
    """Identity between a stage and the copies of its outputs."""

    @staticmethod
    def forward(ctx: Any, stream: AbstractStream, handover: Handover, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.stream, ctx.handover = stream, handover
        handover.ready = _mark(stream)
        return alias(ctx, tensors, ctx.needs_input_grad[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        while ctx.handover.arrived:
            _wait_for(ctx.handover.arrived.pop(), ctx.stream)
        _record(gradients, ctx.stream)
        return None, None, *gradients


class Copy(torch.autograd.Function):
    """Copies between the devices of two streams."""

    @staticmethod
    def forward(
        ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, handover: Handover | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.prev_stream, ctx.next_stream, ctx.handover = prev_stream, next_stream, handover
        if handover is not None:
            _wait_for(handover.ready, prev_stream)
        return alias(ctx, _copies(tensors, prev_stream, next_stream), ctx.needs_input_grad[3:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        copies = _copies(gradients, ctx.next_stream, ctx.prev_stream)
        if ctx.handover is not None:
            ctx.handover.arrived.append(_mark(ctx.prev_stream))
        return None, None, None, *copies


def _copies(tensors: Sequence[Any], source: AbstractStream, target: AbstractStream) -> list[Any]:
    device = get_device(target)
    with use_stream(source), use_stream(target):
        copies = [None if tensor is None else tensor.to(device) for tensor in tensors]
    _record(tensors, source)  # their memory belongs to another stream
    return copies


class Wait(torch.autograd.Function):
    """Identity that makes one stream wait for another."""

    @staticmethod
    def forward(
        ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.prev_stream, ctx.next_stream = prev_stream, next_stream
        wait_stream(next_stream, prev_stream)
        _record(tensors, next_stream)
        return alias(ctx, tensors, ctx.needs_input_grad[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wait_stream(ctx.prev_stream, ctx.next_stream)
        _record(gradients, ctx.prev_stream)
        return None, None, *gradients


def _record(tensors: Sequence[Tensor | None], stream: AbstractStream) -> None:
    for tensor in tensors:
        if tensor is not None:
            record_stream(tensor, stream)


def _mark(stream: AbstractStream) -> _Mark | None:
    if not isinstance(stream, torch.Stream):
        return None
    return enqueued_work(stream)


def _wait_for(mark: _Mark | None, stream: AbstractStream) -> None:
    if mark is not None and isinstance(stream, torch.Stream) and _C.has_sync_edge("pipeline.wait_stream"):
        mark.events[stream.device].wait(stream)
