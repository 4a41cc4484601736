"""Streams of any accelerator, and a stand-in for the CPU, so that code for pipelines has no branches for the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeAlias, cast

import torch

from cudafuture import _C
from cudafuture.streams import own_stream, use_streams
from cudafuture.transfer import enqueued_work, memory_of

__all__ = [
    "CPUStreamType",
    "DeviceLike",
    "current_stream",
    "get_device",
    "new_stream",
    "normalize_device",
    "record_stream",
    "use_device",
    "use_stream",
    "wait_stream",
]

_WITHOUT_STREAMS = frozenset(("cpu", "meta"))


class CPUStreamType:
    """Type of ``CPUStream``."""

    def __repr__(self) -> str:
        return "CPUStream"


CPUStream = CPUStreamType()
"""The one stream of the CPU, on which work is done when a call returns."""

AbstractStream: TypeAlias = torch.Stream | CPUStreamType
"""A stream of an accelerator, or ``CPUStream``."""


class DeviceLike(Protocol):
    """``torch.device``, or an object with its attributes. A type that torch does not know has no streams."""

    @property
    def type(self) -> str:
        """The kind of device, such as "cuda"."""

    @property
    def index(self) -> int | None:
        """The number among its kind; None: the current one."""


def _accelerator(device: DeviceLike) -> torch.device | None:
    """Return the device as a torch.device, or None if it has no streams."""
    if device.type in _WITHOUT_STREAMS:
        return None
    if isinstance(device, torch.device):
        return device
    try:
        return torch.device(device.type) if device.index is None else torch.device(device.type, device.index)
    except RuntimeError:  # torch does not know the type: a fake device of a test
        return None


def normalize_device(device: DeviceLike) -> DeviceLike:
    """Return the device with its number, by default that of the current one. The CPU has no number.

    >>> normalize_device(torch.device("cpu", 0))
    device(type='cpu')
    """
    accelerator = _accelerator(device)
    if accelerator is None:
        return torch.device("cpu") if device.type == "cpu" else device
    return accelerator if accelerator.index is not None else _C.current_streams([accelerator])[0].device


def new_stream(device: DeviceLike) -> AbstractStream:
    """Return a stream that no other caller gets while the returned object lives; ``CPUStream`` for the CPU.

    >>> new_stream(torch.device("cpu"))
    CPUStream
    """
    accelerator = _accelerator(device)
    return CPUStream if accelerator is None else own_stream(accelerator)


def current_stream(device: DeviceLike) -> AbstractStream:
    """Return the calling thread's current stream of the device; ``CPUStream`` for the CPU.

    >>> current_stream(torch.device("cpu"))
    CPUStream
    """
    accelerator = _accelerator(device)
    return CPUStream if accelerator is None else _C.current_streams([accelerator])[0]


def use_device(device: DeviceLike) -> AbstractContextManager[object]:
    """Return a context manager that makes the device current in this thread; for the CPU it has no effect.

    >>> with use_device(torch.device("cpu")):
    ...     pass
    """
    accelerator = _accelerator(device)
    if accelerator is None or accelerator.index is None:
        return nullcontext()
    switch: Any = getattr(torch.get_device_module(accelerator), "device", None)
    return nullcontext() if switch is None else cast("AbstractContextManager[object]", switch(accelerator.index))


def use_stream(stream: AbstractStream | None) -> AbstractContextManager[None]:
    """Return a context manager that makes the stream and its device current in this thread.

    ``CPUStream`` and None change nothing.

    >>> with use_stream(CPUStream):
    ...     pass
    """
    return _use(stream) if isinstance(stream, torch.Stream) else nullcontext()


@contextmanager
def _use(stream: torch.Stream) -> Iterator[None]:
    # Not `with stream`: torch keeps the previous stream in the object, which several threads may share.
    with use_streams(stream):
        torch.get_device_module(stream.device).set_device(stream.device.index)  # use_streams() sets it back
        yield


def get_device(stream: AbstractStream) -> torch.device:
    """Return the stream's device.

    >>> get_device(CPUStream)
    device(type='cpu')
    """
    return stream.device if isinstance(stream, torch.Stream) else torch.device("cpu")


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Make `source` wait for the work that was enqueued on `target` so far.

    If `source` is ``CPUStream``, the calling thread blocks until the work is done. If `target` is, its work is done.

    >>> wait_stream(CPUStream, CPUStream)
    """
    if not isinstance(target, torch.Stream):
        return
    if not isinstance(source, torch.Stream):
        target.synchronize()
    elif _C.has_sync_edge("pipeline.wait_stream"):
        # The library's own event: destroying torch's with another device current would create a context.
        enqueued_work(target).events[target.device].wait(source)


def record_stream(tensor: torch.Tensor, stream: AbstractStream) -> None:
    """Keep the tensor's memory from reuse until the work that was enqueued on `stream` so far is done.

    The memory is the whole storage, of which the tensor may show a part. A stream or tensor of the CPU has no effect.
    A sparse tensor is recorded with all its parts.

    >>> record_stream(torch.ones(2), CPUStream)
    """
    if not isinstance(stream, torch.Stream) or not _C.has_sync_edge("pipeline.record_stream"):
        return
    for memory in memory_of(tensor):
        if memory.device.type == stream.device.type:
            memory.record_stream(stream)
