"""Streams: from a device's pool by priority, those that are current, and making some current for a while."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from cudafuture import _C

__all__ = ["current_streams", "has_context", "own_stream", "pool_stream", "use_streams"]


def pool_stream(device: torch.device | str | int, priority: int = 0) -> torch.Stream:
    """Return a stream of the device's own pool.

    Args:
        device: one that has streams, such as "cuda:0".
        priority: lower is more urgent; 0 (default), -1 high.

    The pool hands its streams out round-robin (CUDA: 32 per priority), so two callers can share one. Do not keep it:
    ``own_stream`` returns one to keep.

    Raises:
        ValueError: a device without streams, such as the CPU.

    >>> pool_stream("cpu")
    Traceback (most recent call last):
        ...
    ValueError: no streams on cpu: they belong to accelerators that are there, and the host has none
    """
    return _C.pool_stream(device, priority)


def own_stream(device: torch.device | str | int, priority: int = 0) -> torch.Stream:
    """Return a stream that no one else gets while the returned object lives, for an object that keeps one.

    Args:
        device: one that has streams, such as "cuda:0".
        priority: lower is more urgent; 0 (default), -1 high. A device clamps a priority that is too high for it.

    The stream is not one of the pool. It is never destroyed, since allocators may still record events on it: when the
    object is gone, the next caller for the device and the priority gets the stream. So a program has as many as it uses
    at a time. Devices other than CUDA's, ROCm's and the simulated ones give a stream of their pool.

    Raises:
        ValueError: a device without streams, such as the CPU.
        RuntimeError: the device could not make a stream.

    >>> own_stream("cpu")
    Traceback (most recent call last):
        ...
    ValueError: no streams on cpu: they belong to accelerators that are there, and the host has none
    """
    stream = _C.acquire_stream(device, priority)
    weakref.finalize(stream, _C.release_stream, stream.device, stream.stream_id, priority).atexit = False
    return stream


def current_streams(devices: Iterable[torch.device | str | int]) -> list[torch.Stream]:
    """Return the calling thread's current stream of each device, in their order; the CPU has none and is passed over.

    >>> current_streams(["cpu"])
    []
    """
    return _C.current_streams(devices)


def has_context(device: torch.device | str | int) -> bool:
    """Return True if this process has a context on the device.

    A device without a context has no pending work of this process, and its first use creates the context: on CUDA about
    half a gigabyte of the device's memory.

    Raises:
        ValueError: a device without streams, such as the CPU.

    >>> has_context("cpu")
    Traceback (most recent call last):
        ...
    ValueError: no streams on cpu: they belong to accelerators that are there, and the host has none
    """
    return _C.has_context(device)


def use_streams(*streams: torch.Stream) -> AbstractContextManager[None]:
    """Return a context manager that makes the streams current in this thread, each on its device.

    On leaving, each device has its stream, and the thread its current device, back, whatever was changed in between.

    >>> with use_streams():
    ...     pass
    """
    return _C.UseStreams(streams)
