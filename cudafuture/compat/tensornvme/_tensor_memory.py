"""Memory of a tensor: the bytes to store, and the storage to free meanwhile."""

from __future__ import annotations

import torch

from cudafuture.errors import TensorError

__all__ = ["Place", "TensorMemory"]

Place = tuple[int, int, int]
"""Storage, offset and size of a range of bytes. A new storage may reuse the number of a freed one."""


class TensorMemory:
    """Bytes of a tensor within its storage.

    Raises:
        TypeError: `tensor` is not a tensor.
        TensorError: it has no memory of its own.
        RuntimeError: it is not contiguous.
    """

    __slots__ = ("nbytes", "offset", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a torch.Tensor, not {type(tensor).__qualname__}")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor._is_zerotensor():
            raise TensorError(
                f"a tensor of layout {tensor.layout} on {tensor.device} has no memory of its own: offload a plain "
                "tensor with its elements"
            )
        if not tensor.is_contiguous():
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that is not contiguous cannot be offloaded: "
                "offload tensor.contiguous() instead"
            )
        self.storage = tensor.untyped_storage()
        self.offset = int(tensor.storage_offset()) * tensor.element_size()
        self.nbytes = tensor.numel() * tensor.element_size()

    @property
    def place(self) -> Place:
        """Identity of these bytes, as long as the storage lives."""
        return self.storage._cdata, self.offset, self.nbytes

    @property
    def is_there(self) -> bool:
        """True if the storage contains these bytes: it does not while its memory is freed."""
        return self.nbytes == 0 or self.storage.nbytes() >= self.offset + self.nbytes

    @property
    def can_be_freed(self) -> bool:
        """True if the storage contains nothing but these bytes, and may be resized."""
        return self.offset == 0 and self.nbytes == self.storage.nbytes() and self.storage.resizable()

    def bytes(self) -> torch.Tensor:
        """Return a tensor of type uint8 over the same memory, which keeps the storage alive."""
        view = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return view.set_(self.storage, self.offset, (self.nbytes,), (1,))

    def free(self) -> None:
        """Free the memory of the storage."""
        self.storage.resize_(0)

    def restore(self) -> bool:
        """Allocate the memory if it was freed; return True if it was."""
        missing = not self.is_there
        if missing:
            self.storage.resize_(self.offset + self.nbytes)
        return missing
