"""What several of the unit tests need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture.storage import Engine, Offloader
from support.storing import BACKENDS, KINDS, engine_on


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is of the host all the same, where everything is to run on a simulated accelerator."""
    if config.getoption("--sim-everywhere"):
        left_out = [item for item in items if "on_the_host" in getattr(item, "fixturenames", ())]
        items[:] = [item for item in items if "on_the_host" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let Python change threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def on_the_host() -> Iterator[None]:
    """Make tensors on the host, whatever the default device of the run is; a run on another one leaves them out.

    So are those of other interpreters, which know nothing of the run's options.
    """
    with torch.device("cpu"):
        yield


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Give an engine with the smallest blocks that a store takes, on each backend."""
    with engine_on(request.param) as engine:
        yield engine


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def store(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Iterator[Offloader]:
    """Give a store of each kind; modules that need another one have their own."""
    with Offloader(tmp_path / "store", engine=engine, **request.param) as store:
        yield store


@pytest.fixture(params=[False, True], ids=["ephemeral", "durable"])
def durable(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
