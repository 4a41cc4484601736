"""Counts and cases of tests that repeat: all under ``make soak``, a part of them otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")

SOAK = os.environ.get("CUDAFUTURE_SOAK", "") not in ("", "0")


in_soak_alone = pytest.mark.skipif(not SOAK, reason="others show it, too; CUDAFUTURE_SOAK=1 runs all")
"""marks one of several tests that take long, where another of them is in every run"""


def soak_count(full: int, part: int = 10) -> int:
    """Return ``full`` under CUDAFUTURE_SOAK=1, else a `part`-th of it and at least 1."""
    return full if SOAK else max(1, full // part)


def soak_cases(cases: Iterable[T], step: int) -> list[T]:
    """Return all cases under CUDAFUTURE_SOAK=1, else one of each `step` cases.

    With a `step` that is small and has no factor in common with the numbers of values of the parameters, the cases that
    are left show every pair of values.
    """
    return list(cases)[:: 1 if SOAK else step]
