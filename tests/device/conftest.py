"""The fixtures of the device suite: what a test runs on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cudafuture.testing import fakecuda
from support.harness import Cuda, Device, Simulated, devices


def _parameters(*, with_host: bool) -> list[Any]:
    return [_parameter(name) for name in devices() if with_host or name != "cpu"]


def _parameter(name: str) -> Any:
    if name == "cuda":
        return pytest.param(name, marks=pytest.mark.cuda)
    if not name.startswith("sim-"):
        return name
    schedule = name.removeprefix("sim-")
    return pytest.param(name, marks=pytest.mark.sim(devices=2, schedule=schedule, strict_devices=True))


def _open_device(name: str, request: pytest.FixtureRequest) -> Iterator[Device]:
    if name == "cuda" and torch.accelerator.current_accelerator() != torch.device("cuda"):
        pytest.skip("in this process torch's accelerator is the simulated one; run these alone: pytest -k cuda")
    device = Simulated() if name.startswith("sim-") else Cuda(spares_device_0=True) if name == "cuda" else Device()
    device.rest()
    checks_contexts = device.first > 0
    if checks_contexts:
        fakecuda.reset_context(0)
    yield device
    device.finish()
    device.rest()
    if checks_contexts and request.node.get_closest_marker("torch_makes_contexts") is None:
        assert 0 not in fakecuda.contexts(), "the test made a context on cuda:0, which it does not use"


@pytest.fixture(params=_parameters(with_host=True))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Yield the host, or an accelerator."""
    yield from _open_device(request.param, request)


@pytest.fixture(params=_parameters(with_host=False))
def accelerator(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Yield an accelerator."""
    yield from _open_device(request.param, request)


@pytest.fixture
def pair(accelerator: Device) -> Device:
    """Yield an accelerator with two devices."""
    if accelerator.count < 2:
        pytest.skip("needs two devices, and there is one")
    return accelerator
