"""The storage node example: states come back to the bit, it notices when they do not, and it ends in order."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cudafuture.testing import Finished, torchrun
from support.soak import in_soak_alone

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "storage_node.py"

A_STATE_THAT_IS_NOT_WRITTEN_AGAIN = """
import sys, rpc_ext, storage_node
from cudafuture import CUDAFuture

class Stale(rpc_ext.RemoteStore):
    def writev(self, tensors):
        if "exp_avg of bucket 0" in tensors and "exp_avg of bucket 0" in self.keys():
            return CUDAFuture.completed(0)
        return super().writev(tensors)

rpc_ext.RemoteStore = Stale
sys.exit(storage_node.main())
"""

A_TRAINER_THAT_BREAKS = """
import os, sys, storage_node

well = storage_node.train

def train(args, states, stop):
    if os.environ["RANK"] == "1":
        raise ArithmeticError("broken on purpose")
    return well(args, states, stop)

storage_node.train = train
sys.exit(storage_node.main())
"""


def options(tmp_path: Path, *args: str) -> list[str]:
    return ["--folder", str(tmp_path / "store"), "--json", str(tmp_path / "results.json"), *args]


def launch(tmp_path: Path, n: int, *args: str, script: Path = SCRIPT) -> Finished:
    """Run the example, or a script that changes it."""
    env = {"PYTHONPATH": str(EXAMPLES)}
    return torchrun(script, n, *options(tmp_path, *args), timeout=100, env=env, check=False)


def results(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "results.json").read_text())


def nothing_is_left(tmp_path: Path) -> bool:
    return [path.name for path in (tmp_path / "store").rglob("*")] == []


def test_two_trainers_recover_states(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(32))
    finished = launch(tmp_path, 3, "--steps", "100", "--secret-file", str(secret))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    written = results(tmp_path)
    assert written["checks"] == {
        "same parameters as in memory": True,
        "same states as in memory": True,
        "same on every rank": True,
        "accuracy": True,
    }
    assert written["signed"]
    assert [trainer["steps"] for trainer in written["trainers"]] == [100, 100]
    nbytes = sum(trainer["state_bytes"] for trainer in written["trainers"])
    assert f"{nbytes * 101 / 1e6:.1f} MB" in finished.stdout, "all states are written at first, and after each step"
    assert "refused 0" in finished.stdout
    assert "Warning" not in finished.stderr
    assert nothing_is_left(tmp_path)


@in_soak_alone
def test_stale_state_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(A_STATE_THAT_IS_NOT_WRITTEN_AGAIN)
    finished = launch(tmp_path, 2, "--steps", "3", script=script)
    assert finished.returncode != 0
    checks = results(tmp_path)["checks"]
    assert not checks["same parameters as in memory"]
    assert not checks["same states as in memory"]
    assert "FAILED  same states as in memory" in finished.stdout
    assert not results(tmp_path)["signed"]


@in_soak_alone
def test_node_leaves_when_trainer_breaks(tmp_path: Path) -> None:
    script = tmp_path / "breaks.py"
    script.write_text(A_TRAINER_THAT_BREAKS)
    finished = launch(tmp_path, 3, script=script)
    assert finished.returncode != 0
    assert "ArithmeticError: broken on purpose" in finished.stderr
    assert "refused 0" in finished.stdout, "it says what it has done so far"
    assert nothing_is_left(tmp_path)


@in_soak_alone
def test_interrupt_ends_node_in_order(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(SCRIPT)]
    command = [*launcher, *options(tmp_path, "--steps", "1000000")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "training; Ctrl-C ends it early\n"
            process.send_signal(signal.SIGINT)
            said = process.communicate()[0]
        finally:
            process.terminate()  # of no effect where it has ended; else it ends its workers
            process.wait()
    errors = (tmp_path / "stderr").read_text()
    assert process.returncode != 0, "torchrun says that it was interrupted"
    assert "storage_node.py" not in errors, errors
    written = results(tmp_path)
    assert written["checks"] == {
        "same parameters as in memory": True,
        "same states as in memory": True,
        "same on every rank": True,
    }
    steps = {trainer["steps"] for trainer in written["trainers"]}
    assert len(steps) == 1, "trainers agree on the last step"
    assert 0 < steps.pop() < 1000000
    assert "refused 0" in said, "the node says what it has done"
    assert nothing_is_left(tmp_path)
