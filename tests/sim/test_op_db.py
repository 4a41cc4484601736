"""torch's operators on the simulated device agree with the CPU, on the samples that torch tests them with itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.soak import SOAK

SWEEP = Path(__file__).parent / "op_db_sweep.py"
SHARDS = 2

# Operators that do not agree, and why. Not in the list: operators that need a GPU's compiler (jiterator).
EXCEPTIONS = {
    "sparse.mm.reduce": "simulated devices have no sparse tensors",
    "sparse.sampled_addmm": "simulated devices have no sparse tensors",
    "to_sparse": "simulated devices have no sparse tensors",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["lazy", "jitter"] if SOAK else ["lazy"])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_operators_and_gradients_match_cpu(shard: int, schedule: str) -> None:
    samples = [] if SOAK else ["--samples=3"]
    command: list[str | Path]
    command = [sys.executable, SWEEP, f"--shard={shard}", f"--shards={SHARDS}", f"--schedule={schedule}", *samples]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"stopped in {result.stderr[-2000:]}"
    found = json.loads(result.stdout)
    assert len(found["names"]) > 500 // SHARDS
    expected = [name for name in found["names"] if name in EXCEPTIONS]
    assert len(expected) <= 0.03 * len(found["names"])
    new = {name: what for name, what in found["different"].items() if name not in EXCEPTIONS}
    assert not new
    stale = [name for name in expected if name not in found["different"]]
    assert not stale
