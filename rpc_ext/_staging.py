"""Tensors of devices that the agent cannot carry, on their way through the host.

::

    caller's tensors ──► to_host ──► message ──► to_devices ──► decoded value
        (after what the caller's streams have to do)   (on streams_for(targets), which wait for the copies)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch

from cudafuture import CUDAFuture, InvalidStateError, copy, pool_stream, use_streams
from rpc_ext._timer import expire

__all__ = ["Targets", "on_streams", "streams_after", "streams_for", "to_devices", "to_host"]

Targets = list[str | None]
"""the device that each tensor belongs on; None: it stays where it is"""

# Not the library's callback thread: a user's callback that waits there for this call would deadlock.
_thread = ThreadPoolExecutor(1, thread_name_prefix="rpc_ext-staging")


def to_host(
    tensors: list[torch.Tensor], targets: Targets, priority: int, seconds: float
) -> CUDAFuture[list[torch.Tensor]]:
    """Copy the tensors that have a target to the host; return a future that completes when the host may read all.

    The copies are made after the work that is now on the calling thread's current streams, and the tensors may be
    dropped at once. The future fails with TimeoutError when the seconds are over (0: no limit).
    """
    places = [i for i, target in enumerate(targets) if target is not None]
    ready: CUDAFuture[list[torch.Tensor]] = CUDAFuture()

    def copied(copies: CUDAFuture[list[torch.Tensor]]) -> None:
        with contextlib.suppress(InvalidStateError):  # too late
            try:
                parts = copies.wait(timeout=0)  # raises what has gone wrong on the device
                ready.set_result(_replaced(tensors, places, parts))
            except BaseException as e:
                ready.set_exception(e)

    try:
        copies = copy([tensors[i] for i in places], "cpu", priority=priority)
    except Exception as e:  # of a device that is lost, say
        ready.set_exception(e)
        return ready
    copies.then(copied, non_blocking=False, executor=_thread)
    expire(ready, seconds, f"tensors were not on the host within {seconds:g} s, to be sent")
    return ready


def on_streams(tensors: list[torch.Tensor]) -> list[CUDAFuture[list[torch.Tensor]]]:
    """Return a future of the tensors on devices, as this thread's current streams leave them; none for none."""
    on_devices = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    return [CUDAFuture.completed(on_devices)] if on_devices else []


@contextlib.contextmanager
def streams_after(futures: list[CUDAFuture[list[torch.Tensor]]], priority: int = 0) -> Iterator[None]:
    """Make streams current that come after the events of the futures, which are complete."""
    devices = dict.fromkeys(device for future in futures for device in future.devices)
    with use_streams(*(pool_stream(device, priority) for device in devices)):
        for future in futures:
            future.wait(non_blocking=True)
        yield


def streams_for(targets: Targets, priority: int = 0) -> AbstractContextManager[None]:
    """Return a context in which each target has a stream of its pool, with no other work of this thread's in it."""
    return use_streams(*(pool_stream(device, priority) for device in dict.fromkeys(targets) if device is not None))


def to_devices(tensors: list[torch.Tensor], targets: Targets, priority: int = 0) -> list[torch.Tensor]:
    """Return the tensors on their targets, for this thread's current streams, which wait for the copies.

    The host's part is done here: on an executor it would stand behind whatever else is there, which may wait for this.
    """
    by_device: dict[str, list[int]] = {}
    for i, target in enumerate(targets):
        if target is not None:
            by_device.setdefault(target, []).append(i)
    for device, places in by_device.items():
        copies = copy([tensors[i].pin_memory() for i in places], device, priority=priority)
        tensors = _replaced(tensors, places, copies.wait(non_blocking=True))
    return tensors


def _replaced(tensors: list[torch.Tensor], places: list[int], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    replaced = list(tensors)
    for place, part in zip(places, parts, strict=True):
        replaced[place] = part
    return replaced
