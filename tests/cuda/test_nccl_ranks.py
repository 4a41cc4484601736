"""Several ranks over NCCL, a GPU each: callbacks that issue collectives, and the devices that they use."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture
import cudafuture.distributed as cfd
from cudafuture.testing import World, torchrun

pytestmark = [pytest.mark.cuda, pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("nccl-ranks")]

RANKS = 4
LONG = 60.0  # seconds; much more than anything takes
CROWDED = {"FAKENCCL_CHANNELS": "1", "NCCL_MAX_NCHANNELS": "1"}  # one kernel of NCCL exhausts a device

RUN_EXAMPLE = """
import sys
sys.path.insert(0, {examples!r})
import zero1_digits
sys.exit(zero1_digits.main())
"""


def make_world(**environment: str) -> Iterator[World]:
    pytest.importorskip("cloudpickle")
    if not dist.is_nccl_available():
        pytest.skip("needs NCCL, which this build of torch does not have")
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs, one for each rank, and there are {torch.cuda.device_count()}")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with World(RANKS, backend="nccl", timeout=120) as world:
            yield world


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    """Give ranks whose device is exhausted by one kernel of NCCL, where that can be chosen."""
    yield from make_world(**CROWDED)


def wait_for_turn(callback: str, first: int) -> None:
    """Let the ranks run a callback one after the other, beginning with rank `first`."""
    store: Any = dist.distributed_c10d._get_default_store()
    store = store.clone()  # a wait blocks other threads that use the same client
    turn = (dist.get_rank() - first) % dist.get_world_size()
    if turn > 0:
        store.wait([f"{callback}, {turn - 1}"], dt.timedelta(seconds=LONG))
    store.set(f"{callback}, {turn}", "")


def test_chains_execute_in_one_order(ranks: World) -> None:
    def run() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.cuda.set_device(rank)

        def step(turn: int, i: int, future: Any) -> Any:
            wait_for_turn(f"chain {turn} {i}", first=turn + i)
            shard = future.value().mul_(0.5)
            return cfd.all_gather_into_tensor(torch.empty(shard.numel() * size, device="cuda"), shard)

        for turn in range(10):
            chains = []
            for i in range(4):
                gradient = torch.full((8 * size,), float(i + 1), device="cuda")
                shard = torch.empty(8, device="cuda")
                reduced = cfd.reduce_scatter_tensor(shard, gradient)
                chains.append(reduced.then_async(lambda f, t=turn, i=i: step(t, i, f)))  # type: ignore[misc]
            for i, whole in enumerate(cudafuture.gather(*chains).wait(timeout=LONG)):
                assert whole.tolist() == [(i + 1) * size / 2] * (8 * size)

    ranks.run(run)


def test_chain_steps_execute_in_one_order(ranks: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        torch.cuda.set_device(rank)

        def again(step: int, i: int, future: Any) -> Any:
            wait_for_turn(f"step {step} {i}", first=step + i)
            return cfd.all_reduce(future.value().clone())

        futures = [cfd.all_reduce(torch.full((4,), float(i), device="cuda")) for i in range(4)]
        for step in range(3):
            futures = [f.then_async(lambda g, s=step, i=i: again(s, i, g)) for i, f in enumerate(futures)]  # type: ignore[misc]
        values = [value.tolist() for value in cudafuture.gather(*futures).wait(timeout=LONG)]
        assert values == [[i * 4.0**4] * 4 for i in range(4)]

    ranks.run(run)


def test_callbacks_of_two_groups_keep_order(ranks: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        first, second = cfd.ProcessGroup(), cfd.new_group()

        def cross(group: cfd.ProcessGroup, way: str, turn: int, future: Any) -> Any:
            wait_for_turn(f"{way} {turn}", first=turn)
            return group.all_reduce(future.value())

        for turn in range(5):
            x, y = (torch.ones(4, device="cuda") for _ in range(2))
            there = first.all_reduce(x).then_async(lambda f, n=turn: cross(second, "there", n, f))  # type: ignore[misc]
            back = second.all_reduce(y).then_async(lambda f, n=turn: cross(first, "back", n, f))  # type: ignore[misc]
            last = first.all_reduce(torch.ones(4, device="cuda"))
            assert there.wait(timeout=LONG).tolist() == back.wait(timeout=LONG).tolist() == [16.0] * 4
            assert last.wait(timeout=LONG).tolist() == [4.0] * 4

    ranks.run(run)


def test_host_callback_may_not_issue_nccl(ranks: World) -> None:
    def run() -> None:
        torch.cuda.set_device(dist.get_rank())
        host = cfd.new_group(backend="gloo")
        refused = host.all_reduce(torch.ones(1)).then_async(lambda f: cfd.all_reduce(torch.ones(1, device="cuda")))
        with pytest.raises(cudafuture.InvalidStateError, match=r"over NCCL.*executor=ProcessGroup\(group\)\.queue"):
            refused.wait(timeout=LONG)
        queue = cfd.ProcessGroup().queue
        x = torch.ones(1, device="cuda")
        taken = host.all_reduce(torch.ones(1)).then_async(lambda f: cfd.all_reduce(x), executor=queue)
        assert taken.wait(timeout=LONG).item() == 4.0

    ranks.run(run)


def test_objects_and_callbacks_use_caller_device(ranks: World) -> None:
    def run() -> None:
        from ctypes import CDLL, byref, c_int, c_uint

        driver = CDLL("libcuda.so.1")

        def contexts() -> list[int]:
            found = []
            for device in range(torch.cuda.device_count()):
                flags, active = c_uint(), c_int()
                assert driver.cuDevicePrimaryCtxGetState(device, byref(flags), byref(active)) == 0
                found += [device] if active.value else []
            return found

        rank, size = dist.get_rank(), dist.get_world_size()
        mine = size - 1 - rank  # not the device that torch would guess
        torch.cuda.set_device(mine)

        def ones() -> torch.Tensor:
            return torch.ones(4, device="cuda")

        group = cfd.new_group()
        x = torch.ones(4, device="cuda")
        chain = group.all_reduce(x).then(
            lambda f: (torch.cuda.current_device(), f.value() + torch.ones(4, device="cuda"))
        )
        where, y = chain.wait(timeout=LONG)
        assert (where, y.device.index, y.tolist()) == (mine, mine, [size + 1.0] * 4)
        assert group.all_gather_object([None] * size, rank).wait(timeout=LONG) == list(range(size))
        here = group.all_gather_object([None] * size, rank).then(lambda f: torch.ones(1, device="cuda").device.index)
        assert here.wait(timeout=LONG) == mine
        assert group.broadcast_object_list([rank], src=2).wait(timeout=LONG) == [2]
        group.barrier().wait(timeout=LONG)
        group.all_reduce(x).then_async(lambda f: group.barrier()).wait(timeout=LONG)
        assert contexts() == [mine], f"rank {rank} on device {mine} has contexts on {contexts()}"

    with World(RANKS, backend="nccl", timeout=120) as fresh:  # the others have used other devices
        fresh.run(run)


def test_zero1_example_trains_over_nccl(ranks: World, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    examples = Path(__file__).parents[2] / "examples"
    path = tmp_path / "results.json"
    arguments = ["--backend", "nccl", "--epochs", "1", "--json", str(path)]
    script = tmp_path / "zero1.py"
    script.write_text(RUN_EXAMPLE.format(examples=str(examples)))
    finished = torchrun(script, RANKS, *arguments, timeout=100, env=CROWDED, check=False)
    assert path.exists(), finished.stderr
    checks = json.loads(path.read_text())["checks"]
    checks.pop("accuracy")  # one epoch is not enough for it
    assert all(checks.values()), finished.stdout
