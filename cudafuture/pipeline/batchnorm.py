"""BatchNorm whose running statistics are those of the mini-batch, although it gets one micro-batch at a time.

Idea: torchgpipe's deferred batch normalisation.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from cudafuture.pipeline.checkpoint import is_recomputing

__all__ = ["DeferredBatchNorm", "convert_deferred_batch_norm"]

_Module = TypeVar("_Module", bound=nn.Module)


class DeferredBatchNorm(_BatchNorm):
    """BatchNorm that updates its running statistics once for `chunks` micro-batches, after the last one.

    The update is that of ``nn.BatchNorm`` for all rows of the mini-batch. In training each micro-batch is normalised
    by its own statistics. A forward pass that is recomputed does not count. The parameters and buffers have the names
    that they have in ``nn.BatchNorm``, so the state_dict is the same.

    Args:
        num_features: channels of the input, its second dimension.
        eps: added to the variance. Default 1e-5.
        momentum: weight of a new mini-batch in the running statistics. Default 0.1; None: all mini-batches weigh the
            same.
        affine: learn a weight and a bias. Default True.
        chunks: micro-batches of a mini-batch. Default 1.

    >>> norm = DeferredBatchNorm(1, momentum=1.0, chunks=2)
    >>> for chunk in torch.tensor([[1.0], [2.0], [3.0], [6.0]]).chunk(2):
    ...     _ = norm(chunk)
    >>> norm.running_mean
    tensor([3.])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.set_chunks(chunks)

    def set_chunks(self, chunks: int) -> None:
        """Begin a mini-batch of `chunks` micro-batches, and drop the statistics of an unfinished one.

        >>> DeferredBatchNorm(1).set_chunks(4)
        """
        self.chunks = chunks
        self._begin()

    def _begin(self) -> None:
        self.tracked = 0  # micro-batches
        self.counter = 0  # values of each channel
        self._mean: Tensor | None = None  # of these values, at least in float32
        self._deviation: Tensor | None = None  # sum of the squares of their distances from the mean

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm takes at least two dimensions, (rows, channels, ...); got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a micro-batch.

        >>> DeferredBatchNorm(1, affine=False)(torch.tensor([[-1.0], [1.0]])).round()
        tensor([[-1.],
                [ 1.]])
        """
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        if not is_recomputing():
            with torch.no_grad():
                self._track(input.detach())
                if self.tracked >= self.chunks:
                    self._commit()
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)

    def _track(self, input: Tensor) -> None:
        """Merge the statistics of a micro-batch (Chan et al., 1979: a sum of squares would cancel)."""
        self.tracked += 1
        count = input.numel() // input.size(1) if input.numel() else 0
        if not count:
            return
        dims = [0, *range(2, input.dim())]
        input = input.to(torch.promote_types(input.dtype, torch.float32))
        var, mean = torch.var_mean(input, dims, correction=0)
        deviation = var * count
        before, self.counter = self.counter, self.counter + count
        if self._mean is None or self._deviation is None:
            self._mean, self._deviation = mean, deviation
        else:
            distance = mean - self._mean
            self._mean = self._mean + distance * (count / self.counter)
            self._deviation = self._deviation + deviation + distance.square() * (before * count / self.counter)

    def _commit(self) -> None:
        """Update the running statistics with the mini-batch."""
        running_mean, running_var, number = self.running_mean, self.running_var, self.num_batches_tracked
        if self._mean is not None and self._deviation is not None:
            assert running_mean is not None
            assert running_var is not None
            assert number is not None
            number.add_(1)
            # Not float(number): it would block the host.
            weight: Any = self.momentum if self.momentum is not None else number.to(running_mean.dtype).reciprocal()
            var = self._deviation / max(self.counter - 1, 1)  # unbiased, as nn.BatchNorm's
            running_mean.lerp_(self._mean.to(running_mean.dtype), weight)
            running_var.lerp_(var.to(running_var.dtype), weight)
        self._begin()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("sum", "sum_squares"):  # buffers of torchgpipe's class; zero between two mini-batches
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @classmethod
    def convert_deferred_batch_norm(cls, module: _Module, chunks: int = 1) -> _Module:
        """Return the module with each BatchNorm replaced; see the function ``convert_deferred_batch_norm``."""
        return cast(_Module, _convert(cls, module, chunks, "", {}))


def convert_deferred_batch_norm(module: _Module, chunks: int = 1) -> _Module:
    """Return the module with each BatchNorm that has running statistics replaced by a ``DeferredBatchNorm``.

    Args:
        module: a BatchNorm, which does not change, or a container of some.
        chunks: micro-batches of a mini-batch. Default 1.

    This changes the containers of the given model, as torchgpipe does: the new layers replace the old ones in them. The
    model itself is returned, unless it is a BatchNorm. Copy it before to keep the original.

    The new layers have the parameters, buffers and hooks of the old ones: the same objects. A ``DeferredBatchNorm``
    with another number of chunks is replaced too.

    Raises:
        TypeError: a layer is a SyncBatchNorm.
        ValueError: a layer is a lazy BatchNorm that does not know its number of features yet.

    >>> model = convert_deferred_batch_norm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), chunks=4)
    >>> model[1].chunks
    4
    >>> list(model.state_dict())[2:]
    ['1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    return DeferredBatchNorm.convert_deferred_batch_norm(module, chunks)


def _convert(
    cls: type[DeferredBatchNorm], module: nn.Module, chunks: int, name: str, converted: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in converted:  # a layer that appears twice stays one layer
        return converted[module]
    converted[module] = module
    if isinstance(module, DeferredBatchNorm) and module.chunks == chunks:
        return module
    if isinstance(module, nn.SyncBatchNorm):
        raise TypeError(
            f"{name or 'the module'} is a SyncBatchNorm, which normalises over processes and cannot be deferred: use "
            "nn.BatchNorm, or a pipeline without deferred_batch_norm"
        )
    if isinstance(module, _BatchNorm) and module.track_running_stats:
        converted[module] = _deferred(cls, module, chunks, name)
    else:
        for child_name, child in module._modules.items():  # named_children() lists no layer twice
            if child is not None:
                path = f"{name}.{child_name}" if name else child_name
                module._modules[child_name] = _convert(cls, child, chunks, path, converted)
    return converted[module]


def _deferred(cls: type[DeferredBatchNorm], module: _BatchNorm, chunks: int, name: str) -> DeferredBatchNorm:
    tensors = (*module._parameters.values(), *module._buffers.values())
    if any(tensor is not None and is_lazy(tensor) for tensor in tensors):
        raise ValueError(f"{name or 'the module'} is lazy: run the model once before it is converted")
    deferred = cls.__new__(cls)
    # All state of the layer, hooks included, in new dictionaries: the old layer does not change.
    state = {key: value.copy() if isinstance(value, dict) else value for key, value in vars(module).items()}
    deferred.__dict__.update(state)
    deferred.set_chunks(chunks)
    return deferred
