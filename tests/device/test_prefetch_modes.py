"""prefetch(): each epoch has the grad mode, inference mode and autocast of its own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from cudafuture import prefetch
from support.harness import SIZE, Device

Tensor = torch.Tensor
Mode = Callable[[], AbstractContextManager[Any]]

MODES: dict[str, Mode] = {
    "training": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
ORDER = [*MODES, *reversed(MODES), "training"]


class Moving:
    """A class that moves itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Moving:
        return Moving(self.x.to(device))


class Resumable:
    """A resumable iterable whose iterators share its position, and which counts them."""

    def __init__(self, count: int) -> None:
        self.count, self.position, self.iterators = count, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.iterators += 1
        return self._read()

    def _read(self) -> Iterator[Tensor]:
        while self.position < self.count:
            self.position += 1
            yield torch.full((SIZE,), self.position - 1.0)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position % self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Asynchronous:
    """An async iterable."""

    def __init__(self, count: int) -> None:
        self.count = count

    async def __aiter__(self) -> AsyncIterator[Tensor]:
        for i in range(self.count):
            await asyncio.sleep(0)
            yield torch.full((SIZE,), float(i))


def mode() -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def mode_of(name: str) -> tuple[bool, bool, bool]:
    with MODES[name]():
        return mode()


class Seen:
    """A transform that notes the modes in which it runs."""

    def __init__(self) -> None:
        self.modes: list[tuple[bool, bool, bool]] = []

    def __call__(self, batch: Tensor) -> tuple[Tensor, tuple[bool, bool, bool]]:
        return batch, mode()


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("futures", [False, True])
def test_inference_mode_leaves_ordinary_memory(device: Device, pack: bool, futures: bool) -> None:
    weight = torch.ones(SIZE, requires_grad=True, device=device.at())
    items = ({"x": torch.ones(SIZE), "moving": Moving(torch.ones(SIZE))} for _ in range(12))
    epoch = iter(prefetch(items, device.at(), pack=pack, futures=futures))
    for i in range(12):
        with torch.inference_mode(i < 6):
            batch = next(epoch).wait(non_blocking=True) if futures else next(epoch)
        for x in (batch["x"], batch["moving"].x):
            assert not x.is_inference()
            (x * weight).sum().backward()


def test_inference_mode_batches_can_train(device: Device) -> None:
    weight = torch.ones(SIZE, requires_grad=True, device=device.at())
    items = [{"x": torch.ones(SIZE)} for _ in range(6)]
    with torch.inference_mode():
        batches = list(prefetch(items, device.at()))
    for batch in batches:
        (batch["x"] * weight).sum().backward()


@pytest.mark.parametrize("target", ["device", "host"])
def test_each_epoch_has_own_modes(device: Device, target: str) -> None:
    seen = Seen()
    where = device.at() if target == "device" else "cpu"
    batches = prefetch([torch.ones(SIZE)] * 5, where, transform=seen, across_epochs=True)
    for name in ORDER:
        with MODES[name]():
            modes = [found for _, found in batches]
        assert modes == [mode_of(name)] * 5
    batches.close()


def test_each_async_epoch_has_own_modes(device: Device) -> None:
    async def main() -> None:
        batches = prefetch(Asynchronous(5), device.at(), transform=Seen(), across_epochs=True)
        for name in ORDER:
            with MODES[name]():
                modes = [found async for _, found in batches]
            assert modes == [mode_of(name)] * 5
        batches.close()

    asyncio.run(main())


def test_iterable_has_modes_of_loop(device: Device) -> None:
    class Loader:
        def __iter__(self) -> Iterator[Any]:
            made = mode()
            return ((made, mode()) for _ in range(4))

    batches = prefetch(Loader(), device.at(), across_epochs=True)
    for name in ORDER:
        with MODES[name]():
            modes = list(batches)
        assert modes == [(mode_of(name),) * 2] * 4
    batches.close()


def test_modes_of_taking_spare_next_epoch(device: Device) -> None:
    source = Resumable(4)
    batches = prefetch(source, device.at(), transform=Seen(), across_epochs=True)
    for number in range(4):
        epoch = iter(batches)
        assert source.iterators == number + 1  # this epoch was read ahead
        with torch.inference_mode():
            modes = [found for _, found in epoch]
        assert modes == [mode_of("training")] * 4
    batches.close()


def test_dropped_epoch_ahead_loses_no_batch(device: Device) -> None:
    numbers: list[int] = []
    batches = prefetch(Resumable(4), device.at(), depth=3, across_epochs=numbers.append)
    for name in ORDER:
        with MODES[name]():
            read = [device.read(batch) for batch in batches]
        assert read == [0, 1, 2, 3]
    state = batches.state_dict()
    assert state["epoch"] == len(ORDER)
    batches.close()
    assert sorted(set(numbers)) == list(range(len(ORDER) + 1))
