"""Micro-batches: a tensor or a tuple of tensors, split from a mini-batch and joined again.

The names are those of torchgpipe's and fairscale's microbatch modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, cast, overload

from torch import Tensor

from cudafuture.pipeline._minibatch import TensorOrTensors, concatenate, expect_tensors, map_tensors, split_rows

__all__ = ["Batch", "check", "gather", "scatter"]

Tensors: TypeAlias = tuple[Tensor, ...]
Function: TypeAlias = Callable[[TensorOrTensors], TensorOrTensors]


class Batch:
    """Tensor (then it is atomic) or tuple of tensors, behind one interface.

    Args:
        value: the tensor or tensors.
        index: the number of the micro-batch in its mini-batch.

    Assigning to an item or to ``[:]`` replaces tensors of the batch, not their elements.

    >>> batch = Batch(torch.ones(2), 3)
    >>> batch.atomic, len(batch), batch.index
    (True, 1, 3)
    >>> batch.call(lambda x: x + 1).tensor
    tensor([2., 2.])
    """

    def __init__(self, value: TensorOrTensors, index: int = 0) -> None:
        self.value = value
        self.atomic = isinstance(value, Tensor)
        self._index = index

    @property
    def index(self) -> int:
        """The number of the micro-batch in its mini-batch."""
        return self._index

    @property
    def tensor(self) -> Tensor:
        """The tensor of an atomic batch; AttributeError for a tuple."""
        if not self.atomic:
            raise AttributeError("the batch is not atomic: it has a tuple of tensors, see Batch.tensors")
        return cast(Tensor, self.value)

    @property
    def tensors(self) -> Tensors:
        """The tuple of tensors; AttributeError for an atomic batch."""
        if self.atomic:
            raise AttributeError("the batch is atomic: it has one tensor and no tuple, see Batch.tensor")
        return cast(Tensors, self.value)

    @property
    def tensor_or_tensors(self) -> TensorOrTensors:
        """The value, of either kind."""
        return self.value

    def call(self, function: Function) -> Batch:
        """Return ``function(value)`` as a batch with the same number.

        >>> Batch((torch.ones(1), torch.ones(1))).call(lambda pair: pair[0] + pair[1]).tensor
        tensor([2.])
        """
        return Batch(function(self.value), self._index)

    def __repr__(self) -> str:
        return f"Batch[atomic={self.atomic!r}]({self.value!r})"

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._as_tuple())

    def __len__(self) -> int:
        return len(self._as_tuple())

    def __getitem__(self, index: int) -> Tensor:
        self._expect_index(index)
        return self._as_tuple()[index]

    @overload
    def __setitem__(self, index: int, value: Tensor) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Tensors) -> None: ...
    def __setitem__(self, index: int | slice, value: TensorOrTensors) -> None:
        if isinstance(index, slice):
            self._replace_all(index, cast(Tensors, value))
            return
        self._expect_index(index)
        if self.atomic:
            self.value = value
        else:
            tensors = list(self.tensors)
            tensors[index] = cast(Tensor, value)
            self.value = tuple(tensors)

    def _replace_all(self, index: slice, tensors: Tensors) -> None:
        if index != slice(None):
            raise NotImplementedError(f"a batch supports only the slice [:], not {index}")
        if not self.atomic:
            self.value = tensors
        elif len(tensors) == 1:
            self.value = tensors[0]
        else:
            raise IndexError(f"an atomic batch has one tensor and cannot be replaced with {len(tensors)}")

    def _expect_index(self, index: int) -> None:
        if self.atomic and index != 0:
            raise IndexError(f"an atomic batch has index 0 only, not {index}")

    def _as_tuple(self) -> Tensors:
        return (self.tensor,) if self.atomic else self.tensors


def check(input: object) -> None:
    """Raise TypeError unless `input` is a tensor or a tuple of tensors.

    >>> check([torch.ones(1)])
    Traceback (most recent call last):
        ...
    TypeError: expected Tensor, but got list
    """
    expect_tensors(input)


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    """Return the micro-batches of a mini-batch: at most `chunks`, as ``torch.chunk`` splits the first dimension.

    Raises:
        ValueError: the tensors of a tuple have different numbers of chunks.

    >>> [batch.tensor.tolist() for batch in scatter(torch.arange(5), 2)]
    [[0, 1, 2], [3, 4]]
    """
    parts = map_tensors(input, lambda tensor: split_rows(tensor, [len(part) for part in tensor.detach().chunk(chunks)]))
    if isinstance(input, tuple):
        if len({len(part) for part in parts}) > 1:
            rows = [len(tensor) for tensor in input]
            raise ValueError(f"the tensors of a mini-batch need the same number of rows, not {rows}")
        parts = zip(*parts, strict=True)
    return [Batch(value, i) for i, value in enumerate(parts)]


def gather(outputs: Sequence[Batch]) -> TensorOrTensors:
    """Return the mini-batch of micro-batches: their tensors, concatenated along the first dimension.

    >>> gather([Batch(torch.tensor([1, 2])), Batch(torch.tensor([3]))])
    tensor([1, 2, 3])
    """
    return concatenate([batch.value for batch in outputs])
