"""Many small parameters: they share reads, writes and calls of the optimizer, and the work for each stays the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import cudafuture.swap
from cudafuture.compat.deepspeed import OptimizerSwapper
from cudafuture.errors import SwapError
from cudafuture.store import DiskStore
from cudafuture.swap import offload
from support.soak import soak_cases
from support.training import OPTIMIZERS, Pair, same

pytestmark = pytest.mark.usefixtures("one_thread")
PLACES: dict[str, dict[str, Any]] = {"small": {"min_bytes": 1 << 20}, "memory": {"memory": 1 << 20}, "store": {}}
PACKAGE = str(Path(cudafuture.swap.__file__).parent)


def lines_of(call: Callable[[], object]) -> int:
    """Return how many lines of the package a call executes in this thread, each iteration of a loop counted."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def parameters_of(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((4,), float(i))) for i in range(count)]


def backward(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
    torch.stack([parameter.square().sum() for parameter in parameters]).sum().backward()


def stepped(count: int, store: DiskStore, **options: Any) -> int:
    parameters = parameters_of(count)
    with offload(torch.optim.Adam(parameters), store, name=f"{count}", min_bytes=0, **options) as optimizer:

        def step() -> None:
            optimizer.zero_grad()
            backward(parameters)
            optimizer.step()

        step()
        return lines_of(step)


def looked_up(count: int, store: DiskStore) -> int:
    parameters = parameters_of(count)
    groups = [{"params": [parameter]} for parameter in parameters]
    with offload(torch.optim.Adam, store, params=groups, name=f"{count}", min_bytes=0) as optimizer:
        return lines_of(
            lambda: [(optimizer.state_of(parameter), parameter in optimizer.state) for parameter in parameters]
        )


def swapped(count: int, store: DiskStore) -> int:
    parameters = parameters_of(count)
    swapper = OptimizerSwapper(torch.optim.Adam(parameters), store, name=f"{count}", min_bytes=0)
    swapper.initialize_parameters(parameters)

    def go_round() -> None:
        for parameter in parameters:
            swapper.swap_out_gradients(parameter, [0], [torch.ones(4)])
            swapper.swap_in_optimizer_state(parameter)
            swapper.swap_out_optimizer_state(parameter, async_swap=False)

    lines = lines_of(go_round)
    swapper.close()
    return lines


def pieced(count: int, store: DiskStore) -> int:
    parameter = nn.Parameter(torch.zeros(count))
    swapper = OptimizerSwapper(torch.optim.Adam([parameter]), store, name=f"{count}", min_bytes=64)
    swapper.initialize_parameters([parameter])
    lines = lines_of(lambda: [swapper.swap_out_gradients(parameter, [i], [torch.ones(1)]) for i in range(count)])
    swapper.close()
    return lines


WORK: dict[str, Callable[[int, DiskStore], int]] = {
    "step": stepped,
    "gradients in the store": lambda count, store: stepped(count, store, swap_gradients=True),
    "during backward": lambda count, store: stepped(count, store, when="backward"),
    "lookups": looked_up,
    "one by one": swapped,
    "pieces of a gradient": pieced,
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_the_work_grows_no_faster_than_the_number_of_parameters(
    work: Callable[[int, DiskStore], int], store: DiskStore
) -> None:
    assert work(200, store) < 4.4 * work(50, store)


def test_small_parameters_share_a_read_and_a_write(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    for verb in ("readv", "writev"):
        whole = getattr(DiskStore, verb)

        def counted(keys: Any, *args: Any, verb: str = verb, whole: Any = whole, **options: Any) -> Any:
            calls.append((verb, len(list(keys))))
            return whole(store, keys, *args, **options)

        monkeypatch.setattr(store, verb, counted)
    pair = Pair(OPTIMIZERS["Adam"], store, ((7,), (3, 4), (0,), (2,), (5, 1)))
    pair.step()
    calls.clear()
    pair.step()
    assert calls == [("readv", 8), ("writev", 8)]
    pair.expect_same()


@pytest.mark.soak
@pytest.mark.parametrize(("name", "place"), soak_cases(product(OPTIMIZERS, PLACES), 7))
def test_many_parameters_in_groups_are_updated_as_by_the_plain_optimizer(
    name: str, place: str, store: DiskStore
) -> None:
    pair = Pair(OPTIMIZERS[name], store, ((3, 4), (2, 5), (4, 4)) * 100, **PLACES[place])
    for optimizer in (pair.optimizer, pair.offloaded):
        group = optimizer.param_groups[0]
        later = {**group, "params": group["params"][150:], "lr": 0.3}
        group["params"] = group["params"][:150]
        optimizer.param_groups.append(later)
    pair.step()
    pair.step(missing=range(0, 300, 7))
    pair.step()
    pair.expect_same()


def test_a_batch_that_fails_is_repeated_without_the_parameters_that_were_updated(store: DiskStore) -> None:
    """The gradient of the fifth parameter has another shape than its state."""
    pair = Pair(OPTIMIZERS["Adam"], store, ((4,),) * 8, min_bytes=1 << 20)
    pair.step()
    pair.give_gradients()
    pair.optimizer.step()
    broken = pair.swapped[4]
    state = pair.offloaded.state_of(broken)
    pair.offloaded.set_state(broken, {**state, "exp_avg": torch.zeros(4, dtype=torch.int64)})
    with pytest.raises(RuntimeError, match="dtype"):
        pair.offloaded.step()
    pair.offloaded.set_state(broken, state)
    pair.offloaded.step()
    pair.expect_same()


def test_the_parameter_that_cannot_be_read_is_named_among_those_that_share_the_read(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, ((4,),) * 8)
    pair.step()
    old = pair.swapped[5].detach().clone()
    (lost,) = (key for key in store.list_keys().wait() if "/5/exp_avg/" in key)
    moment = store.read(lost).wait()
    store.delete(lost).wait()
    pair.give_gradients()
    pair.optimizer.step()
    with pytest.raises(SwapError, match="state of parameter 5 of group 0 cannot be read") as caught:
        pair.offloaded.step()
    assert caught.value.parameter is pair.swapped[5]
    assert same(pair.swapped[5].detach(), old)
    store.write(lost, moment).wait()
    pair.offloaded.step()
    pair.expect_same()
