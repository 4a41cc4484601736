"""What only CUDA can show. Without a GPU every test here is skipped; what all accelerators share is in tests/device."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch

from support.harness import Cuda


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    """The GPU, idle before the test and after it."""
    device = Cuda()
    device.finish()
    yield device
    device.finish()


@pytest.fixture
def alone() -> Callable[..., str]:
    """A function that runs a script in a process of its own, which must end well, and returns what it printed."""

    def run(script: str, **environment: str) -> str:
        command = [sys.executable, "-c", textwrap.dedent(script)]
        variables = os.environ | environment
        child = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=100)
        assert child.returncode == 0, child.stderr
        return child.stdout

    return run
