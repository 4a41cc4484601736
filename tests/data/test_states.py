"""States that the dataset accepts: those of its iterators, of prefetch, and of several kinds of DataLoader."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from cudafuture import prefetch
from cudafuture.data import TgzImages
from data.archives import Entry, InTurn, images, numbers, write_archive

COUNT = 7


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_archive(tmp_path_factory.mktemp("archive"), images(COUNT))


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("index", ["auto", False])
def test_prefetch_resumes_at_every_batch(archive: Path, batch: int | None, index: Any) -> None:
    def make() -> TgzImages:
        return TgzImages(archive, batch=batch, shuffle=3, index=index, shard=(0, 1))

    dataset = make()
    dataset.set_epoch(2)
    whole = list(dataset)
    for count in range(len(whole) + 1):
        dataset = make()
        dataset.set_epoch(2)
        with closing(prefetch(dataset, "cpu")) as batches:
            for _ in zip(range(count), batches, strict=False):
                pass
            state = batches.state_dict()
        with closing(prefetch(make(), "cpu")) as resumed:
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            assert numbers(resumed) == numbers(whole[count:])
            assert numbers(resumed) == numbers(whole)  # the epoch after that


def test_prefetch_resumes_in_later_epoch(archive: Path) -> None:
    dataset = TgzImages(archive, batch=2, shuffle=True)
    whole = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        whole.append(numbers(dataset))
    with closing(prefetch(dataset, "cpu", across_epochs=dataset.set_epoch)) as batches:
        assert numbers(batches) == whole[0]
        next(iter(batches))
        state = batches.state_dict()
    other = TgzImages(archive, batch=2, shuffle=True)
    with closing(prefetch(other, "cpu", across_epochs=other.set_epoch)) as resumed:
        resumed.load_state_dict(state)
        assert numbers(resumed) == whole[1][2:]
        assert numbers(resumed) == whole[2]


def test_dataset_state_is_next_start(archive: Path) -> None:
    dataset = TgzImages(archive, batch=2)
    dataset.set_epoch(4)
    first = dataset.state_dict()
    states: list[dict[str, Any]] = [
        {"epoch": 4, "batches": 2, "workers": 1},
        {"epoch": 4, "position": 4, "part": [0, 1, 0, 1]},
    ]
    for state in states:
        dataset.load_state_dict(state)
        other = TgzImages(archive, batch=2)
        other.load_state_dict(dataset.state_dict())
        assert numbers(other) == numbers(dataset) == [4, 5, 6]
        assert dataset.state_dict() == other.state_dict() == first


@pytest.mark.parametrize("part", [[1, 2, 0, 1], [0, 1, 1, 2]])
def test_iterator_state_of_other_part_is_refused(archive: Path, part: list[int]) -> None:
    dataset = TgzImages(archive)
    dataset.load_state_dict({"epoch": 0, "position": 1, "part": part})
    with pytest.raises(ValueError, match=r"the state is of rank .*; this is rank 0 of 1, worker 0 of 1"):
        iter(dataset)


def test_iterator_state_resumes_its_worker(archive: Path) -> None:
    dataset = TgzImages(archive, batch=2)
    dataset.load_state_dict({"epoch": 0, "position": 4, "part": [0, 1, 0, 1]})
    assert numbers(DataLoader(dataset, batch_size=None, num_workers=1)) == [4, 5, 6]


def test_start_used_by_main_is_not_reused(archive: Path, in_turn: InTurn) -> None:
    for first, second in ((0, 2), (2, 0)):
        dataset = TgzImages(archive, batch=2)
        dataset.load_state_dict({"epoch": 0, "batches": 2})
        assert len(in_turn(dataset, first)) == 2
        assert len(in_turn(dataset, second)) == 4


@pytest.mark.parametrize(("workers", "count"), [(0, 0), (0, 1), (1, 0), (None, 0), (None, 2)])
def test_no_workers_mean_main_process(archive: Path, in_turn: InTurn, workers: int | None, count: int) -> None:
    dataset = TgzImages(archive, batch=2)
    dataset.load_state_dict({"epoch": 0, "batches": 2, "workers": workers})
    assert len(in_turn(dataset, count)) == 2


def in_batches(dataset: TgzImages, in_turn: InTurn) -> list[list[int]]:
    """Return the batches of a DataLoader with 2 workers, batch_size=2 and drop_last=True."""
    return [numbers(batch) for batch in in_turn(dataset, 2, draws=2) if len(batch) == 2]


def test_drop_last_loader_resumes_with_skips(tmp_path: Path, in_turn: InTurn) -> None:
    entries: list[Entry] = list(images(16))
    for i in range(5):
        entries[i] = (entries[i][0], b"no image")
    archive = write_archive(tmp_path, entries)
    whole = in_batches(TgzImages(archive, on_error="skip"), in_turn)
    assert [len(batch) for batch in whole] == [2] * 5
    for count in range(len(whole) + 1):
        dataset = TgzImages(archive, on_error="skip")
        dataset.load_state_dict({"epoch": 0, "batches": count, "batch_size": 2, "workers": 2, "drop_last": True})
        assert in_batches(dataset, in_turn) == whole[count:]


BAD_STATES: list[tuple[Any, type[Exception], str]] = [
    ([("epoch", 0)], TypeError, "a state must be a mapping, not list"),
    ({"epoch": 0, "batches": 1.5}, TypeError, r"batches=1\.5 must be an integer, not float"),
    ({"epoch": "1", "batches": 1}, TypeError, "epoch='1' must be an integer"),
    ({"epoch": 1 << 70, "batches": 1}, ValueError, "epoch=.* does not fit in 64 bits"),
    ({"epoch": 0, "batches": 1, "workers": "2"}, TypeError, "workers='2' must be"),
    ({"epoch": 0, "batches": 1, "drop_last": True}, ValueError, "not a state of a dataset with batch=2"),
    ({"epoch": 0, "position": None, "part": [0, 1, 0, 1]}, TypeError, "position=None must be"),
    ({"epoch": 0, "position": -1, "part": [0, 1, 0, 1]}, ValueError, "not a state of an iterator"),
    ({"epoch": 0, "position": 1, "part": [0, 1]}, ValueError, "not a state of an iterator"),
]


@pytest.mark.parametrize(("state", "kind", "text"), BAD_STATES, ids=str)
def test_state_of_wrong_type_is_refused(archive: Path, state: Any, kind: type[Exception], text: str) -> None:
    dataset = TgzImages(archive, batch=2)
    with pytest.raises(kind, match=text):
        dataset.load_state_dict(state)
    assert numbers(dataset) == list(range(COUNT))


def test_iterator_refuses_wrong_state_types(archive: Path) -> None:
    iterator: Any = iter(TgzImages(archive))
    with pytest.raises(TypeError, match=r"position=1\.5 must be an integer"):
        iterator.load_state_dict({"epoch": 0, "position": 1.5, "part": [0, 1, 0, 1]})
    with pytest.raises(ValueError, match="not a state of an iterator"):
        iterator.load_state_dict({"epoch": 0, "batches": 1})
    assert numbers(iterator) == list(range(COUNT))


def test_non_integer_numbers_are_refused(archive: Path) -> None:
    with pytest.raises(TypeError, match=r"epoch=1\.5 must be an integer"):
        TgzImages(archive).set_epoch(1.5)  # type: ignore[arg-type]
    for argument in ("seed", "shuffle", "batch"):
        with pytest.raises(TypeError, match=f"{argument}='x' must be an integer"):
            TgzImages(archive, **{argument: "x"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seed=.* does not fit"):
        TgzImages(archive, seed=1 << 64)


def test_every_64_bit_seed_gives_order(archive: Path) -> None:
    for seed in (-(1 << 63), (1 << 63) - 1):
        dataset = TgzImages(archive, seed=seed, shuffle=True)
        for epoch in (0, (1 << 63) - 1, -(1 << 63)):
            dataset.set_epoch(epoch)
            assert sorted(numbers(dataset)) == list(range(COUNT))
