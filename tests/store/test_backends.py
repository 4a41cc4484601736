"""The table of backends: each row opens files, or says why it cannot."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from cudafuture.errors import StorageError
from cudafuture.io import BACKENDS, Backend
from cudafuture.io.engine import BackendName
from support.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_available_backend_writes_and_reads(backend: Backend, tmp_path: Path) -> None:
    if reason := backend.why_not():
        pytest.skip(reason)
    written, read = torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)
    with backend.open(tmp_path / "file", "w+", direct=False) as file:
        assert not file.is_direct
        assert file.write(written, 13).wait(timeout=PATIENCE) == written.nbytes
        assert file.read(read, 13).wait(timeout=PATIENCE) == written.nbytes
    assert torch.equal(written, read)
    with backend.open(tmp_path / "file") as file:
        file.read(read.zero_(), 13).wait(timeout=PATIENCE)
    assert torch.equal(written, read)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_unavailable_backend_names_reason(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)  # not installed
    reason = backend.why_not()
    if reason is None:
        pytest.skip("it works here")
    with pytest.raises((StorageError, ImportError)) as caught:
        backend.open(tmp_path / "file", "w")
    assert str(caught.value) == reason


def test_gds_requires_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    (gds,) = (backend for backend in BACKENDS if backend.name == "gds")
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert "pip install kvikio-cu13" in (gds.why_not() or "")
    monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace())
    assert gds.why_not() is None


def test_table_lists_every_backend() -> None:
    names = [backend.name for backend in BACKENDS]
    assert len(set(names)) == len(names)
    assert set(get_args(BackendName)) - {"auto"} <= set(names)
    assert all(backend.needs for backend in BACKENDS)
