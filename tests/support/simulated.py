"""Simulated devices in the ranks of a world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

SCHEDULES = ("lazy", "jitter", "free")


@contextlib.contextmanager
def simulate(schedule: str, devices: int = 2, seed: int = 7) -> Iterator[ModuleType]:
    """Enable simulated devices for a block, in this process, and raise if a race was found in it."""
    from cudafuture.testing import sim

    sim.enable(devices=devices, schedule=schedule, seed=seed, strict_devices=True)  # type: ignore[arg-type]
    try:
        yield sim
        sim.finish()
        if found := sim.races():
            raise sim.RaceError(found)
    finally:
        sim.disable()


def onto(value: Any, device: str) -> Any:
    """Return the value with its tensors on the device, where they have the same strides."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value.detach(), device=device).copy_(value.detach())
    if isinstance(value, (list, tuple)):
        return type(value)(onto(v, device) for v in value)
    return value
