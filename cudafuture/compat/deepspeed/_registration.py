"""Registration of parameters with an optimizer swapper."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from cudafuture._arguments import expect_dtype, expect_int, expect_tensor, listed
from cudafuture._C import CUDAFuture
from cudafuture.combine import wait_all
from cudafuture.compat.deepspeed._assembly import assembled, partitions_of, staged
from cudafuture.compat.deepspeed._parameter_swapper import ParameterSwapper
from cudafuture.io import empty
from cudafuture.swap import OptimizerNamespace, places

__all__ = ["Registration"]


class Registration(ABC):
    """Methods that give parameters their first values: from tensors, or from partitions of half precision."""

    _namespace: OptimizerNamespace
    param_groups: list[dict[str, Any]]

    @property
    @abstractmethod
    def _swap(self) -> ParameterSwapper: ...

    @abstractmethod
    def _stage(self, name: str) -> AbstractContextManager[ParameterSwapper]: ...

    def swappable(self, tensor_or_numel: torch.Tensor | int, dtype: torch.dtype = torch.float32) -> bool:
        """Return whether a tensor, or one with this number of elements and dtype, belongs in the store.

        >>> from cudafuture.compat.deepspeed import OptimizerSwapper
        >>> swapper = OptimizerSwapper(torch.optim.SGD([torch.ones(1)]), "states", min_bytes=4096)
        >>> swapper.swappable(1023), swapper.swappable(1024), swapper.swappable(torch.ones(1024))
        (False, True, True)
        """
        if isinstance(tensor_or_numel, torch.Tensor):
            return self._swap.is_swappable(tensor_or_numel)
        expect_dtype("dtype", dtype)
        numel = expect_int("tensor_or_numel", tensor_or_numel, 0)
        return self._swap.is_swappable(torch.empty(numel, dtype=dtype, device="meta"))

    def initialize_parameters(
        self, parameters: Sequence[torch.Tensor], src_tensors: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Register parameters, write their values, and empty them.

        Args:
            parameters: which are not registered yet. Those below `min_bytes` stay in memory.
            src_tensors: the values, one tensor of the same shape per parameter. Default: the parameters' own values.

        Raises:
            ValueError: a parameter is registered already; a parameter and its state need larger buffers (the message
                has the minimum); the number of tensors differs from the number of parameters.
            StorageError: a value cannot be written; then none of the parameters is registered.

        >>> from cudafuture.compat.deepspeed import OptimizerSwapper
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> swapper.initialize_parameters([weight])
        >>> weight.tolist()
        []
        """
        given = _tensors("parameters", parameters)
        values = [p.detach() for p in given] if src_tensors is None else _tensors("src_tensors", src_tensors)
        if len(values) != len(given):
            raise ValueError(f"src_tensors has {len(values)} tensors for {len(given)} parameters")
        for i, (parameter, value) in enumerate(zip(given, values, strict=True)):
            if parameter.numel() and parameter.shape != value.shape:
                shapes = f"{list(value.shape)}, but the parameter {list(parameter.shape)}"
                raise ValueError(f"src_tensors[{i}] has the shape {shapes}")
        self._initialize(given, [value.shape for value in values], [values])

    def initialize_from_swapped_fp16_params(
        self,
        fp16_partitions_info: Sequence[Sequence[tuple[torch.Tensor | None, int, Any]]],
        fp16_num_elems: Sequence[int],
        fp16_pinned_buffers: Sequence[torch.Tensor] | None,
        fp32_parameters: Sequence[torch.Tensor],
        *,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        """Register parameters, and assemble their float32 values from partitions of half precision.

        Partitions are read, cast and written in as many rounds as the buffers need.

        Args:
            fp16_partitions_info: the partitions of each parameter, in order. Each is a tensor, the number of its
                elements, and their place: None (in the tensor), a key of the store, or the path of a file that begins
                with them. A tensor without the elements only gives the dtype, and may be None.
            fp16_num_elems: the number of elements of each parameter.
            fp16_pinned_buffers: contiguous tensors that partitions are read into; those of one parameter go into one
                buffer. Partitions in memory need no buffer. Default: a new one.
            fp32_parameters: which are not registered yet.
            dtype: of the partitions in files without a tensor.

        Raises:
            ValueError: the arguments do not fit together, or no buffer has room for the partitions of a parameter.
            StorageError: a partition cannot be read, or a value written. Then none of the parameters is registered.

        >>> from cudafuture.compat.deepspeed import OptimizerSwapper
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> swapper = OptimizerSwapper(torch.optim.Adam([weight]), "states", min_bytes=0)
        >>> here = [(torch.ones(2).half(), 2, None)]
        >>> swapper.initialize_from_swapped_fp16_params([here], [2], None, [weight])
        """
        fp32_parameters = _tensors("fp32_parameters", fp32_parameters)
        fp16_num_elems = [
            expect_int("each of fp16_num_elems", numel, 0) for numel in listed("fp16_num_elems", fp16_num_elems, "ints")
        ]
        fp16_partitions_info = listed("fp16_partitions_info", fp16_partitions_info, "lists of partitions")
        expect_dtype("dtype", dtype)
        if not len(fp16_partitions_info) == len(fp16_num_elems) == len(fp32_parameters):
            raise ValueError("the numbers of partition lists, element counts and parameters differ")
        parts = [
            partitions_of(infos, numel, dtype, self._namespace.store)
            for infos, numel in zip(fp16_partitions_info, fp16_num_elems, strict=True)
        ]
        if fp16_pinned_buffers is None:
            largest = max((places(staged(each))[-1] for each in parts), default=0)
            buffers = [empty(max(largest, 4096, min(self._swap.buffers.nbytes, 64 << 20)), torch.uint8)]
        else:
            pinned = _tensors("fp16_pinned_buffers", fp16_pinned_buffers)
            buffers = [buffer.detach().view(-1).view(torch.uint8) for buffer in pinned]
        shapes = [
            parameter.shape if parameter.numel() == numel else torch.Size([numel])
            for parameter, numel in zip(fp32_parameters, fp16_num_elems, strict=True)
        ]
        self._initialize(fp32_parameters, shapes, assembled(parts, self._namespace.store, buffers))

    def _initialize(
        self, parameters: Sequence[torch.Tensor], shapes: Sequence[torch.Size], rounds: Iterable[list[torch.Tensor]]
    ) -> None:
        """Register parameters, and write their values, which arrive in rounds."""
        with self._stage("swap_init_write") as swap:
            states = swap.register(parameters, shapes)
            left = iter(states)
            previous: list[CUDAFuture[int]] = []
            try:
                for values in rounds:
                    now = [(state, swap.write_first(state, value)) for value, state in zip(values, left, strict=False)]
                    wait_all(previous)
                    previous = [future for _, future in now if future is not None]
                wait_all(previous)
            except BaseException:
                swap.unregister(states)
                raise
            for state in states:
                swap.empty(state)
            self.param_groups[0]["params"] += parameters


def _tensors(name: str, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a list of tensors that was passed as an argument."""
    tensors = listed(name, given, "tensors")
    for tensor in tensors:
        expect_tensor(f"each of {name}", tensor)
    return tensors
