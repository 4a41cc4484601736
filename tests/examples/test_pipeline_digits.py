"""The pipeline example: it trains as the plain model does, and a difference is a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.soak import SOAK, in_soak_alone

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("world")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline_digits.py"

A_GRADIENT_LOST = """
import sys, torch, pipeline_digits
from cudafuture.pipeline import Pipeline

def losing(self, *arguments):
    loss = step(self, *arguments)
    next(self.parameters()).grad.zero_()
    return loss

step, Pipeline.step = Pipeline.step, losing
sys.exit(pipeline_digits.main())
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(EXAMPLE.parent), "PATH": ""}
    arguments = [sys.executable, *command, "--short"]
    return subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False, timeout=500)


def test_pipeline_and_plain_model_agree() -> None:
    finished = run(str(EXAMPLE))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("the same parameters as the plain model: True") == 2


def test_ranks_and_plain_model_agree() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    finished = run(*launch, "4" if SOAK else "2", str(EXAMPLE), "--schedule", "zb1p")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("the same parameters as the plain model: True") == (4 if SOAK else 2)


@in_soak_alone
def test_lost_gradient_fails_example(tmp_path: Path) -> None:
    script = tmp_path / "losing.py"
    script.write_text(A_GRADIENT_LOST)
    finished = run(str(script))
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "the same parameters as the plain model: False" in finished.stdout
