"""What several of the unit tests need."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let Python change threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def on_the_host() -> Iterator[None]:
    """Make tensors on the host, whatever the default device of the run is."""
    with torch.device("cpu"):
        yield
