"""Fixtures of the tests of the fake CUDA devices, which run on them: ``make test-cuda``."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable

import pytest

from cudafuture.testing import fakecuda
from support.child import run_script

IMPORTS = """
import ctypes
import pytest
import torch
from cudafuture import CUDAFuture
from cudafuture.testing import fakecuda
"""


@pytest.fixture(autouse=True)
def _needs_fakecuda() -> None:
    if not fakecuda.is_active():
        pytest.skip("this process has no fake devices; run: python -m cudafuture.testing.fakecuda -- pytest")


@pytest.fixture
def alone() -> Callable[..., str]:
    """Return a function that runs a program in a process of its own, which must succeed, and returns its output."""

    def run(program: str, **variables: str) -> str:
        done = run_script(IMPORTS + textwrap.dedent(program), environment=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def race_detection() -> None:
    """Skip the test where the process does not detect races; drop the races that earlier tests left."""
    if not fakecuda.is_active():
        pytest.skip("needs the fake CUDA runtime; run: python -m cudafuture.testing.fakecuda --races -- pytest ...")
    try:
        fakecuda.races()
    except RuntimeError as e:
        pytest.skip(f"needs race detection: {e}")


@pytest.fixture
def lazy_schedule() -> None:
    """Skip the test where operations run before a host thread waits for them."""
    if not fakecuda.is_active() or os.environ["FAKECUDA_SCHEDULE"] != "lazy":
        pytest.skip("needs the fake CUDA runtime with --schedule lazy, under which a missing wait shows each time")
