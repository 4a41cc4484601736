"""Tensors of devices that the agent cannot carry, on their way through the host.

::

    caller's tensors ──► cudafuture.copy to the host ──► message ──► cudafuture.copy to the target ──► decoded value
                              (waits for the caller's streams)              (its events are waited for)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cudafuture import CUDAFuture, copy, gather

__all__ = ["Staged", "to_devices", "to_host", "wait_on_devices"]

Staged = Callable[[list[torch.Tensor] | None, BaseException | None], None]
"""What is done with the copies; or with the error, where there are none."""


def to_host(tensors: list[torch.Tensor], targets: list[str | None], priority: int, staged: Staged) -> None:
    """Copy the tensors that have a target to the host. `staged` is called when the host may read them, without devices.

    They are read after what the calling thread's current streams have to do so far.
    """
    places = [i for i, target in enumerate(targets) if target is not None]
    copies = copy([tensors[i] for i in places], "cpu", priority=priority)
    _when_done(copies, lambda parts: _replaced(tensors, places, parts), staged, on_host=True)


def to_devices(tensors: list[torch.Tensor], targets: list[str | None], priority: int, staged: Staged) -> None:
    """Copy the tensors that have a target there. `staged` is called in streams that come after the copies."""
    places, copies = _copies(tensors, targets, priority)
    together = gather(*copies)
    _when_done(
        together, lambda parts: _replaced(tensors, places, [t for part in parts for t in part]), staged, on_host=False
    )


def wait_on_devices(tensors: list[torch.Tensor], targets: list[str | None]) -> list[torch.Tensor]:
    """Return the tensors on their targets, for this thread's current streams, which wait for the copies."""
    places, copies = _copies(tensors, targets, 0)
    parts = [part for future in copies for part in future.wait(non_blocking=True)]
    return _replaced(tensors, places, parts)


def _copies(
    tensors: list[torch.Tensor], targets: list[str | None], priority: int
) -> tuple[list[int], list[CUDAFuture[list[torch.Tensor]]]]:
    """Begin a copy for each device; beside them the places of the tensors, in the same order."""
    by_device: dict[str, list[int]] = {}
    for i, target in enumerate(targets):
        if target is not None:
            by_device.setdefault(target, []).append(i)
    copies = [copy([tensors[i] for i in at], device, priority=priority) for device, at in by_device.items()]
    return [i for at in by_device.values() for i in at], copies


def _replaced(tensors: list[torch.Tensor], places: list[int], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    replaced = list(tensors)
    for place, part in zip(places, parts, strict=True):
        replaced[place] = part
    return replaced


def _when_done(
    future: CUDAFuture[Any], assemble: Callable[[Any], list[torch.Tensor]], staged: Staged, *, on_host: bool
) -> None:
    def done(copied: CUDAFuture[Any]) -> None:
        try:
            tensors = assemble(copied.value())
        except BaseException as e:
            staged(None, e)
        else:
            staged(tensors, None)

    future.then(done, non_blocking=not on_host)
