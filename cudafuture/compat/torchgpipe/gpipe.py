"""Sequential model that runs as a pipeline: torchgpipe's ``GPipe``, on any accelerator and on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn

from cudafuture.compat.torchgpipe.microbatch import check, scatter
from cudafuture.pipeline._division import move_stages
from cudafuture.pipeline._fill_drain import FillDrain
from cudafuture.pipeline._minibatch import TensorOrTensors, map_tensors
from cudafuture.pipeline.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from cudafuture.pipeline.checkpoint import is_recomputing
from cudafuture.pipeline.skip import verify_skippables
from cudafuture.pipeline.stream import normalize_device

__all__ = ["BalanceError", "GPipe"]

_Device = torch.device | str | int
_MODES = ("always", "except_last", "never")


class BalanceError(ValueError):
    """Error of a balance that does not fit the model: pass the number of layers of each partition.

    ``cudafuture.compat.torchgpipe.balance`` measures a model and returns its balance.
    """


class GPipe(nn.Module):
    """Sequential model in partitions on several devices, through which micro-batches follow each other.

    Args:
        module: an ``nn.Sequential``. Its layers are moved to their devices.
        balance: number of layers of each partition; their sum is the number of layers.
        devices: of the partitions, in their order; surplus devices are ignored, and one may have several partitions.
            Default: all of the current accelerator; the CPU if there is none.
        chunks: micro-batches that a mini-batch is split into along its first dimension. Default 1.
        checkpoint: the micro-batches whose activations are recomputed in the backward pass in training: "always",
            "except_last" (default; the last one's are the first to be needed), or "never".
        deferred_batch_norm: update the running statistics of BatchNorms once for each mini-batch; see
            ``DeferredBatchNorm``. It changes the containers of the given model, as torchgpipe does. Default False.

    All micro-batches go forward, and ``backward()`` of a loss of the output runs them all back ("fill and drain").
    The gradients are those of the model called with one micro-batch after the other.

    Tensors or tuples of tensors pass between two partitions. ``skippable`` layers may pass tensors over others.

    The parameters have the names that torchgpipe gives them: ``partitions.<partition>.<layer>.<parameter>``.

    If a partition fails, its error is raised with its traceback. It gets a note about each other partition that failed
    too, and the model can be called again.

    Attributes:
        balance: number of layers of each partition.
        devices: of each partition; the output is on the last one.
        chunks: as given. It may be changed between two calls.
        checkpoint: as given. It may be changed between two calls.
        partitions: ``nn.ModuleList`` of an ``nn.Sequential`` for each partition.

    Raises:
        TypeError: the module is not an ``nn.Sequential``, or its skips do not match.
        ValueError: an argument is out of range, a layer is in two places, or a parameter on two devices.
        BalanceError: the balance is missing or does not fit.
        IndexError: there are fewer devices than partitions.

    Idea: Huang et al., GPipe (2019), and torchgpipe (Kim et al., 2020).

    >>> layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> model = GPipe(layers, balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
    >>> model(torch.ones(8, 2)).sum().backward()
    >>> list(model.state_dict())
    ['partitions.0.0.weight', 'partitions.0.0.bias', 'partitions.1.2.weight', 'partitions.1.2.bias']
    """

    partitions: nn.ModuleList

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        devices: Iterable[_Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if balance is None:
            raise BalanceError(_with_advice("a balance is required: the number of layers of each partition"))
        _check_layers(module)
        verify_skippables(module)
        self.chunks = int(chunks)
        self.checkpoint = str(checkpoint)
        self._checkpointed(self.chunks)  # raises
        self.balance = _checked_balance(balance, len(module))
        self.devices = _devices(devices)
        if len(self.devices) < len(self.balance):
            raise IndexError(f"{len(self.balance)} partitions need as many devices; there are {len(self.devices)}")
        del self.devices[len(self.balance) :]
        _check_shared(module, self.balance, self.devices)
        if deferred_batch_norm:
            module = convert_deferred_batch_norm(module, self.chunks)
        self.partitions = _split(module, self.balance)
        move_stages(list(self.partitions), self.devices)
        self.training = module.training
        self._deferred = [layer for layer in self.modules() if isinstance(layer, DeferredBatchNorm)]
        self._engine: FillDrain | None = None  # created by the first call; it has streams, so it is not copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}

    def __len__(self) -> int:
        """Return the number of layers."""
        return sum(map(len, self._sequences()))

    def __getitem__(self, index: int) -> nn.Module:
        """Return a layer by its position in the model."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield the layers of the model."""
        for partition in self._sequences():
            yield from partition

    def _sequences(self) -> Iterator[nn.Sequential]:
        return (cast(nn.Sequential, partition) for partition in self.partitions)

    def cuda(self, device: _Device | None = None) -> NoReturn:
        """Raise TypeError: the layers are on the devices of their partitions.

        >>> GPipe(nn.Sequential(nn.ReLU()), [1], devices=["cpu"]).cuda()
        Traceback (most recent call last):
            ...
        TypeError: a GPipe is not moved: its layers are on the devices of their partitions, see GPipe.devices
        """
        raise TypeError("a GPipe is not moved: its layers are on the devices of their partitions, see GPipe.devices")

    def cpu(self) -> NoReturn:
        """Raise TypeError, as ``cuda`` does.

        >>> GPipe(nn.Sequential(nn.ReLU()), [1], devices=["cpu"]).cpu()
        Traceback (most recent call last):
            ...
        TypeError: a GPipe is not moved: its layers are on the devices of their partitions, see GPipe.devices
        """
        self.cuda()

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Convert the parameters to a dtype. A device, or a tensor that selects one, raises TypeError.

        >>> GPipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=["cpu"]).to(torch.float64)[0].weight.dtype
        torch.float64
        """
        moves = isinstance(args[0], torch.device | int | str | torch.Tensor) if args else False
        if moves or kwargs.get("device") is not None or "tensor" in kwargs:
            self.cuda()
        return super().to(*args, **kwargs)

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """Return the output for a mini-batch, on the device of the last partition.

        Args:
            input: a tensor, or a tuple of tensors with the same number of rows. It is copied to the device of the
                first partition if necessary.

        Raises:
            TypeError: the value is not a tensor or a tuple of tensors, here or between two partitions.
            ValueError: the tensors have different lengths, or the tuple is empty.

        >>> model = GPipe(nn.Sequential(nn.ReLU(), nn.ReLU()), [1, 1], devices=["cpu", "cpu"], chunks=2)
        >>> model(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0., 0., 1.])
        """
        check(input)
        if not self.partitions:
            return input
        if isinstance(input, tuple) and not input:
            raise ValueError("a mini-batch needs at least one tensor; the tuple is empty")
        moved = map_tensors(input, lambda tensor: tensor.to(self.devices[0]))
        parts = [batch.value for batch in scatter(moved, self.chunks)]
        if self.training and not is_recomputing():
            for norm in self._deferred:
                norm.set_chunks(len(parts))
        if self._engine is None:
            self._engine = FillDrain(list(self.partitions), self.devices)
        self._engine.stages = list(self.partitions)
        return self._engine.run(moved, parts, self._checkpointed(len(parts)))

    def _checkpointed(self, batches: int) -> int:
        """Return the number of checkpointed micro-batches."""
        if self.chunks < 1:
            raise ValueError(f"chunks must be at least 1, not {self.chunks}")
        if self.checkpoint not in _MODES:
            raise ValueError(f"checkpoint must be one of {', '.join(map(repr, _MODES))}, not {self.checkpoint!r}")
        numbers = {"always": batches, "except_last": batches - 1, "never": 0}
        return numbers[self.checkpoint] if self.training else 0


def _check_layers(module: nn.Module) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"GPipe partitions an nn.Sequential, not a {type(module).__name__}")
    if len(list(module.named_children())) != len(module):
        raise ValueError("a layer is in the model twice: GPipe needs a separate layer in each place")


def _check_shared(module: nn.Module, balance: Sequence[int], devices: Sequence[torch.device]) -> None:
    of_layers = itertools.chain.from_iterable(itertools.repeat(*each) for each in zip(devices, balance, strict=True))
    owners: dict[int, tuple[str, torch.device]] = {}
    for (name, layer), device in zip(module.named_children(), of_layers, strict=True):
        for tensor in itertools.chain(layer.parameters(), layer.buffers()):
            other, other_device = owners.setdefault(id(tensor), (name, device))
            if other_device != device:
                raise ValueError(
                    f"the layers {other!r} and {name!r} share a parameter or a buffer, which cannot lie on two devices "
                    f"({other_device}, {device}): put them into one partition"
                )


def _checked_balance(given: Iterable[int], layers: int) -> list[int]:
    balance = list(given)
    if any(number <= 0 for number in balance):
        raise BalanceError(_with_advice(f"each partition needs at least one layer; the balance is {balance}"))
    if sum(balance) != layers:
        raise BalanceError(_with_advice(f"the balance {balance} is for {sum(balance)} layers; the model has {layers}"))
    return balance


def _with_advice(problem: str) -> str:
    module = "cudafuture.compat.torchgpipe.balance"
    return f"{problem}. {module}.balance_by_time(partitions, module, sample) returns one that fits."


def _devices(given: Iterable[_Device] | None) -> list[torch.device]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.device_count() else None
    if given is None:
        given = ["cpu"] if accelerator is None else range(torch.accelerator.device_count())
    devices = []
    for each in given:
        device = torch.device(accelerator.type, each) if isinstance(each, int) and accelerator else torch.device(each)
        devices.append(cast(torch.device, normalize_device(device)))
    return devices


def _split(module: nn.Sequential, balance: Sequence[int]) -> nn.ModuleList:
    layers = iter(module.named_children())
    partitions = nn.ModuleList()
    for number in balance:
        partition = nn.Sequential()
        for _ in range(number):
            partition.add_module(*next(layers))
        partition.training = module.training
        partitions.append(partition)
    return partitions
