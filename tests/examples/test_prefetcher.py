"""The example for strangers runs as it says."""

from __future__ import annotations

from pathlib import Path

from support.child import RUN_PYTEST, run_script


def test_prefetcher_bugs_are_found() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "test_prefetcher.py"
    options = ["--disable-plugin-autoload", "-p", "cudafuture.testing.plugin", "-p", "no:cacheprovider"]
    done = run_script(RUN_PYTEST, *options, "-c", "/dev/null", str(example))
    assert "3 passed" in done.stdout, done.stdout + done.stderr
