"""States of datasets: conversion between the user's dictionaries and starts of iterations."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from cudafuture.data._progress import StartPosition

__all__ = ["integer", "start_of", "state_of"]


def integer(name: str, value: object) -> int:
    """Return an integer that fits in 64 bits.

    Raises:
        TypeError: the value is not an integer.
        ValueError: it does not fit.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer, not {type(value).__name__}") from None
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{name}={value} does not fit in 64 bits")
    return number


def start_of(state: Mapping[str, Any], batch: int | None) -> StartPosition:
    """Return the start that a state describes, for a dataset with minibatches of `batch` images.

    Raises:
        KeyError, TypeError, ValueError: as for ``TgzImages.load_state_dict``.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a state must be a mapping, not {type(state).__name__}")
    epoch = integer("epoch", state["epoch"])
    if "position" in state:
        part = [integer("part", number) for number in state["part"]]
        position = integer("position", state["position"])
        if position < 0 or len(part) != 4:
            raise ValueError(f"{dict(state)!r} is not a state of an iterator")
        return StartPosition(epoch, 0, 1, -1, 0, position, *part)
    batches = integer("batches", state["batches"])
    batch_size = integer("batch_size", state.get("batch_size", batch or 1))
    workers = state.get("workers")
    workers = -1 if workers is None else integer("workers", workers)
    drop_last = integer("drop_last", state.get("drop_last", False))
    if batches < 0 or batch_size < 1 or (batch and (batch_size != batch or drop_last)):
        raise ValueError(f"{dict(state)!r} is not a state of a dataset with batch={batch}")
    return StartPosition(epoch, batches, batch_size, workers, int(drop_last != 0))


def state_of(start: StartPosition) -> dict[str, Any]:
    """Return the state that describes a start."""
    if start.position >= 0:
        return {"epoch": start.epoch, "position": start.position, "part": start.part}
    state: dict[str, Any] = {"epoch": start.epoch, "batches": start.batches}
    if start.batches:
        state |= {"batch_size": start.batch_size, "drop_last": start.drop_last != 0}
        if start.workers >= 0:
            state["workers"] = start.workers
    return state
