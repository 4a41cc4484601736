"""What several of the unit tests need."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from cudafuture.storage import Engine
from unit.storing import BACKENDS, engine_on


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


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Give an engine with the smallest blocks that a store takes, on each backend."""
    with engine_on(request.param) as engine:
        yield engine


@pytest.fixture(params=[False, True], ids=["ephemeral", "durable"])
def durable(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
