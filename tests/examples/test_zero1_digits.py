"""The ZeRO-1 example: it equals plain torch with a share of the state, and notices when it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cudafuture.testing import Finished, torchrun
from support.soak import in_soak_alone

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

EXAMPLES = Path(__file__).parents[2] / "examples"

A_LITTLE_WRONG = """
import sys, zero1_digits

class Wrong(zero1_digits.Bucket):
    def _step(self, reduced):
        if self.optimizer.state:  # from the second step on: Adam does not care about a factor in all of them
            reduced.value().mul_(1.001)
        return super()._step(reduced)

zero1_digits.Bucket = Wrong
sys.exit(zero1_digits.main())
"""


def train(n: int, tmp_path: Path, *args: str, script: Path = EXAMPLES / "zero1_digits.py") -> tuple[Finished, Any]:
    """Run the example: how it ended, and its results."""
    path = tmp_path / "results.json"
    env = {"PYTHONPATH": str(EXAMPLES)}
    finished = torchrun(script, n, *args, "--json", str(path), timeout=100, env=env, check=False)
    assert path.exists(), finished.stderr
    return finished, json.loads(path.read_text())


def test_two_ranks_learn_with_half_state(tmp_path: Path) -> None:
    finished, results = train(2, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert results["checks"] == {
        "accuracy": True,
        "same on every rank": True,
        "same as plain torch": True,
        "an even share of the state": True,
    }
    assert results["largest_difference"] == 0, "two numbers have one sum, in whatever order"
    assert results["state_bytes"] * 2 == results["full_state_bytes"]
    assert finished.stdout.count("ZeRO-1 on 2 ranks") == 1, "one summary, of rank 0"
    assert "Warning" not in finished.stderr


@in_soak_alone
def test_three_ranks_have_padded_shards(tmp_path: Path) -> None:
    finished, results = train(3, tmp_path, "--epochs", "2")
    results["checks"].pop("accuracy")
    assert all(results["checks"].values()), finished.stdout
    assert results["state_bytes"] * 3 > results["full_state_bytes"]


def test_disk_state_gives_same_training(tmp_path: Path) -> None:
    _, results = train(2, tmp_path, "--epochs", "1", "--state", "disk")
    results["checks"].pop("accuracy")
    assert results["checks"].pop("the state is on disk")
    assert all(results["checks"].values()), results
    assert results["largest_difference"] == 0


@in_soak_alone
def test_slightly_wrong_gradients_are_noticed(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(A_LITTLE_WRONG)
    finished, results = train(2, tmp_path, "--epochs", "1", script=script)
    assert finished.returncode != 0
    assert results["checks"]["same on every rank"]
    assert not results["checks"]["same as plain torch"]
    assert "FAILED  same as plain torch" in finished.stdout
