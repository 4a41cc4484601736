"""``cudafuture store``: what is in a durable store on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cudafuture.cli import main
from cudafuture.store import DiskStore
from support.patience import PATIENCE
from support.storing import flip, slabs

pytestmark = pytest.mark.usefixtures("on_the_host")

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with DiskStore(tmp_path, durable=True) as store:
        store.write("layer 1/weight", torch.arange(1024.0).reshape(2, 512)).wait(timeout=PATIENCE)
        store.write("step", torch.tensor(7)).wait(timeout=PATIENCE)
    return tmp_path


def run(*arguments: object) -> int:
    return main(["store", *map(str, arguments)])


def test_ls_shows_size_dtype_and_shape(folder: Path, capsys: Captured) -> None:
    assert run("ls", folder) == 0
    assert capsys.readouterr().out == "    4 KiB  float32[2, 512]  layer 1/weight\n      8 B  int64[]  step\n"


def test_stat_shows_sizes(folder: Path, capsys: Captured) -> None:
    assert run("stat", folder) == 0
    out = capsys.readouterr().out
    assert "  keys             2\n" in out
    assert "  bytes            4.01 KiB\n" in out


def test_verify_names_damaged_keys(folder: Path, capsys: Captured) -> None:
    assert run("verify", folder) == 0
    assert capsys.readouterr().out == "2 keys, 4.01 KiB: none damaged\n"
    (slab,) = slabs(folder)
    flip(slab, slab.read_bytes().find(torch.arange(100.0).numpy().tobytes()))
    assert run("verify", folder) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("layer 1/weight: ")
    assert last == "2 keys, 4.01 KiB: 1 damaged"


def test_nothing_is_changed_or_created(folder: Path, capsys: Captured) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for command in ("ls", "stat", "verify"):
        assert run(command, folder) == 0
        assert run(command, folder / "nowhere") == 2
        assert "No such file or directory" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_store_in_use_is_refused_with_its_process(folder: Path, capsys: Captured) -> None:
    with DiskStore(folder, durable=True):
        assert run("ls", folder) == 2
    assert "process" in capsys.readouterr().err
