"""The main job: what it claims holds with two processes, and its checks notice when something does not."""

from __future__ import annotations

import importlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.testing import Finished, torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"

SCRIPT_WITH_ONE_CHANGED_BIT = """
import torch, torch.distributed as dist, train_digits
dist.init_process_group("gloo")
torch.manual_seed(0)
model = train_digits.make_model()
assert train_digits.same_on_every_rank(model), "the same seed made different models"
if dist.get_rank() == 1:
    with torch.no_grad():
        last = next(reversed(list(model.parameters())))
        last[-1] = torch.nextafter(last[-1], torch.tensor(torch.inf))
assert not train_digits.same_on_every_rank(model), "the changed bit went unnoticed"
dist.barrier()
dist.destroy_process_group()
"""


def launch(script: Path, *args: str) -> Finished:
    """Run a script on two ranks, which find the modules of the examples."""
    return torchrun(script, 2, *args, timeout=100, env={"PYTHONPATH": str(EXAMPLES)}, check=False)


def train(tmp_path: Path, *args: str) -> tuple[int, str, dict[str, Any]]:
    """Run the example: its exit code, what it printed, and its results."""
    path = tmp_path / "results.json"
    ran = launch(EXAMPLES / "train_digits.py", *args, "--json", str(path))
    assert path.exists(), ran.stderr
    return ran.returncode, ran.stdout + ran.stderr, json.loads(path.read_text())


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_digits")


@pytest.mark.slow
def test_training_learns_overlaps_and_equals_the_synchronous_loop(tmp_path: Path) -> None:
    code, printed, results = train(tmp_path, "--epochs", "10")
    assert code == 0, printed
    assert results["accuracy"] >= 0.95
    assert results["checks"] == {"accuracy": True, "same on every rank": True, "same as the synchronous loop": True}
    layers = [layer for row in results["overlap"] for layer in row["layers"]]
    assert layers == ["fc2", "fc1", "conv3", "conv2", "conv1"]
    assert len(results["overlap"]) >= 3
    assert all(row["all_reduce_us"] > 0 and row["update_us"] > 0 for row in results["overlap"])
    first = results["overlap"][0]
    assert first["all_reduce_during_backward_us"] > 0, "the first bucket did not travel while backward went on"
    assert "What overlapped with what" in printed
    assert len(re.findall("overlapped .*100%", printed)) == 1, "one progress bar, of rank 0"


@pytest.mark.slow
def test_training_that_has_not_learnt_exits_with_an_error(tmp_path: Path) -> None:
    code, printed, results = train(tmp_path, "--epochs", "1", "--no-compare")
    assert code != 0
    assert results["checks"] == {"accuracy": False, "same on every rank": True}
    assert "FAILED  accuracy" in printed


@pytest.mark.slow
def test_one_bit_that_differs_between_ranks_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "changed_bit.py"
    script.write_text(SCRIPT_WITH_ONE_CHANGED_BIT)
    ran = launch(script)
    assert ran.returncode == 0, ran.stderr


def test_one_bit_that_differs_from_the_synchronous_loop_is_noticed(example: ModuleType) -> None:
    torch.manual_seed(0)
    ours, theirs = example.make_model(), example.make_model()
    theirs.load_state_dict(ours.state_dict())
    assert example.differing(ours, theirs) == []
    with torch.no_grad():
        theirs.conv2.weight[3, 2, 1, 0].nextafter_(torch.tensor(torch.inf))
    assert example.differing(ours, theirs) == ["conv2.weight"]


def test_the_next_forward_waits_for_each_layer_right_before_it(example: ModuleType) -> None:
    model = example.make_model()
    buckets = example.make_buckets(model, 0)
    order: list[str] = []

    class Update:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self, *, non_blocking: bool) -> None:
            assert non_blocking
            order.append(f"wait for {self.name}")

    example.Overlap(buckets)
    for bucket in buckets:
        bucket.updated = Update(*bucket.layers)
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda *_, name=name: order.append(name))
    model(torch.zeros(1, 1, 8, 8))
    expected = []
    for name, layer in model.named_children():
        expected += [f"wait for {name}"] if list(layer.parameters()) else []
        expected.append(name)
    assert order == expected


@pytest.mark.parametrize(
    ("kib", "groups"),
    [
        (0, [["fc2"], ["fc1"], ["conv3"], ["conv2"], ["conv1"]]),
        (64, [["fc2"], ["fc1"], ["conv3"], ["conv2", "conv1"]]),
        (10_000, [["fc2", "fc1", "conv3", "conv2", "conv1"]]),
    ],
)
def test_buckets_hold_whole_layers_in_reverse_order_of_use(
    example: ModuleType, kib: int, groups: Sequence[Sequence[str]]
) -> None:
    model = example.make_model()
    buckets = example.make_buckets(model, kib)
    assert [list(bucket.layers) for bucket in buckets] == groups
    owned = [id(p) for bucket in buckets for p in bucket.parameters]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())


def test_overlap_counts_only_the_time_that_spans_share(example: ModuleType) -> None:
    timeline = importlib.import_module("_timeline")
    us = 1000
    spans = [
        timeline.Span(1, "backward", timeline.NO_BUCKET, 0, 100 * us),
        timeline.Span(1, "all_reduce", 0, 40 * us, 130 * us),  # 60 during backward, 20 + 10 during other updates
        timeline.Span(1, "update", 1, 80 * us, 100 * us),
        timeline.Span(1, "update", 2, 120 * us, 150 * us),
        timeline.Span(1, "update", 0, 130 * us, 160 * us),
        timeline.Span(1, "wait", 0, 155 * us, 160 * us),
        timeline.Span(1, "wait", 0, 170 * us, 171 * us),
    ]
    assert timeline.overlap_in_step(spans, 0) == {
        "all_reduce_us": 90,
        "all_reduce_during_backward_us": 60,
        "all_reduce_during_other_updates_us": 30,
        "update_us": 30,
        "update_during_backward_us": 0,
        "forward_waited_us": 6,
    }
    assert timeline.overlap_in_step(spans, 1)["update_during_backward_us"] == 20


def test_a_watched_future_counts_until_it_was_last_seen_pending(example: ModuleType) -> None:
    timeline = importlib.import_module("_timeline").Timeline()
    future: CUDAFuture[None] = CUDAFuture()
    timeline.watch("all_reduce", 0, future)
    with timeline.span("backward"):
        pass
    future.set_result(None)
    completed = time.perf_counter_ns()
    with timeline.span("update", 1):
        pass
    flight, backward, update = timeline.spans
    assert flight.start < backward.start < backward.end < flight.end < completed < update.start
