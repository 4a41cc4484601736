"""Staging: copies through the host of device tensors that the agent cannot carry.

::

    caller's tensors ──► to_host ──► message ──► to_devices ──► decoded value
        (after the work on the caller's streams)       (on streams_for(targets), which wait for the copies)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch

from cudafuture import CUDAFuture, InvalidStateError, copy, fail, pool_stream, use_streams
from cudafuture.timer import expire
from cudafuture.transfer import Transfer

__all__ = ["Targets", "on_streams", "streams_after", "streams_for", "to_devices", "to_host"]

Targets = list[str | None]
"""the target device of each tensor; None: no copy"""

# Not the library's callback thread: a user's callback that waits there for this call would deadlock.
_thread = ThreadPoolExecutor(1, thread_name_prefix="rpc_ext-staging")


def to_host(
    tensors: list[torch.Tensor], targets: Targets, priority: int, seconds: float
) -> CUDAFuture[list[torch.Tensor]]:
    """Copy the tensors that have a target to the host; return a future of all tensors on the host.

    The copies are ordered after the work that is now on the thread's current streams, and the caller may drop the
    tensors at once. The future fails with TimeoutError after `seconds` (0: no limit).
    """
    places = [i for i, target in enumerate(targets) if target is not None]
    ready: CUDAFuture[list[torch.Tensor]] = CUDAFuture()

    def copied(copies: CUDAFuture[list[torch.Tensor]]) -> None:
        with contextlib.suppress(InvalidStateError):  # too late
            try:
                parts = copies.wait(timeout=0)  # raises the error of the device
                ready.set_result(_replaced(tensors, places, parts))
            except BaseException as e:
                fail(ready, e)

    try:
        copies = copy([tensors[i] for i in places], "cpu", priority=priority)
    except Exception as e:  # for example of a lost device
        fail(ready, e)
        return ready
    copies.then(copied, non_blocking=False, executor=_thread)
    expire(ready, seconds, f"the tensors to be sent were not copied to the host within {seconds:g} s")
    return ready


def on_streams(tensors: list[torch.Tensor]) -> list[CUDAFuture[list[torch.Tensor]]]:
    """Return a list with a future of the device tensors, ordered after the current streams; [] if there are none."""
    on_devices = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    return [CUDAFuture.completed(on_devices)] if on_devices else []


@contextlib.contextmanager
def streams_after(futures: list[CUDAFuture[list[torch.Tensor]]], priority: int = 0) -> Iterator[None]:
    """Make pool streams current that wait for the events of completed futures."""
    devices = dict.fromkeys(device for future in futures for device in future.devices)
    with use_streams(*(pool_stream(device, priority) for device in devices)):
        for future in futures:
            future.wait(non_blocking=True)
        yield


def streams_for(targets: Targets, priority: int = 0) -> AbstractContextManager[None]:
    """Return a context that makes a pool stream of each target device current."""
    return use_streams(*(pool_stream(device, priority) for device in dict.fromkeys(targets) if device is not None))


def to_devices(tensors: list[torch.Tensor], targets: Targets, priority: int = 0) -> list[torch.Tensor]:
    """Return the tensors on their target devices. This thread's current streams wait for the copies.

    The host's part of the copies runs here: on an executor, a task before it might wait for this call.
    """
    by_device: dict[str, list[int]] = {}
    for i, target in enumerate(targets):
        if target is not None:
            by_device.setdefault(target, []).append(i)
    for device, places in by_device.items():
        copies = Transfer([tensors[i] for i in places], torch.device(device), priority).start(most=math.inf)
        tensors = _replaced(tensors, places, copies.wait(non_blocking=True))
    return tensors


def _replaced(tensors: list[torch.Tensor], places: list[int], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    replaced = list(tensors)
    for place, part in zip(places, parts, strict=True):
        replaced[place] = part
    return replaced
