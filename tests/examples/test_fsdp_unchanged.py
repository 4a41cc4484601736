"""The FSDP2 example: its training over the backend "cudafuture" equals that over Gloo, and every bucket has times."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cudafuture.testing import Finished, torchrun

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

EXAMPLES = Path(__file__).parents[2] / "examples"
LITTLE = ["--steps", "4", "--width", "64", "--batch-size", "8"]

A_LITTLE_WRONG = """
import sys, fsdp_unchanged

trained = fsdp_unchanged.train

def train(mesh, args):
    shards = trained(mesh, args)
    if fsdp_unchanged.dist.get_backend(mesh.get_group()) == "cudafuture":
        shards[0].view(-1)[0] += 1e-6
    return shards

fsdp_unchanged.train = train
sys.exit(fsdp_unchanged.main())
"""


def run(tmp_path: Path, *args: str, script: Path = EXAMPLES / "fsdp_unchanged.py") -> tuple[Finished, Any]:
    """Run the example on two ranks: how it ended, and its results."""
    path = tmp_path / "results.json"
    env = {"PYTHONPATH": str(EXAMPLES)}
    finished = torchrun(script, 2, *LITTLE, *args, "--json", str(path), timeout=100, env=env, check=False)
    assert path.exists(), finished.stderr
    return finished, json.loads(path.read_text())


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("fsdp_unchanged")


@pytest.mark.parametrize("options", [[], ["--prefetch"]], ids=["default", "prefetch"])
def test_each_bucket_of_the_backend_has_times(tmp_path: Path, options: list[str]) -> None:
    finished, results = run(tmp_path, *options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert results["checks"] == {"same as over Gloo": True, "every collective has completed": True}
    names = [bucket["name"] for bucket in results["buckets"]]
    assert names.count("reduce_scatter_tensor") == 4, "one for each layer"
    assert names.count("all_gather_into_tensor") >= 4
    assert all(bucket["in_flight_ms"] > 0 and bucket["exposed_ms"] > 0 for bucket in results["buckets"])
    assert finished.stdout.count("FSDP2 on 2 ranks") == 1, "one summary, of rank 0"
    assert "Warning" not in finished.stderr


def test_same_program_runs_over_gloo(tmp_path: Path) -> None:
    finished, results = run(tmp_path, "--backend", "gloo")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert results["checks"] == {"same as over Gloo": True}
    assert results["buckets"] == [], "the Works of Gloo have no futures"


def test_different_parameter_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(A_LITTLE_WRONG)
    finished, results = run(tmp_path, script=script)
    assert finished.returncode != 0
    assert not results["checks"]["same as over Gloo"]


def test_collectives_are_grouped_by_place_in_step(example: ModuleType) -> None:
    all_gathers = [
        example.Collective("all_gather", 8, issued=0.0, completed=9.0, waited=9.0),  # of the first step
        example.Collective("all_gather", 8, issued=1.0, completed=3.0, waited=0.5),
        example.Collective("all_gather", 8, issued=1.0, completed=5.0, waited=1.5),
    ]
    reduce_scatter = example.Collective("reduce_scatter", 4, issued=0.0)
    collectives = [one for all_gather in all_gathers for one in (all_gather, reduce_scatter)]
    buckets = example.by_bucket(collectives, 3)
    assert buckets[0] == example.Bucket("all_gather", 8, in_flight_ms=3000, exposed_ms=1000)
    assert [bucket.name for bucket in buckets] == ["all_gather", "reduce_scatter"]
    with pytest.raises(ValueError, match="no multiple of 4 steps"):
        example.by_bucket(collectives, 4)
    with pytest.raises(ValueError, match="not the same in all steps"):
        example.by_bucket(collectives, 2)
