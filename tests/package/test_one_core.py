"""Both native modules use one copy of the core, whichever is loaded first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cudafuture._C
import rpc_ext._C

SCRIPT = Path(__file__).with_name("one_core.py")


@pytest.mark.parametrize("names", [("cudafuture", "rpc_ext"), ("rpc_ext", "cudafuture")], ids="-".join)
def test_modules_share_one_core(names: tuple[str, str]) -> None:
    folder = Path(str(cudafuture._C.__file__)).parents[1]
    assert Path(str(rpc_ext._C.__file__)).parents[1] == folder
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *names], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
