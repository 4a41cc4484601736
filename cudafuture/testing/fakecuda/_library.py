"""Fake CUDA runtime of this process, through ctypes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

__all__ = ["is_active", "library", "stream_of"]


class CudaCounters(ctypes.Structure):
    """Counters in the layout that ``fakecuda_statistics`` writes."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "kernels_run",
            "kernels_skipped",
            "copies",
            "events_created",
            "events_alive",
            "streams_created",
            "pinned_bytes",
            "contexts",
        )
    ]


@functools.cache
def _found() -> Any:
    process = ctypes.CDLL(None)
    if not hasattr(process, "fakecuda_launch"):
        return None
    process.fakecuda_hold.argtypes = [ctypes.c_void_p, ctypes.c_int]
    process.fakecuda_hold.restype = ctypes.c_void_p
    process.fakecuda_open.argtypes = [ctypes.c_void_p]
    process.fakecuda_fail.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    process.fakecuda_fail_allocations.argtypes = [ctypes.c_uint64]
    process.fakecuda_statistics.argtypes = [ctypes.POINTER(CudaCounters)]
    for name in ("fakecuda_skipped_kernels", "fakecuda_take_races"):
        getattr(process, name).restype = ctypes.c_void_p
    process.fakecuda_reset_context.argtypes = [ctypes.c_int]
    process.fakecuda_free.argtypes = [ctypes.c_void_p]
    return process


def is_active() -> bool:
    """Return whether this process runs on fakecuda.

    >>> fakecuda.is_active()
    True
    """
    return _found() is not None


def library() -> Any:
    """Return the fake CUDA runtime.

    Raises:
        RuntimeError: this process does not run on it.
    """
    found = _found()
    if found is None:
        raise RuntimeError("this process has no fake devices; run: python -m cudafuture.testing.fakecuda -- COMMAND")
    return found


def stream_of(stream: torch.Stream | None) -> tuple[int, int]:
    """Return the handle and the device of a CUDA stream; None is the current stream of the current device."""
    if stream is None:
        stream = torch.cuda.current_stream()
    if stream.device.type != "cuda":
        raise ValueError(f"fakecuda has streams of cuda devices; this one is of {stream.device}")
    known = torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=int(stream.device_type)
    )
    return known.cuda_stream, stream.device_index


def text(function: str) -> str:
    """Return the text that a function of the library returns."""
    pointer = getattr(library(), function)()
    try:
        return ctypes.string_at(pointer).decode(errors="replace")
    finally:
        library().fakecuda_free(pointer)
