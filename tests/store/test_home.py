"""The folders of stores: the remains of interrupted ones, and locks that a forked process must not keep."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch

from cudafuture.io import Engine
from cudafuture.store import DiskStore, _home
from support.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("on_the_host")


def stores(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "store-" in path.name)


@pytest.mark.parametrize("by", ["its end", "a sweep"])
def test_remains_of_interrupted_removal_are_swept(
    by: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_lease(folder: Path, ignore_errors: bool) -> None:
        (folder / "lease").unlink()

    store = DiskStore(tmp_path, engine=engine)
    store.write("x", torch.ones(1000)).wait(timeout=PATIENCE)
    if by == "a sweep":  # it has died
        (home,) = (path for path in tmp_path.iterdir() if path.name.startswith("store-"))
        shutil.copytree(home, tmp_path / "store-dead")
    with monkeypatch.context() as cut_short:
        cut_short.setattr(shutil, "rmtree", remove_lease)
        if by == "a sweep":
            DiskStore(tmp_path, engine=engine).close()
        store.close()
    assert stores(tmp_path) != []
    with DiskStore(tmp_path, engine=engine):
        assert len(stores(tmp_path)) == 1
    assert stores(tmp_path) == []


def test_fork_during_creation_keeps_no_lock(tmp_path: Path) -> None:
    lock = tmp_path / ".stores"
    ours, theirs = socket.socketpair()
    with _home._locked(lock):
        child = os.fork()
        if child == 0:
            ours.close()
            theirs.send(b"I live")
            theirs.recv(1)  # until the test is done
            os._exit(0)
    theirs.close()
    try:
        assert ours.recv(10) == b"I live"
        with lock.open() as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        ours.close()
        os.waitpid(child, 0)


def test_durable_store_syncs_new_folders(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(_home, "_sync", synced.append)
    DiskStore(tmp_path / "a" / "b" / "c", engine=engine, durable=True).close()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    synced.clear()
    DiskStore(tmp_path / "a" / "b" / "c", engine=engine, durable=True).close()
    assert synced == [tmp_path / "a" / "b"]
