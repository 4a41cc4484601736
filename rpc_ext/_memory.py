"""The bytes that travel: in memory that is used again, and the few that a message carries itself."""

from __future__ import annotations

import torch

from rpc_ext._C import Pieces, alone, memory, receive_into
from rpc_ext._offload_wire import PACK, PIECE

__all__ = ["Carried", "alone", "arrived", "carried", "receive_here", "take"]

Carried = bytes | torch.Tensor
_KEPT = 8  # of each kind, that this process keeps while they are not in use: 160 MiB
_SMALL = 1 << 14  # bytes up to which a tensor is slower than a part of the message, which takes no handshake

_pieces, _packs = Pieces(PIECE, _KEPT), Pieces(PACK, _KEPT)
_is_received_here = False


def receive_here() -> None:
    """Receive what comes from other workers into such memory, too."""
    global _is_received_here
    if not _is_received_here:
        receive_into([_packs, _pieces])
        _is_received_here = True


def take(nbytes: int) -> torch.Tensor:
    """Return a tensor of bytes, which are not initialized, in a storage of its own."""
    return (_packs if nbytes <= PACK else _pieces).take(nbytes)


def carried(data: torch.Tensor) -> Carried:
    """Return bytes as they are sent."""
    return memory(data).tobytes() if data.numel() <= _SMALL else data


def arrived(data: object) -> torch.Tensor:
    """Return bytes that have been sent so.

    Raises:
        ValueError: they have not.
    """
    if isinstance(data, bytes):
        _expect_piece(len(data))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    if not isinstance(data, torch.Tensor) or data.layout is not torch.strided or not data.is_cpu:
        raise ValueError("what travels along is bytes, or a tensor of them on the host")
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise ValueError(f"what travels along is bytes, not {data.dtype} of shape {list(data.shape)}")
    _expect_piece(data.numel())
    data = data.detach()
    return data.clone() if data.storage_offset() or not data.is_contiguous() else data


def _expect_piece(nbytes: int) -> None:
    if nbytes > PIECE:
        raise ValueError(f"{nbytes} bytes are more than a request carries, {PIECE}")
