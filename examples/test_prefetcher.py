"""Tests that find the bugs of a prefetcher without a GPU: the simulated accelerator as a test fixture.

    pip install --no-build-isolation ".[testing]"
    pytest examples/test_prefetcher.py

`NaivePrefetcher` copies the next batch to the device on a stream of its own while the current batch is worked on. It
has passed every test on a GPU, and has two bugs that are found in many programs: the memory of a batch can be handed
out again while the consumer's stream still reads it, and the pinned buffer can be filled again while the copy out of it
is still running. Both show here at once, each time, with the two places in the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from cudafuture.testing import sim

BATCH = 4096


def batches(count: int = 4) -> Iterator[torch.Tensor]:
    """Yield batches in ordinary memory, as a data loader does: one of zeros, one of ones, one of twos, ..."""
    return (torch.full((BATCH,), float(i)) for i in range(count))


class NaivePrefetcher:
    """Iterates over batches on the device, one batch ahead. Do not use it: see `Prefetcher`."""

    def __init__(self, source: Iterable[torch.Tensor], device: str) -> None:
        self.source = iter(source)
        self.device = device
        self.stream = torch.Stream(device)
        self.pinned = torch.empty(BATCH).pin_memory()

    def __iter__(self) -> Iterator[torch.Tensor]:
        ahead = self.copy_next()
        while ahead is not None:
            torch.accelerator.current_stream().wait_stream(self.stream)
            batch, ahead = ahead, self.copy_next()
            yield batch

    def copy_next(self) -> torch.Tensor | None:
        """Start to copy the next batch; None at the end."""
        host = next(self.source, None)
        if host is None:
            return None
        self.pinned.copy_(host)
        with self.stream:
            return self.pinned.to(self.device, non_blocking=True)


class Prefetcher(NaivePrefetcher):
    """The same with both bugs mended."""

    def __init__(self, source: Iterable[torch.Tensor], device: str) -> None:
        super().__init__(source, device)
        self.copied = torch.Event(device)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in super().__iter__():
            # The batch was allocated on the copying stream and is used on this one: its memory may be handed out again
            # only when this stream has passed this point, too.
            batch.record_stream(torch.accelerator.current_stream())
            yield batch

    def copy_next(self) -> torch.Tensor | None:
        self.copied.synchronize()  # the pinned buffer is free again
        batch = super().copy_next()
        self.copied.record(self.stream)
        return batch


def work_through(prefetcher: NaivePrefetcher) -> list[float]:
    """Do something with each batch that takes the device a while, and return what came out."""
    results = []
    for batch in prefetcher:
        sim.sleep(ms=1)
        results.append(batch.mean())
    return [result.item() for result in results]


@pytest.mark.sim(schedule="lazy")
def test_naive_prefetcher_has_two_bugs() -> None:
    with pytest.raises(sim.RaceError) as found, sim.detect_races():
        assert work_through(NaivePrefetcher(batches(), "sim")) != [0.0, 1.0, 2.0, 3.0]

    kinds = {report.kind for report in found.value.reports}
    assert kinds == {"host_race", "reuse"}
    refilled = next(report for report in found.value.reports if report.kind == "host_race")
    assert refilled.later is not None
    assert "copy_next" in refilled.later.stack[-1]


@pytest.mark.sim(schedule="lazy")
def test_mended_prefetcher_has_no_bug() -> None:
    assert work_through(Prefetcher(batches(), "sim")) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.sim(schedule="free")
def test_copies_overlap_with_work() -> None:
    copying = BATCH * 4 / 1e6  # milliseconds at the speed set below
    sim.set_speeds(sim.Speeds(compute=1e15, copy=1e9, launch=0))
    work_through(Prefetcher(batches(), "sim"))
    assert sim.clock() * 1e3 == pytest.approx(copying + 4, rel=0.01), "only the first copy is waited for"
