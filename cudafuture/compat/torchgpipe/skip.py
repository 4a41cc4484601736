"""Connections that skip layers, under the names of ``torchgpipe.skip``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cudafuture.compat.torchgpipe.microbatch import Batch
from cudafuture.pipeline import skip
from cudafuture.pipeline.skip import (
    SkipLayout,
    Skippable,
    current_skip_tracker,
    inspect_skip_layout,
    pop,
    skippable,
    stash,
    use_skip_tracker,
    verify_skippables,
)
from cudafuture.pipeline.skip import (
    SkipNamespace as Namespace,
)

__all__ = [
    "Namespace",
    "SkipLayout",
    "SkipTracker",
    "Skippable",
    "current_skip_tracker",
    "inspect_skip_layout",
    "pop",
    "skippable",
    "stash",
    "use_skip_tracker",
    "verify_skippables",
]


class SkipTracker(skip.SkipTracker):
    """Tracker of skip tensors whose methods get micro-batches, as those of torchgpipe do.

    `batch` is the module's argument in ``load`` and its result in ``save``, and may be changed; None if that is not a
    tensor or a tuple of tensors.

    >>> tracker = SkipTracker()
    >>> tracker.batch_of((torch.ones(1), torch.ones(1))).tensors
    (tensor([1.]), tensor([1.]))
    """

    def batch_of(self, value: Any) -> Batch | None:
        """Return the micro-batch, or None if the value is neither a tensor nor a tuple of tensors.

        >>> SkipTracker().batch_of({})
        """
        is_tuple = type(value) is tuple and value and all(isinstance(part, Tensor) for part in value)
        return Batch(value) if is_tuple or isinstance(value, Tensor) else None
