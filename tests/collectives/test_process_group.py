"""ProcessGroup, the groups that are made out of one, and what the functions have in common with torch's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture
from cudafuture.testing import World
from support.comparison import ALL, COMMON, TIMEOUT, Place, by_ours, compare, expect_common

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

ROOT = Path(__file__).parents[2]
FUNCTIONS = sorted(
    name
    for name in cfd.__all__
    if inspect.isfunction(getattr(cfd, name))
    and name not in ("ddp_comm_hook", "dump_flight_recorder", "new_group", "wrap")
)
NEWER = {  # than torch 2.11
    "barrier": {"timeout"},
    "new_group": {"sort_ranks"},
    **{name: {"weights_only"} for name in FUNCTIONS if "_object" in name},
}

NOT_OURS = {  # functions of torch that the library does not have
    "init_process_group destroy_process_group set_timeout record_comm": "they issue nothing",
    "new_subgroups new_subgroups_by_enumeration split_group": "ProcessGroup.split()",
    "shrink_group": "ProcessGroup.new_group()",
}
QUESTIONS = re.compile("get_|is_|supports_")  # functions that answer at once

Shape = list[tuple[str, Any, Any]]


def shape(function: Callable[..., Any], *without: str) -> Shape:
    """Return name, kind and default of every parameter but some."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name not in without]


@pytest.mark.parametrize("name", [*FUNCTIONS, "new_group"])
def test_parameters_match_torch(name: str) -> None:
    if name not in dist.distributed_c10d.__all__:
        pytest.skip("this torch does not have it")
    theirs = shape(getattr(dist, name), "async_op")
    newer = NEWER.get(name, set()) - {p for p, *_ in theirs}
    assert shape(getattr(cfd, name), *newer) == theirs


def test_every_torch_function_exists_or_is_excused() -> None:
    c10d: Any = dist.distributed_c10d
    functions = {name for name in c10d.__all__ if type(vars(c10d)[name]) is FunctionType}
    not_ours = {name for names in NOT_OURS for name in names.split()}
    assert {"send_object_list", "recv_object_list", "all_gather_into_tensor"} <= functions
    missing = {name for name in functions - set(cfd.__all__) if not QUESTIONS.match(name)}
    assert missing <= not_ours
    assert not not_ours & set(cfd.__all__)
    section = (ROOT / "docs" / "collectives.md").read_text(encoding="utf-8").partition("## Functions of torch")[2]
    assert all(f"`{name}`" in section for name in not_ours)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_methods_match_function_parameters(name: str) -> None:
    function = inspect.signature(getattr(cfd, name), eval_str=True)
    method = inspect.signature(getattr(cfd.ProcessGroup, name), eval_str=True)
    without_group = [p for p in function.parameters.values() if p.name != "group"]
    assert list(method.parameters.values())[1:] == without_group
    assert method.return_annotation == function.return_annotation


@pytest.mark.parametrize("name", [*FUNCTIONS, "new_group"])
def test_missing_default_group_is_explained(name: str) -> None:
    if dist.is_initialized():
        pytest.fail("something has left a process group behind")
    tensor = torch.ones(1)
    given: dict[str, Any] = {
        **{name: [tensor] for name in ("tensors", "input_list", "tensor_list", "input_tensor_list")},
        "output_tensor_lists": [[tensor]],
        "p2p_op_list": [],
        "object_list": [None],
    }
    required = [p for p in inspect.signature(getattr(cfd, name)).parameters.values() if p.default is p.empty]
    with pytest.raises(ValueError, match=r"init|at least one P2POp"):
        getattr(cfd, name)(*[given.get(p.name, tensor) for p in required])


def test_process_group_needs_torch_group() -> None:
    with pytest.raises(ValueError, match=r"call init_process_group\(\) first"):
        cfd.ProcessGroup()
    for other in (3, "gloo", object()):
        with pytest.raises(TypeError, match="process group"):
            cfd.ProcessGroup(other)


@pytest.mark.world(2)
def test_methods_match_functions(world: World) -> None:
    def run() -> None:
        pg = cfd.ProcessGroup()
        expect_common(compare(Place(root=1), ALL, COMMON, partial(by_ours, owner=pg)), ALL)
        compare(Place(root=1, by_global_rank=True), ALL, COMMON, partial(by_ours, owner=pg))

    world.run(run)


@pytest.mark.world(3)
def test_several_objects_share_one_group(world: World) -> None:
    def run() -> None:
        group = dist.new_group([0, 1])
        whole, part = cfd.ProcessGroup(), cfd.ProcessGroup(group)
        outside = cfd.ProcessGroup(dist.GroupMember.NON_GROUP_MEMBER)
        assert whole == cfd.ProcessGroup(dist.group.WORLD) == cfd.ProcessGroup(whole)
        assert part == cfd.ProcessGroup(group) != whole
        assert whole != whole.group
        assert {whole, cfd.ProcessGroup(whole), part, cfd.ProcessGroup(group)} == {part, whole}
        rank = dist.get_rank()
        assert (whole.rank(), whole.size(), whole.ranks()) == (rank, 3, [0, 1, 2])
        assert dist.group.WORLD is not None
        assert repr(whole) == f"<ProcessGroup '{dist.group.WORLD.group_name}', rank {rank} of 3>"
        assert whole.queue is cfd.ProcessGroup(whole).queue
        assert (outside.rank(), outside.size(), outside.ranks()) == (-1, -1, [])
        assert repr(outside) == "<ProcessGroup without this rank>"
        if rank == 2:
            assert part == outside
            assert hash(part) == hash(outside)
        else:
            assert (part.rank(), part.size(), part.ranks()) == (rank, 2, [0, 1])
            assert part.queue is not whole.queue
        with pytest.raises(ValueError, match="not in the group"):
            _ = outside.queue

    world.run(run)


@pytest.mark.world(1)
def test_other_futures_follow_group_order(world: World) -> None:
    def run() -> None:
        pg = cfd.ProcessGroup()
        read = CUDAFuture.completed(torch.ones(2)).then_async(lambda f: pg.all_reduce(f.value()), executor=pg.queue)
        assert read.wait(timeout=TIMEOUT).tolist() == [1.0, 1.0]

    world.run(run)


def total(pg: cfd.ProcessGroup) -> float | None:
    """Add up the ranks of a group, by a collective; None outside."""
    tensor = pg.all_reduce(torch.tensor([float(dist.get_rank())])).wait(timeout=TIMEOUT)
    return None if tensor is None else tensor.item()


@pytest.mark.world(4)
def test_new_group_matches_torch(world: World) -> None:
    def run() -> list[Any]:
        rank = dist.get_rank()
        everyone = cfd.new_group()
        some = cfd.new_group([3, 1], timedelta(seconds=TIMEOUT), "gloo", group_desc="some")
        assert everyone.ranks() == [0, 1, 2, 3]
        found = [some.ranks(), total(everyone), total(some)]
        if rank == 2:
            alone = cfd.new_group([2], use_local_synchronization=True)
            assert (alone.ranks(), total(alone)) == ([2], 2.0)
        if rank in (1, 3):
            assert some.group.group_desc == "some"
            assert dist.get_backend(some.group) == "gloo"
        return found

    member, outside = [[1, 3], 6.0, 4.0], [[], 6.0, None]
    assert world.run(run) == [outside, member, outside, member]


@pytest.mark.world(3)
@pytest.mark.skipif("sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="torch 2.13 has it")
def test_group_ranks_may_have_any_order(world: World) -> None:
    def run() -> None:
        part = cfd.new_group([2, 0], sort_ranks=False)
        if dist.get_rank() == 1:
            return
        assert part.ranks() == [2, 0]
        assert part.rank() == (0 if dist.get_rank() == 2 else 1)
        compare(Place(part.group, 1), ALL, COMMON)
        compare(Place(part.group, 1, by_global_rank=True), ALL, COMMON)
        peer = part.ranks()[1 - part.rank()]
        future = part.recv(torch.zeros(1))
        part.send(torch.ones(1), peer).wait(timeout=TIMEOUT)
        assert future.wait(timeout=TIMEOUT).source == peer

    world.run(run)


@pytest.mark.world(4)
def test_only_members_make_subgroup(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        part = cfd.new_group([1, 2, 3])
        if rank == 0:
            with pytest.raises(ValueError, match="only those ranks call it"):
                part.new_group()
            return
        for _ in range(2):  # another group every time
            again = part.new_group()
            assert (again.ranks(), total(again)) == ([1, 2, 3], 6.0)
            assert again != part
        if rank in (1, 3):
            pair = part.new_group([0, 2], timedelta(seconds=TIMEOUT))
            assert (pair.ranks(), total(pair)) == ([1, 3], 4.0)
            alone = pair.new_group([pair.rank()])
            assert (alone.ranks(), total(alone)) == ([rank], rank)
        for wrong in ([0, 3], [-1, 0, 1, 2], [r for r in range(3) if r != part.rank()], [0, 0, 1, 2], []):
            with pytest.raises(ValueError, match="rank"):
                part.new_group(wrong)

    world.run(run)


@pytest.mark.world(4)
def test_split_assigns_each_rank_one_group(world: World) -> None:
    def run() -> list[Any]:
        whole = cfd.ProcessGroup()
        found = []
        for _ in range(2):
            part = whole.split([[3, 0], [1]], timedelta(seconds=TIMEOUT))
            found.append((part.rank() >= 0, part.ranks(), total(part)))
        assert whole.split([]).rank() == -1
        assert part.split([[0]]).rank() == (0 if part.rank() == 0 else -1)
        for wrong in ([[0, 1], [1, 2]], [[0, 0]], [[0], [1, 4]], [[-1], [0]]):
            with pytest.raises(ValueError, match="rank"):
                whole.split(wrong)
        assert found[0] == found[1]
        return list(found[0])

    outer, inner, none = [True, [0, 3], 3.0], [True, [1], 1.0], [False, [], None]
    assert world.run(run) == [outer, inner, none, outer]


@pytest.mark.world(3)
def test_gather_single_matches_gather(world: World) -> None:
    def run() -> None:
        rank, pg = dist.get_rank(), cfd.ProcessGroup()
        for shape in ((6, 2), (3, 2, 2), (12,)):  # joined, stacked, flat
            for function in (cfd.gather_single, pg.gather_into_tensor):
                whole = torch.zeros(shape) if rank == 1 else None
                assert function(torch.full((2, 2), float(rank)), whole, dst=1).wait(timeout=TIMEOUT) is whole
                assert whole is None or whole.flatten().tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
        for wrong in (None, torch.zeros(5), torch.zeros(4, 3).t()):
            with pytest.raises((TypeError, ValueError)):
                cfd.gather_single(torch.ones(2, 2), wrong, dst=rank)
        with pytest.raises(ValueError, match=f"only rank {(rank + 1) % 3} of the group has"):
            cfd.gather_single(torch.ones(2, 2), torch.ones(12), dst=(rank + 1) % 3)
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            cfd.gather_single(3, torch.ones(3), dst=rank)  # type: ignore[arg-type]

    world.run(run)
