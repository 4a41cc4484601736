"""Updates in which the optimizer itself raises: the other parameters have their old values and state, or new ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from itertools import product
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cudafuture import CUDAFuture
from cudafuture.errors import StorageError, SwapError
from cudafuture.store import DiskStore
from support.soak import soak_cases
from support.training import OPTIMIZERS, Make, Pair, same

SMALL = ((4, 1), (3, 2), (1, 5), (2, 1))
CHUNKED = ((7, 1), (200, 200), (3, 3))  # one, three and one
PLACES: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "store": (SMALL, {}),
    "memory": (SMALL, {"min_bytes": 1 << 20}),
    "memory beside the buffers": (SMALL, {"memory": 1 << 20}),
    "chunks": (CHUNKED, {"chunk_bytes": 1 << 16}),
    "gradients": (CHUNKED, {"chunk_bytes": 1 << 16, "swap_gradients": True}),
}
UPDATES: dict[str, Make] = {
    **OPTIMIZERS,
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "SGD, fused": partial(torch.optim.SGD, momentum=0.9, fused=True),
}

LAST = ("Adam", "SGD, momentum", "Adagrad", "AdamW, fused")  # they change a parameter with their last operator

pytestmark = pytest.mark.usefixtures("one_thread")


class Fault(TorchDispatchMode):
    """Mode in which one operator of the optimizer runs out of memory; it counts the operators of the optimizer."""

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number, self.count = number, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_called_by_an_optimizer(sys._getframe(1)) and "profiler" not in str(operator):
            self.count += 1
            if self.count == self.number:
                raise torch.OutOfMemoryError(f"no memory for {operator}")
        return operator(*args, **(kwargs or {}))


def _is_called_by_an_optimizer(frame: FrameType | None) -> bool:
    while frame is not None and "torch/optim/" not in frame.f_code.co_filename:
        frame = None if "cudafuture/swap/" in frame.f_code.co_filename else frame.f_back
    return frame is not None


def train_pair(make: Make, place: str, store: DiskStore, steps: int) -> Pair:
    shapes, options = PLACES[place]
    pair = Pair(make, store, shapes, **options)
    for _ in range(steps):
        pair.step()
    pair.give_gradients()
    pair.optimizer.step()
    return pair


def differences(pair: Pair) -> list[int]:
    """Return the numbers of the parameters whose value or state is not that of the plain optimizer."""
    return [
        i
        for i, (plain, swapped) in enumerate(zip(pair.plain, pair.swapped, strict=True))
        if not same(plain, swapped)
        or pair.offloaded.state_of(swapped).keys() != pair.optimizer.state[plain].keys()
        or not all(same(v, pair.optimizer.state[plain][name]) for name, v in pair.offloaded.state_of(swapped).items())
    ]


def count_operators(make: Make, place: str, store: DiskStore, steps: int) -> int:
    pair = train_pair(make, place, store, steps)
    fault = Fault(0)
    with fault:
        pair.offloaded.step()
    pair.offloaded.close()
    return fault.count


@pytest.mark.soak
@pytest.mark.parametrize(("name", "place", "steps"), soak_cases(product(UPDATES, ["store", "memory"], [0, 1]), 5))
def test_failed_operator_leaves_other_parameters_updated_once(
    name: str, place: str, steps: int, store: DiskStore
) -> None:
    make = UPDATES[name]
    count = count_operators(make, place, store, steps)
    for number in range(1, count + 1, max(1, count // 6)):
        pair = train_pair(make, place, store, steps)
        with pytest.raises(torch.OutOfMemoryError), Fault(number):
            pair.offloaded.step()
        pair.offloaded.step()
        assert len(differences(pair)) <= 1, number
        pair.offloaded.close()


@pytest.mark.soak
@pytest.mark.parametrize(("name", "place"), soak_cases(product(LAST, ["store", "chunks", "gradients"]), 5))
def test_stored_state_is_old_if_value_is(name: str, place: str, store: DiskStore) -> None:
    make = UPDATES[name]
    for number in range(1, count_operators(make, place, store, 1) + 1):
        pair = train_pair(make, place, store, 1)
        with pytest.raises(torch.OutOfMemoryError), Fault(number):
            pair.offloaded.step()
        pair.offloaded.step()
        pair.expect_same()
        pair.offloaded.close()


@pytest.mark.parametrize("place", ["store", "chunks"])
def test_unwritten_state_stays_in_memory_after_failed_update(
    place: str, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: Mapping[str, torch.Tensor], **options: Any) -> CUDAFuture[int]:
        return CUDAFuture.failed(StorageError("no space"))

    make = OPTIMIZERS["Adam"]
    count = count_operators(make, place, store, 1)
    for number in range(count // 2, count + 1, 4):
        pair = train_pair(make, place, store, 1)
        monkeypatch.setattr(store, "writev", fail)
        with pytest.raises(torch.OutOfMemoryError), Fault(number):
            pair.offloaded.step()
        monkeypatch.undo()
        with pytest.raises(SwapError, match="no space"):
            pair.offloaded.flush()
        pair.offloaded.step()
        pair.expect_same()
        pair.step()
        pair.expect_same()
        pair.offloaded.close()
