"""Balance of a sequential model: the number of layers of each partition, by measured time or by size."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cudafuture._arguments import expect_int, parse_device, shown
from cudafuture.pipeline._minibatch import TensorOrTensors, map_tensors
from cudafuture.pipeline.skip import SkipTracker, use_skip_tracker

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]

_Device = torch.device | str | int


def balance_cost(cost: Sequence[float], partitions: int) -> list[int]:
    """Return the number of layers of each partition that minimises the largest sum of costs.

    Args:
        cost: of each layer, in any unit, at least 0.
        partitions: at least 1, at most the number of layers. Each gets at least one layer.

    Of the best answers it returns the one with the smallest sum of the squares of the partitions' costs.

    Raises:
        ValueError: the number of partitions does not fit the number of layers, or a cost is negative.

    >>> balance_cost([1, 1, 1, 3, 1, 1], 3)
    [3, 1, 2]
    """
    layers = len(cost)
    if not 1 <= partitions <= layers:
        raise ValueError(f"{layers} layers cannot be split into {partitions} partitions of at least one layer")
    if any(not c >= 0 for c in cost):
        raise ValueError(f"costs must be at least 0: {list(cost)}")
    sums = [0, *itertools.accumulate(cost)]
    # best[k][n]: (largest sum, sum of squares, cut) of the first n layers in k + 1 partitions. First all largest sums:
    # the best division of the whole may have a larger intermediate maximum, if its squares are smaller.
    limit = _smallest_limit(sums, partitions)
    infinite = float("inf")
    squares = [infinite] * (layers + 1)
    squares[0] = 0.0
    cuts: list[list[int]] = []
    for _ in range(partitions):
        before, squares, cut = squares, [infinite] * (layers + 1), [0] * (layers + 1)
        for end in range(1, layers + 1):
            for start in range(end - 1, -1, -1):
                block = sums[end] - sums[start]
                if block > limit:
                    break
                if before[start] + block * block < squares[end]:
                    squares[end], cut[end] = before[start] + block * block, start
        cuts.append(cut)
    balance: list[int] = []
    end = layers
    for cut in reversed(cuts):
        balance.insert(0, end - cut[end])
        end = cut[end]
    return balance


def _smallest_limit(sums: Sequence[float], partitions: int) -> float:
    """Return the smallest possible largest sum of a block, by dynamic programming over the number of blocks."""
    layers = len(sums) - 1
    largest = [float("inf")] * (layers + 1)
    largest[0] = 0.0
    for _ in range(partitions):
        largest = [
            min((max(largest[start], sums[end] - sums[start]) for start in range(end)), default=float("inf"))
            for end in range(layers + 1)
        ]
    return largest[layers]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: TensorOrTensors,
    *,
    timeout: float = 1.0,
    device: _Device | None = None,
) -> list[int]:
    """Return the number of layers of each partition, by the time of each layer's forward and backward pass.

    Args:
        partitions: their number.
        module: the sequential model. It does not change: each layer is copied to the device for its measurement.
        sample: an input with any number of rows.
        timeout: seconds; the model is measured repeatedly until they have passed, and the median counts. Default 1.
        device: measures on this device. Default: the current accelerator; the CPU if there is none.

    Raises:
        ValueError: a parameter has a gradient already, or there are fewer layers than partitions.

    >>> balance_by_time(2, nn.Sequential(nn.ReLU(), nn.ReLU()), torch.ones(4, 4), timeout=0, device="cpu")
    [1, 1]
    """
    where = _device(device)
    _check_number(partitions, module)
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("a parameter has a gradient: measure before training, or call zero_grad() first")
    times: list[list[float]] = [[] for _ in module]
    began = time.perf_counter()
    while True:

        def measure(i: int, layer: nn.Module, inputs: TensorOrTensors) -> TensorOrTensors:
            _synchronize(where)
            before = time.perf_counter()
            outputs: TensorOrTensors = layer(inputs)
            _backward(outputs)
            _synchronize(where)
            times[i].append(time.perf_counter() - before)
            return outputs

        _run_layers(module, sample, where, measure)
        if time.perf_counter() - began >= timeout:
            break
    return balance_cost([statistics.median(each) for each in times], partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: TensorOrTensors,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: _Device | None = None,
) -> list[int]:
    """Return the number of layers of each partition, by the memory that each layer takes in training.

    Args:
        partitions: their number.
        module: the sequential model. It does not change: each layer is copied to the device for its measurement.
        input: a mini-batch with as many rows as in training. Two of them are used.
        chunks: micro-batches of a mini-batch. Default 1.
        param_scale: copies of the parameters that exist in training: the parameters, their gradients, and the state of
            the optimizer. 2 (default) or 3 for SGD, without and with momentum, 4 for Adam.
        device: measures on this device. Default: the current accelerator; the CPU if there is none.

    The size of a layer is that of the tensors that its forward pass keeps for the backward pass, and of its output, for
    one micro-batch, plus `param_scale` times that of its parameters.

    >>> balance_by_size(2, nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.ReLU()), torch.ones(4, 9), device="cpu")
    [1, 2]
    """
    where = _device(device)
    _check_number(partitions, module)
    expect_int("chunks", chunks, 1)
    rows = _tensors_of(input)[0].size(0)
    few = min(rows, 2)  # not one: a BatchNorm has no variance for it
    sample = map_tensors(input, lambda tensor: tensor[:few])
    sizes: list[float] = []

    def measure(i: int, layer: nn.Module, inputs: TensorOrTensors) -> TensorOrTensors:
        parameters = _bytes_of(layer.parameters())
        outputs, kept = _memory_of(layer, inputs)
        sizes.append(kept * rows / few / chunks + parameters * param_scale)
        return outputs

    _run_layers(module, sample, where, measure)
    return balance_cost(sizes, partitions)


def _memory_of(layer: nn.Module, inputs: TensorOrTensors) -> tuple[TensorOrTensors, int]:
    """Return the layer's output, and the bytes that the forward pass adds: saved tensors, and the output."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer(inputs)
    there = {_storage(tensor) for tensor in (*_tensors_of(inputs), *layer.parameters(), *layer.buffers())}
    return outputs, _bytes_of((*saved, *_tensors_of(outputs)), without=there)


def _tensors_of(value: TensorOrTensors) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensors: Any, without: set[int] = frozenset()) -> int:  # type: ignore[assignment]
    """Return the bytes of the tensors' memory, each storage once."""
    storages = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for storage, size in storages.items() if storage not in without)


def _run_layers(
    module: nn.Sequential,
    sample: TensorOrTensors,
    device: torch.device,
    measure: Callable[[int, nn.Module, TensorOrTensors], TensorOrTensors],
) -> None:
    """Call `measure` with each layer in training mode on the device, and its input: the output of the previous one."""
    value = map_tensors(sample, lambda x: x.detach().to(device).requires_grad_(x.requires_grad))
    with use_skip_tracker(_Detached()), torch.enable_grad():
        for i, layer in enumerate(_layers_on(module, device)):
            # Not a leaf: a layer that works in place would refuse it.
            value = map_tensors(value, lambda x: x.detach().requires_grad_(x.requires_grad).clone())
            value = measure(i, layer, value)


def _layers_on(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


class _Detached(SkipTracker):
    """Tracker whose tensors do not lead back to the layer that stashed them, because that is measured alone."""

    def save(self, batch: Any, ns: Any, name: str, tensor: Tensor | None) -> None:
        detached = None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
        super().save(batch, ns, name, detached)


def _backward(outputs: TensorOrTensors) -> None:
    roots = tuple(tensor for tensor in _tensors_of(outputs) if tensor.requires_grad)
    if roots:
        torch.autograd.backward(roots, tuple(torch.ones_like(root) for root in roots))


def _check_number(partitions: int, module: nn.Sequential) -> None:
    """Raise before the measurement, which is slow."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module is an nn.Sequential, not {shown(module)}")
    balance_cost([0] * len(module), partitions)


def _device(device: _Device | None) -> torch.device:
    if device is not None:
        return parse_device("device", device)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.device_count() else None
    return accelerator or torch.device("cpu")


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
