"""The image example: both loops train alike, and a difference is a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.soak import in_soak_alone

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("world")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_images.py"

A_BATCH_LOST = """
import itertools, sys, train_images

def losing(loader, device):
    return itertools.islice(copy_each(loader, device), 3)

copy_each, train_images.copy_each = train_images.copy_each, losing
sys.exit(train_images.main())
"""


def run(script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), "--short", "--device", "cpu"]
    environment = {"PYTHONPATH": str(EXAMPLE.parent), "PATH": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=500)


def test_both_loops_end_with_same_parameters() -> None:
    finished = run(EXAMPLE)
    assert finished.returncode == 0, finished.stderr
    assert "both loops end with the same parameters: True" in finished.stdout
    assert finished.stdout.count(" prefetch: ") == 2


@in_soak_alone
def test_lost_batch_is_failure(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(A_BATCH_LOST)
    finished = run(script)
    assert finished.returncode == 1, finished.stderr
    assert "the same parameters: False" in finished.stdout
