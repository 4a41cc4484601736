"""An offloaded optimizer is an optimizer of torch: schedulers, scalers, hooks, state_dict, and clear refusals."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from cudafuture.errors import InvalidStateError
from cudafuture.storage import Offloader
from cudafuture.swap import offload
from swap.training import OPTIMIZERS, Pair, same

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def pair(store: Offloader) -> Pair:
    return Pair(OPTIMIZERS["AdamW"], store, ((200, 201), (77,)), chunk_bytes=1 << 16)


def test_schedulers_set_its_learning_rate(pair: Pair) -> None:
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10) for o in (pair.optimizer, pair.offloaded)
    ]
    for _ in range(8):
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
    assert pair.offloaded.param_groups[0]["lr"] == pair.optimizer.param_groups[0]["lr"]
    pair.expect_same()


def test_a_gradient_scaler_skips_steps_with_infinite_gradients(pair: Pair) -> None:
    for parameters, optimizer in ((pair.plain, pair.optimizer), (pair.swapped, pair.offloaded)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(5):
            optimizer.zero_grad()
            loss = sum((p * (float("inf") if step == 2 else step)).sum() for p in parameters)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert pair.offloaded.statistics().steps == 4
    pair.expect_same()


def test_hooks_and_closures_run_once_for_each_step(pair: Pair) -> None:
    said: list[str] = []
    pair.offloaded.register_step_pre_hook(lambda *_: said.append("before"))
    pair.offloaded.register_step_post_hook(lambda *_: said.append("after"))
    every = register_optimizer_step_post_hook(lambda *_: said.append("any"))

    def closure() -> torch.Tensor:
        said.append("closure")
        assert torch.is_grad_enabled()
        pair.offloaded.zero_grad()
        loss = sum((p.square().sum() for p in pair.swapped), torch.zeros(()))
        loss.backward()
        return loss

    loss = pair.offloaded.step(closure)
    every.remove()
    assert loss.item() > 0
    assert said == ["before", "closure", "after", "any"]


def test_state_dicts_are_exchanged_with_plain_optimizers(pair: Pair, tmp_path: Path) -> None:
    for _ in range(3):
        pair.step()
    plain, swapped = pair.optimizer.state_dict(), pair.offloaded.state_dict()
    assert plain["param_groups"] == swapped["param_groups"]
    for number, state in plain["state"].items():
        assert all(same(value, swapped["state"][number][name]) for name, value in state.items())
    torch.save(swapped, tmp_path / "states.pt")
    for _ in range(2):  # what was taken stays what it was
        pair.step()
    loaded = torch.load(tmp_path / "states.pt")
    for number, state in plain["state"].items():
        assert all(same(value, swapped["state"][number][name]) for name, value in loaded["state"][number].items()), (
            state
        )
    before = copy.deepcopy(pair.plain)
    pair.optimizer.load_state_dict(loaded)
    pair.offloaded.load_state_dict(plain if same(before[0], pair.plain[0]) else loaded)
    for _ in range(2):
        pair.step()


def test_loaded_state_is_that_of_the_plain_optimizer(pair: Pair) -> None:
    for _ in range(3):
        pair.step()
    saved = copy.deepcopy(pair.optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    pair.step()
    pair.optimizer.load_state_dict(copy.deepcopy(saved))
    pair.offloaded.load_state_dict(saved)
    pair.expect_same()
    for _ in range(3):
        pair.step()
    pair.expect_same()


def test_its_state_reads_as_a_mapping(pair: Pair) -> None:
    first, second = pair.swapped
    assert (len(pair.offloaded.state), first in pair.offloaded.state) == (0, False)
    pair.step(missing=[1])
    state = pair.offloaded.state
    assert list(state) == [first]
    assert second not in state
    assert state[first].keys() == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(KeyError):
        state[second]
    pair.offloaded.set_state(first, {})
    assert len(state) == 0


def test_state_is_read_and_replaced_for_one_parameter(pair: Pair) -> None:
    pair.step()
    for parameters, state in ((pair.plain, pair.optimizer.state), (pair.swapped, pair.offloaded.state)):
        doubled = {name: value * 2 for name, value in state[parameters[0]].items()}
        state[parameters[0]] = doubled
    pair.expect_same()
    pair.step()
    pair.expect_same()
    with pytest.raises(KeyError):
        pair.offloaded.state_of(nn.Parameter(torch.ones(3)))


def test_memory_that_is_allowed_is_used_and_no_more(store: Offloader) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, ((100,), (1000,), (100,)), memory=2 * 4 * 200)
    pair.step()
    found = pair.offloaded.statistics()
    assert (found.resident_bytes, found.stored_bytes) == (2 * 4 * 200, 2 * 4 * 1000)
    assert found.swap_in_state_bytes == 0
    pair.step()
    assert pair.offloaded.statistics().swap_in_state_bytes == 2 * 4 * 1000
    assert pair.offloaded.statistics().swap_out_state_bytes == 2 * 2 * 4 * 1000


def test_small_state_stays_in_memory(store: Offloader) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, ((100,), (1000,)), min_bytes=4000)
    pair.step()
    assert pair.offloaded.statistics().stored_bytes == 2 * 4 * 1000


def test_buffers_that_hold_one_parameter_are_enough(store: Offloader) -> None:
    with pytest.raises(ValueError, match=r"buffer_bytes=1000 is less than one parameter or chunk needs: \d+") as caught:
        Pair(OPTIMIZERS["Adam"], store, buffer_bytes=1000)
    least = int(str(caught.value).split()[-1])
    pair = Pair(OPTIMIZERS["Adam"], store, buffer_bytes=least)
    for _ in range(3):
        pair.step()
    pair.expect_same()
    with pytest.raises(ValueError, match="buffer_bytes"):
        pair.offloaded.add_param_group({"params": [nn.Parameter(torch.ones(1000, 1000))]})
    pair.step()
    pair.expect_same()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("when", ["step", "backward"])
def test_memory_that_comes_back_is_waited_for(when: str, prefetch: int, store: Offloader) -> None:
    """Buffers for one parameter, and more parameters than are read and written at a time."""
    size = 12 * 64 * 1024 + 8 * 4096
    shapes = ((256, 256),) * 9
    pair = Pair(OPTIMIZERS["Adam"], store, shapes, when=when, prefetch=prefetch, buffer_bytes=size)
    for step in range(4):
        pair.step(missing=[step])
    pair.expect_same()


def test_what_cannot_be_offloaded_is_refused(store: Offloader) -> None:
    parameter = nn.Parameter(torch.ones(10, 10))
    with pytest.raises(ValueError, match="LBFGS"):
        offload(torch.optim.LBFGS([parameter]), store)
    optimizer = offload(torch.optim.SGD([parameter], momentum=0.9), store)
    parameter.grad = torch.ones(10, 10).to_sparse()
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is sparse"):
        optimizer.step()
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises(ValueError, match="another optimizer has the name 'optimizer'"):
        offload(torch.optim.SGD([parameter]), store)
    optimizer.close()
    optimizer.close()
    with pytest.raises(InvalidStateError, match="closed"):
        optimizer.step()
    offload(torch.optim.SGD([parameter]), store).close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_bytes": -1},
        {"memory": -1},
        {"prefetch": -1},
        {"chunk_bytes": 1000},
        {"when": "later"},
        {"compute": "gpu"},
        {"name": ""},
        {"name": "a/b"},
        {"params": []},
    ],
    ids=str,
)
def test_arguments_out_of_their_range_are_refused(wrong: dict[str, Any], store: Offloader) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        offload(torch.optim.SGD([nn.Parameter(torch.ones(3))]), store, **wrong)


def test_names_of_parameters_are_in_errors(store: Offloader) -> None:
    model = nn.Linear(3, 3)
    optimizer = offload(torch.optim.SGD(model.named_parameters()), store)
    model.weight.grad = torch.ones(3, 3).to_sparse()
    with pytest.raises(RuntimeError, match="parameter 'weight'"):
        optimizer.step()


# ---- updates during backward


def backward_pair(store: Offloader) -> Pair:
    return Pair(OPTIMIZERS["Adam"], store, ((50, 60), (60, 70), (70, 10)), when="backward")


def test_backward_leaves_a_gradient_that_cannot_be_used_again(store: Offloader) -> None:
    pair = backward_pair(store)
    pair.step()
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(pair.swapped, 1.0),
        lambda: pair.swapped[0].square().sum().backward(),
        lambda: torch.isinf(pair.swapped[0].grad),
    ):
        with pytest.raises(RuntimeError, match=r"need when='step'"):
            use()
    pair.offloaded.zero_grad(set_to_none=False)
    assert all(parameter.grad is None for parameter in pair.swapped)
    pair.expect_same()


def test_backward_in_other_orders_gives_the_same(store: Offloader) -> None:
    pair = backward_pair(store)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (1,), (), (0, 1, 2), (0, 1, 2)):
        for parameters, optimizer in ((pair.plain, pair.optimizer), (pair.swapped, pair.offloaded)):
            optimizer.zero_grad()
            for i in order:
                parameters[i].square().sum().backward()
            optimizer.step()
    pair.expect_same()


def test_backward_reads_ahead_in_the_order_of_the_last_time(store: Offloader) -> None:
    pair = backward_pair(store)
    for _ in range(3):
        pair.step()
    state = pair.offloaded.state_of(pair.swapped[0])  # drops what was read ahead
    pair.offloaded.set_state(pair.swapped[0], state)
    for _ in range(3):
        pair.step()
    pair.expect_same()
