"""Pairs of one model trained twice: with an optimizer of torch, and with the same optimizer offloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from cudafuture.store import Store
from cudafuture.swap import OffloadedOptimizer, offload

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "ASGD": partial(torch.optim.ASGD, t0=3, foreach=False),
    "Adadelta": partial(torch.optim.Adadelta, foreach=False),
    "Adafactor": partial(torch.optim.Adafactor, foreach=False),
    "Adagrad": partial(torch.optim.Adagrad, lr_decay=0.1, foreach=False, fused=False),
    "Adam": partial(torch.optim.Adam, foreach=False, fused=False),
    "Adam, amsgrad": partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1, maximize=True, foreach=False),
    "AdamW": partial(torch.optim.AdamW, foreach=False, fused=False),
    "Adamax": partial(torch.optim.Adamax, foreach=False),
    "Muon": torch.optim.Muon,
    "NAdam": partial(torch.optim.NAdam, foreach=False),
    "RAdam": partial(torch.optim.RAdam, foreach=False),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True, foreach=False),
    "Rprop": partial(torch.optim.Rprop, foreach=False),
    "SGD": partial(torch.optim.SGD, lr=0.1, foreach=False, fused=False),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
}
SIZES = [0, 1, 4095, 4096, 4097]


class Pair:
    """The same parameters and gradients for an optimizer of torch and an offloaded one."""

    def __init__(
        self,
        make: Make,
        store: Store | str,
        shapes: Sequence[tuple[int, ...]] = ((300, 301), (123,), (64, 500)),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        memory_format: torch.memory_format = torch.contiguous_format,
        **options: Any,
    ) -> None:
        self.numbers = torch.Generator().manual_seed(0)
        self.plain = [nn.Parameter(self.random(s, dtype, device).to(memory_format=memory_format)) for s in shapes]
        self.swapped = copy.deepcopy(self.plain)
        self.optimizer = make(self.plain)
        self.offloaded: OffloadedOptimizer = offload(make(self.swapped), store, **{"min_bytes": 0, **options})

    def random(self, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        return torch.randn(shape, generator=self.numbers).to(device, dtype)

    def give_gradients(self, missing: Sequence[int] = ()) -> None:
        """Give both models the same new gradients, as backward does, so that hooks run."""
        for i, (plain, swapped) in enumerate(zip(self.plain, self.swapped, strict=True)):
            plain.grad = swapped.grad = None
            if i in missing or not plain.requires_grad:
                continue
            gradient = self.random(tuple(plain.shape), plain.dtype, str(plain.device))
            for parameter in (plain, swapped):
                product = (parameter * gradient).sum()
                (product.real if product.is_complex() else product).backward()

    def step(self, missing: Sequence[int] = ()) -> None:
        self.give_gradients(missing)
        self.optimizer.step()
        self.offloaded.step()

    def expect_same(self) -> None:
        """Compare the parameters and all of the state, bit for bit."""
        for plain, swapped in zip(self.plain, self.swapped, strict=True):
            assert same(plain, swapped)
            expected = self.optimizer.state.get(plain, {})
            found = self.offloaded.state_of(swapped)
            assert found.keys() == expected.keys()
            assert all(same(value, found[name]) for name, value in expected.items())


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a == b
