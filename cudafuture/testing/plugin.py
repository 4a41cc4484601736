"""The pytest plugin: the marker and the fixture ``world``."""

from __future__ import annotations

import pytest

from cudafuture.testing._pool import Pool
from cudafuture.testing.world import World

__all__: list[str] = []  # pytest finds what it needs

_MARKER = "world(n, backend='gloo', timeout=60): the `world` fixture of this test has n ranks; timeout in seconds"
_pool = pytest.StashKey[Pool]()


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker."""
    config.addinivalue_line("markers", _MARKER)
    config.stash[_pool] = Pool()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the workers."""
    if _pool in config.stash:
        config.stash[_pool].close()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Processes with torch.distributed initialised: ``world.run(function, *args)``. See ``pytest.mark.world``."""
    marker = request.node.get_closest_marker("world")
    if marker is None:
        raise pytest.UsageError("the fixture `world` needs to know its size: @pytest.mark.world(2)")
    return World(*marker.args, **marker.kwargs, pool=request.config.stash[_pool])
