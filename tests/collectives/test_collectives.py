"""The collectives on tensors, next to torch's own: the same inputs, the same bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture
from cudafuture.errors import TensorError
from cudafuture.testing import World
from support.comparison import (
    ALL,
    COMMON,
    DTYPES,
    NEWER,
    REDUCING,
    TIMEOUT,
    Case,
    Make,
    Place,
    Tensor,
    WrongArguments,
    by_ours,
    by_torch,
    compare,
    expect_common,
    expect_gathered_layouts,
    values,
)

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

SIZES = pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.world(n)) for n in (1, 2, 3, 4)])
SOME = (torch.float32, torch.complex64, torch.bool, torch.int16)  # Gloo refuses the last


def in_a_callback(group: Any) -> Callable[[Callable[[], Any]], Any]:
    """Return a way to issue collectives in a callback of a future of `group`."""
    # Not of a barrier: Gloo's fails with whatever fails before it.
    return lambda issue: cfd.all_reduce(torch.ones(1), group=group).then(lambda _: issue()).wait(timeout=TIMEOUT)


@SIZES
def test_dtypes_and_reduce_ops_match_torch(world: World, n: int) -> None:
    def run() -> None:
        taken = compare(Place(root=dist.get_world_size() - 1), ALL, DTYPES)
        expect_common(taken, ALL)
        tried = [d for d in DTYPES if d == torch.int16 or ("all_reduce", d) in taken]
        for name, op in dist.ReduceOp.RedOpType.__members__.items():
            taken = compare(Place(), REDUCING, tried, op=op)
            if name in ("SUM", "PRODUCT", "MIN", "MAX"):
                expect_common(taken, REDUCING)
            if name in ("BAND", "BOR", "BXOR"):
                expect_common(taken, REDUCING, [torch.int64])
        expect_common(compare(Place(), REDUCING, tried, op=dist.ReduceOp(dist.ReduceOp.MAX)), REDUCING)

    world.run(run)


@pytest.mark.world(4)
@pytest.mark.parametrize("ranks", [[1, 3], [2, 3, 1], [2]], ids=str)
def test_group_without_rank_0_matches_torch(world: World, ranks: list[int]) -> None:
    def run() -> None:
        group = dist.new_group(ranks)
        if dist.get_rank() not in ranks:
            for make in ALL:
                for given in (group, cfd.ProcessGroup(group)):
                    future = by_ours(make(Place(), torch.float32), group=given)
                    assert future.done()
                    assert future.value() is None
            return
        for by_global_rank in (False, True):
            place = Place(group, len(ranks) - 1, by_global_rank)
            for given in (group, cfd.ProcessGroup(group), cfd.ProcessGroup(cfd.ProcessGroup(group))):
                expect_common(compare(place, ALL, COMMON, partial(by_ours, group=given)), ALL)
            compare(place, ALL, SOME, within=in_a_callback(group))

    world.run(run)


@pytest.mark.world(3)
def test_callback_gets_torch_result(world: World) -> None:
    def run() -> None:
        place = Place(root=1)
        expect_common(compare(place, ALL, DTYPES, within=in_a_callback(None)), ALL)
        compare(Place(root=2, by_global_rank=True), ALL, SOME, within=in_a_callback(None))
        for op in dist.ReduceOp.RedOpType.__members__.values():
            compare(place, REDUCING, SOME, within=in_a_callback(None), op=op)

    world.run(run)


def make_layout_case(function: str, layout: Callable[[Tensor], Tensor], name: str) -> Make:
    """Return a case of a function that takes one tensor, and one of that layout."""

    def make(place: Place, dtype: torch.dtype) -> Case:
        t = layout(values(dtype, 6, place.rank))
        return Case(function, (t,), [t], t, {"src": 0} if function == "broadcast" else {})

    make.__name__ = f"{function} of a {name} tensor"
    return make


class Labelled(torch.Tensor):
    """Tensor whose class overrides torch's own functions."""


TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "scalar": lambda t: t[0].clone(),
    "empty": lambda t: t[:0],
    "part of a": lambda t: t[2:4],
    "transposed": lambda t: t.view(2, 3).t(),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "leaf": lambda t: t.requires_grad_(),
    "subclassed": lambda t: t.as_subclass(Labelled),
}


@pytest.mark.world(2)
def test_dense_layouts_match_torch(world: World) -> None:
    def run() -> None:
        makes = [make_layout_case(f, make, name) for f in ("all_reduce", "broadcast") for name, make in TAKEN.items()]
        dtypes = (torch.float32, torch.complex64)
        taken = compare(Place(), makes, dtypes)
        assert {(make.__name__, torch.float32) for make in makes} <= taken

    world.run(run)


@pytest.mark.world(2)
def test_tensor_with_gaps_is_refused(world: World) -> None:
    def run() -> None:
        t, both, two = torch.ones(2), torch.ones(4), [torch.ones(2), torch.ones(2)]
        for gaps in (torch.ones(4)[::2], torch.ones(1).expand(2)):
            calls: list[tuple[Any, ...]] = [
                ("all_reduce", gaps),
                ("all_reduce_coalesced", [t, gaps]),
                ("broadcast", gaps, 0),
                ("reduce", gaps, 0),
                ("all_gather_into_tensor", both, gaps),
                ("scatter", gaps, two if dist.get_rank() == 0 else None, 0),
                ("reduce_scatter", gaps, two),
                ("reduce_scatter_tensor", gaps, both),
                ("all_to_all", [t, gaps], two),
                ("all_to_all", two, [t, gaps]),
                ("all_to_all_single", gaps, t),
            ]
            for f, *args in calls:
                with pytest.raises(ValueError, match="contiguous"):
                    getattr(cfd, f)(*args)

    world.run(run)


def replace_each(arguments: Any, view: Callable[[Tensor], Tensor]) -> list[Any]:
    """Return copies of the arguments, or of a list in them, in each of which one tensor is replaced by a view."""
    found: list[Any] = []
    for i, one in enumerate(arguments):
        if isinstance(one, Tensor):
            found.append([*arguments[:i], view(one), *arguments[i + 1 :]])
        if isinstance(one, list):
            found += [[*arguments[:i], part, *arguments[i + 1 :]] for part in replace_each(one, view)]
    return found


@pytest.mark.world(2)
def test_conjugate_or_negative_view_is_refused(world: World) -> None:
    views: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        (r"conjugated .*resolve_conj\(\)", torch.conj),
        (r"negated .*resolve_neg\(\)", torch._neg_view),
        (r"negated .*resolve_neg\(\)", lambda t: torch._neg_view(torch.stack([t, t], -1))[..., 0]),  # it has gaps, too
    ]

    def run() -> None:
        place, peer, t = Place(root=dist.get_rank()), 1 - dist.get_rank(), torch.ones(2, dtype=torch.complex64)
        calls = [(case.function, case.arguments, case.keywords) for case in (make(place, t.dtype) for make in ALL)]
        calls += [(f, (t, peer), {}) for f in ("send", "recv", "isend", "irecv")]
        for message, view in views:
            for name, arguments, keywords in calls:
                for wrong in replace_each(arguments, view):
                    with pytest.raises(ValueError, match=message):
                        getattr(cfd, name)(*wrong, **keywords)
            with pytest.raises(ValueError, match=message):
                cfd.batch_isend_irecv([dist.P2POp(dist.irecv, view(t), peer)])
        assert cfd.all_reduce(torch.ones(1)).wait(timeout=TIMEOUT).item() == 2

    world.run(run)


@pytest.mark.world(2)
def test_tensor_without_memory_is_refused(world: World) -> None:
    def run() -> None:
        t, freed, shrunk, values = torch.ones(2), torch.ones(2), torch.ones(4), torch.eye(2).to_sparse()
        gaps = shrunk[::2]
        for tensor, nbytes in ((freed, 0), (shrunk, 8), (values._values(), 0)):
            tensor.untyped_storage().resize_(nbytes)
        calls: list[tuple[Any, ...]] = [
            ("all_reduce", freed),
            ("all_reduce", values),
            ("all_gather", [t, freed], t),
            ("all_gather", [t, torch.ones(2)], freed),
            ("all_gather_into_tensor", shrunk, t),
            ("broadcast", gaps, 0),
            ("send", freed, 1 - dist.get_rank()),
            ("recv", freed, 1 - dist.get_rank()),
        ]
        for f, *args in calls:
            with pytest.raises(TensorError, match="freed or shrunk"):
                getattr(cfd, f)(*args)
        objects: list[tuple[Any, ...]] = [
            ("all_gather_object", [None, None], {"model": freed}),
            ("broadcast_object_list", [values], dist.get_rank()),
            ("scatter_object_list", [None], [t, [shrunk]], dist.get_rank()),
            ("gather_object", freed, [None, None] if dist.get_rank() == 0 else None, 0),
        ]
        for f, *args in objects:
            with pytest.raises(TensorError, match="freed or shrunk"):
                getattr(cfd, f)(*args)
        for wrong in (torch._efficientzerotensor((2,)), TwoTensor(t, t), torch.empty(2, device="meta")):
            with pytest.raises(TensorError, match="no memory of its own"):
                cfd.scatter(torch.ones(2), [wrong, wrong], dist.get_rank())
            with pytest.raises(TensorError, match="no memory of its own"):
                cfd.all_reduce(wrong)
        assert cfd.all_reduce(torch.empty(0, 5)[:, 4]).wait(timeout=TIMEOUT).numel() == 0

    world.run(run)


@pytest.mark.world(3)
@pytest.mark.parametrize("name", ["all_gather", "all_gather_coalesced", "gather"])
def test_tensors_of_any_layout_are_gathered(world: World, name: str) -> None:
    def run() -> None:
        expect_gathered_layouts(name, "cpu")

    world.run(run)


@pytest.mark.world(2)
def test_sparse_reduction_matches_torch(world: World) -> None:
    def run() -> None:
        theirs, ours = (torch.eye(3)[dist.get_rank()].to_sparse() for _ in range(2))
        dist.all_reduce(theirs)
        assert cfd.all_reduce(ours).wait(timeout=TIMEOUT) is ours
        assert torch.equal(ours.to_dense(), theirs.to_dense())

    world.run(run)


@SIZES
def test_barrier_waits_for_all_ranks(world: World, n: int) -> None:
    def run() -> None:
        store = dist.distributed_c10d._get_default_store()
        pg = cfd.ProcessGroup()
        ways: list[Callable[[], CUDAFuture[Any]]]
        ways = [cfd.barrier, cfd.monitored_barrier, partial(cfd.monitored_barrier, wait_all_ranks=True)]
        ways += [pg.barrier, pg.monitored_barrier]
        if "timeout" in inspect.signature(dist.barrier).parameters:  # from torch 2.13 on
            ways.append(partial(cfd.barrier, timeout=timedelta(seconds=TIMEOUT)))
        for i, barrier in enumerate(ways):
            store.add(f"came {i}", 1)
            assert barrier().wait(timeout=TIMEOUT) is None
            assert store.add(f"came {i}", 0) == dist.get_world_size()

    world.run(run)


@pytest.mark.world(2)
def test_started_collective_refuses_cancel(world: World) -> None:
    def run() -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.wait(["tried to cancel"])
        place = Place()
        cases = [make(place, torch.float32) for make in ALL if make not in NEWER]
        futures = [by_ours(case) for case in cases]
        objects: list[Any] = [None, None]
        more: list[CUDAFuture[Any]]
        more = [cfd.barrier(), cfd.all_gather_object(objects, dist.get_rank()), cfd.monitored_barrier()]
        assert not any(future.cancel() for future in [*futures, *more])
        assert not any(future.cancelled() for future in [*futures, *more])
        if dist.get_rank() == 0:
            store.set("tried to cancel", "")
        for case, future in zip(cases, futures, strict=True):
            assert future.wait(timeout=TIMEOUT) is case.value
        assert [future.wait(timeout=TIMEOUT) for future in more] == [None, [0, 1], None]

    world.run(run)


def wrong_for_one_tensor() -> list[tuple[Any, ...]]:
    """Return calls that are wrong in the same way on every rank."""
    t, size = torch.ones(4), dist.get_world_size()
    return [
        *((f, wrong) for f in ("all_reduce", "broadcast", "reduce") for wrong in (3, [t])),
        ("all_reduce_coalesced", 3),
        ("all_reduce_coalesced", [t, 3]),
        ("all_reduce_coalesced", [t, torch.ones(4, dtype=torch.int64)]),
        *((f, wrong, 0) for f in ("broadcast", "reduce") for wrong in (3, [t])),
        *((f, t, root) for f in ("broadcast", "reduce") for root in (None, size, -1)),
        *((f, wrong, None) for f in ("gather", "scatter") for wrong in (3, [t])),
        *((f, t, None, root) for f in ("gather", "scatter") for root in (size, -1)),
    ]


def wrong_for_many_tensors() -> list[tuple[Any, ...]]:
    """Return calls that are wrong in the same way on every rank."""
    t, integers, size = torch.ones(4), torch.ones(4, dtype=torch.int64), dist.get_world_size()
    fit, long = [torch.ones(4) for _ in range(size)], [torch.ones(4) for _ in range(size + 1)]
    whole = torch.ones(4 * size)
    return [
        *(("all_gather", out, t) for out in (long, fit[1:], t, [3] * size)),
        *(("all_gather", fit, wrong) for wrong in (3, [t], torch.ones(5), integers)),
        *(("all_gather_coalesced", out, [t]) for out in ([[t]] * (size + 1), fit, t, [[t, t]] * size)),
        *(("all_gather_coalesced", [[t]] * size, wrong) for wrong in (3, [3], [t, integers], [torch.ones(5)])),
        *(("all_gather_into_tensor", out, t) for out in (torch.ones(4 * size + 1), [whole], 3)),
        *(("all_gather_into_tensor", whole, wrong) for wrong in (3, [t], integers)),
        *(("reduce_scatter", t, parts) for parts in (long, fit[1:], t, [3] * size)),
        ("reduce_scatter", 3, fit),
        *(("reduce_scatter_tensor", t, wrong) for wrong in (torch.ones(4 * size + 1), [whole], 3)),
        ("reduce_scatter_tensor", 3, whole),
        *(("all_to_all", out, fit) for out in (long, t, [3] * size)),
        *(("all_to_all", fit, parts) for parts in (long, t, [3] * size)),
        *(("all_to_all_single", out, whole) for out in (3, [whole])),
        *(("all_to_all_single", whole, wrong) for wrong in (3, [whole])),
        *(("all_to_all_single", whole, t, sizes, sizes) for sizes in ([1] * (size + 1), [5] * size)),
    ]


def wrong_everywhere() -> list[Case]:
    one_root_twice = [("broadcast", "src"), ("reduce", "dst"), ("gather", "dst"), ("scatter", "src")]
    return [
        *(Case(f, tuple(args), [], None) for f, *args in wrong_for_one_tensor() + wrong_for_many_tensors()),
        *(Case(f, (torch.ones(4),), [], None, {root: 0, f"group_{root}": 0}) for f, root in one_root_twice),
    ]


@pytest.mark.world(2)
def test_wrong_arguments_are_refused_at_once(world: World) -> None:
    def run() -> None:
        for case in wrong_everywhere():
            what = f"{case.function}{case.arguments} {case.keywords}"
            error = by_ours(case).exception(timeout=TIMEOUT)
            assert isinstance(error, WrongArguments | cfd.CollectiveError), f"{what} comes to {error!r}"
            assert by_torch(case) is not None, f"torch takes {what}"
        expect_common(compare(Place(), ALL, COMMON), ALL)  # the group is as good as before

    world.run(run)


@pytest.mark.world(1)
def test_root_refuses_wrong_root_arguments(world: World) -> None:
    def run() -> None:
        t = torch.ones(4)
        calls: list[tuple[Any, ...]] = [
            ("gather", t, None, 0),
            ("gather", t, [t, t.clone()], 0),
            ("gather", t, [3], 0),
            ("gather", t, [torch.ones(5)], 0),
            ("scatter", t, None, 0),
            ("scatter", t, [t, t.clone()], 0),
            ("scatter", t, [3], 0),
            ("scatter", t, [torch.ones(5)], 0),
        ]
        for f, *args in calls:
            case = Case(f, tuple(args), [], None)
            error = by_ours(case).exception(timeout=TIMEOUT)
            assert isinstance(error, WrongArguments | cfd.CollectiveError), f"{f}{args} comes to {error!r}"
            assert by_torch(case) is not None, f"torch takes {f}{args}"

    world.run(run)


@pytest.mark.world(2)
def test_torch_debug_checks_change_nothing(world: World) -> None:
    def run() -> None:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            group = dist.new_group()
        finally:
            dist.set_debug_level(dist.DebugLevel.OFF)
        place = Place(group)
        expect_common(compare(place, ALL, COMMON), ALL)
        expect_common(compare(place, ALL, COMMON, within=in_a_callback(group)), ALL)
        rank = dist.get_rank()
        assert cfd.all_gather_object([None, None], rank, group).wait(timeout=TIMEOUT) == [0, 1]
        assert cfd.monitored_barrier(group).wait(timeout=TIMEOUT) is None
        received = cfd.recv(torch.zeros(1), 1 - rank, group)
        cfd.send(torch.ones(1), 1 - rank, group).wait(timeout=TIMEOUT)
        assert received.wait(timeout=TIMEOUT).source == 1 - rank

    world.run(run)
