"""The GPT example: training with state on a disk equals training in memory, and a difference is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soak import in_soak_alone

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("world")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt_nvme.py"

A_LITTLE_WRONG = """
import sys, torch, train_gpt_nvme

def wrong(optimizer, *args, **kwargs):
    optimizer.param_groups[0]["lr"] *= 1.0001
    return offload(optimizer, *args, **kwargs)

offload, train_gpt_nvme.offload, train_gpt_nvme.__file__ = train_gpt_nvme.offload, wrong, __file__
sys.exit(train_gpt_nvme.main())
"""


def train(tmp_path: Path, *options: str, script: Path = EXAMPLE) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run the example: how it ended, and its results."""
    path = tmp_path / "results.json"
    command = [sys.executable, str(script), "--short", "--folder", str(tmp_path), "--json", str(path), *options]
    environment = {"PYTHONPATH": str(EXAMPLE.parent), "PATH": ""}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=100)
    assert path.exists(), finished.stderr
    return finished, json.loads(path.read_text())


@pytest.mark.parametrize("when", ["step", pytest.param("backward", marks=in_soak_alone)])
def test_training_with_state_on_a_disk_equals_training_in_memory(tmp_path: Path, when: str) -> None:
    finished, results = train(tmp_path, "--when", when)
    assert finished.returncode == 0, finished.stdout
    assert results["disk"]["losses"] == results["memory"]["losses"]
    assert results["disk"]["disk_bytes"] > 0.9 * 8 * results["disk"]["parameters"]
    assert results["memory"]["disk_bytes"] == 0
    assert "FAILED" not in finished.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "results.json"]


def test_a_difference_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(A_LITTLE_WRONG)
    finished, results = train(tmp_path, "--steps", "3", script=script)
    assert finished.returncode != 0
    assert not results["checks"]["losses, parameters and state are equal bit for bit"]
    assert "FAILED  losses" in finished.stdout
