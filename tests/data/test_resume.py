"""Iterations that begin where an earlier one was cut off."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from cudafuture.data import TgzImages
from data.archives import Entry, InTurn, images, numbers, write_archive
from support.soak import soak_cases

COUNT = 19
SETTINGS = soak_cases(product((0, 1, 2, 3), (1, 2), ("auto", False), (None, 2), (0, 4), ("raise", "skip")), step=5)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_archive(tmp_path_factory.mktemp("archive"), images(COUNT))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries: list[Entry] = [("none.png", b""), *images(COUNT), ("a/end.png", b"no image")]
    for i in (1, 2, 3, 4, 9, 17):
        entries[i] = (entries[i][0], b"no image")
    return write_archive(tmp_path_factory.mktemp("archive"), entries)


def in_batches(batches: list[list[Any]]) -> list[list[int]]:
    return [numbers(batch) for batch in batches]


@pytest.mark.parametrize(("workers", "ranks", "index", "batch", "shuffle", "on_error"), SETTINGS)
def test_resume_at_any_batch_gives_rest(
    archive: Path,
    faulty: Path,
    in_turn: InTurn,
    workers: int,
    ranks: int,
    index: Any,
    batch: int | None,
    shuffle: int,
    on_error: Any,
) -> None:
    path = faulty if on_error == "skip" else archive
    draws = 1 if batch else 3
    for rank in range(ranks):

        def make(rank: int = rank) -> TgzImages:
            return TgzImages(path, index=index, batch=batch, shuffle=shuffle, shard=(rank, ranks), on_error=on_error)

        dataset = make()
        dataset.set_epoch(5)
        whole = in_batches(in_turn(dataset, workers, draws))
        skipped = dataset.skipped
        for count in range(len(whole) + 1):
            dataset = make()
            dataset.load_state_dict({"epoch": 5, "batches": count, "batch_size": batch or draws})
            assert in_batches(in_turn(dataset, workers, draws)) == whole[count:]
            assert dataset.skipped.total() <= skipped.total()
            assert in_batches(in_turn(dataset, workers, draws)) == whole  # the iteration after that


@pytest.mark.parametrize("index", ["auto", False])
@pytest.mark.parametrize("shuffle", [0, 4])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_iterator_state_gives_rest(archive: Path, faulty: Path, index: Any, shuffle: int, on_error: Any) -> None:
    path = faulty if on_error == "skip" else archive
    for batch in (None, 3):
        dataset = TgzImages(path, index=index, batch=batch, shuffle=shuffle, on_error=on_error)
        dataset.set_epoch(2)
        iterator: Any = iter(dataset)
        states, items, skipped = [iterator.state_dict()], [], [dataset.skipped]
        for item in iterator:
            items.append(item)
            states.append(iterator.state_dict())
            skipped.append(dataset.skipped)
        for count, state in enumerate(states):
            resumed = TgzImages(path, index=index, batch=batch, shuffle=shuffle, on_error=on_error)
            other: Any = iter(resumed)
            next(other)  # a state replaces the place of an iterator that has begun
            before = resumed.skipped
            other.load_state_dict(state)
            assert other.state_dict() == state
            assert numbers(other) == numbers(items[count:])
            assert resumed.skipped - before == dataset.skipped - skipped[count]


def test_state_of_other_part_is_refused(archive: Path) -> None:
    state = iter(TgzImages(archive, shard=(0, 2))).state_dict()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="rank 0 of 2, worker 0 of 1; this is rank 1 of 2"):
        iter(TgzImages(archive, shard=(1, 2))).load_state_dict(state)  # type: ignore[attr-defined]


@pytest.mark.parametrize("index", ["auto", False])
def test_dataloader_resumes_in_each_worker(archive: Path, index: Any) -> None:
    dataset = TgzImages(archive, index=index, batch=2, shuffle=3)
    dataset.set_epoch(1)
    whole = numbers(DataLoader(dataset, batch_size=None, num_workers=2))
    other = TgzImages(archive, index=index, batch=2, shuffle=3)
    other.load_state_dict({"epoch": 1, "batches": 5, "workers": 2})
    other.set_epoch(1)  # as a loop over epochs does
    loader = DataLoader(other, batch_size=None, num_workers=2)
    assert numbers(loader) == whole[10:]
    assert numbers(loader) == whole


def test_persistent_workers_resume_once(archive: Path) -> None:
    dataset = TgzImages(archive, batch=2)
    dataset.load_state_dict({"epoch": 0, "batches": 5})
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    assert numbers(loader) == list(range(10, COUNT))
    assert numbers(loader) == list(range(COUNT))
    dataset.load_state_dict({"epoch": 0, "batches": 9})
    assert numbers(loader) == [18]


def test_workers_of_other_loader_do_not_resume(archive: Path, in_turn: InTurn) -> None:
    dataset = TgzImages(archive, batch=2)
    dataset.load_state_dict({"epoch": 0, "batches": 5})
    assert numbers(DataLoader(dataset, batch_size=None, num_workers=1)) == list(range(10, COUNT))
    assert sorted(numbers(DataLoader(dataset, batch_size=None, num_workers=2))) == list(range(COUNT))


def test_other_epoch_begins_at_first_image(archive: Path) -> None:
    dataset = TgzImages(archive)
    dataset.load_state_dict({"epoch": 3, "batches": 5})
    dataset.set_epoch(4)
    assert numbers(dataset) == list(range(COUNT))


def test_indexed_resume_reads_only_rest(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cudafuture.data._archive_index import ArchiveReader

    read = []
    original = ArchiveReader.read
    monkeypatch.setattr(ArchiveReader, "read", lambda *args: read.append(args[1]) or original(*args))  # type: ignore[func-returns-value]
    dataset = TgzImages(archive, batch=2)
    dataset.load_state_dict({"epoch": 0, "batches": 8})
    assert numbers(dataset) == [16, 17, 18]
    assert len(read) == 3


@pytest.mark.parametrize(
    "state", [{"epoch": 0, "batches": -1}, {"epoch": 0, "batches": 1, "batch_size": 3}, {"epoch": 0}]
)
def test_impossible_state_is_refused(archive: Path, state: dict[str, int]) -> None:
    with pytest.raises((ValueError, KeyError), match="batch"):
        TgzImages(archive, batch=2).load_state_dict(state)


def test_another_number_of_workers_is_refused(archive: Path) -> None:
    dataset = TgzImages(archive, batch=2)
    dataset.load_state_dict({"epoch": 0, "batches": 1, "workers": 4})
    with pytest.raises(ValueError, match="the state is of 4 workers"):
        iter(dataset)


def test_resume_skips_transforms(faulty: Path) -> None:
    called: list[torch.Tensor] = []
    dataset = TgzImages(faulty, transform=lambda t: called.append(t) or t, on_error="skip")  # type: ignore[func-returns-value]
    dataset.load_state_dict({"epoch": 0, "batches": 10})
    assert len(list(dataset)) == len(called) == 3


def test_inference_mode_dataset_resumes_outside(archive: Path) -> None:
    with torch.inference_mode():
        dataset = TgzImages(archive)
        assert numbers(dataset) == list(range(COUNT))
    dataset.set_epoch(1)
    dataset.load_state_dict(dataset.state_dict())
    assert numbers(dataset) == list(range(COUNT))
