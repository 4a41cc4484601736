"""The same inputs for torch.distributed and for cudafuture.distributed, and a comparison of what comes of them."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
from cudafuture import CUDAFuture

DTYPES = tuple(dict.fromkeys(d for d in vars(torch).values() if isinstance(d, torch.dtype)))
# Every version of Gloo takes these, so that a comparison in which all is refused is found out.
COMMON = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
TIMEOUT = 40  # seconds, of a test that hangs

Tensor = torch.Tensor
# Errors of torch for wrong arguments, and for refusals of the backend.
REFUSED = (TypeError, ValueError, RuntimeError)


class Case(NamedTuple):
    """One call of one function on this rank."""

    function: str
    arguments: tuple[Any, ...]
    written: list[Tensor]
    value: object
    keywords: dict[str, Any] = {}  # noqa: RUF012 (it is never written)


class Place:
    """Place at which a case is issued: this rank, its group, and the parameter that names the root."""

    def __init__(self, group: Any = None, root: int = 0, by_global_rank: bool = False) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.at_root = self.rank == root
        whole: Any = group or dist.group.WORLD
        self._root = (root, dist.get_global_rank(whole, root)) if self.rank >= 0 else (0, 0)
        self._by_global_rank = by_global_rank

    def root(self, name: str) -> dict[str, Any]:
        local, of_all = self._root
        return {name: of_all} if self._by_global_rank else {f"group_{name}": local}


def values(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Return numbers of any dtype, also of those that know no arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dtype.is_floating_point or dtype.is_complex:
            drawn = torch.complex128 if dtype.is_complex else torch.float64
            return torch.randn(count, dtype=drawn, generator=generator).to(dtype)
        return torch.randint(-3, 4, (count,), generator=generator).to(dtype)
    return torch.randint(0, 256, (16 * count,), dtype=torch.uint8, generator=generator).view(dtype)[:count]


def bits(tensor: Tensor) -> Tensor:
    """Return what is in the memory of a tensor: NaN equals NaN there, and 0 is not -0."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


Make = Callable[[Place, torch.dtype], Case]


def all_reduce(place: Place, dtype: torch.dtype) -> Case:
    t = values(dtype, 7, place.rank)
    return Case("all_reduce", (t,), [t], t)


def all_reduce_coalesced(place: Place, dtype: torch.dtype) -> Case:
    ts = [values(dtype, n, place.rank) for n in (1, 5, 3)]
    return Case("all_reduce_coalesced", (ts,), ts, ts)


def broadcast(place: Place, dtype: torch.dtype) -> Case:
    t = values(dtype, 7, place.rank)
    return Case("broadcast", (t,), [t], t, place.root("src"))


def reduce(place: Place, dtype: torch.dtype) -> Case:
    t = values(dtype, 7, place.rank)
    written, value = ([t], t) if place.at_root else ([], None)
    return Case("reduce", (t,), written, value, place.root("dst"))


def all_gather(place: Place, dtype: torch.dtype) -> Case:
    ts = [values(dtype, 5, 100) for _ in range(place.size)]
    return Case("all_gather", (ts, values(dtype, 5, place.rank)), ts, ts)


def all_gather_coalesced(place: Place, dtype: torch.dtype) -> Case:
    gathered = [[values(dtype, n, 100) for n in (1, 5, 3)] for _ in range(place.size)]
    mine = [values(dtype, n, place.rank) for n in (1, 5, 3)]
    return Case("all_gather_coalesced", (gathered, mine), [t for ts in gathered for t in ts], gathered)


def all_gather_into_tensor(place: Place, dtype: torch.dtype) -> Case:
    t = values(dtype, 5 * place.size, 100)
    return Case("all_gather_into_tensor", (t, values(dtype, 5, place.rank)), [t], t)


def all_gather_stacked(place: Place, dtype: torch.dtype) -> Case:
    """Make a case with a dimension for the ranks, which Gloo refuses."""
    t = values(dtype, 5 * place.size, 100).view(place.size, 5)
    return Case("all_gather_into_tensor", (t, values(dtype, 5, place.rank)), [t], t)


def gather(place: Place, dtype: torch.dtype) -> Case:
    ts = [values(dtype, 5, 100) for _ in range(place.size)] if place.at_root else None
    return Case("gather", (values(dtype, 5, place.rank), ts), ts or [], ts, place.root("dst"))


def scatter(place: Place, dtype: torch.dtype) -> Case:
    t = values(dtype, 5, 100)
    ts = [values(dtype, 5, r) for r in range(place.size)] if place.at_root else None
    return Case("scatter", (t, ts), [t], t, place.root("src"))


def reduce_scatter(place: Place, dtype: torch.dtype) -> Case:
    t = values(dtype, 5, 100)
    parts = [values(dtype, 5, place.rank + 10 * r) for r in range(place.size)]
    return Case("reduce_scatter", (t, parts), [t], t)


def reduce_scatter_tensor(place: Place, dtype: torch.dtype) -> Case:
    t = values(dtype, 5, 100)
    return Case("reduce_scatter_tensor", (t, values(dtype, 5 * place.size, place.rank)), [t], t)


def all_to_all(place: Place, dtype: torch.dtype) -> Case:
    ts = [values(dtype, 5, 100) for _ in range(place.size)]
    return Case("all_to_all", (ts, [values(dtype, 5, place.rank + 10 * r) for r in range(place.size)]), ts, ts)


def all_to_all_single(place: Place, dtype: torch.dtype) -> Case:
    t = values(dtype, 3 * place.size, 100)
    return Case("all_to_all_single", (t, values(dtype, 3 * place.size, place.rank)), [t], t)


def all_to_all_single_uneven(place: Place, dtype: torch.dtype) -> Case:
    """Make a case in which rank r sends (r + 2p) % 3 rows to rank p: none to some."""
    give = [(place.rank + 2 * p) % 3 for p in range(place.size)]
    take = [(p + 2 * place.rank) % 3 for p in range(place.size)]
    t = values(dtype, 2 * sum(take), 100).view(-1, 2)
    return Case("all_to_all_single", (t, values(dtype, 2 * sum(give), place.rank).view(-1, 2), take, give), [t], t)


REDUCING: tuple[Make, ...] = (all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_tensor)
MOVING: tuple[Make, ...] = (
    broadcast,
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_stacked,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    all_to_all_single_uneven,
)
ALL = REDUCING + MOVING
# The version of torch decides which of these Gloo has.
NEWER: tuple[Make, ...] = (reduce_scatter, reduce_scatter_tensor, all_to_all, all_gather_stacked)


class WrongArguments(Exception):
    """Error of wrong arguments, raised at the call and not by the future."""


def by_torch(case: Case, **more: Any) -> Exception | None:
    """Let torch do it; return how it refuses."""
    with warnings.catch_warnings():  # some functions are deprecated, and some dtypes experimental
        warnings.simplefilter("ignore")
        try:
            getattr(dist, case.function)(*case.arguments, **case.keywords, **more)
        except REFUSED as e:
            return e
    return None


def by_ours(case: Case, owner: Any = cfd, **more: Any) -> CUDAFuture[Any]:
    """Let ours do it: a function of the package, or a method of a ProcessGroup."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            future: CUDAFuture[Any] = getattr(owner, case.function)(*case.arguments, **case.keywords, **more)
        except (TypeError, ValueError) as e:
            return CUDAFuture.failed(WrongArguments(e))
    return future


def agree(refusal: Exception | None, wanted: Case, future: CUDAFuture[Any], case: Case, what: str) -> None:
    """Check that our future has the outcome of torch."""
    error = future.exception(timeout=TIMEOUT)
    if refusal is not None:
        expected = cfd.CollectiveError if isinstance(refusal, RuntimeError) else WrongArguments
        assert isinstance(error, expected), f"{what}: torch raises {refusal!r}, ours: {error!r}"
        return
    assert error is None, f"{what}: torch takes it, ours: {error!r}"
    assert future.value() is case.value, f"{what}: the value is another object"
    for theirs, ours in zip(wanted.written, case.written, strict=True):
        assert torch.equal(bits(theirs), bits(ours)), f"{what}: torch gives {theirs}, ours gives {ours}"


Taken = set[tuple[str, torch.dtype]]


def compare(
    place: Place,
    makes: Sequence[Make],
    dtypes: Sequence[torch.dtype],
    ours: Callable[[Case], CUDAFuture[Any]] | None = None,
    within: Callable[[Callable[[], Any]], Any] = lambda issue: issue(),
    **more: Any,
) -> Taken:
    """Compare each of `makes` for each dtype, and return what torch takes.

    `ours` issues a case (by default as a function, on the same group), `within` says where: all of them at once.
    """
    if ours is None:
        ours = partial(by_ours, group=place.group)
    issue = partial(ours, **more)
    keys = [(make, dtype) for make in makes for dtype in dtypes]
    cases = [make(place, dtype) for make, dtype in keys]
    wanted = [make(place, dtype) for make, dtype in keys]
    refusals = [by_torch(case, group=place.group, **more) for case in wanted]
    futures = within(lambda: [issue(case) for case in cases])
    for i, (make, dtype) in enumerate(keys):
        what = f"{make.__name__} of {dtype}, {more}, rank {place.rank} of {place.size}"
        agree(refusals[i], wanted[i], futures[i], cases[i], what)
    return {(make.__name__, dtype) for (make, dtype), refusal in zip(keys, refusals, strict=True) if refusal is None}


def expect_common(taken: Taken, makes: Iterable[Make], dtypes: Iterable[torch.dtype] = COMMON) -> None:
    """Check that a comparison was not empty."""
    missing = {(make.__name__, dtype) for make in makes if make not in NEWER for dtype in dtypes} - taken
    assert not missing, f"torch refuses {missing}"


# ---- layouts of tensors that are gathered

# Views of the values, and of negative numbers around them.
STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: torch.clone(t)[:],
    "transposed": lambda t: torch.clone(t.t(), memory_format=torch.contiguous_format).t(),
    "with gaps": lambda t: torch.stack([t, -t - 1], -1)[..., 0],
    "transposed with gaps": lambda t: torch.stack([t.t(), -t.t() - 1], 1)[:, 0].t(),
}


def expect_gathered_layouts(name: str, device: str) -> None:
    """Compare what a gathering function of ours and torch's own on the host write into outputs of every layout."""
    place = Place(root=1)
    source = torch.arange(8.0).view(4, 2) + 100 * place.rank
    for read, written in itertools.product(STRIDED, STRIDED):
        # The layouts differ between the ranks: what is sent does not depend on them.
        mine = STRIDED["contiguous" if place.rank == 2 else read](source)
        theirs, there = ([STRIDED[written](torch.zeros(4, 2)) for _ in range(place.size)] for _ in range(2))
        ours = [_move(t, device) for t in there]
        future: CUDAFuture[Any]
        if name == "all_gather":
            dist.all_gather(theirs, mine)
            future = cfd.all_gather(ours, _move(mine, device))
        elif name == "all_gather_coalesced":
            dist.all_gather(theirs, mine)
            future = cfd.all_gather_coalesced([[t] for t in ours], [_move(mine, device)])
        else:
            dist.gather(mine, theirs if place.at_root else None, **place.root("dst"))
            future = cfd.gather(_move(mine, device), ours if place.at_root else None, **place.root("dst"))
        future.wait(timeout=TIMEOUT)
        for wanted, output in zip(theirs, ours, strict=True):
            assert output._base is not None
            assert wanted._base is not None
            assert torch.equal(output._base.cpu(), wanted._base), f"{name}, {read} into {written}"


def _move(tensor: Tensor, device: str) -> Tensor:
    """Return the same view of a copy on the device."""
    assert tensor._base is not None
    return tensor._base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
