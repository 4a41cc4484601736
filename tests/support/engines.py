"""Engines that fail or hold results back, and tensors to store with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cudafuture.io import Engine


@contextmanager
def hold_engine() -> Iterator[Engine]:
    """Give an engine that gives no result before it is released."""
    with Engine("threads", threads=2, _faults={"held": True}) as engine:
        try:
            yield engine
        finally:
            engine._native.release_held()


def failing(**faults: Any) -> Engine:
    """Return an engine that makes up errors."""
    return Engine("threads", threads=2, _faults=faults)


def size(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's storage."""
    return tensor.untyped_storage().size()


def make_tensors(count: int, number: int = 1000) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return so many tensors of so many elements, all different, and copies of them."""
    tensors = [torch.arange(number, dtype=torch.float32) + i * number for i in range(count)]
    return tensors, [t.clone() for t in tensors]


def equal(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def in_a_thread(fn: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=fn)
    thread.start()
    return thread
