"""Faults of chosen I/Os, and a store in which each I/O fails in turn."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from cudafuture import CUDAFuture, wait
from cudafuture.errors import StorageError
from cudafuture.io import File
from cudafuture.store import DiskStore
from cudafuture.testing import FaultyEngine
from support.patience import PATIENCE
from support.storing import contents, expect

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.fixture(params=["io_uring", "threads"])
def backend(request: pytest.FixtureRequest) -> Literal["io_uring", "threads"]:
    try:
        FaultyEngine(request.param).close()
    except StorageError as e:
        pytest.skip(str(e))
    which: Literal["io_uring", "threads"] = request.param
    return which


def test_chosen_ios_fail_with_chosen_errors(backend: Literal["io_uring", "threads"], tmp_path: Path) -> None:
    at = {2: errno.EIO, 4: errno.ENOSPC, 6: errno.EINTR}
    with FaultyEngine(backend, at=at) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        errors = [file.write(contents(4096, i), 4096 * i).exception(timeout=PATIENCE) for i in range(6)]
        assert [getattr(error, "errno", 0) for error in errors] == [0, errno.EIO, 0, errno.ENOSPC, 0, 0]
        assert engine.statistics().again == 1
        file.read(got := torch.zeros(4096, dtype=torch.uint8), 5 * 4096).wait(timeout=PATIENCE)
        assert torch.equal(got, contents(4096, 5))


def steps(store: DiskStore) -> list[CUDAFuture[Any]]:
    """Write, replace and read tensors of all kinds, one call after the other."""
    done: list[CUDAFuture[Any]] = []
    for call in (
        lambda: store.write("small", contents(100, 1)),
        lambda: store.writev({"large": contents(700_000, 2), "other": contents(5000, 3)}),
        lambda: store.writev({"large": contents(600_000, 4), "small": contents(50, 5)}, atomic=True),
        lambda: store.read("large"),
        lambda: store.readv(["small", "other"]),
    ):
        done.append(call())
        wait(done, timeout=PATIENCE)
    return done


def test_failed_io_harms_one_call(backend: Literal["io_uring", "threads"], durable: bool, tmp_path: Path) -> None:
    with FaultyEngine(backend, block_size=1 << 18) as engine:
        with DiskStore(tmp_path / "all", engine=engine, durable=durable) as store:
            assert all(future.exception() is None for future in steps(store))
        count = engine.statistics().blocks
    assert count > 5
    for number in range(1, count + 1):
        folder = tmp_path / f"{number}"
        with FaultyEngine(backend, block_size=1 << 18, at={number: errno.EIO}) as engine:
            with DiskStore(folder, engine=engine, durable=durable) as store:
                done = steps(store)
                failed = [i for i, future in enumerate(done) if future.exception() is not None]
                keys = store.keys()
                there = dict(zip(keys, store.readv(keys).wait(timeout=PATIENCE), strict=True))
            first = [future.exception() for future in done if future.exception() is not None][:1]
            assert [error.errno for error in first if isinstance(error, StorageError)] in ([errno.EIO], [])
        if 2 not in failed:
            assert torch.equal(there["large"], contents(600_000, 4))
            assert torch.equal(there["small"], contents(50, 5))
        elif 0 not in failed:
            assert torch.equal(there["small"], contents(100, 1))
        if durable:
            with DiskStore(folder, durable=True) as store:
                expect(store, there)


@pytest.mark.parametrize("wrong", [{"at": {0: 5}}, {"at": {1: 0}}, {"at": {1: 999}}, {"late": 1.5}, {"again": -1.0}])
def test_invalid_faults_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"at=|between 0 and 1"):
        FaultyEngine(**wrong)
