"""Recomputation of the forward pass of a stage in its backward pass, with the random numbers of the first run.

Idea: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); its place in a pipeline: torchgpipe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["is_checkpointing", "is_recomputing"]


class _Flags(threading.local):
    is_checkpointing = False
    is_recomputing = False


_flags = _Flags()

_generator_lock = threading.RLock()
"""Held while a stage draws random numbers that it must draw again: all threads share the generator of the host."""


def is_checkpointing() -> bool:
    """Return whether this thread runs a forward pass that will be recomputed.

    >>> is_checkpointing()
    False
    """
    return _flags.is_checkpointing


def is_recomputing() -> bool:
    """Return whether this thread runs a forward pass for the second time.

    >>> is_recomputing()
    False
    """
    return _flags.is_recomputing


@contextmanager
def checkpointing() -> Iterator[None]:
    """Make ``is_checkpointing`` return True in this thread, and keep other threads from drawing for a checkpoint."""
    before = _flags.is_checkpointing
    with _generator_lock:
        _flags.is_checkpointing = True
        try:
            yield
        finally:
            _flags.is_checkpointing = before


def drawing() -> AbstractContextManager[object]:
    """Return a context manager that keeps other threads from drawing random numbers for a checkpoint."""
    return _generator_lock


@contextmanager
def recomputing(state: RandomState) -> Iterator[None]:
    """Make ``is_recomputing`` return True in this thread, with the generators in the states of `state`."""
    before = _flags.is_recomputing
    with _generator_lock:
        now = RandomState.capture(state.device)
        state.restore()
        _flags.is_recomputing = True
        try:
            yield
        finally:
            _flags.is_recomputing = before
            now.restore()


@dataclass(frozen=True)
class RandomState:
    """States of the generators of the host and of one device. Capture it inside ``checkpointing()``."""

    device: torch.device
    host: torch.Tensor
    on_device: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Return the current states."""
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), on_device)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.host)
        if self.on_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.on_device, self.device)
