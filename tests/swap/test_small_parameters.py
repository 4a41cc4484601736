"""Many small parameters: they share reads, writes and calls of the optimizer, and the work for each stays the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from cudafuture.errors import SwapError
from cudafuture.store import DiskStore
from cudafuture.swap import offload
from support.executed_lines import count_lines
from support.soak import soak_cases
from support.training import OPTIMIZERS, Pair, same

pytestmark = pytest.mark.usefixtures("one_thread")
PLACES: dict[str, dict[str, Any]] = {"small": {"min_bytes": 1 << 20}, "memory": {"memory": 1 << 20}, "store": {}}


def parameters_of(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((4,), float(i))) for i in range(count)]


def backward(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
    torch.stack([parameter.square().sum() for parameter in parameters]).sum().backward()


def count_lines_of_step(count: int, store: DiskStore, **options: Any) -> int:
    parameters = parameters_of(count)
    with offload(torch.optim.Adam(parameters), store, name=f"{count}", min_bytes=0, **options) as optimizer:

        def step() -> None:
            optimizer.zero_grad()
            backward(parameters)
            optimizer.step()

        step()
        return count_lines(step)


def count_lines_of_lookups(count: int, store: DiskStore) -> int:
    parameters = parameters_of(count)
    groups = [{"params": [parameter]} for parameter in parameters]
    with offload(torch.optim.Adam, store, params=groups, name=f"{count}", min_bytes=0) as optimizer:
        return count_lines(
            lambda: [(optimizer.state_of(parameter), parameter in optimizer.state) for parameter in parameters]
        )


WORK: dict[str, Callable[[int, DiskStore], int]] = {
    "step": count_lines_of_step,
    "gradients in the store": lambda count, store: count_lines_of_step(count, store, swap_gradients=True),
    "during backward": lambda count, store: count_lines_of_step(count, store, when="backward"),
    "lookups": count_lines_of_lookups,
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_work_grows_linearly_with_parameters(work: Callable[[int, DiskStore], int], store: DiskStore) -> None:
    assert work(200, store) < 4.4 * work(50, store)


def test_small_parameters_share_reads_and_writes(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    for verb in ("readv", "writev"):
        whole = getattr(DiskStore, verb)

        def count(keys: Any, *args: Any, verb: str = verb, whole: Any = whole, **options: Any) -> Any:
            calls.append((verb, len(list(keys))))
            return whole(store, keys, *args, **options)

        monkeypatch.setattr(store, verb, count)
    pair = Pair(OPTIMIZERS["Adam"], store, ((7,), (3, 4), (0,), (2,), (5, 1)))
    pair.step()
    calls.clear()
    pair.step()
    assert calls == [("readv", 8), ("writev", 8)]
    pair.expect_same()


@pytest.mark.soak
@pytest.mark.parametrize(("name", "place"), soak_cases(product(OPTIMIZERS, PLACES), 7))
def test_many_grouped_parameters_equal_plain_optimizer(name: str, place: str, store: DiskStore) -> None:
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


def test_failed_batch_repeats_without_updated_parameters(store: DiskStore) -> None:
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


def test_error_of_shared_read_names_parameter(store: DiskStore) -> None:
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
