"""``DiskStore.verify()``: all tensors against their checksums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cudafuture.errors import ChecksumError, InvalidStateError
from cudafuture.store import DiskStore
from support.patience import PATIENCE
from support.storing import contents, flip, slabs

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.mark.parametrize("durable", [False, True])
def test_changed_bytes_are_found_in_an_open_store(durable: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, durable=durable) as store:
        store.writev({f"{i}": contents(5000, i) for i in range(9)}).wait(timeout=PATIENCE)
        assert store.verify() == {}
        (slab,) = slabs(tmp_path)
        flip(slab, slab.read_bytes().find(contents(5000, 4)[:100].numpy().tobytes()))
        damaged = store.verify()
        assert list(damaged) == ["4"]
        assert isinstance(damaged["4"], ChecksumError)
        store.write("4", contents(10)).wait(timeout=PATIENCE)
        assert store.verify() == {}
    with pytest.raises(InvalidStateError):
        store.verify()


def test_large_store_is_read_in_parts(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        for key in range(5):
            store.write(f"{key}", torch.zeros(24 << 20, dtype=torch.uint8)).wait(timeout=PATIENCE)
        done: list[int] = []
        assert store.verify(done.append) == {}
        assert done == [72 << 20, 120 << 20]


def test_key_deleted_meanwhile_is_no_damage(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        for key in range(4):
            store.write(f"{key}", torch.zeros(32 << 20, dtype=torch.uint8)).wait(timeout=PATIENCE)

        def delete(done: int) -> None:
            if done == 64 << 20:
                store.delete("3").wait(timeout=PATIENCE)

        assert store.verify(delete) == {}
        assert store.keys() == ["0", "1", "2"]
