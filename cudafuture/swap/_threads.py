"""Threads with which torch updates parameters on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

__all__ = ["one_thread_less"]


@contextmanager
def one_thread_less(allowed: bool) -> Iterator[None]:
    """Let the calling thread compute with one thread less, so that the store's engine has a core.

    OpenMP's threads wait for each other at the end of every operation, and GNU's keep spinning for about 10 ms after
    it. If the engine takes the core of one of them, or needs one, all lose time. The number is set for the calling
    thread only; ``torch.set_num_threads`` would also set it for threads that start meanwhile. Nothing changes if it is
    not allowed, if torch has one thread, or with another threading library.

    Args:
        allowed: True if the result of the update does not depend on the number of threads.
    """
    threads = torch.get_num_threads()
    openmp = _openmp()
    if not allowed or threads == 1 or openmp is None:
        yield
        return
    openmp.omp_set_num_threads(threads - 1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(threads)


@cache
def _openmp() -> ctypes.CDLL | None:
    """Return torch's library, which gives access to the OpenMP that it is linked with; None if it has none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    except OSError:
        return None
    return library if hasattr(library, "omp_set_num_threads") else None
