"""The parameter server example: what it claims holds with two trainers; its checks notice when something does not."""

from __future__ import annotations

import argparse
import importlib
import json
import secrets
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cudafuture.testing import Finished, torchrun
from support.soak import in_soak_alone

pytestmark = pytest.mark.world

EXAMPLES = Path(__file__).parents[2] / "examples"

A_TRAINER_THAT_BREAKS = """
import sys, parameter_server

well = parameter_server.train

def train(trainer, shards, args):
    if trainer == 1:
        raise ArithmeticError("broken on purpose")
    return well(trainer, shards, args)

parameter_server.train = train
sys.exit(parameter_server.main())
"""


def launch(script: Path, *args: str, **env: str) -> Finished:
    """Run a script on three ranks, which find the modules of the examples."""
    return torchrun(script, 3, *args, timeout=100, env={"PYTHONPATH": str(EXAMPLES), **env}, check=False)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("parameter_server")


@pytest.mark.slow
@pytest.mark.xdist_group("world")
def test_two_trainers_learn_with_signed_messages(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(32))
    path = tmp_path / "results.json"
    script = EXAMPLES / "parameter_server.py"
    finished = launch(script, "--json", str(path), CUDAFUTURE_RPC_SECRET_FILE=str(secret))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads(path.read_text())
    assert results["checks"] == {
        "accuracy": True,
        "every gradient was applied": True,
        "staleness within its bound": True,
    }
    assert results["signed"]
    assert results["trainers"].keys() == {"trainer1", "trainer2"}
    assert sum(results["staleness"].values()) == 2 * 200 * 4, "gradients: of two trainers, in steps, for shards"
    assert finished.stdout.count("accuracy on new images") == 1, "one summary, of rank 0"
    assert "Warning" not in finished.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("world")
@in_soak_alone
def test_training_without_learning_exits_with_error(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    script = EXAMPLES / "parameter_server.py"
    finished = launch(script, "--steps", "2", "--json", str(path))
    assert finished.returncode != 0
    results = json.loads(path.read_text())
    assert not results["checks"].pop("accuracy")
    assert all(results["checks"].values())
    assert not results["signed"]
    assert "FAILED  accuracy" in finished.stdout
    assert "Warning" not in finished.stderr, "loopback without a secret is nothing to warn of"


@pytest.mark.slow
@pytest.mark.xdist_group("world")
@in_soak_alone
def test_failing_trainer_is_named(tmp_path: Path) -> None:
    script = tmp_path / "breaks.py"
    script.write_text(A_TRAINER_THAT_BREAKS)
    finished = launch(script, "--steps", "2")  # as many as a trainer may be ahead of one that makes none
    assert finished.returncode != 0
    assert "1 of 2 calls have failed" in finished.stderr
    assert "trainer2: ArithmeticError: broken on purpose" in finished.stderr


def settings(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"learning_rate": 1e-3, "slack": 1, **changed})


def test_answer_to_fast_trainer_is_held(example: ModuleType) -> None:
    shard = example.Shard(torch.zeros(2), 2, settings())
    first, second = (shard.push(0, version, torch.ones(2)) for version in range(2))
    assert first.wait()[0] == 1
    assert not second.done(), "two ahead of the other, and one is allowed"
    assert shard.push(1, 0, torch.ones(2)).wait()[0] == 3, "who is behind is answered at once"
    version, values = second.wait()
    assert version == 3
    assert torch.equal(values, shard.values)


def test_staleness_counts_updates_between(example: ModuleType) -> None:
    shard = example.Shard(torch.zeros(2), 2, settings(slack=100))
    for trainer, version in [(0, 0), (0, 1), (0, 2), (1, 0)]:
        shard.push(trainer, version, torch.ones(2)).wait()
    assert shard.staleness == {0: 3, 3: 1}


def test_fetched_values_survive_later_gradients(example: ModuleType) -> None:
    shard = example.Shard(torch.zeros(2), 1, settings())
    version, values = shard.fetch()
    shard.push(0, 0, torch.ones(2)).wait()
    assert version == 0
    assert torch.equal(values, torch.zeros(2))
    assert not torch.equal(shard.fetch()[1], values)
