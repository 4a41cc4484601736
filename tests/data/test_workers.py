"""The division of an archive between DataLoader workers and ranks, with and without processes."""

from __future__ import annotations

import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from cudafuture.data import TgzImages
from data.archives import InTurn, images, numbers, png, write_archive
from support.soak import SOAK

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores

COUNT = 23
MATRIX = list(product(range(5), range(1, 4), ("auto", False), (None, 3), (0, 5)))
IN_PROCESSES = MATRIX if SOAK else [(2, 2, "auto", 3, 0), (3, 1, False, None, 5)]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_archive(tmp_path_factory.mktemp("archive"), images(COUNT))


def flat(batches: list[list[Any]]) -> list[int]:
    return numbers(item for batch in batches for item in batch)


@pytest.mark.parametrize(("workers", "ranks", "index", "batch", "shuffle"), MATRIX)
def test_each_image_arrives_exactly_once(
    archive: Path, in_turn: InTurn, workers: int, ranks: int, index: Any, batch: int | None, shuffle: int
) -> None:
    found = []
    for rank in range(ranks):
        dataset = TgzImages(archive, index=index, batch=batch, shuffle=shuffle, shard=(rank, ranks))
        batches = in_turn(dataset, workers)
        found += flat(batches)
        if index == "auto":
            assert len(batches) == len(dataset)
        if batch:
            assert [len(labels) for ((_, labels),) in batches[:-1]] == [batch] * (len(batches) - 1)
    assert sorted(found) == list(range(COUNT))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("workers", "ranks", "index", "batch", "shuffle"), IN_PROCESSES)
def test_processes_deliver_each_image_once(
    archive: Path, in_turn: InTurn, workers: int, ranks: int, index: Any, batch: int | None, shuffle: int
) -> None:
    found = []
    for rank in range(ranks):
        dataset = TgzImages(archive, index=index, batch=batch, shuffle=shuffle, shard=(rank, ranks))
        size = None if batch else 4
        loader = DataLoader(dataset, batch_size=size, num_workers=workers)
        order = numbers(loader)
        assert order == flat(in_turn(dataset, workers, draws=size or 1))  # the order that the other tests simulate
        found += order
    assert sorted(found) == list(range(COUNT))


def test_index_gives_parts_contiguous_runs(archive: Path) -> None:
    runs = [numbers(TgzImages(archive, shard=(rank, 3))) for rank in range(3)]
    assert runs == [list(range(8)), list(range(8, 16)), list(range(16, 23))]


@pytest.mark.slow
def test_spawned_worker_has_parent_index_and_rank(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, images(5))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        dataset = TgzImages(archive, batch=2)
        archive.with_name("images.tgz.index").unlink()
        assert numbers(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")) == [3, 4]
    finally:
        dist.destroy_process_group()


def test_ranks_come_from_torch_distributed(archive: Path) -> None:
    dataset = TgzImages(archive)
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        assert numbers(dataset) == list(range(16, 23))
        assert numbers(TgzImages(archive, shard=None)) == list(range(COUNT))
        assert len(dataset) == 7
    finally:
        dist.destroy_process_group()
    assert len(dataset) == COUNT


def test_persistent_workers_see_epoch(archive: Path) -> None:
    dataset = TgzImages(archive, shuffle=1, batch=4)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        orders.append(numbers(loader))
    assert orders[0] == orders[2] != orders[1]
    assert orders[1] == numbers(loader_of_epoch(archive, 1))


def loader_of_epoch(archive: Path, epoch: int) -> TgzImages:
    dataset = TgzImages(archive, shuffle=1, batch=4)
    dataset.set_epoch(epoch)
    return dataset


def test_killed_worker_is_loader_error(archive: Path) -> None:
    def kill(pixels: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return pixels

    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (killed|exited unexpectedly)"):
        list(DataLoader(TgzImages(archive, transform=kill), batch_size=None, num_workers=1))


def test_skipped_members_of_workers_are_counted(tmp_path: Path) -> None:
    entries = [
        (f"a/{i}.png", b"no image" if i % 2 else png(torch.zeros(3, 2, 2, dtype=torch.uint8))) for i in range(20)
    ]
    for index in ("auto", False):
        dataset = TgzImages(write_archive(tmp_path, entries), index=index, on_error="skip")
        assert len(list(DataLoader(dataset, batch_size=None, num_workers=2))) == 10
        assert dataset.skipped == {"not_an_image": 10}
