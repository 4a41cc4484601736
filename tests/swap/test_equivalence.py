"""An offloaded optimizer computes bit for bit what the optimizer computes that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cudafuture.store import DiskStore
from cudafuture.swap import offload
from support.soak import soak_count
from support.training import OPTIMIZERS, SIZES, Pair, same

SCHEDULES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"chunk_bytes": 1 << 16},
    "one at a time": {"chunk_bytes": 1 << 16, "prefetch": 0},
    "in memory": {"memory": 1 << 30},
    "partly in memory": {"memory": 800_000},
    "backward": {"when": "backward", "chunk_bytes": 1 << 16},
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_plain_optimizer(name: str, schedule: dict[str, Any], store: DiskStore) -> None:
    shapes = ((20, 30), (8, 9)) if name == "Muon" else ((200, 201), (123,), (64, 500), ())
    pair = Pair(OPTIMIZERS[name], store, shapes, **schedule)
    for step in range(max(10, soak_count(50))):
        pair.step(missing=[step % 5] if step % 2 else [])
        assert all(same(a, b) for a, b in zip(pair.plain, pair.swapped, strict=True)), step
    pair.expect_same()
    pair.offloaded.close()
    assert store.keys() == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("name", ["Adam", "SGD, momentum", "RMSprop"])
def test_steps_equal_plain_optimizer_in_other_dtypes(name: str, dtype: torch.dtype, store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS[name], store, ((300, 301), (7,)), dtype, chunk_bytes=1 << 16)
    for _ in range(10):
        pair.step()
    pair.expect_same()


def test_sizes_around_page_give_same_result(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, [(size,) for size in SIZES] + [(4, size) for size in SIZES])
    for _ in range(10):
        pair.step()
    pair.expect_same()


def test_noncontiguous_parameters_give_same_result(store: DiskStore) -> None:
    layout = torch.channels_last
    pair = Pair(OPTIMIZERS["Adam"], store, ((8, 3, 70, 70),), memory_format=layout, chunk_bytes=1 << 16)
    assert pair.swapped[0].is_contiguous(memory_format=layout)
    for _ in range(5):
        pair.step()
    pair.expect_same()


def test_gradient_of_other_layout_gives_same_result(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, ((300, 301),), chunk_bytes=1 << 16)
    for _ in range(5):
        gradient = pair.random((301, 300), torch.float32).t()
        pair.plain[0].grad, pair.swapped[0].grad = gradient.clone(), gradient
        pair.optimizer.step()
        pair.offloaded.step()
    pair.expect_same()


def test_parameters_are_added_frozen_and_thawed(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store)
    for step in range(12):
        if step == 3:
            for parameters, optimizer in ((pair.plain, pair.optimizer), (pair.swapped, pair.offloaded)):
                parameters.append(nn.Parameter(torch.ones(50, 60)))
                optimizer.add_param_group({"params": [parameters[-1]], "lr": 0.5})
        for parameters in (pair.plain, pair.swapped):
            parameters[0].requires_grad_(step < 4 or step > 8)
        pair.step()
    pair.expect_same()


def test_layer_used_twice_gives_same_result_in_backward(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, ((40, 40), (40, 40)), when="backward")
    for step in range(6):
        for (first, second), optimizer in ((pair.plain, pair.optimizer), (pair.swapped, pair.offloaded)):
            optimizer.zero_grad()
            x = torch.full((2, 40), float(step))
            (x @ first @ second @ first).tanh().sum().backward()
            optimizer.step()
    pair.expect_same()


def test_gradients_accumulate_and_are_clipped(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["AdamW"], store)
    for _ in range(4):
        for parameters, optimizer in ((pair.plain, pair.optimizer), (pair.swapped, pair.offloaded)):
            optimizer.zero_grad()
            for scale in (1.0, 2.0, 5.0):
                sum((p * scale).square().sum() for p in parameters).backward()  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    pair.expect_same()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("when", ["step", "backward"])
def test_master_weights_equal_float32_copy(dtype: torch.dtype, when: Any, store: DiskStore) -> None:
    half = nn.Parameter(torch.randn(300, 301, generator=torch.Generator().manual_seed(0)).to(dtype))
    master = nn.Parameter(half.detach().float())
    plain = OPTIMIZERS["AdamW"]([master])
    offloaded = offload(
        OPTIMIZERS["AdamW"]([half]), store, master_weights=True, min_bytes=0, chunk_bytes=1 << 16, when=when
    )
    for step in range(8):
        offloaded.zero_grad()
        (half * step).square().sum().backward()
        master.grad = (half.detach() * step * step * 2).float()
        if when == "step":
            assert half.grad is not None
            master.grad = half.grad.float()
        else:
            continue
        plain.step()
        offloaded.step()
        assert torch.equal(half, master.to(dtype))
        assert torch.equal(offloaded.state_of(half)["master"], master)
    if when == "backward":
        assert offloaded.state_of(half)["master"].dtype == torch.float32


def test_initial_state_is_made_chunk_by_chunk(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adagrad"], store, ((300, 301), (5,)))
    most = 0

    def make(params: Any) -> torch.optim.Optimizer:
        nonlocal most
        made = torch.optim.Adagrad(params, lr_decay=0.1, initial_accumulator_value=0.5, foreach=False)
        most = max(most, *(tensor.numel() for state in made.state.values() for tensor in state.values()))
        return made

    pair.optimizer = make(pair.plain)
    most = 0
    pair.offloaded.close()
    pair.offloaded = offload(make, store, params=pair.swapped, min_bytes=0, chunk_bytes=1 << 16)
    assert most == (1 << 16) // 4
    assert pair.offloaded.statistics().stored_bytes == 4 * (300 * 301 + 5)
    for _ in range(5):
        pair.step()
    pair.expect_same()


def test_existing_state_is_taken_over(tmp_path: Path) -> None:
    pair = Pair(OPTIMIZERS["Adam"], str(tmp_path))
    for _ in range(3):
        pair.step()
    plain = OPTIMIZERS["Adam"](pair.swapped)
    plain.load_state_dict(pair.offloaded.state_dict())
    pair.offloaded.close()
    pair.offloaded = offload(plain, str(tmp_path), min_bytes=0)
    assert not plain.state
    for _ in range(3):
        pair.step()
    pair.expect_same()
