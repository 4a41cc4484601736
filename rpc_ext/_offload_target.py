"""Where a tensor that is read from another worker goes: one that is given, or a new one, on the host or a device.

::

    bytes that have come ──► out or a new tensor               on the host: one copy, on the callback thread
                         ──► pinned ──► device ──► its place   on pool streams, after what the caller had enqueued
"""

from __future__ import annotations

from typing import Protocol

import torch

from cudafuture import CUDAFuture, copy, executors, gather, pool_stream, use_streams
from rpc_ext._offload_source import expect_memory
from rpc_ext._offload_wire import Header

__all__ = ["Assembly", "Target", "filled", "target_of"]


class Assembly(Protocol):
    """A tensor of which pieces are coming."""

    def fill(self, at: int, data: torch.Tensor) -> CUDAFuture[object]:
        """Put a piece where it belongs."""
        ...

    def finish(self) -> CUDAFuture[torch.Tensor]:
        """Return the tensor, of which all pieces have been filled in."""
        ...


class Target:
    """Where on the host a tensor goes.

    Args:
        out: what is to be filled; None: a new one.
    """

    is_on_device = False
    wants_digest = False  # of the bytes that come
    digest = 0  # when they have come: of a tensor in one piece always, of another one where it is wanted

    def __init__(self, out: torch.Tensor | None) -> None:
        self.out = out

    @property
    def nbytes(self) -> int | None:
        """How many bytes are wanted, where that is known before they come."""
        return None if self.out is None else self.out.nbytes

    def expect(self, header: Header) -> None:
        """See whether what comes is what is wanted.

        Raises:
            ValueError: it has another dtype or shape.
        """
        out = self.out
        if out is not None and (out.dtype, tuple(out.shape)) != (header.dtype, header.shape):
            raise ValueError(
                f"key {header.key!r} is a tensor of {header.dtype} {list(header.shape)}, and the one to be filled of "
                f"{out.dtype} {list(out.shape)}"
            )

    def whole(self, header: Header, data: torch.Tensor) -> CUDAFuture[torch.Tensor]:
        """Bring a tensor there of which all bytes have come."""
        tensor = _shaped(header, data)
        if self.out is not None:
            return CUDAFuture.completed(filled(self.out, tensor))
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone()  # not to keep what it has come with
        return CUDAFuture.completed(tensor)

    def assemble(self, header: Header) -> Assembly:
        """Begin with a tensor that comes in pieces."""
        return _HostAssembly(self, header)


class _HostAssembly:
    def __init__(self, target: Target, header: Header) -> None:
        out = target.out
        fills = out is not None and out.is_contiguous() and not out.is_conj() and not out.is_neg()
        self._header = header
        self._whole = out if fills and out is not None else torch.empty(header.shape, dtype=header.dtype)
        self._then_to = None if fills else target
        self._bytes = self._whole.detach().reshape(-1).view(torch.uint8)

    def fill(self, at: int, data: torch.Tensor) -> CUDAFuture[object]:
        filled(self._bytes[at : at + data.numel()], data)
        return CUDAFuture.completed(None)

    def finish(self) -> CUDAFuture[torch.Tensor]:
        if self._then_to is None:
            return CUDAFuture.completed(self._whole)
        return self._then_to.whole(self._header, self._bytes)


class _DeviceTarget(Target):
    """Where on a device it goes.

    Args:
        out: what is to be filled, after what the current streams have to do so far; None: a new one.
        device: where to; priority: of the pool streams.
    """

    is_on_device = True

    def __init__(self, out: torch.Tensor | None, device: torch.device, priority: int) -> None:
        super().__init__(out)
        self._device = pool_stream(device, priority).device  # with its index
        self._priority = priority
        self.place: CUDAFuture[torch.Tensor] | None = None if out is None else CUDAFuture.completed(out)

    def whole(self, header: Header, data: torch.Tensor) -> CUDAFuture[torch.Tensor]:
        tensor = _shaped(header, data)
        if self.place is None:
            return copy(tensor, self._device, priority=self._priority)
        return self.put(tensor, self.place)

    def put(self, tensor: torch.Tensor, place: CUDAFuture[torch.Tensor]) -> CUDAFuture[torch.Tensor]:
        """Copy what is on the host to a place on the device. Gives the place."""

        def fill(done: CUDAFuture[list[torch.Tensor]]) -> torch.Tensor:
            arrived, place = done.value()
            return filled(place, arrived)

        arrived = copy(tensor, self._device, priority=self._priority)
        return gather(arrived, place).then(fill, priority=self._priority, executor=executors.inline)

    def assemble(self, header: Header) -> Assembly:
        return _DeviceAssembly(self, header, pool_stream(self._device, self._priority))


class _DeviceAssembly:
    def __init__(self, target: _DeviceTarget, header: Header, stream: torch.Stream) -> None:
        self._target, self._header = target, header
        self._filled: list[CUDAFuture[torch.Tensor]] = []
        with use_streams(stream):
            empty = torch.empty(header.nbytes, dtype=torch.uint8, device=stream.device)
            self._bytes: CUDAFuture[torch.Tensor] = CUDAFuture.completed(empty)

    def fill(self, at: int, data: torch.Tensor) -> CUDAFuture[object]:
        place = self._bytes.then(lambda done: done.value()[at : at + data.numel()], executor=executors.inline)
        filled = self._target.put(data, place)
        self._filled.append(filled)
        return filled.then(lambda done: done.value(), executor=executors.inline)

    def finish(self) -> CUDAFuture[torch.Tensor]:
        def shaped(done: CUDAFuture[list[torch.Tensor]]) -> torch.Tensor:
            return _shaped(self._header, done.value()[0])

        tensor = gather(self._bytes, *self._filled).then(shaped, executor=executors.inline)
        if self._target.place is None:
            return tensor
        return gather(tensor, self._target.place).then(_copied, executor=executors.inline)


def _copied(done: CUDAFuture[list[torch.Tensor]]) -> torch.Tensor:
    tensor, out = done.value()
    return filled(out, tensor)


def target_of(out: torch.Tensor | None, device: torch.device | str | int | None, priority: int) -> Target:
    """Return where a tensor is wanted.

    Raises:
        TypeError: in a tensor that has no memory of its own.
        ValueError: at two places, on a device that has no streams, or in a tensor whose storage is too small.
    """
    if out is not None and device is not None:
        raise ValueError("a tensor to be filled is where it is: give it, or a device")
    if out is not None:
        expect_memory(out)
    where = torch.device(device) if device is not None else None if out is None else out.device
    if where is None or where.type == "cpu":
        return Target(out)
    return _DeviceTarget(out, where, priority)


def filled(place: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor, whatever mode the thread is in that does so."""
    if torch.is_inference_mode_enabled() == place.is_inference():  # the other guard takes longer than a small copy
        with torch.no_grad():
            return place.copy_(tensor)
    with torch.inference_mode(place.is_inference()), torch.no_grad():
        return place.copy_(tensor)


def _shaped(header: Header, data: torch.Tensor) -> torch.Tensor:
    return data.view(header.dtype).reshape(header.shape)
