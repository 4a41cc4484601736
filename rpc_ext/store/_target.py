"""Targets of reads. The native client fills tensors on the host; this module fills tensors on devices.

::

    received bytes ──► pinned ──► device ──► its place    on pool streams, after the work that the caller had enqueued
"""

from __future__ import annotations

from typing import Any

import torch

from cudafuture import CUDAFuture, copy, executors, gather, pool_stream, use_streams
from rpc_ext._C import expect_memory

__all__ = ["DeviceTarget", "filled", "target_of"]

_Shape = tuple[int, ...]


class DeviceTarget:
    """A tensor on a device.

    Args:
        out: the tensor to be filled, after the work that is on the current streams now; None: a new one.
        device: device of the tensor.
        priority: priority of the pool streams.
    """

    def __init__(self, out: torch.Tensor | None, device: torch.device, priority: int) -> None:
        self.out = out
        self._stream = pool_stream(device, priority)
        self._priority = priority
        self._place: CUDAFuture[torch.Tensor] | None = None if out is None else CUDAFuture.completed(out)
        self._parts: list[CUDAFuture[torch.Tensor]] = []
        self._on_device: CUDAFuture[torch.Tensor] | None = None

    def whole(self, dtype: torch.dtype, shape: _Shape, data: torch.Tensor) -> CUDAFuture[torch.Tensor]:
        """Return a future of the tensor whose bytes are all in `data`."""
        tensor = data.view(dtype).reshape(shape)
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

    def begin(self, dtype: torch.dtype, shape: _Shape, nbytes: int) -> None:
        """Prepare for a tensor that is received in parts."""
        self._dtype, self._shape = dtype, shape
        self._parts = []
        self._on_device = None  # a repeated read needs no memory for two
        with use_streams(self._stream):
            empty = torch.empty(nbytes, dtype=torch.uint8, device=self._stream.device)
            self._on_device = CUDAFuture.completed(empty)

    def fill(self, at: int, data: torch.Tensor) -> None:
        """Put a part at its place."""
        assert self._on_device is not None
        place = self._on_device.then(lambda done: done.value()[at : at + data.numel()], executor=executors.inline)
        self._parts.append(self._put(data, place))

    def finish(self) -> CUDAFuture[torch.Tensor]:
        """Return a future of the tensor, after all of its parts were put at their places."""

        def shaped(done: CUDAFuture[list[Any]]) -> torch.Tensor:
            tensor: torch.Tensor = done.value()[0].view(self._dtype).reshape(self._shape)
            return tensor

        assert self._on_device is not None
        tensor = gather(self._on_device, *self._parts).then(shaped, executor=executors.inline)
        if self._place is None:
            return tensor
        return gather(tensor, self._place).then(_copied, executor=executors.inline)


def _copied(done: CUDAFuture[list[torch.Tensor]]) -> torch.Tensor:
    tensor, out = done.value()
    return filled(out, tensor)


def target_of(
    out: torch.Tensor | None, device: torch.device | str | int | None, priority: int
) -> torch.Tensor | DeviceTarget | None:
    """Return the target of a read: a tensor on the host to be filled, a ``DeviceTarget``, or None for a new tensor.

    Raises:
        TypeError: `out` is no tensor.
        TensorError: `out` has no memory of its own, or its storage was freed or shrunk.
        ValueError: both `out` and `device` are given; the device has no streams; or the elements of `out` share memory.
    """
    if device is not None:
        if out is not None:
            raise ValueError("pass either out or device, not both: out already has a device")
        where = torch.device(device)
        return None if where.type == "cpu" else DeviceTarget(None, where, priority)
    if out is None:
        return None
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a torch.Tensor, not {type(out).__qualname__}")
    expect_memory(out)
    if not out.is_contiguous() and any(s == 0 and n > 1 for n, s in zip(out.shape, out.stride(), strict=True)):
        raise ValueError("some elements of out share memory, so they cannot be filled")
    return out if out.is_cpu else DeviceTarget(out, out.device, priority)


def filled(place: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy `tensor` to `place` in any grad and inference mode of the thread; return `place`."""
    if not (place.requires_grad or place.is_inference() or torch.is_inference_mode_enabled()):
        return place.copy_(tensor)
    if torch.is_inference_mode_enabled() == place.is_inference():  # the other guard takes longer than a small copy
        with torch.no_grad():
            return place.copy_(tensor)
    with torch.inference_mode(place.is_inference()), torch.no_grad():
        return place.copy_(tensor)
