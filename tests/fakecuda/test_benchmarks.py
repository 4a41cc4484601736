"""The benchmark of a GPU on fake devices: each row runs its logic with its data checked, and takes no figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.soak import in_soak_alone

pytestmark = [pytest.mark.cuda, pytest.mark.slow]

SKIPPED = {"prefetching-overlap", "storing-read-gds"}  # for want of a profile, and of KvikIO
MAY_BE_SKIPPED = {"io_uring", "direct"}  # where the kernel or the file system has none


@pytest.mark.parametrize("schedule", ["jitter", pytest.param("lazy", marks=in_soak_alone)])
def test_gpu_benchmark_rows_run(tmp_path: Path, schedule: str) -> None:
    report = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "cudafuture", "bench", "gpu", "--check", "--json", str(report)]
    variables = {"FAKECUDA_SCHEDULE": schedule, "FAKECUDA_RACES": "0", "CUDAFUTURE_BENCH_DIR": str(tmp_path)}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(report.read_text())["rows"]}
    assert "copies-pinned-64KiB" in rows
    for name, row in rows.items():
        may_be_skipped = name in SKIPPED or MAY_BE_SKIPPED & set(name.split("-"))
        assert row["verdict"] == "rehearsed" or (row["verdict"] == "skipped" and may_be_skipped), row
        assert "measured" not in row
