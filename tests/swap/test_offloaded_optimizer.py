"""An offloaded optimizer is an optimizer of torch: schedulers, scalers, hooks, state_dict, and clear refusals."""

from __future__ import annotations

import copy
import gc
import math
import mmap
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from cudafuture.errors import InvalidStateError
from cudafuture.store import DiskStore
from cudafuture.swap import offload
from support.training import OPTIMIZERS, Pair, same

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def pair(store: DiskStore) -> Pair:
    return Pair(OPTIMIZERS["AdamW"], store, ((200, 201), (77,)), chunk_bytes=1 << 16)


def test_schedulers_set_learning_rate(pair: Pair) -> None:
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10) for o in (pair.optimizer, pair.offloaded)
    ]
    for _ in range(8):
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
    assert pair.offloaded.param_groups[0]["lr"] == pair.optimizer.param_groups[0]["lr"]
    pair.expect_same()


def test_gradient_scaler_skips_infinite_gradients(pair: Pair) -> None:
    for parameters, optimizer in ((pair.plain, pair.optimizer), (pair.swapped, pair.offloaded)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(5):
            optimizer.zero_grad()
            loss: Any = sum((p * (float("inf") if step == 2 else step)).sum() for p in parameters)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert pair.offloaded.statistics().steps == 4
    pair.expect_same()


def test_hooks_and_closures_run_once_per_step(pair: Pair) -> None:
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


def test_loaded_state_equals_plain_optimizer(pair: Pair) -> None:
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


def test_state_reads_as_mapping(pair: Pair) -> None:
    first, second = pair.swapped
    assert (len(pair.offloaded.state), first in pair.offloaded.state) == (0, False)
    pair.step(missing=[1])
    state = pair.offloaded.state
    assert list(state) == [first]
    assert second not in state
    assert state[first].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert (state[second], state.get(second), state.pop(second, 1)) == ({}, None, 1)  # as a defaultdict's
    with pytest.raises(KeyError):
        state.pop(second)
    with pytest.raises(KeyError):
        state[nn.Parameter(torch.ones(3))]
    state.setdefault(second, {"step": torch.tensor(1.0)})
    assert state.pop(second) == {"step": 1}
    assert list(state) == [first]
    pair.offloaded.set_state(first, {})
    assert len(state) == 0


def test_state_of_one_parameter_is_replaced(pair: Pair) -> None:
    pair.step()
    for parameters, state in ((pair.plain, pair.optimizer.state), (pair.swapped, pair.offloaded.state)):
        doubled = {name: value * 2 for name, value in state[parameters[0]].items()}
        state[parameters[0]] = doubled
    pair.expect_same()
    pair.step()
    pair.expect_same()
    with pytest.raises(KeyError):
        pair.offloaded.state_of(nn.Parameter(torch.ones(3)))


def test_memory_budget_is_used_and_not_exceeded(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, ((100,), (1000,), (100,)), memory=2 * 4 * 200)
    pair.step()
    found = pair.offloaded.statistics()
    assert (found.resident_bytes, found.stored_bytes) == (2 * 4 * 200, 2 * 4 * 1000)
    assert found.swap_in_state_bytes == 0
    pair.step()
    assert pair.offloaded.statistics().swap_in_state_bytes == 2 * 4 * 1000
    assert pair.offloaded.statistics().swap_out_state_bytes == 2 * 2 * 4 * 1000


def test_small_state_stays_in_memory(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, ((100,), (1000,)), min_bytes=4000)
    pair.step()
    assert pair.offloaded.statistics().stored_bytes == 2 * 4 * 1000


def test_buffers_of_one_parameter_are_enough(store: DiskStore) -> None:
    with pytest.raises(
        ValueError, match=r"buffer_bytes=1000 is less than parameter \d of group 0 needs: \d+"
    ) as caught:
        Pair(OPTIMIZERS["Adam"], store, buffer_bytes=1000)
    least = int(str(caught.value).partition("needs: ")[2].split()[0])
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
def test_released_memory_is_waited_for(when: str, prefetch: int, store: DiskStore) -> None:
    """Buffers for one parameter, and more parameters than are read and written at a time."""
    size = 12 * 64 * 1024 + 8 * 4096
    shapes = ((256, 256),) * 9
    pair = Pair(OPTIMIZERS["Adam"], store, shapes, when=when, prefetch=prefetch, buffer_bytes=size)
    for step in range(4):
        pair.step(missing=[step])
    pair.expect_same()


def test_next_parameters_are_read_during_update(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of writes that have ended goes to reads before the update of the next parameter begins."""
    condition = threading.Condition()
    reads, updated, watched = 0, 0, False
    late: list[int] = []

    class Watched(torch.optim.SGD):  # a subclass: its parameters are not cut into chunks
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            nonlocal updated
            if watched:
                updated += 1
                due = min(2 * math.ceil(updated / 2) + 4, len(parameters))  # two parameters are read together
                with condition:
                    if not late and not condition.wait_for(lambda: reads >= due, timeout=10):
                        late.append(updated)
            super().step()

    def readv(keys: list[str], *args: Any, **options: Any) -> Any:
        nonlocal reads
        with condition:
            reads += len(keys)
            condition.notify_all()
        return DiskStore.readv(store, keys, *args, **options)

    def writev(*args: Any, **options: Any) -> Any:
        future = DiskStore.writev(store, *args, **options)
        future.wait()
        return future

    parameters = [nn.Parameter(torch.ones(64, 1024)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    size = 4 * (2 * parameters[0].nbytes + 8 * 4096)
    with offload(Watched(parameters, momentum=0.9), store, min_bytes=0, prefetch=2, buffer_bytes=size) as optimizer:
        optimizer.step()
        watched = True
        monkeypatch.setattr(store, "readv", readv)
        monkeypatch.setattr(store, "writev", writev)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert (reads, updated, late) == (16, 16, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_state_is_written_from_buffers(
    dtype: torch.dtype, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers hold the new tensors of an update until the store has written them, so their memory is bounded."""
    addresses: list[int] = []

    def writev(tensors: dict[str, torch.Tensor], **options: Any) -> Any:
        addresses.extend(tensor.data_ptr() for tensor in tensors.values())
        return DiskStore.writev(store, tensors, **options)

    monkeypatch.setattr(store, "writev", writev)
    parameter = nn.Parameter(torch.ones(100_001, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    adam = torch.optim.Adam([parameter], amsgrad=True)
    with offload(adam, store, min_bytes=0, chunk_bytes=1 << 16, master_weights=True) as optimizer:
        optimizer.step()
        assert len(addresses) > 3
        assert not any(address % mmap.PAGESIZE for address in addresses)  # malloc aligns tensors to 64 bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_leaves_core_to_store(name: str, dtype: torch.dtype, store: DiskStore) -> None:
    counts: set[int] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts.add(torch.get_num_threads())
            return func(*args, **(kwargs or {}))

    torch.set_num_threads(3)
    pair = Pair(OPTIMIZERS[name], store, ((333, 301), (40_001, 1)), dtype)
    for _ in range(2):
        pair.give_gradients()
        pair.optimizer.step()
        with Watch():  # type: ignore[no-untyped-call]
            pair.offloaded.step()
        whole = name in ("Adafactor", "Muon", "SGD") or dtype != torch.float32  # this SGD has no state in the store
        assert (min(counts), torch.get_num_threads()) == (3 if whole else 2, 3)
    pair.expect_same()


@pytest.mark.parametrize(
    "change",
    [torch.Tensor.half, torch.Tensor.double, lambda values: values[:9], lambda values: torch.cat([values, values])],
    ids=["half", "double", "smaller", "larger"],
)
def test_changed_parameter_is_refused_like_torch(change: Any, store: DiskStore) -> None:
    """Nothing is lost: with its old type and shape, training goes on."""
    pair = Pair(OPTIMIZERS["Adam"], store, chunk_bytes=1 << 16)
    pair.step()
    both = (pair.plain[0], pair.swapped[0])
    for parameter in both:
        before = parameter.data
        parameter.grad = None
        parameter.data = change(before)
        changed = parameter.detach().clone()
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(RuntimeError, match=r"dtype|size|elements"):
            (pair.optimizer if parameter is both[0] else pair.offloaded).step()
        assert same(parameter.detach(), changed)
        parameter.grad = None
        parameter.data = before
    for plain, swapped in zip(pair.plain[1:], pair.swapped[1:], strict=True):
        pair.offloaded.set_state(swapped, pair.optimizer.state[plain])
        swapped.data = plain.detach().clone()
    state = pair.optimizer.state[both[0]]
    state["step"] = state["step"] - 1  # torch counts a step that it refuses
    pair.step()
    pair.expect_same()


def test_refused_optimizer_keeps_its_state(store: DiskStore) -> None:
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(ValueError, match="buffer_bytes"):
        offload(optimizer, store, min_bytes=0, buffer_bytes=1)
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert optimizer.state[parameter]["step"] == 1
    offloaded = offload(optimizer, store, min_bytes=0)
    assert offloaded.state_of(parameter)["step"] == 1
    for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(InvalidStateError, match=r"call \w+\(\) of what offload"):
            call()


def test_scheduler_of_the_given_optimizer_goes_on(store: DiskStore) -> None:
    parameter = nn.Parameter(torch.ones(1000))
    given = torch.optim.Adam([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(given, 1, 0.5)
    offloaded = offload(given, store, min_bytes=0)
    for step in range(3):
        parameter.grad = torch.ones_like(parameter)
        offloaded.step()
        scheduler.step()
        assert offloaded.param_groups[0]["lr"] == 0.5 ** (step + 1)
        given.zero_grad()
        assert parameter.grad is None
    offloaded.load_state_dict(offloaded.state_dict())
    scheduler.step()
    assert offloaded.param_groups[0]["lr"] == 0.5**4


def test_checkpoint_in_ephemeral_store_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = offload(torch.optim.Adam([parameter]), DiskStore(tmp_path / "ephemeral"))
    optimizer.save("first")
    optimizer.save("second")
    assert [record.getMessage().partition(" in <")[0] for record in caplog.records] == ["checkpoints"]
    caplog.clear()
    with DiskStore(tmp_path / "durable", durable=True) as durable:
        offload(torch.optim.Adam([parameter]), durable).save("first")
    assert not caplog.records


def channels_last() -> torch.Tensor:
    return torch.randn(32, 16, 5, 5).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("options", [{}, {"memory": 1 << 30}], ids=str)
@pytest.mark.parametrize("make_values", [lambda: torch.randn(64, 96).t(), channels_last], ids=["t", "channels_last"])
@pytest.mark.parametrize(
    "make",
    [partial(torch.optim.Adam), partial(torch.optim.AdamW, amsgrad=True), partial(torch.optim.SGD, momentum=0.9)],
    ids=["adam", "amsgrad", "momentum"],
)
def test_fused_updates_of_other_layouts(
    store: DiskStore, make: Any, make_values: Callable[[], torch.Tensor], options: dict[str, Any]
) -> None:
    plain, swapped = [nn.Parameter(make_values().clone()) for _ in range(2)]
    swapped.data.copy_(plain.data)
    optimizer = make([plain], lr=0.01, fused=True)
    offloaded = offload(make([swapped], lr=0.01, fused=True), store, min_bytes=0, **options)
    for _ in range(3):
        plain.grad = torch.empty_like(plain).copy_(torch.randn(plain.shape))
        swapped.grad = torch.empty_like(swapped).copy_(plain.grad)
        optimizer.step()
        offloaded.step()
    assert plain.stride() == swapped.stride() != torch.empty(plain.shape).stride()
    assert torch.equal(plain, swapped)


class Preconditioned(torch.optim.Optimizer):
    """An optimizer whose state for n elements is a matrix of n x n."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["matrix"] = torch.zeros(parameter.numel(), parameter.numel())
                    state["matrix"].diagonal().add_(parameter.grad.square())
                    parameter.sub_(group["lr"] * parameter.grad / state["matrix"].diagonal().sqrt())


def test_state_may_be_larger_than_parameter(store: DiskStore) -> None:
    """The buffers grow beyond their default of 64 MiB; where the user has given a size, the error has the name."""
    pair = Pair(Preconditioned, store, ((4200,), (10,)), prefetch=0)
    pair.optimizer.step = torch.no_grad()(pair.optimizer.step)  # type: ignore[method-assign]
    for _ in range(3):
        pair.step()
    pair.expect_same()
    tight = offload(Preconditioned(pair.plain), store, name="tight", min_bytes=0, buffer_bytes=1 << 20)
    tight.step()
    with pytest.raises(ValueError, match=r"buffer_bytes=1048576 is less than parameter 0 of group 0 needs: \d+"):
        tight.step()


def test_backward_continues_without_room_in_buffers(store: DiskStore) -> None:
    parameters = [nn.Parameter(torch.ones(count)) for count in (10, 1000, 10)]
    plain = Preconditioned(parameters)
    with offload(plain, store, min_bytes=0, buffer_bytes=1 << 20, when="backward") as optimizer:
        sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        assert all(parameter.grad is not None for parameter in parameters)
        with pytest.raises(ValueError, match="buffer_bytes=1048576 is less than parameter 1 of group 0 needs"):
            optimizer.step()
        assert [optimizer.state_of(parameter)["matrix"][0, 0].item() for parameter in parameters] == [2, 1, 2]


def test_buffers_grow_with_added_parameters(store: DiskStore) -> None:
    """Muon updates whole matrices, and this one needs more than the default of 64 MiB."""
    pair = Pair(OPTIMIZERS["Muon"], store, ((2, 3),), prefetch=0)
    large = nn.Parameter(torch.ones(2, 5 << 20))
    pair.offloaded.add_param_group({"params": [large]})
    large.grad = torch.zeros_like(large)
    for _ in range(2):
        pair.offloaded.step()
    assert pair.offloaded.state_of(large)["momentum_buffer"].shape == large.shape


def test_state_of_other_shape_is_refused(pair: Pair) -> None:
    pair.step()
    state = pair.offloaded.state_of(pair.swapped[1])
    with pytest.raises(ValueError, match=r"'exp_avg' has the shape \(76,\), but the parameter has \(77,\)"):
        pair.offloaded.set_state(pair.swapped[1], {**state, "exp_avg": torch.ones(76)})
    saved = copy.deepcopy(pair.optimizer.state_dict())
    saved["state"][0]["exp_avg"] += 1
    saved["state"][1]["exp_avg"] = torch.ones(76)
    with pytest.raises(ValueError, match="'exp_avg' has the shape"):
        pair.offloaded.load_state_dict(saved)
    pair.step()
    pair.expect_same()


def test_dropped_optimizer_updates_nothing(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = offload(torch.optim.SGD([parameter]), tmp_path, min_bytes=0, when="backward")
    parameter.sum().backward()
    optimizer.step()
    dropped = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert dropped() is None
    finally:
        gc.enable()
    parameter.grad = None
    before = parameter.detach().clone()
    parameter.sum().backward()
    assert torch.equal(parameter, before)
    assert torch.equal(parameter.grad, torch.ones(1000))  # type: ignore[arg-type]


def test_reads_on_request_count_as_exposed(pair: Pair) -> None:
    pair.step()
    pair.offloaded.flush()
    before = pair.offloaded.statistics().exposed_io_seconds
    pair.offloaded.state_of(pair.swapped[0])
    assert pair.offloaded.statistics().exposed_io_seconds > before


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("without_step", ["all", "one"])
def test_each_backward_updates_once_without_step(without_step: str, count: int, store: DiskStore) -> None:
    shapes = ((300, 301),) * count
    pair = Pair(OPTIMIZERS["Adam"], store, shapes, when="backward", prefetch=4, chunk_bytes=1 << 16)
    for number in range(6):
        for _ in range(2 if without_step == "all" else 1):
            pair.give_gradients()
            pair.optimizer.step()
            pair.offloaded.zero_grad()
        if number != 2:
            pair.offloaded.step()
    pair.expect_same()  # not before the end: it would drop what was read ahead


def test_large_parameters_stay_in_memory_within_budget(store: DiskStore) -> None:
    """The first ones that are updated get it; parameters over `chunk_bytes` are then updated as a whole."""
    shapes = ((300, 301), (200, 301), (300, 300))
    memory = 2 * 4 * (300 * 301 + 200 * 301)
    pair = Pair(OPTIMIZERS["Adam"], store, shapes, chunk_bytes=1 << 16, memory=memory)
    for _ in range(3):
        pair.step()
    assert pair.offloaded.statistics().resident_bytes == memory
    assert pair.offloaded.statistics(last_step=True).swap_in_state_bytes == 2 * 4 * 300 * 300
    pair.offloaded.save("latest")
    pair.step()
    pair.expect_same()


def test_matrix_optimizer_is_tried_with_matrix(store: DiskStore) -> None:
    parameter = nn.Parameter(torch.ones(3, 4))
    with offload(torch.optim.Muon, store, params=[parameter], min_bytes=0) as optimizer:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert optimizer.state_of(parameter)["momentum_buffer"].shape == (3, 4)


def test_offloaded_optimizer_is_not_offloaded_again(store: DiskStore) -> None:
    with (
        offload(torch.optim.Adam([nn.Parameter(torch.ones(3))]), store) as optimizer,
        pytest.raises(ValueError, match="offloaded already"),
    ):
        offload(optimizer, store, name="again")


def test_unsupported_optimizers_are_refused(store: DiskStore) -> None:
    parameter = nn.Parameter(torch.ones(10, 10))
    with pytest.raises(ValueError, match="LBFGS"):
        offload(torch.optim.LBFGS([parameter]), store)
    optimizer = offload(torch.optim.SGD([parameter], momentum=0.9), store)
    parameter.grad = torch.ones(10, 10).to_sparse()
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is sparse"):
        optimizer.step()
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises(ValueError, match="another optimizer uses the name 'optimizer'"):
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
def test_arguments_out_of_range_are_refused(wrong: dict[str, Any], store: DiskStore) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        offload(torch.optim.SGD([nn.Parameter(torch.ones(3))]), store, **wrong)


def test_errors_name_parameters(store: DiskStore) -> None:
    model = nn.Linear(3, 3)
    optimizer = offload(torch.optim.SGD(model.named_parameters()), store)
    model.weight.grad = torch.ones(3, 3).to_sparse()
    with pytest.raises(RuntimeError, match="parameter 'weight'"):
        optimizer.step()


# ---- updates during backward


def backward_pair(store: DiskStore) -> Pair:
    return Pair(OPTIMIZERS["Adam"], store, ((50, 60), (60, 70), (70, 10)), when="backward")


def test_backward_leaves_unusable_gradient(store: DiskStore) -> None:
    pair = backward_pair(store)
    pair.step()
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(pair.swapped, 1.0),
        lambda: pair.swapped[0].square().sum().backward(),
        lambda: torch.isinf(pair.swapped[0].grad),  # type: ignore[arg-type]
    ):
        with pytest.raises(RuntimeError, match=r"need when='step'"):
            use()
    pair.offloaded.zero_grad(set_to_none=False)
    assert all(parameter.grad is None for parameter in pair.swapped)
    pair.expect_same()


def test_backward_in_other_order_gives_same_result(store: DiskStore) -> None:
    pair = backward_pair(store)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (1,), (), (0, 1, 2), (0, 1, 2)):
        for parameters, optimizer in ((pair.plain, pair.optimizer), (pair.swapped, pair.offloaded)):
            optimizer.zero_grad()
            for i in order:
                parameters[i].square().sum().backward()
            optimizer.step()
    pair.expect_same()


def test_backward_reads_ahead_in_last_order(store: DiskStore) -> None:
    pair = backward_pair(store)
    for _ in range(3):
        pair.step()
    state = pair.offloaded.state_of(pair.swapped[0])  # drops what was read ahead
    pair.offloaded.set_state(pair.swapped[0], state)
    for _ in range(3):
        pair.step()
    pair.expect_same()
