"""Optimizers whose state is in a store, with parameters on devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture.io import Engine
from cudafuture.store import DiskStore
from cudafuture.swap import offload
from support.harness import Device
from support.training import OPTIMIZERS, Pair

OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"chunk_bytes": 1 << 16},
    "in memory": {"memory": 1 << 30},
    "backward": {"when": "backward", "chunk_bytes": 1 << 16},
    "gradients": {"swap_gradients": True, "chunk_bytes": 1 << 16},
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with (
        Engine(queue_depth=4, block_size=1 << 18, threads=2) as engine,
        DiskStore(tmp_path, engine=engine) as store,
    ):
        yield store


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["Adam", "SGD, momentum", "Adafactor"])
def test_device_steps_equal_plain_optimizer(
    accelerator: Device, store: DiskStore, name: str, options: dict[str, Any]
) -> None:
    with accelerator.on(accelerator.stream()):
        pair = Pair(OPTIMIZERS[name], store, ((200, 201), (64, 50), (3,)), device=str(accelerator.at()), **options)
        for step in range(4):
            pair.step(missing=[step])
        pair.expect_same()
    pair.offloaded.close()


@pytest.mark.parametrize("when", ["step", "backward"])
def test_host_updates_device_parameters(accelerator: Device, store: DiskStore, when: str) -> None:
    """As for a copy of the parameters on the host."""
    host = Pair(OPTIMIZERS["Adam"], store, ((200, 201), (64, 50)), name="host")
    pair = Pair(
        OPTIMIZERS["Adam"],
        store,
        ((200, 201), (64, 50)),
        device=str(accelerator.at()),
        compute="cpu",
        when=when,
        chunk_bytes=1 << 16,
        name="device",
    )
    for _ in range(4):
        host.step()
        pair.step()
    for a, b in zip(host.plain, pair.swapped, strict=True):
        assert torch.equal(a.detach(), b.detach().cpu())
        assert pair.offloaded.state_of(b)["exp_avg"].device.type == "cpu"


def test_one_step_updates_several_devices(accelerator: Device, store: DiskStore) -> None:
    pair = Pair(OPTIMIZERS["Adam"], store, ((64, 50), (64, 51)))
    devices = [accelerator.at(i) for i in accelerator.indices()]
    parameters = [[p.detach().to(devices[i % len(devices)]) for i, p in enumerate(pair.plain)] for _ in range(2)]
    pair.offloaded.close()
    plain = [torch.nn.Parameter(p.clone()) for p in parameters[0]]
    swapped = [torch.nn.Parameter(p.clone()) for p in parameters[1]]
    pair.plain, pair.swapped = plain, swapped
    pair.optimizer = OPTIMIZERS["Adam"](plain)
    pair.offloaded = offload(OPTIMIZERS["Adam"](swapped), store, min_bytes=0)
    for _ in range(4):
        pair.step()
    pair.expect_same()
