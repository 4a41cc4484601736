"""The function that puts the state of an optimizer into a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from cudafuture.storage import Store
from cudafuture.swap._options import SwapOptions
from cudafuture.swap.offloaded_optimizer import OffloadedOptimizer

__all__ = ["offload"]


def offload(
    optimizer: torch.optim.Optimizer | Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    store: Store | str | os.PathLike[str],
    *,
    params: Iterable[Any] | None = None,
    name: str = "optimizer",
    min_bytes: int = 1 << 20,
    memory: int = 0,
    prefetch: int = 2,
    chunk_bytes: int = 2 << 20,
    buffer_bytes: int | None = None,
    when: Literal["step", "backward"] = "step",
    compute: Literal["parameter", "cpu"] = "parameter",
    master_weights: bool = False,
    swap_gradients: bool = False,
) -> OffloadedOptimizer:
    """Return an optimizer like the given one whose state is in a store.

    The optimizer that is returned replaces the given one, whose state it takes over: use it for steps, schedulers,
    scalers and checkpoints. Each step computes bit for bit what the given optimizer computes with ``foreach=False``.
    State tensors are read into buffers, updated, and written back, several parameters at a time, so memory holds the
    buffers and not the state.

    Args:
        optimizer: an optimizer of ``torch.optim`` other than LBFGS and SparseAdam, or one of your own whose state
            belongs to single parameters. Or a function of a list of parameters that makes one, such as a class or
            ``functools.partial(torch.optim.Adagrad, lr=0.1)``: it is called for one parameter, or one chunk, at a time,
            so that state which an optimizer allocates at once never fills the memory.
        store: a store, or a folder for an ephemeral one that the optimizer closes.
        params: the parameters or groups, where `optimizer` is a function.
        name: the beginning of the keys. Optimizers that share a store need different names.
        min_bytes: the size from which a state tensor is in the store; smaller ones stay in memory.
        memory: bytes of state that stay in memory beside the buffers. The first parameters that are updated get them.
        prefetch: how many units of state are read ahead of the computation, and how many are written behind it.
        chunk_bytes: the size of a parameter from which an element-wise optimizer updates it in chunks, bytes. The
            update allocates some tensors of a chunk's size beside the buffers.
        buffer_bytes: the memory for state on the host that is in flight. Default: enough for `prefetch`. The old values
            of a parameter that is updated in chunks take up to an eighth more; where they are more, and cannot be read
            from master weights, the store keeps them until the parameter is updated.
        when: "step" updates all parameters in ``step()``. "backward" updates each parameter as soon as its gradient is
            complete, while backward goes on; then what needs all gradients at once (clipping, a scaler, accumulation
            over several backward passes) raises an error.
        compute: where the update runs: on the device of the parameter, or on the "cpu".
        master_weights: whether parameters of less than 32 bits have a float32 copy in the store, which is updated in
            their place.
        swap_gradients: whether each gradient of at least `min_bytes` goes to the store as soon as backward has made it.
            ``parameter.grad`` is then an object on which torch's functions raise: the optimizer has
            ``clip_grad_norm_()``, ``unscale_()`` and ``gradient_of()`` in their place. Backward passes accumulate.

    Raises:
        ValueError: the optimizer cannot be split by parameter; an argument is out of its range; `buffer_bytes` is less
            than one unit needs (the message has the minimum).

    >>> model = torch.nn.Linear(1024, 1024)
    >>> optimizer = offload(torch.optim.AdamW(model.parameters(), lr=1e-3), "states")
    >>> model(torch.ones(1, 1024)).sum().backward()
    >>> optimizer.step()
    """
    if isinstance(optimizer, OffloadedOptimizer):
        raise ValueError("the optimizer is offloaded already")
    if isinstance(optimizer, torch.optim.Optimizer):
        if params is not None:
            raise ValueError("params= is for a function that makes an optimizer; this one has its parameters")
        make = None
        groups: list[dict[str, Any]] = optimizer.param_groups
    else:
        if params is None:
            raise ValueError("a function that makes an optimizer needs params=")
        make = optimizer
        groups = _groups(params)
        shape = (0,) * max(groups[0]["params"][0].dim(), 1) if groups[0]["params"] else (0,)  # Muon takes matrices only
        optimizer = make([torch.zeros(shape, requires_grad=True)])
    options = SwapOptions(
        min_bytes, memory, prefetch, chunk_bytes, buffer_bytes, compute, master_weights, swap_gradients
    )
    return OffloadedOptimizer(optimizer, groups, make, store, name, when, options)


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(params)
    if not given or not isinstance(given[0], dict):
        given = [{"params": given}]
    return [dict(group) for group in given]
