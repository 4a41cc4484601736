"""The example of pipelines beside each other: it trains as the plain model does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("world")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline_gpt.py"


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "gpipe"] if SOAK else ["1f1b"])
def test_mesh_and_plain_model_agree(schedule: str, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(EXAMPLE.parent), "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(EXAMPLE)]
    command += ["--short", "--schedule", schedule, "--folder", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=500)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("the parameters of the plain model: True") == 4
    assert list(tmp_path.iterdir()) == []
