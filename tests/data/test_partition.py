"""The division of images between ranks and workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cudafuture.data._partition import WorkerPart

COUNTS = st.integers(0, 70)
SMALL = st.integers(1, 5)


def deliver(batches: list[list[list[int]]]) -> list[list[int]]:
    """Return the batches of several workers in a DataLoader's order."""
    found = []
    for turn in range(max(map(len, batches), default=0)):
        found += [worker[turn] for worker in batches if turn < len(worker)]
    return found


def cut(images: list[int], block: int) -> list[list[int]]:
    return [images[i : i + block] for i in range(0, len(images), block)]


@given(COUNTS, SMALL, SMALL, SMALL)
def test_parts_cover_every_position_once(images: int, ranks: int, workers: int, block: int) -> None:
    parts = [WorkerPart(r, ranks, w, workers, block) for r in range(ranks) for w in range(workers)]
    assert sorted(i for part in parts for i in part.slice_of(images)) == list(range(images))


@given(COUNTS, SMALL, SMALL, SMALL)
def test_every_image_has_one_owner(images: int, ranks: int, workers: int, block: int) -> None:
    parts = [WorkerPart(r, ranks, w, workers, block) for r in range(ranks) for w in range(workers)]
    assert all(sum(part.owns(i) for part in parts) == 1 for i in range(images))


@given(COUNTS, SMALL, SMALL, SMALL)
def test_only_last_batch_is_partial(images: int, ranks: int, workers: int, block: int) -> None:
    for rank in range(ranks):
        parts = [WorkerPart(rank, ranks, w, workers, block) for w in range(workers)]
        for mine in (
            [list(part.slice_of(images)) for part in parts],
            [[i for i in range(images) if part.owns(i)] for part in parts],
        ):
            batches = deliver([cut(one, block) for one in mine])
            total = sum(map(len, mine))
            assert len(batches) == -(-total // block)
            assert all(len(batch) == block for batch in batches[:-1])
        assert parts[0].images_of_rank(images) == sum(len(part.slice_of(images)) for part in parts)


@given(COUNTS, SMALL, SMALL, SMALL, st.integers(1, 4))
def test_worker_batches_follow_loader_batches(images: int, ranks: int, workers: int, block: int, draws: int) -> None:
    for size in {block, draws if block == 1 else block}:
        parts = [WorkerPart(0, ranks, w, workers, block) for w in range(workers)]
        own = [cut([(w << 8) + i for i in part.slice_of(images)], size) for w, part in enumerate(parts)]
        order = [batch[0] >> 8 for batch in deliver(own)]
        for count in range(len(order) + 1):
            assert [order[:count].count(w) for w in range(workers)] == [p.batches_of_worker(count) for p in parts]
