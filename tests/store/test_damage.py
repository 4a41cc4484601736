"""Damage to the files of a store: truncated, changed and deleted slabs, and writes torn by crashes."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from cudafuture.errors import ChecksumError, StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from support.patience import PATIENCE
from support.storing import MIB, contents, expect, flip, slabs

PAGE = 4096

pytestmark = pytest.mark.usefixtures("on_the_host")


def find_tensor(tensor: torch.Tensor, folder: Path) -> tuple[Path, int]:
    """Return the slab that holds a tensor, and its offset there."""
    wanted = bytes(tensor.tolist())
    for path in slabs(folder):
        offset = path.read_bytes().find(wanted)
        if offset >= 0:
            return path, offset
    raise AssertionError("the tensor is in no slab")


def readable_keys(store: DiskStore, expected: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the keys that read back as written. Check that each other key fails with StorageError."""
    good = set()
    for key, tensor in expected.items():
        read = store.read(key)
        error = read.exception(timeout=PATIENCE)
        if error is None:
            assert torch.equal(read.value(), tensor), key
            good.add(key)
        else:
            assert isinstance(error, StorageError), error
    return good


# ---- bits of tensors


@pytest.mark.parametrize("size", [1, 1000, 100_000, 3 * MIB])
@pytest.mark.parametrize("place", [0.0, 0.6, 1.0], ids=["first", "middle", "last"])
def test_flipped_bit_fails_its_key_alone(
    engine: Engine, durable: bool, size: int, place: float, tmp_path: Path
) -> None:
    tensors = {f"{i}": contents(size, i) for i in range(5)}
    tensors["2"] = torch.arange(size).mul(7).add(13).remainder(241).to(torch.uint8)  # found whatever its size
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        store.writev(tensors).wait(timeout=PATIENCE)
        marked = contents(64, 1000) if size == 1 else tensors["2"]
        if size == 1:  # alone in its line of 64 bytes: so that it can be found, it lies behind what can
            tensors |= {"before": marked, "2": contents(1, 9)}
            store.writev({"before": marked, "2": tensors["2"]}).wait(timeout=PATIENCE)
        path, offset = find_tensor(marked, tmp_path)
        flip(path, offset + (64 if size == 1 else int(place * (size - 1))), bit=int(place * 7))
        for count in 1, 2:
            with pytest.raises(ChecksumError, match="'2'") as caught:
                store.read("2", torch.zeros(size, dtype=torch.uint8)).wait(timeout=PATIENCE)
            assert (caught.value.path, caught.value.wanted) == (str(path), size)
            assert store.statistics().checksum_errors == count
        with pytest.raises(ChecksumError):
            store.readv(list(tensors)).wait(timeout=PATIENCE)
        assert store.statistics().checksum_errors == 3
        assert readable_keys(store, tensors) == set(tensors) - {"2"}
        store.write("2", tensors["2"]).wait(timeout=PATIENCE)
        expect(store, tensors)


def test_misplaced_tensor_fails_its_key(engine: Engine, tmp_path: Path) -> None:
    tensors = {f"{i}": contents(5000, i) for i in range(2)}
    with DiskStore(tmp_path, engine=engine) as store:
        store.writev(tensors).wait(timeout=PATIENCE)
        (path, first), (_, second) = (find_tensor(tensor, tmp_path) for tensor in tensors.values())
        with path.open("r+b") as file:
            file.seek(first)
            content = file.read(5000)
            file.seek(second)
            file.write(content)
        assert readable_keys(store, tensors) == {"0"}
        store.write("1", tensors["0"]).wait(timeout=PATIENCE)
        expect(store, {"0": tensors["0"], "1": tensors["0"]})


# ---- slabs that were cut off


def write_mixed(store: DiskStore, folder: Path, name: str = "") -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Write small tensors that share pages, then large ones; return all, and the offset at which each ends."""
    small = {f"{name}small {i}": contents(3000, i) for i in range(40)}
    large = {f"{name}large {i}": contents(300_000, 100 + i) for i in range(6)}
    store.writev(small).wait(timeout=PATIENCE)
    store.writev(large).wait(timeout=PATIENCE)
    tensors = small | large
    return tensors, {key: find_tensor(tensor, folder)[1] + tensor.nbytes for key, tensor in tensors.items()}


@pytest.mark.parametrize("left", [0, 10 * PAGE, 10 * PAGE + 77, 200 * PAGE])
def test_truncated_slab_is_readable_and_rewritable(engine: Engine, durable: bool, left: int, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        tensors, ends = write_mixed(store, tmp_path)
        (slab,) = slabs(tmp_path)
        os.truncate(slab, left)
        assert readable_keys(store, tensors) == {key for key, end in ends.items() if end <= left}
        store.writev(tensors).wait(timeout=PATIENCE)
        expect(store, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 10 * PAGE, 10 * PAGE + 77, 200 * PAGE])
def test_slab_truncated_between_runs_keeps_the_rest(engine: Engine, left: int, tmp_path: Path) -> None:
    for number in range(6):  # other names: in another order
        folder = tmp_path / f"{number}"
        with DiskStore(folder, engine=engine, durable=True) as store:
            tensors, ends = write_mixed(store, folder, f"{number} ")
        (slab,) = slabs(folder)
        os.truncate(slab, left)
        with DiskStore(folder, engine=engine, durable=True) as store:
            good = readable_keys(store, tensors)
            assert good == {key for key, end in ends.items() if end <= left}
            later = {f"later {i}": contents(3000, 200 + i) for i in range(20)}
            for key, tensor in later.items():
                store.write(key, tensor).wait(timeout=PATIENCE)
            assert readable_keys(store, tensors) == good, "what was written since lies where others do"
            store.deletev([key for key in tensors if key not in good]).wait(timeout=PATIENCE)
            expect(store, {key: tensors[key] for key in good} | later)
        with DiskStore(folder, engine=engine, durable=True) as store:
            expect(store, {key: tensors[key] for key in good} | later)


# ---- slabs that are not there


def test_missing_slab_spares_other_slabs(engine: Engine, tmp_path: Path) -> None:
    tensors = {f"{i}": contents(20 * MIB, i) for i in range(2)} | {"small": contents(1000, 2)}
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        for key, tensor in tensors.items():
            store.write(key, tensor).wait(timeout=PATIENCE)
    path, away = tmp_path / "slab-00000000", tmp_path / "away"
    path.rename(away)
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        good = readable_keys(store, tensors)
        assert good == {"1", "small"}
        error = store.read("0").exception(timeout=PATIENCE)
        assert isinstance(error, StorageError)
        assert (error.errno, error.path) == (errno.ENOENT, str(path))
        with pytest.raises(StorageError):
            store.readv(list(tensors)).wait(timeout=PATIENCE)
        tensors["new"] = contents(5 * MIB, 3)
        store.write("new", tensors["new"]).wait(timeout=PATIENCE)
    away.rename(path)
    with DiskStore(tmp_path, engine=engine, durable=True) as store:  # it is found again
        expect(store, tensors)
    path.unlink()
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.write("0", contents(1000)).wait(timeout=PATIENCE)
        expect(store, tensors | {"0": contents(1000)})
        store.delete("0").wait(timeout=PATIENCE)
    del tensors["0"]
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        expect(store, tensors)
