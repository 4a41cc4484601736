"""The example that keeps activations on disk does as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "offload_activations.py"


def test_activations_go_to_disk_and_come_back(tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path / "store"), "--depth", "12", "--rows", "24576", "--under-way", "24"]
    done = subprocess.run([sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = re.search(r"in memory +(\d+) MiB.*\noffloaded +(\d+) MiB", done.stdout)
    assert figures is not None, done.stdout
    assert int(figures[2]) < int(figures[1])
    assert [p.name for p in (tmp_path / "store").iterdir()] == [".stores"]
