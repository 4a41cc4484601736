"""Packing: host tensors that one transfer copies to a device, through one staging buffer into one slab."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cudafuture import _C
from cudafuture.streams import use_streams

__all__ = ["described", "expect_slab", "send_packed"]

_ALIGNMENT = 512
"""Bytes to which packed tensors are aligned."""


def send_packed(
    tensors: list[torch.Tensor],
    stream: torch.Stream,
    owners: Iterable[torch.Stream],
    slab: _C.DeviceSlab | None = None,
    *,
    pack: bool = True,
    pin: bool = True,
    may_drop_unordered: bool = True,
) -> list[torch.Tensor]:
    """Enqueue the copies of packable host tensors on a stream; return them. Block while the host reads the tensors.

    Args:
        tensors: on the host, in memory that ``_C.packable`` accepts.
        stream: runs the copies, after the work that the owner of the slab has enqueued so far.
        owners: the streams that new device memory belongs to, one for each device.
        slab: device memory for the copies, used if it is large enough; None: new memory.
        pack: one staging buffer and one slab; False: one of each for every tensor.
        pin: the staging buffers are in pinned memory.
        may_drop_unordered: the copies' owner may drop them without waiting for the stream.

    >>> from cudafuture import own_stream
    >>> send_packed([torch.ones(2)], own_stream("cpu"), [])
    Traceback (most recent call last):
        ...
    ValueError: no streams on cpu: name an accelerator that is present; the host has no streams
    """
    with use_streams(*owners):
        return _C.copy_batch(tensors, stream, slab, pack, pin, may_drop_unordered)


def expect_slab(out: object, device: torch.device, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return `out`; raise TypeError or ValueError unless it is device memory that the packed tensors fit into."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"copy(pack=True): out must be a tensor of bytes on the device, not {type(out).__name__}")
    wanted = _C.batch_nbytes(tensors)
    if out.device != device or out.dtype is not torch.uint8 or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(
            f"copy(pack=True): out must be a contiguous one-dimensional tensor of uint8 on {device}, not "
            f"{described(out)}"
        )
    if out.nbytes < wanted or out.data_ptr() % _ALIGNMENT:
        raise ValueError(
            f"copy(pack=True): out needs {wanted} bytes that begin at a multiple of {_ALIGNMENT}, and has "
            f"{out.nbytes} bytes at {out.data_ptr():#x}"
        )
    return out


def described(tensor: torch.Tensor) -> str:
    """Return the text that errors have of a tensor."""
    return f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} on {tensor.device}"
