"""The example for strangers runs as it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_bugs_of_the_prefetcher_are_found() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "test_prefetcher.py"
    command = [sys.executable, "-m", "pytest", "--disable-plugin-autoload", "-p", "cudafuture.testing.plugin"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-c", "/dev/null", str(example)], capture_output=True, text=True
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr
