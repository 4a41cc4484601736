"""Fixtures of the tests that need CUDA. Without a GPU every test here is skipped. All devices share tests/device."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch

from support.child import run_script
from support.harness import Cuda


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    """Yield the GPU, idle before the test and after it."""
    device = Cuda()
    device.finish()
    yield device
    device.finish()


@pytest.fixture
def alone() -> Callable[..., str]:
    """Return a function that runs a script in a new process, checks its status, and returns its output."""

    def run(script: str, **environment: str) -> str:
        done = run_script(textwrap.dedent(script), environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
