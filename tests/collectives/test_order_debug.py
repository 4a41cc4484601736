"""CUDAFUTURE_DEBUG: the first difference between what the ranks issue, and tensors of collectives that change."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import cudafuture
import cudafuture.distributed as cfd
from cudafuture import CUDAFuture
from cudafuture.distributed import CollectiveError, _issue, _order
from cudafuture.distributed._group import group_of
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
        first = dist.all_reduce(ones(1), async_op=True).get_future()  # in C++, and in hooks of DDP
        hooked: Any = first.then(lambda f: dist.all_reduce(f.value()[0], async_op=True).wait())
        assert hooked.wait() is True
        sent: Any = dist.isend(ones(2) * rank, 1 - rank)
        assert dist.recv(into) == 1 - rank
        sent.wait()


def test_agreeing_ranks_notice_nothing_in_torch() -> None:
    run_ranks(2, agree_in_torch, backend="cudafuture")


def issue_through_both_doors(rank: int) -> None:
    world: Any = dist.group.WORLD
    pair, complexes = ones(2) * rank, torch.ones(2, dtype=torch.complex64)
    doors: list[list[Callable[[], Any]]] = [
        [lambda: cfd.reduce(pair, 0, dist.ReduceOp.MAX).wait(), lambda: dist.reduce(pair, 0, dist.ReduceOp.MAX)],
        [lambda: cfd.all_reduce(complexes).wait(), lambda: dist.all_reduce(complexes)],
        [
            lambda: functional.wait_tensor(functional.all_gather_tensor(pair, 0, world)),
            lambda: dist.all_gather_into_tensor(ones(4), pair),
        ],
    ]
    with compare_order():
        for number in range(len(doors)):
            doors[number][rank]()
        for refused in (cfd.all_gather, dist.all_gather)[rank : rank + 1]:
            with pytest.raises(RuntimeError):  # at the call or in the future
                wait_for(refused([ones(2), ones(3)], ones(2)))
        dist.all_reduce(pair)


def wait_for(future: Any) -> None:
    future.wait(timeout=LONG)


def test_ranks_may_issue_through_both_doors() -> None:
    run_ranks(2, issue_through_both_doors, backend="cudafuture")


def wrap_on_one_rank(rank: int) -> None:
    group: Any = dist.new_group(backend="gloo")
    if rank == 0:
        cfd.wrap(group)
    with compare_order(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_order, "_PATIENCE", 0.0)
        dist.all_reduce(ones(1), group=group)


def test_operation_that_other_ranks_do_not_show_is_not_waited_for() -> None:
    run_ranks(2, wrap_on_one_rank)


def destroy_groups(rank: int) -> None:
    comparisons = []
    for _ in range(3):
        group: Any = dist.new_group()
        with compare_order():
            dist.all_reduce(ones(1), group=group)
        comparisons.append(weakref.ref(group_of(group).program.comparison))
        dist.destroy_process_group(group)
        del group
        gc.collect()
    assert [c() for c in comparisons[:2]] == [None, None]


def test_comparison_ends_with_its_group() -> None:
    run_ranks(2, destroy_groups, backend="cudafuture")


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
        lambda g: dist.all_reduce(ones(4), group=g, async_op=True).wait(),
    ],
    "all_gather_into_tensor float32[4], float32[2] | reduce_scatter_tensor float32[2], float32[4]": [
        lambda g: dist.all_gather_into_tensor(ones(4), ones(2), group=g),
        lambda g: dist.reduce_scatter_tensor(ones(2), ones(4), group=g),
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
