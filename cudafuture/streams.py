"""Streams: from the library's pool by priority, the current ones, and a context that makes streams current."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from cudafuture import _C
from cudafuture._arguments import listed, parse_device

__all__ = ["current_streams", "has_context", "own_stream", "pool_stream", "use_streams"]


def pool_stream(device: torch.device | str | int, priority: int = 0) -> torch.Stream:
    """Return a stream of the library's pool.

    Args:
        device: a device that has streams, such as "cuda:0".
        priority: lower is more urgent; 0 (default), -1 high.

    The pool has four streams for each device and priority, and returns one that is idle if it can, so two callers can
    share a stream. Do not keep it: ``own_stream`` returns a stream to keep. None of them is a stream of torch's pool.
    While the device's current stream is captured, the returned stream is in the same capture, after its work.
    Devices other than CUDA's, ROCm's and the simulated ones return a stream of torch's pool that is not being captured.

    Raises:
        ValueError: the device has no streams, such as the CPU.

    >>> pool_stream("cpu")
    Traceback (most recent call last):
        ...
    ValueError: no streams on cpu: name an accelerator that is present; the host has no streams
    """
    try:
        return _C.pool_stream(device, priority)
    except (RuntimeError, TypeError):
        parse_device("device", device)
        raise


def own_stream(device: torch.device | str | int, priority: int = 0) -> torch.Stream:
    """Return a stream that no other caller gets while the returned object lives.

    Args:
        device: a device that has streams, such as "cuda:0".
        priority: lower is more urgent; 0 (default), -1 high. A device clamps a priority that is too high for it.

    The stream is not from the pool. It is never destroyed, since allocators may still record events on it. When the
    object is freed, the next caller for the same device and priority gets the stream. A program therefore has as many
    streams as it uses at a time. Devices other than CUDA's, ROCm's and the simulated ones return a pool stream.

    Raises:
        ValueError: the device has no streams, such as the CPU.
        RuntimeError: the device could not create a stream, even after a garbage collection.

    >>> own_stream("cpu")
    Traceback (most recent call last):
        ...
    ValueError: no streams on cpu: name an accelerator that is present; the host has no streams
    """
    try:
        stream = _C.acquire_stream(device, priority)
    except TypeError:
        parse_device("device", device)
        raise
    except RuntimeError:
        parse_device("device", device)
        gc.collect()  # streams of objects in reference cycles that nothing uses
        stream = _C.acquire_stream(device, priority)
    weakref.finalize(stream, _C.release_stream, stream.device, stream.stream_id, priority).atexit = False
    return stream


def current_streams(devices: Iterable[torch.device | str | int]) -> list[torch.Stream]:
    """Return the calling thread's current stream of each device, in their order; skip the CPU, which has none.

    >>> current_streams(["cpu"])
    []
    """
    try:
        return _C.current_streams(devices)
    except TypeError:
        listed("devices", devices, "devices")
        raise


def has_context(device: torch.device | str | int) -> bool:
    """Return True if this process has a context on the device.

    A device without a context has no pending work of this process, and its first use creates the context: on CUDA about
    half a gigabyte of the device's memory.

    Raises:
        ValueError: the device has no streams, such as the CPU.

    >>> has_context("cpu")
    Traceback (most recent call last):
        ...
    ValueError: no streams on cpu: name an accelerator that is present; the host has no streams
    """
    try:
        return _C.has_context(device)
    except (RuntimeError, TypeError):
        parse_device("device", device)
        raise


def use_streams(*streams: torch.Stream) -> AbstractContextManager[None]:
    """Return a context manager that makes the streams current in this thread, each on its device.

    On exit, each device gets its previous stream back, and the thread its previous current device.

    >>> with use_streams():
    ...     pass
    """
    return _C.UseStreams(streams)
