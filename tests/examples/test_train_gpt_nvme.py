"""The GPT example: training with state on a disk equals training in memory, and differences are failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.soak import in_soak_alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("world")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt_nvme.py"

SMALL = ["--layers", "2", "--width", "192"]

A_LITTLE_WRONG = """
import sys, torch, train_gpt_nvme

def wrong(optimizer, *args, **kwargs):
    optimizer.param_groups[0]["lr"] *= 1.0001
    return offload(optimizer, *args, **kwargs)

offload, train_gpt_nvme.offload, train_gpt_nvme.__file__ = train_gpt_nvme.offload, wrong, __file__
sys.exit(train_gpt_nvme.main())
"""


def train(tmp_path: Path, *options: str, script: Path = EXAMPLE) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Run the example; return the finished process and its results."""
    path = tmp_path / "results.json"
    command = [sys.executable, str(script), "--folder", str(tmp_path), "--json", str(path), *options]
    environment = {"PYTHONPATH": str(EXAMPLE.parent), "PATH": ""}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=500)
    assert path.exists(), finished.stderr
    return finished, json.loads(path.read_text())


@pytest.mark.parametrize("when", ["step", pytest.param("backward", marks=in_soak_alone)])
def test_disk_training_equals_memory_training(tmp_path: Path, when: str) -> None:
    finished, results = train(tmp_path, "--short", *SMALL, "--steps", "24", "--when", when)
    disk, serial, memory = results["disk"], results["serial"], results["memory"]
    assert finished.returncode == 0, finished.stdout
    assert all(results["checks"].values())
    assert len(disk["losses"]) == 24
    assert disk["losses"] == serial["losses"] == memory["losses"]
    assert len(disk["seconds"]) == len(serial["seconds"]) == len(memory["seconds"]) == 24
    assert serial["disk_bytes"] == disk["disk_bytes"]
    assert disk["disk_bytes"] > 0.9 * 8 * disk["parameters"], "nearly all of AdamW's two tensors for each parameter"
    assert memory["disk_bytes"] == 0
    assert finished.stdout.count(" before training)") == 3, "one memory peak for each training"
    assert finished.stdout.count(" ms per step") == 3
    assert "FAILED" not in finished.stdout
    assert finished.stderr.count("mean loss") == 3 * 6
    assert list(tmp_path.iterdir()) == [tmp_path / "results.json"]


@in_soak_alone
def test_differences_and_constant_loss_are_failures(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(A_LITTLE_WRONG)
    finished, results = train(tmp_path, *SMALL, "--steps", "1", script=script)
    assert finished.returncode == 2, finished.stdout
    assert results["disk"]["losses"] == results["memory"]["losses"], "the first loss is that of the first parameters"
    assert not any(results["checks"].values())
    assert finished.stdout.count("FAILED") == 2


@in_soak_alone
@pytest.mark.parametrize("options", [[], ["--when", "step"]])
def test_disk_training_takes_less_memory(tmp_path: Path, options: list[str]) -> None:
    finished, results = train(tmp_path, *options)
    assert finished.returncode == 0, finished.stdout
    saved = results["memory"]["peak_bytes"] - results["disk"]["peak_bytes"]
    assert saved > results["disk"]["disk_bytes"] / 2, finished.stdout
