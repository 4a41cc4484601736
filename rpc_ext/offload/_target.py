"""Targets of reads: a given tensor or a new one, on the host or on a device.

::

    received bytes ──► out or a new tensor              on the host: one copy
                   ──► pinned ──► device ──► its place  on pool streams, after the work that the caller had enqueued
"""

from __future__ import annotations

from typing import Any

import torch

from cudafuture import CUDAFuture, copy, executors, gather, pool_stream, use_streams
from rpc_ext.offload._source import expect_memory
from rpc_ext.offload._wire import Found

__all__ = ["Target", "filled", "target_of"]


class Target:
    """A tensor on the host.

    Args:
        out: the tensor to be filled; None: a new one.
    """

    is_on_device = False
    digest = 0  # of the received bytes, once all were received

    def __init__(self, out: torch.Tensor | None) -> None:
        self._out = out
        self.nbytes = None if out is None else out.nbytes
        """expected size in bytes; None: not known before the reply"""

    def expect(self, key: str, found: Found) -> None:
        """Raise ValueError unless dtype and shape match the tensor to be filled."""
        out = self._out
        if out is not None and (out.dtype, tuple(out.shape)) != (found.dtype, found.shape):
            raise ValueError(
                f"key {key!r} is a tensor of {found.dtype} {list(found.shape)}, and the one to be filled of "
                f"{out.dtype} {list(out.shape)}"
            )

    def whole(self, found: Found, data: torch.Tensor) -> torch.Tensor | CUDAFuture[torch.Tensor]:
        """Return the tensor whose bytes are all in `data`, or a future of it."""
        tensor = data.view(found.dtype).reshape(found.shape)
        if self._out is not None:
            return filled(self._out, tensor)
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

    def begin(self, found: Found) -> None:
        """Prepare for a tensor that is received in parts."""
        out = self._out
        self._is_filled_in_place = out is not None and out.is_contiguous() and not out.is_conj() and not out.is_neg()
        self._found = found
        self._whole = out if self._is_filled_in_place else torch.empty(found.shape, dtype=found.dtype)
        assert self._whole is not None
        self._bytes = self._whole.detach().reshape(-1).view(torch.uint8)

    def fill(self, at: int, data: torch.Tensor) -> None:
        """Put a part at its place."""
        filled(self._bytes[at : at + data.numel()], data)

    def finish(self) -> torch.Tensor | CUDAFuture[torch.Tensor]:
        """Return the tensor after all of its parts were filled, or a future of it."""
        if self._is_filled_in_place:
            assert self._whole is not None
            return self._whole
        return self.whole(self._found, self._bytes)


class _DeviceTarget(Target):
    """A tensor on a device.

    Args:
        out: the tensor to be filled, after the work that is on the current streams now; None: a new one.
        device: device of the tensor.
        priority: priority of the pool streams.
    """

    is_on_device = True

    def __init__(self, out: torch.Tensor | None, device: torch.device, priority: int) -> None:
        super().__init__(out)
        self._stream = pool_stream(device, priority)
        self._priority = priority
        self._place: CUDAFuture[torch.Tensor] | None = None if out is None else CUDAFuture.completed(out)
        self._parts: list[CUDAFuture[torch.Tensor]] = []

    def whole(self, found: Found, data: torch.Tensor) -> CUDAFuture[torch.Tensor]:
        tensor = data.view(found.dtype).reshape(found.shape)
        if self._place is None:
            return copy(tensor, self._stream.device, priority=self._priority)
        return self._put(tensor, self._place)

    def _put(self, tensor: torch.Tensor, place: CUDAFuture[torch.Tensor]) -> CUDAFuture[torch.Tensor]:
        """Copy a tensor on the host to a tensor on the device; return a future of the latter."""

        def fill(done: CUDAFuture[list[torch.Tensor]]) -> torch.Tensor:
            arrived, place = done.value()
            return filled(place, arrived)

        arrived = copy(tensor, self._stream.device, priority=self._priority)
        return gather(arrived, place).then(fill, priority=self._priority, executor=executors.inline)

    def begin(self, found: Found) -> None:
        self._found = found
        with use_streams(self._stream):
            empty = torch.empty(found.nbytes, dtype=torch.uint8, device=self._stream.device)
            self._on_device: CUDAFuture[torch.Tensor] = CUDAFuture.completed(empty)

    def fill(self, at: int, data: torch.Tensor) -> None:
        place = self._on_device.then(lambda done: done.value()[at : at + data.numel()], executor=executors.inline)
        self._parts.append(self._put(data, place))

    def finish(self) -> CUDAFuture[torch.Tensor]:
        def shaped(done: CUDAFuture[list[Any]]) -> torch.Tensor:
            found = self._found
            tensor: torch.Tensor = done.value()[0].view(found.dtype).reshape(found.shape)
            return tensor

        tensor = gather(self._on_device, *self._parts).then(shaped, executor=executors.inline)
        if self._place is None:
            return tensor
        return gather(tensor, self._place).then(_copied, executor=executors.inline)


def _copied(done: CUDAFuture[list[torch.Tensor]]) -> torch.Tensor:
    tensor, out = done.value()
    return filled(out, tensor)


def target_of(out: torch.Tensor | None, device: torch.device | str | int | None, priority: int) -> Target:
    """Return the target of a read.

    Raises:
        TypeError: `out` is no tensor, or has no memory of its own.
        ValueError: both `out` and `device` are given; the device has no streams; the storage of `out` is too small, or
            its elements share memory.
    """
    if out is not None and device is not None:
        raise ValueError("pass either out or device, not both: out already has a device")
    if out is not None:
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"out is a torch.Tensor, not {type(out).__qualname__}")
        expect_memory(out)
        if not out.is_contiguous() and any(s == 0 and n > 1 for n, s in zip(out.shape, out.stride(), strict=True)):
            raise ValueError("some elements of out share memory, so they cannot be filled")
        where = out.device
    elif device is not None:
        where = torch.device(device)
    else:
        return Target(None)
    return Target(out) if where.type == "cpu" else _DeviceTarget(out, where, priority)


def filled(place: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy `tensor` to `place` in any grad and inference mode of the thread; return `place`."""
    if not (place.requires_grad or place.is_inference() or torch.is_inference_mode_enabled()):
        return place.copy_(tensor)
    if torch.is_inference_mode_enabled() == place.is_inference():  # the other guard takes longer than a small copy
        with torch.no_grad():
            return place.copy_(tensor)
    with torch.inference_mode(place.is_inference()), torch.no_grad():
        return place.copy_(tensor)
