"""Priorities: 0 or negative, as in the stream pools of every device; refused elsewhere, whatever the device."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, copy, submit
from cudafuture.io import Engine, File
from cudafuture.store import DiskStore, ShardedStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path / "store") as store:
        yield store


PLACES: dict[str, Callable[[int], Any]] = {
    "CUDAFuture": lambda priority: CUDAFuture(priority=priority),
    "then": lambda priority: CUDAFuture().then(lambda done: done.value(), priority=priority),
    "then_async": lambda priority: CUDAFuture().then_async(lambda done: done, priority=priority),
    "submit": lambda priority: submit(int, priority=priority),
    "copy": lambda priority: copy(torch.ones(2), "cpu", priority=priority),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_priority_above_0_is_refused(place: Callable[[int], Any]) -> None:
    with pytest.raises(ValueError, match=r"priority is 0 .* not 1"):
        place(1)
    for priority in (0, -1):
        place(priority)


def test_files_and_stores_refuse_positive_priority(store: DiskStore, tmp_path: Path) -> None:
    x = torch.ones(4)
    with Engine("threads") as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        for begin in (file.write, file.read):
            with pytest.raises(ValueError, match="not 2"):
                begin(x, priority=2)
    with pytest.raises(ValueError, match="not 2"):
        store.write("x", x, priority=2)
    store.write("x", x).wait(timeout=60)
    with pytest.raises(ValueError, match="not 2"):
        store.read("x", priority=2)
    with pytest.raises(ValueError, match="not 2"):
        ShardedStore({"only": store}).writev({"y": x}, priority=2).wait(timeout=60)
