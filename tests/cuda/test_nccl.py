"""Collectives on CUDA tensors in a group of one process: over NCCL, and over Gloo, which copies them by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture
import cudafuture.distributed as cfd
from cudafuture import CUDAFuture

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.world,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore"),  # torch's, of devices that it has to guess
]

LONG = 60.0  # seconds; much more than anything takes
CYCLES = 50_000_000  # some ten milliseconds


def fill(value: float) -> torch.Tensor:
    """Return a tensor that the device fills after a while."""
    x = torch.empty(1 << 20, device="cuda")
    torch.cuda._sleep(CYCLES)
    return x.fill_(value)


def only(x: torch.Tensor) -> float:
    low, high = (x * 1).aminmax()
    assert low.item() == high.item()
    return float(high.item())


@pytest.fixture(scope="module", params=["nccl", "gloo"])
def group(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the tests a process group of this process alone."""
    if request.param == "nccl" and not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    torch.cuda.set_device(0)
    store = dist.HashStore()
    dist.init_process_group(f"cpu:gloo,cuda:{request.param}", store=store, rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


def test_waiter_follows_collective(group: str) -> None:
    reduced = cfd.all_reduce(fill(2.0))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert only(reduced.wait(non_blocking=True)) == 2.0


def test_input_follows_stream_of_caller(group: str) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        output = torch.empty(1 << 20, device="cuda")
        gathered = cfd.all_gather_into_tensor(output, fill(3.0))
    assert only(gathered.wait(non_blocking=True)) == 3.0


def test_future_has_device_event(group: str) -> None:
    x = fill(1.0)
    reduced = cfd.all_reduce(x)
    assert reduced.wait(timeout=LONG) is x
    assert list(reduced.events) == [x.device]
    assert reduced.ready()


def test_callbacks_chain_collectives(group: str) -> None:
    chains: list[CUDAFuture[torch.Tensor]] = []
    for i in range(4):
        chain = cfd.all_reduce(fill(float(i))).then(lambda f: f.value() + 1)
        chains.append(chain.then_async(lambda f: cfd.broadcast(f.value() * 2, src=0)))
    assert [only(x) for x in cudafuture.gather(*chains).wait(timeout=LONG)] == [2.0, 4.0, 6.0, 8.0]


def test_every_function_completes(group: str) -> None:
    def ones() -> torch.Tensor:
        return torch.ones(64, device="cuda")

    futures: list[CUDAFuture[Any]] = [
        cfd.all_reduce_coalesced([ones(), ones()]),
        cfd.broadcast(ones(), src=0),
        cfd.reduce(ones(), dst=0),
        cfd.all_gather([ones()], ones()),
        cfd.all_to_all_single(ones(), ones()),
        cfd.reduce_scatter(ones(), [ones()]),
        cfd.reduce_scatter_tensor(ones(), ones()),
        cfd.gather(ones(), [ones()]),
        cfd.scatter(ones(), [ones()]),
        cfd.barrier(),
    ]
    for future in futures:
        future.wait(timeout=LONG)
        assert future.ready()


def test_host_tensors_travel_beside_device_tensors(group: str) -> None:
    on_device = [cfd.all_reduce(fill(float(i))) for i in range(3)]
    on_host = [cfd.all_reduce(torch.full((8,), float(i))) for i in range(3)]
    assert [f.wait(timeout=LONG)[0].item() for f in on_host] == [0.0, 1.0, 2.0]
    assert [only(f.wait(non_blocking=True)) for f in on_device] == [0.0, 1.0, 2.0]
