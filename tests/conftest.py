"""Fixtures and hooks of all tests."""

from __future__ import annotations

import gc
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from cudafuture import debug
from cudafuture.config import config
from support.backends import choose_backend
from support.soak import SOAK

# The same examples in every run, so that a change is what makes a test fail; new ones each time under soak.
settings.register_profile("repeatable", derandomize=True)
if not SOAK:
    settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Let Ctrl-C interrupt the tests and their scripts, also where a shell runs them in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_crashed: list[object] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Record a worker of pytest-xdist that has crashed."""
    if error is not None:
        _crashed.append(node)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which a worker has crashed between tests: pytest-xdist would call it a success."""
    if _crashed and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the backends, and deselect the tests of the host where everything runs on a simulated accelerator."""
    for item in items:
        choose_backend(item)
    if config.getoption("--sim-everywhere"):
        left_out = [item for item in items if "on_the_host" in getattr(item, "fixturenames", ())]
        items[:] = [item for item in items if "on_the_host" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Hide the collected tests from the garbage collector, which many tests call often."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def without_origins() -> Iterator[None]:
    """Let futures not know the lines that make them, also with CUDAFUTURE_DEBUG=origin: whole texts are compared."""
    debug.record_origins(False)
    yield
    debug.record_origins(config.debug_origin)


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return pytest's folder, which is emptied after a test that passes: those of a whole run would take 13 GB.

    The folder itself stays. Otherwise a later test would get its name while a FileStore of this test still uses it.
    """
    failed = request.session.testsfailed
    yield tmp_path
    if request.session.testsfailed == failed:
        for entry in tmp_path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return pytest's fixture, without what futures that earlier tests have left in cycles say when they are freed."""
    gc.collect()
    caplog.clear()
    return caplog


@pytest.fixture
def small_heap() -> None:
    """Hide the objects that exist from the garbage collector, for a test that asks it often."""
    gc.collect()
    gc.freeze()


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
