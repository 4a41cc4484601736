"""Gradients in the store: the steps are those of gradients in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from cudafuture.errors import SwapError
from cudafuture.store import DiskStore
from cudafuture.swap import offload
from support.training import OPTIMIZERS, Pair, same

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = ((200, 201), (4097,), (64, 50), (3,))
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"chunk_bytes": 1 << 16},
    "in memory": {"memory": 1 << 30},
    "some gradients in memory": {"min_bytes": 1 << 14},
    "nothing read ahead": {"prefetch": 0, "chunk_bytes": 1 << 16},
}


def gradient_keys(store: DiskStore) -> list[str]:
    store.flush().wait()
    return [key for key in store.list_keys().wait() if "/gradient/" in key]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor"])
def test_steps_equal_plain_optimizer(store: DiskStore, name: str, options: dict[str, Any]) -> None:
    pair = Pair(OPTIMIZERS[name], store, SHAPES, swap_gradients=True, **options)
    for step in range(4):
        pair.give_gradients(missing=[step])
        assert gradient_keys(store)
        pair.optimizer.step()
        pair.offloaded.step()
        pair.expect_same()
        assert not gradient_keys(store)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_gradients_have_dtype_of_parameter(store: DiskStore, dtype: torch.dtype) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, dtype, swap_gradients=True)
    pair.step()
    pair.step()
    pair.expect_same()


@pytest.mark.parametrize("options", [OPTIONS["chunks"], OPTIONS["some gradients in memory"]], ids=["chunks", "some"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_accumulation_unscaling_and_clipping_equal_torch(
    store: DiskStore, options: dict[str, Any], norm_type: float
) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, swap_gradients=True, **options)
    for step in range(3):
        pair.optimizer.zero_grad()
        pair.offloaded.zero_grad()
        for _ in range(3):
            for plain, swapped in zip(pair.plain, pair.swapped, strict=True):
                gradient = pair.random(tuple(plain.shape), plain.dtype)
                for parameter in (plain, swapped):
                    (parameter * gradient * 256.0).sum().backward()
        for parameter in pair.plain:
            assert parameter.grad is not None
            parameter.grad.div_(256.0)
        assert pair.offloaded.unscale_(256.0)
        max_norm = 1.0 if step else 1e9
        expected = nn.utils.clip_grad_norm_(pair.plain, max_norm, norm_type)
        assert same(pair.offloaded.clip_grad_norm_(max_norm, norm_type), expected)
        for plain, swapped in zip(pair.plain, pair.swapped, strict=True):
            assert same(pair.offloaded.gradient_of(swapped), plain.grad)
        pair.optimizer.step()
        pair.offloaded.step()
        pair.expect_same()


def test_accumulation_adds_to_clipped_gradient(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, swap_gradients=True, chunk_bytes=1 << 16)
    pair.give_gradients()
    nn.utils.clip_grad_norm_(pair.plain, 1.0)
    pair.offloaded.clip_grad_norm_(1.0)
    for plain, swapped in zip(pair.plain, pair.swapped, strict=True):
        plain.square().sum().backward()
        swapped.square().sum().backward()
        assert same(pair.offloaded.gradient_of(swapped), plain.grad)


def test_unscale_finds_infinite_gradients(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, swap_gradients=True)
    pair.give_gradients()
    (pair.swapped[1] * math.inf).sum().backward()
    assert not pair.offloaded.unscale_(2.0)
    with pytest.raises(RuntimeError, match="norm of order 2"):
        pair.offloaded.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_torch_functions_raise_on_stored_gradients(store: DiskStore) -> None:
    """They would otherwise clip or unscale the gradients in memory only."""
    pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, swap_gradients=True)
    pair.give_gradients()
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        nn.utils.clip_grad_norm_(pair.swapped, 1.0)
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        nn.utils.clip_grad_value_(pair.swapped, 1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(pair.offloaded)


@pytest.mark.parametrize("by", ["optimizer", "module", "assignment"])
def test_dropped_gradients_are_not_applied(store: DiskStore, by: str) -> None:
    pair = Pair(OPTIMIZERS["SGD"], store, SHAPES, swap_gradients=True)
    pair.give_gradients()
    if by == "optimizer":
        pair.offloaded.zero_grad()
    elif by == "module":
        nn.ParameterList(pair.swapped).zero_grad()
    for plain, swapped in zip(pair.plain, pair.swapped, strict=True):
        plain.grad = torch.ones_like(plain)
        if by == "assignment":
            swapped.grad = torch.ones_like(swapped)
        else:
            swapped.sum().backward()
    pair.optimizer.step()
    pair.offloaded.step()
    pair.expect_same()


def test_applied_gradient_is_not_added_to(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["SGD"], store, SHAPES, swap_gradients=True)
    pair.step()
    pair.offloaded.step()  # updates nobody again
    pair.expect_same()
    with pytest.raises(RuntimeError, match="already applied"):
        pair.swapped[0].sum().backward()
    pair.offloaded.zero_grad()
    pair.step()
    pair.expect_same()


def test_gradient_stays_in_memory_if_store_is_full(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with DiskStore(tmp_path, capacity=1 << 22) as store:
        pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, swap_gradients=True, chunk_bytes=1 << 16)
        pair.step()
        others: list[str] = []
        while store.write(f"other {len(others)}", torch.zeros(1024)).exception() is None:
            others.append(f"other {len(others)}")
        pair.give_gradients()
        norm = nn.utils.clip_grad_norm_(pair.plain, 1.0)
        assert same(pair.offloaded.clip_grad_norm_(1.0), norm)
        assert "a gradient stays in memory" in caplog.text
        pair.optimizer.step()
        with pytest.raises(SwapError, match="cannot be written"):
            pair.offloaded.step()
        store.deletev(others).wait()
        pair.expect_same()


def test_statistics_count_gradients_by_step(store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, SHAPES, swap_gradients=True, chunk_bytes=1 << 16)
    for _ in range(3):
        pair.step()
    all_steps, last = pair.offloaded.statistics(), pair.offloaded.statistics(last_step=True)
    nbytes = sum(4 * p.numel() for p in pair.swapped)
    assert (all_steps.steps, all_steps.swap_in_gradient_bytes, all_steps.swap_out_gradient_bytes) == (
        3,
        3 * nbytes,
        3 * nbytes,
    )
    assert (last.steps, last.swap_in_gradient_bytes, last.swap_out_gradient_bytes) == (1, nbytes, nbytes)
    assert last.swap_in_state_bytes == last.stored_bytes == 2 * nbytes
    assert 0 < last.exposed_io_seconds < all_steps.exposed_io_seconds


def test_swap_gradients_excludes_updates_during_backward(store: DiskStore) -> None:
    with pytest.raises(ValueError, match="when='step'"):
        offload(torch.optim.Adam([nn.Parameter(torch.ones(3))]), store, swap_gradients=True, when="backward")
