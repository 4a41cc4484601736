"""Collectives on Python objects, next to torch's own."""

from __future__ import annotations

import inspect
import pickle
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, gather
from cudafuture.testing import World
from support.comparison import TIMEOUT, Place

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]

HAS_WEIGHTS_ONLY = "weights_only" in inspect.signature(dist.all_gather_object).parameters
SIZES = pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.world(n)) for n in (1, 2, 3, 4)])

# A call: the function, its arguments, the list that it writes, and whether this rank has that as its value.
Call = tuple[str, tuple[Any, ...], dict[str, Any], list[Any], bool]


def some_object(rank: int, seed: int = 0) -> Any:
    """Return an object of another kind and size on every rank."""
    kinds = [None, {"rank": rank, "seed": seed}, "x" * 10_000, [1.5, (rank, seed)]]
    return rank, kinds[(rank + seed) % len(kinds)]


def calls(place: Place) -> list[Call]:
    rank, size, at_root = place.rank, place.size, place.at_root
    everyone: list[Any] = [None] * size
    gathered: list[Any] = [None] * size if at_root else []
    sent = [some_object(rank, i) for i in range(3)]
    parts = [some_object(r, 5) for r in range(size)] if at_root else None
    output: list[Any] = ["old", "kept"]
    return [
        ("all_gather_object", (everyone, some_object(rank)), {}, everyone, True),
        ("broadcast_object_list", (sent,), place.root("src"), sent, True),
        ("scatter_object_list", (output, parts), place.root("src"), output, True),
        ("gather_object", (some_object(rank), gathered if at_root else None), place.root("dst"), gathered, at_root),
    ]


def compare(place: Place, owner: Any, **more: Any) -> None:
    """Compare the functions of `owner`, issued all at once, with those of torch."""
    wanted, ours = calls(place), calls(place)
    for name, args, kwargs, _, _ in wanted:
        getattr(dist, name)(*args, group=place.group, **kwargs)
    futures = [getattr(owner, name)(*args, **more, **kwargs) for name, args, kwargs, _, _ in ours]
    for (name, _, _, theirs, _), (_, _, _, written, has), future in zip(wanted, ours, futures, strict=True):
        assert future.wait(timeout=TIMEOUT) is (written if has else None), name
        assert written == theirs, name


@SIZES
def test_object_results_match_torch(world: World, n: int) -> None:
    def run() -> None:
        for root in range(dist.get_world_size()):
            for by_global_rank in (False, True):
                compare(Place(None, root, by_global_rank), cfd)
                compare(Place(None, root, by_global_rank), cfd.ProcessGroup())

    world.run(run)


@pytest.mark.world(2)
@pytest.mark.skipif(not HAS_WEIGHTS_ONLY, reason="torch 2.14 is the first with weights_only in object collectives")
def test_weights_only_transfers_only_safe_objects(world: World) -> None:
    def run() -> None:
        safely = {"weights_only": True}
        compare(Place(root=1), cfd, **safely)
        compare(Place(root=1), cfd.ProcessGroup(), **safely)
        for name, position in (("all_gather_object", 1), ("gather_object", 0)):
            args, kwargs = next((list(args), kwargs) for n, args, kwargs, _, _ in calls(Place(root=1)) if n == name)
            args[position] = Fraction(1, 2)
            future = getattr(cfd, name)(*args, **kwargs, **safely)
            if name == "gather_object" and dist.get_rank() != 1:
                future.wait(timeout=TIMEOUT)
                continue
            with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
                future.wait(timeout=TIMEOUT)

    world.run(run)


@pytest.mark.world(1)
@pytest.mark.skipif(HAS_WEIGHTS_ONLY, reason="this torch has weights_only in object collectives")
def test_weights_only_is_refused_without_torch_support(world: World) -> None:
    def run() -> None:
        for name, args, kwargs, _, _ in calls(Place()):
            for owner in (cfd, cfd.ProcessGroup()):
                with pytest.raises(ValueError, match=r"weights_only=True needs torch 2\.14 or newer; this is torch"):
                    getattr(owner, name)(*args, **kwargs, weights_only=True)

    world.run(run)


@pytest.mark.world(4)
def test_group_without_rank_0_matches_torch(world: World) -> None:
    def run() -> None:
        group = dist.new_group([1, 3])
        if dist.get_rank() in (0, 2):
            for name, args, _, _, _ in calls(Place()):
                for given in (group, cfd.ProcessGroup(group)):
                    future = getattr(cfd, name)(*args, group=given)
                    assert (future.done(), future.value()) == (True, None)
            assert cfd.monitored_barrier(group).wait() is None
            return
        for by_global_rank in (False, True):
            place = Place(group, 1, by_global_rank)
            compare(place, cfd, group=group)
            compare(place, cfd, group=cfd.ProcessGroup(group))
            compare(place, cfd.ProcessGroup(group))
        assert cfd.monitored_barrier(group).wait(timeout=TIMEOUT) is None
        for function in (cfd.gather_object, cfd.broadcast_object_list, partial(cfd.scatter_object_list, [None])):
            with pytest.raises(ValueError, match="not part of group"):
                function([None], group=group)

    world.run(run)


@pytest.mark.world(2)
def test_object_steps_stay_together(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()
        lists: list[list[Any]] = [[None, None] for _ in range(20)]
        tensors = [torch.full((4,), float(rank + i)) for i in range(20)]
        futures: list[CUDAFuture[Any]] = []
        for i, (objects, tensor) in enumerate(zip(lists, tensors, strict=True)):
            futures.append(cfd.all_gather_object(objects, some_object(rank, i)))
            futures.append(cfd.all_reduce(tensor))
            sent = [some_object(rank, i)]
            futures.append(cfd.broadcast_object_list(sent, 1).then(lambda f: f.value()[0]))
            futures.append(cfd.monitored_barrier())
        values = gather(*futures).wait(timeout=TIMEOUT)
        assert lists == [[some_object(0, i), some_object(1, i)] for i in range(20)]
        assert [t[0].item() for t in tensors] == [2 * i + 1 for i in range(20)]
        assert values[2::4] == [some_object(1, i) for i in range(20)]

    world.run(run)


@pytest.mark.world(2)
def test_callbacks_may_use_object_collectives(world: World) -> None:
    def run() -> None:
        rank = dist.get_rank()

        def issue(_: CUDAFuture[Any]) -> CUDAFuture[list[Any]]:
            return cfd.all_gather_object([None, None], some_object(rank))

        chain = cfd.all_reduce(torch.ones(1)).then_async(issue).then_async(issue)
        assert chain.wait(timeout=TIMEOUT) == [some_object(0), some_object(1)]

    world.run(run)


class Unpicklable:
    def __reduce__(self) -> str:
        raise ArithmeticError("it stays here")


def outcome(function: Any, *args: Any, **kwargs: Any) -> BaseException | None:
    """Return what a call raises, or what its future fails with."""
    try:
        future: CUDAFuture[Any] = function(*args, **kwargs)
    except (TypeError, ValueError) as e:
        return e
    return future.exception(timeout=TIMEOUT)


@pytest.mark.world(1)
def test_wrong_arguments_fail_like_torch(world: World) -> None:
    def run() -> None:
        wrong: list[tuple[Any, ...]] = [
            ("all_gather_object", [], 1),
            ("all_gather_object", 3, 1),
            ("all_gather_object", [None], Unpicklable()),
            ("broadcast_object_list", [1], 7),
            ("broadcast_object_list", 3, 0),
            ("broadcast_object_list", [Unpicklable()], 0),
            ("scatter_object_list", [], [1], 0),
            ("scatter_object_list", 3, [1], 0),
            ("scatter_object_list", [None], None, 0),
            ("scatter_object_list", [None], [1, 2], 0),
            ("scatter_object_list", [None], [1], 7),
            ("gather_object", 1, None, 0),
            ("gather_object", 1, [None], 7),
            ("gather_object", Unpicklable(), [None], 0),
        ]
        for name, *args in wrong:
            with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever it is)
                getattr(dist, name)(*args)
            error = outcome(getattr(cfd, name), *args)
            assert isinstance(error, (type(caught.value), ValueError, cfd.CollectiveError)), f"{name}{args}: {error!r}"
        for name, root in (("gather_object", "dst"), ("broadcast_object_list", "src")):
            assert isinstance(outcome(getattr(cfd, name), [1], **{root: 0, f"group_{root}": 0}), ValueError)
        assert cfd.all_gather_object([None], "still good").wait(timeout=TIMEOUT) == ["still good"]

    world.run(run)
