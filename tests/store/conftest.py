"""Fixtures of the store tests: an engine on each backend, and a store of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cudafuture.io import Engine
from cudafuture.store import DiskStore
from support.storing import BACKENDS, KINDS, engine_on


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Open an engine on each backend, with the smallest blocks that a store accepts."""
    with engine_on(request.param) as engine:
        yield engine


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
def store(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Iterator[DiskStore]:
    """Open a store of each kind. Modules that need another store define their own fixture."""
    with DiskStore(tmp_path / "store", engine=engine, **request.param) as store:
        yield store


@pytest.fixture(params=[False, True], ids=["ephemeral", "durable"])
def durable(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
