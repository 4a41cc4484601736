"""Durable stores that an earlier version has written and this version must open.

The archive has a store with checksums, one without, one that a service kept for a namespace, and one with the saved
state of an optimizer. ``expected.pt`` has what was written.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc_ext
from cudafuture.store import DiskStore
from cudafuture.swap import offload
from rpc_ext import RemoteStore, serve_store
from support.patience import PATIENCE

ARCHIVE = Path(__file__).parent / "stores_of_2026_11.tar.xz"


@pytest.fixture(scope="module")
def archive_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def reference(archive_folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(archive_folder / "expected.pt", weights_only=True)
    return loaded


@pytest.mark.parametrize("folder", ["durable", "unchecked"])
def test_written_store_opens(folder: str, archive_folder: Path, reference: dict[str, Any]) -> None:
    tensors: dict[str, torch.Tensor] = reference["tensors"]
    with DiskStore(archive_folder / folder, durable=True, checksum=folder == "durable") as store:
        keys = store.keys()
        assert set(keys) == tensors.keys() - ({"parts"} if folder == "unchecked" else set())
        found = dict(zip(keys, store.readv(keys).wait(timeout=PATIENCE), strict=True))
    torch.testing.assert_close(found, {key: tensors[key] for key in keys}, rtol=0, atol=0)


@pytest.mark.world
def test_written_namespace_is_served(archive_folder: Path, reference: dict[str, Any]) -> None:
    tensors = {key: tensor for key, tensor in reference["tensors"].items() if key != "parts"}
    with (
        rpc_ext.init_rpc("me", rank=0, world_size=1, init_method="tcp://127.0.0.1:0"),
        serve_store(archive_folder / "served", durable=True),
        RemoteStore("me", namespace="kept") as remote,
    ):
        assert sorted(remote.keys()) == sorted(tensors)
        found = remote.readv(list(tensors)).wait(timeout=PATIENCE)
    torch.testing.assert_close(dict(zip(tensors, found, strict=True)), tensors, rtol=0, atol=0)


def test_saved_optimizer_loads(archive_folder: Path, reference: dict[str, Any]) -> None:
    model = torch.nn.Linear(4, 3)
    with DiskStore(archive_folder / "trained", durable=True) as store:
        optimizer = offload(torch.optim.AdamW(model.parameters(), lr=1.0), store)
        optimizer.load("step 3")
        state = optimizer.state_dict()
        optimizer.close()
    torch.testing.assert_close(state["state"], reference["optimizer"]["state"], rtol=0, atol=0)
    assert state["param_groups"][0]["lr"] == reference["optimizer"]["param_groups"][0]["lr"] == 0.1
