"""Tensors as bytes that travel, and what has come as the tensor that is wanted."""

from __future__ import annotations

import torch

from cudafuture import CUDAFuture, copy
from rpc_ext._offload_wire import Header, code_of, pieces_of

__all__ = ["bytes_of", "delivered", "header_of"]


def header_of(key: str, tensor: torch.Tensor) -> Header:
    """Return what is said of a tensor.

    Raises:
        TypeError: it is none, or one that cannot be sent.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a torch.Tensor is wanted, not {tensor!r}")
    code_of(tensor.dtype)
    return Header(key, tensor.dtype, tuple(tensor.shape), tensor.nbytes, pieces=pieces_of(tensor.nbytes))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor on the host as they lie in order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def delivered(
    tensor: torch.Tensor, out: torch.Tensor | None, device: torch.device | str | int | None
) -> CUDAFuture[torch.Tensor]:
    """Bring a tensor on the host to where it is wanted."""
    if out is not None:
        with torch.no_grad():
            out.copy_(tensor)
        return CUDAFuture.completed(out)
    if device is not None and torch.device(device).type != "cpu":
        return copy(tensor, device)
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()  # not to keep what it has come with
    return CUDAFuture.completed(tensor)
