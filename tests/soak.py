"""How often a test repeats what has to hold every time: in full under ``make soak``, a tenth of it otherwise."""

from __future__ import annotations

import os

SOAK = os.environ.get("CUDAFUTURE_SOAK", "") not in ("", "0")


def soak_count(full: int) -> int:
    """Return ``full`` under CUDAFUTURE_SOAK=1, else a tenth of it and at least 1."""
    return full if SOAK else max(1, full // 10)
