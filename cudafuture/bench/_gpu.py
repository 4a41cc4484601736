"""Shared parts of the benchmarks of a GPU: the test for a real device, and timing of work to its end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from cudafuture.bench._rows import Row, Timed, by_turns
from cudafuture.testing import fakecuda

IS_FAKE = fakecuda.is_active()
"""True on fake devices, where everything is small and figures mean nothing"""
MIB = 1 << 20
Medians = dict[str, float]  # nanoseconds, by the name of a contender
now = time.perf_counter_ns
sync: Callable[[], None] = torch.cuda.synchronize


def to_the_end(call: Callable[[], Any]) -> Timed:
    """Return a function that returns the nanoseconds from a call until the device has finished its work."""

    def time_call() -> float:
        sync()
        start = now()
        call()
        sync()
        return now() - start

    return time_call


def medians(rounds: int, **calls: Callable[[], Any]) -> Medians:
    """Run the calls by turns and return the median of each."""
    took = by_turns(1 if IS_FAKE else rounds, *map(to_the_end, calls.values()))
    return dict(zip(calls, map(statistics.median, took), strict=True))


def against(name: str, what: str, took: Medians, ours: str, peer: str, limit: float) -> Row:
    """Return the row of a ratio, in microseconds; `what` tells the other contenders."""
    others = ", ".join(f"{n} {ns / 1e3:,.0f}" for n, ns in took.items() if n not in (ours, peer))
    us, them = took[ours], took[peer]
    told = f"{what} ({others})" if others else what
    return Row(name, told, "us", us / 1e3, them / 1e3, peer.replace("_", " "), "x", us / them, limit)


def expect(is_right: object, what: str) -> None:
    """Raise unless the data are right: figures of wrong data mean nothing."""
    if not is_right:
        raise AssertionError(f"the data are wrong: {what}")


def expect_equal(tensor: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Raise unless a tensor has these elements."""
    expect(torch.equal(tensor.cpu(), wanted.cpu()), what)
