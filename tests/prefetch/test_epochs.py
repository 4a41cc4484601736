"""prefetch(): epochs that are left, interrupted, resumed or read ahead lose nothing and can be used again."""

from __future__ import annotations

import asyncio
import gc
import logging
import pathlib
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

from cudafuture import prefetch
from cudafuture.prefetch import Prefetcher
from support.interrupts import interrupt_at

LONG = 60.0  # seconds, for what happens at once
FOLDER = str(pathlib.Path(sys.modules[Prefetcher.__module__].__file__ or "").parent)


class Asynchronous:
    """An async iterable of numbers that can be resumed; iterators share its position."""

    def __init__(self, count: int = 8) -> None:
        self.count, self.position = count, 0

    async def __aiter__(self) -> AsyncIterator[int]:
        while self.position < self.count:
            await asyncio.sleep(0)
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Epochs:
    """A resumable iterable of (epoch, position) with a ``set_epoch``, as samplers have."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch, start, self.position = self.epoch, self.position, 0
        for self.position in range(start + 1, 5):
            yield epoch, self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


# ---- read ahead across epochs


def test_new_loop_ends_epoch_read_ahead() -> None:
    batches = prefetch(range(6), "cpu", depth=8, across_epochs=True)
    kept = iter(batches)
    assert next(kept) == 0
    assert list(batches) == list(range(6))
    with pytest.raises(RuntimeError, match="create a second prefetcher"):
        next(kept)
    assert list(batches) == list(range(6))


def test_each_event_loop_gets_whole_epochs() -> None:
    batches = prefetch(Asynchronous(), "cpu", across_epochs=True)

    async def main() -> list[int]:
        return [x async for x in batches]

    for _ in range(3):
        source_is_whole = asyncio.run(main())
        assert source_is_whole == list(range(8))


def test_resumed_program_sets_iterable_epoch() -> None:
    source = Epochs()
    batches = prefetch(source, "cpu", across_epochs=source.set_epoch)
    list(batches)
    epoch = iter(batches)
    assert [next(epoch), next(epoch)] == [(1, 0), (1, 1)]
    state = batches.state_dict()
    again = Epochs()
    resumed = prefetch(again, "cpu", across_epochs=again.set_epoch)
    resumed.load_state_dict(state)
    assert list(resumed) == [(1, 2), (1, 3)]
    assert list(resumed) == [(2, position) for position in range(4)]
    assert resumed.state_dict()["epoch"] == 3  # the next one


def test_error_between_epochs_reaches_next_loop() -> None:
    def refuse(number: int) -> None:
        if number == 1:
            raise ValueError("no second epoch")

    batches = prefetch(range(3), "cpu", across_epochs=refuse)
    assert list(batches) == [0, 1, 2]
    with pytest.raises(ValueError, match="no second epoch"):
        iter(batches)


def test_dropped_prefetcher_ends_without_collection() -> None:
    class Source:
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    source = Source()
    source_ref = weakref.ref(source)
    batches = prefetch(source, "cpu", across_epochs=True)
    before = set(threading.enumerate())
    gc.disable()
    try:
        assert list(batches) == [0, 1, 2, 3]
        ahead = set(threading.enumerate()) - before
        del source, batches
        assert source_ref() is None
        for thread in ahead:
            thread.join(LONG)
            assert not thread.is_alive()
    finally:
        gc.enable()


# ---- several loops at a time


@pytest.mark.parametrize("across_epochs", [False, True])
def test_two_loops_are_refused(across_epochs: bool) -> None:
    batches = prefetch(range(4), "cpu", across_epochs=across_epochs)
    with pytest.raises(RuntimeError, match="reads one epoch at a time"):
        list(zip(batches, batches, strict=True))
    with pytest.raises(RuntimeError, match="reads one epoch at a time"):
        [(outer, inner) for outer in batches for inner in batches]
    other = prefetch(range(4), "cpu")
    assert [pair for a in batches for pair in zip([a], other, strict=False)] == [(a, 0) for a in range(4)]


def test_two_async_loops_are_refused() -> None:
    async def main() -> None:
        batches = prefetch(range(4), "cpu")
        async for _ in batches:
            assert [x async for x in batches] == list(range(4))

    with pytest.raises(RuntimeError, match="reads one epoch at a time"):
        asyncio.run(main())


def test_waiting_iterator_raises_on_new_epoch() -> None:
    released = threading.Event()

    def block_once() -> Iterator[int]:
        yield 0
        assert released.wait(LONG)
        yield 1

    class Source:
        def __iter__(self) -> Iterator[int]:
            return block_once()

    batches = prefetch(Source(), "cpu")
    first = iter(batches)
    assert next(first) == 0
    errors: list[str] = []

    def wait() -> None:
        try:
            next(first)
        except RuntimeError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    beginning = threading.Thread(target=lambda: iter(batches))  # it waits until no thread is inside the iterable
    beginning.start()
    waiting.join(LONG)
    released.set()
    beginning.join(LONG)
    assert "reads one epoch at a time" in errors[0]


def test_finished_loop_does_not_block_another() -> None:
    batches = prefetch(range(4), "cpu")
    ended = iter(batches)
    assert list(ended) == list(range(4))
    for _ in batches:
        break
    assert list(zip(range(2), batches, strict=False)) == [(0, 0), (1, 1)]
    assert list(batches) == list(range(4))
    assert list(ended) == []


def test_shared_iterator_yields_each_batch_once() -> None:
    batches = iter(prefetch(range(200), "cpu"))
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.extend(batches)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert sorted(got) == list(range(200))


# ---- async


@pytest.mark.parametrize("depth", [1, 3])
def test_state_loaded_in_async_epoch_counts(depth: int) -> None:
    async def main() -> None:
        batches = prefetch(Asynchronous(), "cpu", depth=depth)
        epoch = aiter(batches)
        assert [await anext(epoch), await anext(epoch)] == [0, 1]
        state = batches.state_dict()
        assert await anext(epoch) == 2
        batches.load_state_dict(state)
        assert [x async for x in batches] == list(range(2, 8))

    asyncio.run(main())


def test_cancelled_async_epoch_fails() -> None:
    async def main() -> None:
        epoch = aiter(prefetch(Asynchronous(100), "cpu"))
        assert await anext(epoch) == 0
        (reading,) = asyncio.all_tasks() - {asyncio.current_task()}
        reading.cancel()
        with pytest.raises(RuntimeError, match="was cancelled"):
            async for _batch in epoch:
                pass

    asyncio.run(main())


def test_two_tasks_may_share_epoch() -> None:
    async def main() -> None:
        epoch = aiter(prefetch(Asynchronous(), "cpu"))
        assert await asyncio.gather(*(anext(epoch) for _ in range(4))) == [0, 1, 2, 3]

    asyncio.run(asyncio.wait_for(main(), LONG))


def test_async_epoch_refuses_next() -> None:
    async def main() -> None:
        epoch = aiter(prefetch(Asynchronous(), "cpu"))
        with pytest.raises(TypeError, match="async for"):
            next(epoch)

    asyncio.run(main())


# ---- states


def test_state_is_copy() -> None:
    shared: dict[str, int] = {}

    class Changing(Epochs):
        def state_dict(self) -> dict[str, int]:
            shared["position"] = self.position
            return shared

    batches = prefetch(Changing(), "cpu", depth=4)
    epoch = iter(batches)
    next(epoch)
    state = batches.state_dict()
    list(epoch)
    assert state == {"position": 1}


@pytest.mark.parametrize("fails_at", range(6))
def test_failing_state_dict_drops_iterator(fails_at: int) -> None:
    calls = [0]
    iterators: list[weakref.ref[Any]] = []

    class Failing(Epochs):
        def __iter__(self) -> Iterator[Any]:
            made = (x for x in range(4))
            iterators.append(weakref.ref(made))
            return made

        def state_dict(self) -> dict[str, int]:
            calls[0] += 1
            if calls[0] == fails_at + 1:
                raise ValueError("no state")
            return {"position": 0}

    batches = prefetch(Failing(), "cpu")
    taken: list[int] = []
    with pytest.raises(ValueError, match="no state"):
        taken.extend(batches)
    assert taken == list(range(fails_at - 1))  # one call is made before the first batch
    assert list(batches) == list(range(4))
    assert len(iterators) == 2
    deadline = time.monotonic() + LONG
    while any(ref() is not None for ref in iterators):  # the thread that has read the last batch may not be at its end
        gc.collect()
        assert time.monotonic() < deadline


# ---- leaving


def test_futures_of_abandoned_epoch_complete() -> None:
    go_on = threading.Event()

    def transform(batch: int) -> int:
        go_on.wait(LONG)
        return batch

    epoch = iter(prefetch(range(4), "cpu", futures=True, transform=transform))
    first = next(epoch)
    epoch.close()
    go_on.set()
    assert first.wait(timeout=LONG) == 0 or first.cancelled()


def test_error_of_untaken_batch_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def read() -> Iterator[int]:
        yield 0
        failed.set()
        raise ValueError("nobody wants this")

    with caplog.at_level(logging.DEBUG):
        batches = prefetch(read(), "cpu", depth=4)
        epoch = iter(batches)
        assert next(epoch) == 0
        assert failed.wait(LONG)
        epoch.close()
        del epoch, batches
        gc.collect()
    assert "nobody wants this" not in caplog.text


# ---- Ctrl-C


def take_all(batches: Prefetcher) -> None:
    for _batch in batches:
        pass


def take_one(batches: Prefetcher) -> None:
    for _batch in batches:
        break


def close(batches: Prefetcher) -> None:
    next(iter(batches))
    batches.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C inside __del__
@pytest.mark.parametrize("across_epochs", [False, True])
@pytest.mark.parametrize("body", [take_all, take_one, close])
def test_ctrl_c_anywhere_leaves_prefetcher_usable(
    body: Callable[[Prefetcher], None], across_epochs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    line = 1
    while True:
        batches = prefetch(range(3), "cpu", across_epochs=across_epochs)
        if not interrupt_at(line, FOLDER, lambda batches=batches: body(batches)):  # type: ignore[misc]
            break
        assert list(batches) == [0, 1, 2], f"interrupted at line {line}"
        line += 1
    assert line > 30


def test_arguments_of_other_types_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"depth": 1.5},
        {"depth": True},
        {"bytes": 0.5},
        {"priority": "high"},
        {"transform": 3},
        {"across_epochs": "yes"},
        {"pack": 1},
        {"futures": None},
    ]
    for arguments in wrong:
        with pytest.raises(TypeError, match=f"{next(iter(arguments))}(=| is a callable)"):
            prefetch([torch.ones(1)], "cpu", **arguments)
