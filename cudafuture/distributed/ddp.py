"""Communication hooks of DistributedDataParallel, written with CUDAFuture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import GradBucket

from cudafuture._C import CUDAFuture

__all__ = ["ddp_comm_hook"]

S = TypeVar("S")


def ddp_comm_hook(
    fn: Callable[[S, GradBucket], CUDAFuture[torch.Tensor]],
) -> Callable[[S, GradBucket], torch.futures.Future[torch.Tensor]]:
    """Create a hook for ``DistributedDataParallel.register_comm_hook`` from a function that returns a CUDAFuture.

    `fn` gets the state given to ``register_comm_hook`` and a bucket of gradients. The value of its future replaces the
    bucket: a tensor of the shape, dtype and device of ``bucket.buffer()``, which it may be. DDP then does not divide by
    the world size. Chains of any length work, ``then_async`` included.

    >>> import cudafuture.distributed as cfd
    >>> @ddp_comm_hook
    ... def average(group, bucket):
    ...     size = torch.distributed.get_world_size(group)
    ...     return cfd.all_reduce(bucket.buffer(), group=group).then(lambda f: f.value().div_(size))
    >>> # model = DistributedDataParallel(...); model.register_comm_hook(None, average)

    Raises (in ``backward``):
        TypeError: `fn` returned another object than a CUDAFuture.
    """

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = fn(state, bucket)
        if not isinstance(future, CUDAFuture):
            raise TypeError(f"the function of ddp_comm_hook() returns a CUDAFuture, not {future!r}")
        return future.to_torch()

    # DDP checks the annotations and the name.
    hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    hook.__name__ = hook.__qualname__ = getattr(fn, "__name__", "hook")
    hook.__doc__ = fn.__doc__
    return hook
