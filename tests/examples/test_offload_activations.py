"""The example that keeps activations on disk does as it says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.storing import open_held_store

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "offload_activations.py"


def test_activations_return_from_disk(tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path / "store"), "--depth", "12", "--rows", "24576", "--in-flight", "24"]
    done = subprocess.run([sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = re.search(r"in memory +(\d+) MiB.*\noffloaded +(\d+) MiB", done.stdout)
    assert figures is not None, done.stdout
    assert int(figures[2]) < int(figures[1])
    assert [p.name for p in (tmp_path / "store").iterdir()] == []


@pytest.mark.usefixtures("on_the_host")
def test_activation_changed_during_write_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("offload_activations", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    engine, store = open_held_store(tmp_path)
    with engine, store:
        offload = example.OffloadActivations(store)
        with offload:
            x = torch.ones(1 << 19, requires_grad=True).tanh()
            loss = (x * x).sum()
        with torch.no_grad():
            x.zero_()
        engine._native.release_held()
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()
