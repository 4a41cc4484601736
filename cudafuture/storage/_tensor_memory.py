"""The memory of a tensor: what is to be stored of it, and what can be given back meanwhile."""

from __future__ import annotations

import torch

__all__ = ["Place", "TensorMemory"]

Place = tuple[int, int, int]
"""Which bytes of which storage. The number of a storage is given to another one when it is gone."""


class TensorMemory:
    """The bytes of a tensor within its storage.

    Raises:
        TypeError: no tensor.
        RuntimeError: a tensor that is not contiguous, or that has no memory of its own.
    """

    __slots__ = ("nbytes", "offset", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a torch.Tensor is wanted, not {type(tensor).__qualname__}")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that is not contiguous cannot be offloaded: "
                "take what contiguous() returns"
            )
        self.storage = tensor.untyped_storage()
        self.offset = int(tensor.storage_offset()) * tensor.element_size()
        self.nbytes = tensor.numel() * tensor.element_size()

    @property
    def place(self) -> Place:
        """What tells these bytes from all others, as long as the storage lives."""
        return self.storage._cdata, self.offset, self.nbytes

    @property
    def is_there(self) -> bool:
        """Whether the storage reaches that far: it does not while its memory is given back."""
        return self.nbytes == 0 or self.storage.nbytes() >= self.offset + self.nbytes

    @property
    def can_be_freed(self) -> bool:
        """Whether the storage has nothing but these bytes, and may be resized."""
        return self.offset == 0 and self.nbytes == self.storage.nbytes() and self.storage.resizable()

    def bytes(self) -> torch.Tensor:
        """Return a tensor of type uint8 over the same memory, and keep the storage alive by it."""
        view = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return view.set_(self.storage, self.offset, (self.nbytes,), (1,))

    def free(self) -> None:
        """Give the memory of the storage back."""
        self.storage.resize_(0)

    def restore(self) -> bool:
        """Have memory where there is none, and say whether that was so."""
        missing = not self.is_there
        if missing:
            self.storage.resize_(self.offset + self.nbytes)
        return missing
