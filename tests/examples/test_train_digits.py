"""The main job: what it claims holds with two processes, and its checks notice when something does not."""

from __future__ import annotations

import importlib
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cudafuture import trace
from cudafuture.testing import Finished, torchrun
from cudafuture.trace import Trace, TracedFuture
from support.soak import in_soak_alone

pytestmark = pytest.mark.world

EXAMPLES = Path(__file__).parents[2] / "examples"

IN_MEMORY = "same as blocking calls, Adam's state in memory"

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

STATE_THAT_IS_WRONG = """
import os, sys, rpc_ext, train_digits
from collections import Counter
from cudafuture import CUDAFuture, errors

read, write = rpc_ext.RemoteStore.read, rpc_ext.RemoteStore.write
turns, first = Counter(), {}

def is_turn(key, turn):
    turns[key] += 1
    return key.startswith("fc1") and turns[key] == turn

def read_stale(self, key, *args, **options):
    if is_turn(key, 5):
        return CUDAFuture.completed(first[key].clone())
    future = read(self, key, *args, **options)
    return future.then(lambda done: first.setdefault(key, done.value().clone()) is None or done.value())

def write_other_bits(self, key, tensor, **options):
    if is_turn(key, 5):
        tensor[0].nextafter_(tensor.new_tensor(1))
    return write(self, key, tensor, **options)

def write_not_at_all(self, key, tensor, turn=5, **options):
    return CUDAFuture.completed(tensor.nbytes) if is_turn(key, turn) else write(self, key, tensor, **options)

def write_not_the_last(self, key, tensor, **options):
    return write_not_at_all(self, key, tensor, 1 + 22, **options)  # steps of an epoch, and the zeros at the begin

def write_and_fail(self, key, tensor, **options):
    if is_turn(key, 5) and os.environ["RANK"] == "0":
        return CUDAFuture.failed(errors.StorageError("broken on purpose"))
    return write(self, key, tensor, **options)

wrong = sys.argv.pop(1)
setattr(rpc_ext.RemoteStore, wrong.partition("_")[0], globals()[wrong])
sys.exit(train_digits.main())
"""


def launch(script: Path, *args: str) -> Finished:
    """Run a script on two ranks, which find the modules of the examples."""
    return torchrun(script, 2, *args, timeout=100, env={"PYTHONPATH": str(EXAMPLES)}, check=False)


def train(tmp_path: Path, *args: str, script: Path = EXAMPLES / "train_digits.py") -> tuple[int, str, dict[str, Any]]:
    """Run the example: its exit code, what it printed, and its results."""
    path = tmp_path / "results.json"
    ran = launch(script, *args, "--json", str(path))
    assert path.exists(), ran.stderr
    return ran.returncode, ran.stdout + ran.stderr, json.loads(path.read_text())


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_digits")


@pytest.mark.slow
def test_training_learns_overlaps_and_matches_blocking(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    traces = tmp_path / "traces"
    code, printed, results = train(tmp_path, "--epochs", "6", "--folder", str(folder), "--trace", str(traces))
    assert code == 0, printed
    assert results["accuracy"] >= 0.95
    assert results["checks"] == {
        "accuracy": True,
        "same on every rank": True,
        "same as blocking calls, Adam's state on the same disk": True,
        IN_MEMORY: True,
        "same state on the disk": True,
    }
    of_a_step = 2 * sum(results["kib"]) / 1024
    assert results["disk"]["mib_written"] == pytest.approx((results["steps"] + 1) * of_a_step)
    assert results["disk"]["mib_read"] >= results["steps"] * of_a_step
    assert results["disk"]["refused"] == 0
    assert not list(folder.glob("store*")), "nothing is left on the disk"
    assert len(results["kib"]) >= 3
    communication = results["overlap"]["communication"]
    assert 0 < communication["overlapped"] <= communication["in_flight"], "no bucket travelled while backward went on"
    assert results["analysis"] in printed
    assert re.search(rf"^{2 * results['steps']} steps, median", results["analysis"]), "those of both ranks"
    assert "in _wait_for_update()" in results["analysis"]
    assert_in_order(trace.load(traces))
    assert len(re.findall("overlapped .*100%", printed)) == 1, "one progress bar, of rank 0"
    loops = ["overlapped", "blocking", "blocking in memory"]
    assert list(results["seconds"]) == loops
    for loop, words in zip(loops, ["overlapped.*other worker", "blocking.*same disk", "blocking.*memory"], strict=True):
        assert re.findall(rf"^  {words}: +(\d+\.\d\d) s$", printed, re.MULTILINE) == [f"{results['seconds'][loop]:.2f}"]


def test_gain_compares_on_same_disk(example: ModuleType) -> None:
    seconds = {"overlapped": 3.0, "blocking": 4.0, "blocking in memory": 2.0}
    assert example.gain(seconds) == (
        "overlap takes 0.75 of the time of blocking calls\n"
        "the disk adds 2.00 s with blocking calls, and 1.00 s with overlap"
    )
    assert example.gain(seconds | {"overlapped": 4.4}) == (
        "no gain from overlap on this machine: it takes 1.10 times the time of blocking calls"
    )
    in_memory = {"overlapped in memory": 1.0, "blocking in memory": 2.0}
    assert example.gain(in_memory) == "overlap takes 0.50 of the time of blocking calls"


def assert_in_order(recorded: Trace) -> None:
    """Assert that each bucket is read after its last write, in the same number of turns, on both ranks."""
    assert len(recorded.ranks) == 2
    assert recorded.lost == 0
    for rank in recorded.ranks:
        calls: defaultdict[str, list[TracedFuture]] = defaultdict(list)
        for operation in rank.operations():
            is_call = operation.place is not None and operation.place["kind"] == "worker"
            if is_call and operation.name.startswith(("read ", "write ")):
                calls[operation.name.split()[-1]].append(operation)
        assert len(calls) >= 3
        for key, of_bucket in calls.items():
            assert len(of_bucket) > 100
            ordered = sorted(of_bucket, key=lambda call: call.issued or 0)
            for first, second in pairwise(ordered):
                assert first.done is not None, key
                assert second.issued is not None, key
                assert first.done <= second.issued, "a read that began before the write had ended, or the reverse"


@pytest.mark.slow
@in_soak_alone
def test_training_without_learning_exits_with_error(tmp_path: Path) -> None:
    code, printed, results = train(tmp_path, "--epochs", "1", "--no-compare", "--state", "memory")
    assert code != 0
    assert results["checks"] == {"accuracy": False, "same on every rank": True}
    assert "FAILED  accuracy" in printed
    assert results["disk"] is None
    assert results["overlap"]["io"]["in_flight"] == 0, "all of it stays in memory"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "noticed"),
    [
        ("read_stale", IN_MEMORY),
        pytest.param("write_other_bits", IN_MEMORY, marks=in_soak_alone),
        pytest.param("write_not_at_all", IN_MEMORY, marks=in_soak_alone),
        pytest.param("write_not_the_last", "same state on the disk", marks=in_soak_alone),
    ],
)
def test_slightly_wrong_state_is_noticed(tmp_path: Path, wrong: str, noticed: str) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(STATE_THAT_IS_WRONG)
    code, printed, results = train(tmp_path, wrong, "--epochs", "1", script=script)
    assert code != 0
    assert results["checks"]["same on every rank"], "both ranks are wrong in the same way"
    assert not results["checks"][noticed]
    assert f"FAILED  {noticed}" in printed


@pytest.mark.slow
def test_failed_write_reaches_forward(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(STATE_THAT_IS_WRONG)
    ran = launch(script, "write_and_fail", "--folder", str(tmp_path / "disk"))
    assert ran.returncode != 0
    of_rank_0 = "\n".join(line for line in ran.stderr.splitlines() if line.startswith("[rank0]"))
    assert "in _wait_for_update" in of_rank_0
    assert "StorageError: broken on purpose" in of_rank_0


@pytest.mark.slow
@in_soak_alone
def test_bit_difference_between_ranks_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "changed_bit.py"
    script.write_text(SCRIPT_WITH_ONE_CHANGED_BIT)
    ran = launch(script)
    assert ran.returncode == 0, ran.stderr


def test_bit_difference_from_loop_is_noticed(example: ModuleType) -> None:
    torch.manual_seed(0)
    ours, theirs = example.make_model(), example.make_model()
    theirs.load_state_dict(ours.state_dict())
    assert example.differing(ours, theirs) == []
    with torch.no_grad():
        theirs.conv2.weight[3, 2, 1, 0].nextafter_(torch.tensor(torch.inf))
    assert example.differing(ours, theirs) == ["conv2.weight"]


def test_next_forward_waits_layer_by_layer(example: ModuleType) -> None:
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
def test_buckets_hold_layers_in_reverse(example: ModuleType, kib: int, groups: Sequence[Sequence[str]]) -> None:
    model = example.make_model()
    buckets = example.make_buckets(model, kib)
    assert [list(bucket.layers) for bucket in buckets] == groups
    owned = [id(p) for bucket in buckets for p in bucket.parameters]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
