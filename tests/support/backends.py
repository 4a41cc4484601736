"""The c10d backends of the tests' groups: torch's own, or the backend "cudafuture" around them.

With CUDAFUTURE_TEST_BACKEND=cudafuture every world and every rank that a test starts over Gloo or NCCL has the backend
"cudafuture". The tests then show that the functions of cudafuture.distributed do the same on such a group.
"""

from __future__ import annotations

import os

import pytest

__all__ = ["GLOO", "NCCL", "choose_backend"]

_WRAPS = os.environ.get("CUDAFUTURE_TEST_BACKEND") == "cudafuture"
GLOO = "cudafuture" if _WRAPS else "gloo"
NCCL = "cudafuture" if _WRAPS else "nccl"


def choose_backend(item: pytest.Item) -> None:
    """Give the world of a test the backend, unless its marker names one."""
    marker = item.get_closest_marker("world")
    if marker is not None and len(marker.args) == 1 and "backend" not in marker.kwargs:
        item.add_marker(pytest.mark.world(*marker.args, backend=GLOO, **marker.kwargs), append=False)
