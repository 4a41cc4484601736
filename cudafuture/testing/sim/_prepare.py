"""Registration of the backend "sim" in torch."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from pathlib import Path

import torch
from torch.utils import backend_registration

from cudafuture.testing.sim import _C as _native

__all__ = ["prepare"]

_lock = threading.Lock()
_is_prepared = False


def prepare() -> None:
    """Register the backend "sim" in torch, with no devices yet. ``enable`` calls this if the program has not.

    Call it before the first ``backward()`` of the process, since autograd then creates its threads, one for each
    existing device. It cannot be undone.

    Raises:
        RuntimeError: it is too late, or another backend uses torch's only free slot.

    >>> sim.prepare()
    """
    global _is_prepared
    with _lock:
        if _is_prepared:
            return
        backend = torch._C._get_privateuse1_backend_name()
        if backend not in ("privateuseone", "sim"):
            raise RuntimeError(f"torch has room for one external backend, and {backend!r} is registered already")
        from cudafuture.testing.sim import _device

        backend_registration.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", _device)
        backend_registration.generate_methods_for_privateuse1_backend()
        _start_autograd()
        atexit.register(_native.settle_autograd)
        _is_prepared = True


def _start_autograd() -> None:
    """Make autograd create a thread for each possible device, by computing one gradient on the host."""
    _native.start(_native.MAX_DEVICES, "free", 0, False, False, 1 << 20, False, _native.Speeds(1, 1, 1))
    try:
        torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True).sum().backward()
    finally:
        _native.stop()
    deadline = time.monotonic() + 1  # a thread sets its name when it first runs
    while _autograd_threads() < _native.MAX_DEVICES:
        if time.monotonic() > deadline:
            raise RuntimeError(
                "autograd has created its threads already, and none for simulated devices: call sim.prepare() or "
                "sim.enable() before the first backward() of the process"
            )
        time.sleep(0.001)


def _autograd_threads() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            count += (task / "comm").read_text(encoding="utf-8", errors="replace").startswith("pt_autograd")
    return count
