"""CUDAFUTURE_DEBUG: the first difference between what the ranks issue, and tensors of collectives that change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cudafuture
import cudafuture.distributed as cfd
from cudafuture import CUDAFuture
from cudafuture.distributed import CollectiveError, _issue
from cudafuture.errors import OwnershipError
from cudafuture.testing import World, torchrun
from support.operations import issue_each
from support.ranks import compare_order, run_ranks, short_group

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("failures")]

LONG = 60.0  # seconds; much more than anything takes


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


@pytest.mark.world(2)
def test_agreeing_ranks_notice_nothing(world: World) -> None:
    def run() -> None:
        with compare_order():
            rank = dist.get_rank()
            for turn in range(20):
                tensor = ones(3) * turn
                future = cfd.all_reduce(tensor)
                assert future.wait(timeout=LONG) is tensor
                assert tensor.tolist() == [2.0 * turn] * 3
            parts = [ones(2) for _ in range(2)]
            assert cfd.all_gather(parts, ones(2) * rank).wait(timeout=LONG) is parts
            assert cfd.gather(ones(2), parts if rank == 0 else None).wait(timeout=LONG) is (
                parts if rank == 0 else None
            )
            chains = [
                cfd.all_reduce(ones(1)).then_async(lambda f: cfd.broadcast(f.value(), 0)).then(lambda f: f.value() + 1)
                for _ in range(5)
            ]
            assert [t.item() for t in cudafuture.gather(*chains).wait(timeout=LONG)] == [3.0] * 5
            cfd.barrier().wait(timeout=LONG)

    world.run(run)


def change_too_early(rank: int) -> None:
    group, turn = short_group(), dist.distributed_c10d._get_default_store()
    _issue._checks_ownership = True
    try:
        for name in ("all_reduce", "broadcast"):
            tensor, kept = ones(4), ones(4)
            if rank == 1:
                turn.wait([name])
            futures = [getattr(group, name)(t, *([0] if name == "broadcast" else [])) for t in (tensor, kept)]
            if rank == 0:
                tensor.add_(1)
            turn.set(name, "")
            if rank == 0 and name == "all_reduce":
                error = futures[0].exception(timeout=LONG)
                assert isinstance(error, OwnershipError)
                assert "all_reduce: a tensor was changed" in str(error)
                assert Path(__file__).name in str(error)
            assert futures[1].then_async(lambda done: group.all_reduce(done.value())).wait(timeout=LONG) is kept
    finally:
        _issue._checks_ownership = False


def test_early_changed_tensor_is_named() -> None:
    """CUDAFUTURE_DEBUG=ownership. Collectives in callbacks keep their order."""
    run_ranks(2, change_too_early)


DIFFERENCES: dict[str, list[Callable[[cfd.ProcessGroup], CUDAFuture[Any]]]] = {
    "all_reduce float32[4] | broadcast float32[4]": [
        lambda g: g.all_reduce(ones(4)),
        lambda g: g.broadcast(ones(4), 0),
    ],
    "all_reduce float32[4] | all_reduce float32[5]": [lambda g: g.all_reduce(ones(4)), lambda g: g.all_reduce(ones(5))],
    "broadcast float32[4] | broadcast float32[8]": [
        lambda g: g.broadcast(ones(4), 0),
        lambda g: g.broadcast(ones(8), 0),
    ],
    "barrier | all_reduce float32[4]": [lambda g: g.barrier(), lambda g: g.all_reduce(ones(4))],
}


def differ(rank: int, case: str) -> None:
    group = short_group()
    with compare_order():
        assert group.all_reduce(ones(1)).wait(timeout=LONG).item() == 2
        error = DIFFERENCES[case][rank](group).exception(timeout=LONG)
    assert isinstance(error, CollectiveError)
    text = str(error)
    assert "first as #1" in text
    mine, other = case.split(" | ") if rank == 0 else reversed(case.split(" | "))
    for who, what in ((rank, mine), (1 - rank, other)):
        line = next(line for line in text.splitlines() if f"rank {who}: " in line)
        assert f"rank {who}: {what} at " in line
        assert Path(__file__).name in line
    assert (error.rank, error.sequence, error.group) == (rank, 1, group.group.group_name)


@pytest.mark.parametrize("case", DIFFERENCES)
def test_difference_names_both_call_sites(case: str) -> None:
    run_ranks(2, differ, case)


def differ_in_a_callback(rank: int) -> None:
    group = short_group()

    def second(future: CUDAFuture[torch.Tensor]) -> CUDAFuture[torch.Tensor]:
        return group.all_reduce(ones(2)) if rank == 0 else group.broadcast(ones(2), 0)

    with compare_order():
        error = group.all_reduce(ones(1)).then_async(second).exception(timeout=LONG)
    assert isinstance(error, CollectiveError)
    assert f"in serial queue '{group.group.group_name}.0', first as #0" in str(error)
    assert "in second()" in str(error)


def test_callback_difference_names_serial_queue() -> None:
    run_ranks(2, differ_in_a_callback)


def stay_away(rank: int) -> None:
    group = short_group()
    with compare_order():
        if rank == 0:
            error = group.all_reduce(ones(4)).exception(timeout=LONG)
            assert isinstance(error, CollectiveError)
            assert "ranks [1] have not issued it" in str(error)
    dist.barrier()


def test_absent_rank_is_named() -> None:
    run_ranks(2, stay_away)


# ---- what a program issues through torch, over the backend "cudafuture"


def agree_in_torch(rank: int) -> None:
    group = short_group(LONG)
    with compare_order():
        for work, value in issue_each(rank).values():
            assert work.wait()
            assert (work.future.wait(timeout=LONG) is None) == (value is None)
        mixed = dist.all_reduce(ones(3), async_op=True) if rank == 0 else cfd.all_reduce(ones(3))
        chained = mixed.then_async(lambda f: dist.all_reduce(f.value(), group=group.group, async_op=True))
        assert chained.wait(timeout=LONG).tolist() == [4.0] * 3
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, rank)
        assert parts == [0, 1]
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model(ones(2)).sum().backward()
        into = ones(2)
        sent: Any = dist.isend(ones(2) * rank, 1 - rank)
        assert dist.recv(into) == 1 - rank
        sent.wait()


def test_agreeing_ranks_notice_nothing_in_torch() -> None:
    run_ranks(2, agree_in_torch, backend="cudafuture")


IN_TORCH: dict[str, list[Callable[[Any], Any]]] = {
    "all_reduce float32[4] | broadcast float32[4]": [
        lambda g: dist.all_reduce(ones(4), group=g, async_op=True).future.wait(timeout=LONG),
        lambda g: dist.broadcast(ones(4), 0, group=g),
    ],
    "all_reduce float32[4] | all_reduce float32[5]": [
        lambda g: dist.all_reduce(ones(4), group=g),
        lambda g: cfd.all_reduce(ones(5), group=g).wait(timeout=LONG),
    ],
    "all_reduce float32[4], with op=MAX | all_reduce float32[4], with the default options": [
        lambda g: dist.all_reduce(ones(4), dist.ReduceOp.MAX, group=g),
        lambda g: dist.all_reduce(ones(4), group=g),
    ],
    "barrier | all_reduce float32[4]": [
        lambda g: dist.barrier(group=g),
        lambda g: dist.all_reduce(ones(4), group=g, async_op=True).get_future().wait(),
    ],
    "send float32[2] | recv int64[2]": [
        lambda g: cfd.isend(ones(2), 1, group=g).wait(timeout=LONG),
        lambda g: dist.recv(torch.ones(2, dtype=torch.int64), 0, group=g),
    ],
}


def differ_in_torch(rank: int, case: str) -> None:
    group = short_group(LONG).group
    with compare_order():
        dist.all_reduce(ones(1), group=group)
        with pytest.raises((CollectiveError, RuntimeError)) as raised:
            IN_TORCH[case][rank](group)
    text = str(raised.value)
    for who, what in enumerate(case.split(" | ")):
        operation, _, options = what.partition(", with")
        line = next(line for line in text.splitlines() if f"rank {who}: " in line)
        assert f"rank {who}: {operation} at {__file__}" in line
        assert options in line


@pytest.mark.parametrize("case", IN_TORCH)
def test_difference_in_torch_names_both_call_sites(case: str) -> None:
    run_ranks(2, differ_in_torch, case, backend="cudafuture")


SCRIPT = """
import datetime
import torch, torch.distributed as dist
import cudafuture.distributed as cfd
dist.init_process_group("cudafuture", timeout=datetime.timedelta(seconds=60))
issue = [lambda: cfd.all_reduce(torch.ones(1)), lambda: dist.barrier(async_op=True).future][dist.get_rank()]
error = issue().exception(timeout=60)
assert "issue different collectives" in str(error), error
print("told\\n", end="", flush=True)
"""


def test_variable_turns_comparison_on(tmp_path: Path) -> None:
    script = tmp_path / "differ.py"
    script.write_text(SCRIPT)
    assert torchrun(script, 2, env={"CUDAFUTURE_DEBUG": "order"}).stdout.count("told") == 2
