"""Streams of any accelerator and of the CPU, under the names of ``torchgpipe.stream``.

There, "cuda" means CUDA; here, ``is_cuda`` and ``as_cuda`` mean any accelerator that torch has streams for.
``AbstractStream`` is the type of a stream, and ``CPUStream`` that of the CPU.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from cudafuture.pipeline.stream import (
    AbstractStream,
    CPUStream,
    CPUStreamType,
    DeviceLike,
    current_stream,
    get_device,
    new_stream,
    record_stream,
    use_device,
    use_stream,
    wait_stream,
)

__all__ = [
    "AbstractStream",
    "CPUStream",
    "CPUStreamType",
    "as_cuda",
    "current_stream",
    "default_stream",
    "get_device",
    "is_cuda",
    "new_stream",
    "record_stream",
    "use_device",
    "use_stream",
    "wait_stream",
]


def default_stream(device: DeviceLike) -> AbstractStream:
    """Return the device's default stream; ``CPUStream`` for the CPU.

    >>> default_stream(torch.device("cpu"))
    CPUStream
    """
    now = current_stream(device)  # has the device's number and torch's number of its type
    if not isinstance(now, torch.Stream):
        return CPUStream
    default: Any = getattr(torch.get_device_module(now.device), "default_stream", None)
    if default is not None:
        return cast(torch.Stream, default(now.device))
    return torch.Stream(stream_id=0, device_index=now.device_index, device_type=now.device_type)


def is_cuda(stream: AbstractStream | None) -> bool:
    """Return whether the stream is one of an accelerator, of any type.

    >>> is_cuda(CPUStream)
    False
    """
    return isinstance(stream, torch.Stream)


def as_cuda(stream: AbstractStream) -> torch.Stream:
    """Return the stream unchanged, for a type checker: the caller knows that it is an accelerator's.

    >>> as_cuda(CPUStream)
    CPUStream
    """
    return cast(torch.Stream, stream)
