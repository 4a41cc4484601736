"""Making torch know the backend "sim"."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from pathlib import Path

import torch
from torch.utils import backend_registration

from cudafuture.testing import _sim as _native

__all__ = ["prepare"]

_lock = threading.Lock()
_is_prepared = False


def prepare() -> None:
    """Make torch know the backend "sim", with no devices yet. ``enable`` does it where nobody has.

    Must come before the first ``backward()`` of the process, since autograd makes its threads then, one for each device
    that is there. Cannot be undone.

    Raises:
        RuntimeError: too late, or another backend has torch's only free place.

    >>> sim.prepare()
    """
    global _is_prepared
    with _lock:
        if _is_prepared:
            return
        backend = torch._C._get_privateuse1_backend_name()
        if backend not in ("privateuseone", "sim"):
            raise RuntimeError(f"torch has room for one backend from outside, and {backend!r} is there already")
        from cudafuture.testing.sim import _device

        backend_registration.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", _device)  # type: ignore[no-untyped-call]
        backend_registration.generate_methods_for_privateuse1_backend()
        _start_autograd()
        atexit.register(_native.settle_autograd)
        _is_prepared = True


def _start_autograd() -> None:
    """Let autograd make a thread for each device there can be. A gradient of the host's does that, and is done with."""
    _native.start(_native.MAX_DEVICES, "free", 0, False, False, 1 << 20, False, _native.Speeds(1, 1, 1))
    try:
        torch.zeros(1, device="cpu", requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        _native.stop()
    deadline = time.monotonic() + 1  # a thread takes its name when it first runs
    while _autograd_threads() < _native.MAX_DEVICES:
        if time.monotonic() > deadline:
            raise RuntimeError(
                "autograd has made its threads already, and none for simulated devices: call sim.prepare() or "
                "sim.enable() before the first backward() of the process"
            )
        time.sleep(0.001)


def _autograd_threads() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            count += (task / "comm").read_text(encoding="utf-8", errors="replace").startswith("pt_autograd")
    return count
