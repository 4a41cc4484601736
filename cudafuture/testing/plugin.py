"""Pytest plugin: the markers ``world`` and ``sim``, and the fixtures of the same names."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import pytest

from cudafuture.testing._worker_pool import WorkerPool
from cudafuture.testing.world import World

__all__: list[str] = []  # pytest finds what it needs

_MARKERS = (
    "world(n, backend='gloo', timeout=60): the `world` fixture of this test has n ranks; timeout in seconds",
    "sim(devices=1, schedule='free', seed=None, ...): the test runs with a simulated accelerator, as sim.enable() "
    "creates it, and fails on any race or failed device work; seed=None: a new one each time, shown on failure",
)
_SCHEDULES = ("free", "jitter", "lazy")
_pool = pytest.StashKey[WorkerPool]()
_seed = pytest.StashKey[int]()
_failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options."""
    group = parser.getgroup("cudafuture")
    group.addoption("--sim-seed", type=int, help="the seed of every simulated accelerator, as a failed test showed it")
    group.addoption("--sim-schedule", choices=_SCHEDULES, help="the schedule of every simulated accelerator")
    group.addoption(
        "--sim-everywhere",
        action="store_true",
        help="run every test with a simulated accelerator whose device 0 is torch's default device",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    config.stash[_pool] = WorkerPool()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Kill the workers."""
    if _pool in config.stash:
        config.stash[_pool].close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare the accelerator before any test computes a gradient."""
    if any(_is_simulated(item) for item in session.items):
        from cudafuture.testing import sim

        sim.prepare()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Return a world of processes with torch.distributed initialised: ``world.run(function, *args)``."""
    marker = request.node.get_closest_marker("world")
    if marker is None:
        raise pytest.UsageError("the fixture `world` needs its size: @pytest.mark.world(2)")
    return World(*marker.args, **marker.kwargs, pool=request.config.stash[_pool])


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Provide the module ``cudafuture.testing.sim``, enabled as ``pytest.mark.sim`` requests, for one test."""
    from cudafuture.testing import sim

    wanted = _wanted(request.node)
    request.node.stash[_seed] = wanted["seed"]
    sim.enable(**wanted)
    try:
        with _default_device(request.config):
            yield sim
        if not request.node.stash.get(_failed, False):
            _expect_clean(sim)  # checks the work of other fixtures after the test
    finally:
        sim.disable()


@pytest.fixture(autouse=True)
def _sim_by_marker(request: pytest.FixtureRequest) -> None:
    if _is_simulated(request.node):
        request.getfixturevalue("sim")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that left a race or a broken device behind."""
    __tracebackhide__ = True
    if _seed not in item.stash:
        return (yield)
    from cudafuture.testing import sim

    try:
        result = yield
        _expect_clean(sim)
    except BaseException:
        item.stash[_failed] = True
        sim.release()  # a fixture that waits now must not wait for holds of the failed test
        raise
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Show the options that reproduce a failed test, and its races if it failed for another reason."""
    report = yield
    if report.failed and _seed in item.stash:
        from cudafuture.testing import sim

        wanted = _wanted(item)
        again = f"--sim-seed={wanted['seed']} --sim-schedule={wanted['schedule']}"
        lines = [f"to reproduce: pytest {again} '{item.nodeid}'", *map(str, sim.races())]
        report.sections.append(("simulated accelerator", "\n".join(lines)))
    return report


def _expect_clean(sim: ModuleType) -> None:
    """Wait for the devices; raise the error of failed device work, and a RaceError for races."""
    __tracebackhide__ = True
    from cudafuture.testing.sim._races import raise_races

    sim.finish()
    raise_races()


def _is_simulated(item: Any) -> bool:
    return (
        item.get_closest_marker("sim") is not None
        or "sim" in getattr(item, "fixturenames", ())
        or bool(item.config.getoption("--sim-everywhere"))
    )


def _wanted(item: Any) -> dict[str, Any]:
    marker = item.get_closest_marker("sim")
    wanted = {} if marker is None else dict(marker.kwargs)
    if marker is not None and marker.args:
        raise pytest.UsageError("pytest.mark.sim takes keywords: @pytest.mark.sim(devices=2, schedule='lazy')")
    if unknown := wanted.keys() - _arguments():
        raise pytest.UsageError(f"pytest.mark.sim has no {', '.join(unknown)}, but {', '.join(_arguments())}")
    options = item.config.option
    if options.sim_schedule is not None:
        wanted["schedule"] = options.sim_schedule
    if options.sim_seed is not None:
        wanted["seed"] = options.sim_seed
    if wanted.get("seed") is None:
        wanted["seed"] = item.stash.get(_seed, random.SystemRandom().getrandbits(32))
    if "schedule" not in wanted:
        wanted["schedule"] = _SCHEDULES[wanted["seed"] % 3] if options.sim_everywhere else "free"
    return wanted


def _arguments() -> list[str]:
    from cudafuture.testing import sim

    return list(inspect.signature(sim.enable).parameters)


def _default_device(config: pytest.Config) -> AbstractContextManager[Any]:
    import torch

    return torch.device("sim:0") if config.getoption("--sim-everywhere") else contextlib.nullcontext()
