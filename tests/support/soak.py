"""How often a test repeats what has to hold every time: in full under ``make soak``, a tenth of it otherwise."""

from __future__ import annotations

import os

import pytest

SOAK = os.environ.get("CUDAFUTURE_SOAK", "") not in ("", "0")


in_soak_alone = pytest.mark.skipif(not SOAK, reason="others show it, too; CUDAFUTURE_SOAK=1 runs all")
"""marks one of several tests that take long, where another of them is in every run"""


def soak_count(full: int) -> int:
    """Return ``full`` under CUDAFUTURE_SOAK=1, else a tenth of it and at least 1."""
    return full if SOAK else max(1, full // 10)
