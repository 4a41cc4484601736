"""Function that moves the state of an optimizer into a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from cudafuture._arguments import expect_tensor, listed, shown
from cudafuture.store import Store
from cudafuture.swap._given_optimizer import is_taken
from cudafuture.swap._state_layout import SwapOptions
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

    The returned optimizer replaces the given one and takes its state: use it for steps, schedulers, scalers and
    checkpoints. Each step computes bit for bit the result of the given optimizer with ``foreach=False``. State tensors
    are read into buffers, updated, and written back, several parameters at a time, so memory contains the buffers and
    not the state.

    Args:
        optimizer: an optimizer of ``torch.optim`` other than LBFGS and SparseAdam, or your own one whose state belongs
            to single parameters. Or a function that creates one from a list of parameters, such as a class or
            ``functools.partial(torch.optim.Adagrad, lr=0.1)``: it is called for one parameter, or one chunk, at a time,
            so that state which an optimizer allocates on creation never fills the memory.
        store: a store, or a folder for an ephemeral one that the optimizer closes.
        params: the parameters or groups, if `optimizer` is a function.
        name: the prefix of the keys. Optimizers that share a store need different names.
        min_bytes: the size from which a state tensor is in the store; smaller ones stay in memory.
        memory: bytes of state that stay in memory beside the buffers. The first parameters that are updated get them.
        prefetch: the number of units of state that are read ahead of the computation, and written behind it.
        chunk_bytes: the size of a parameter, in bytes, from which an element-wise optimizer updates it in chunks. The
            update allocates some tensors of a chunk's size beside the buffers.
        buffer_bytes: host memory for state in flight. Default: enough for `prefetch`. The old values of a parameter
            that is updated in chunks take up to an eighth more. If they need more, and cannot be read from master
            weights, the store keeps them until the parameter is updated.
        when: "step" updates all parameters in ``step()``. "backward" updates each parameter as soon as its gradient is
            complete, while backward continues; then operations that need all gradients at once (clipping, a scaler,
            accumulation over several backward passes) raise an error.
        compute: the device of the update: that of the parameter, or the "cpu".
        master_weights: keep a float32 copy of parameters of less than 32 bits in the store, and update the copy.
        swap_gradients: move each gradient of at least `min_bytes` to the store as soon as backward has computed it.
            ``parameter.grad`` is then a placeholder on which torch's functions raise; use the optimizer's
            ``clip_grad_norm_()``, ``unscale_()`` and ``gradient_of()`` instead. Backward passes accumulate.

    Raises:
        TypeError: an argument has another type.
        ValueError: the optimizer cannot be split by parameter; an argument is out of its range; `buffer_bytes` is less
            than one unit needs (the message has the minimum).

    >>> model = torch.nn.Linear(1024, 1024)
    >>> optimizer = offload(torch.optim.AdamW(model.parameters(), lr=1e-3), "states")
    >>> model(torch.ones(1, 1024)).sum().backward()
    >>> optimizer.step()
    """
    if isinstance(optimizer, OffloadedOptimizer):
        raise ValueError("the optimizer is offloaded already")
    if is_taken(optimizer):
        raise ValueError("offload() was given this optimizer before: use what it returned, or make a new optimizer")
    if isinstance(optimizer, torch.optim.Optimizer):
        if params is not None:
            raise ValueError("params= is for a function that creates an optimizer; this optimizer has its parameters")
        make = None
        groups: list[dict[str, Any]] = optimizer.param_groups
    else:
        if isinstance(optimizer, torch.nn.Module) or not callable(optimizer):
            raise TypeError(
                "optimizer is a torch.optim.Optimizer, or a function that creates one from parameters, such as "
                f"torch.optim.Adam, not {shown(optimizer)}"
            )
        if params is None:
            raise ValueError("a function that creates an optimizer needs params=")
        make = optimizer
        groups = _groups(params)
        shape = (0,) * max(groups[0]["params"][0].dim(), 1) if groups[0]["params"] else (0,)  # Muon takes matrices only
        optimizer = make([torch.zeros(shape, dtype=torch.float32, device="cpu", requires_grad=True)])
    options = SwapOptions(
        min_bytes, memory, prefetch, chunk_bytes, buffer_bytes, compute, master_weights, swap_gradients
    )
    return OffloadedOptimizer(optimizer, groups, make, store, name, when, options)


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = listed("params", params, "parameters or groups")
    if not given:
        raise ValueError("params is empty: pass at least one parameter")
    if isinstance(given[0], tuple):
        raise TypeError(
            "params is a list of parameters or groups, not of names and parameters: pass model.parameters()"
        )
    if not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = [dict(group) for group in given]
    for group in groups:
        of_group = group["params"]
        group["params"] = [of_group] if isinstance(of_group, torch.Tensor) else list(of_group)
        for parameter in group["params"]:
            expect_tensor("each of params", parameter)
    return groups
