"""Shards of a store: their names, and their shares of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from cudafuture._arguments import listed, shown
from cudafuture._C import CUDAFuture
from cudafuture.errors import WorkerLostError
from cudafuture.executors import callback_thread
from cudafuture.store.protocol import Store

__all__ = [
    "Merge",
    "ShardFailure",
    "Share",
    "begun",
    "blamed",
    "error_of",
    "in_order",
    "named",
    "nothing",
    "part_of",
    "the_one",
    "total",
]

T = TypeVar("T")
Merge = Callable[[list[Any], list[list[int]]], T]
"""Function that merges the values of the shards, given the positions of each shard's keys in the call."""

_MOST_NAMED = 8  # keys that an error lists


class Share(NamedTuple):
    """Part of a call that one shard executes."""

    shard: str
    keys: Sequence[str]
    future: CUDAFuture[Any]


class ShardFailure(NamedTuple):
    """Error of one shard's share of a call."""

    shard: str
    keys: Sequence[str]
    error: BaseException


def named(stores: Mapping[str, Store] | Sequence[Store]) -> dict[str, Store]:
    """Return shards by name, in the order of the names.

    Raises:
        ValueError: there are no shards, one appears twice, two have the same name, or one has no name.
        TypeError: a name is not a str.
    """
    pairs: Iterable[tuple[str, Store]]
    if isinstance(stores, Mapping):
        pairs = stores.items()
    else:
        pairs = [(_name_of(each), each) for each in listed("stores", stores, "stores, or a mapping of names")]
    shards: dict[str, Store] = {}
    for name, shard in pairs:
        if not isinstance(name, str):
            raise TypeError(f"a shard's name is a str, not {name!r}")
        _expect_store(shard)
        if name in shards:
            raise ValueError(f"two shards are called {name!r}: give a mapping of names to stores")
        shards[name] = shard
    if not shards:
        raise ValueError("no stores were given: pass at least one")
    if len({id(shard) for shard in shards.values()}) < len(shards):
        raise ValueError(f"one store is used for several of {sorted(shards)}")
    return dict(sorted(shards.items()))


def _expect_store(shard: Store) -> None:
    if not hasattr(shard, "readv"):
        raise TypeError(f"shards are stores, such as DiskStore('folder'), not {shown(shard)}")


def _name_of(shard: Store) -> str:
    """Return a shard's own name; its position in a list would not show where keys lie."""
    _expect_store(shard)
    for fact in ("worker", "dir"):
        if isinstance(name := getattr(shard, fact, None), str):
            return name
    raise ValueError(f"{shard!r} has no worker and no folder: give a mapping of names to stores")


def blamed(failures: Sequence[ShardFailure]) -> BaseException:
    """Return the error of a call: that of the first failed share, or, if shards are lost, of the first lost one.

    It keeps its type. If a worker is lost or did not answer, the message names the shards and the keys.
    """
    lost = [failure for failure in failures if isinstance(failure.error, WorkerLostError)]
    first = (lost or failures)[0]
    message = "; ".join(map(_described, [first, *(failure for failure in failures if failure is not first)]))
    error = first.error
    if isinstance(error, WorkerLostError):
        told: BaseException = WorkerLostError(message, worker=error.worker)
    elif type(error) is TimeoutError:
        told = TimeoutError(message)
    else:
        noted: Any = error  # Python 3.10 has no add_note
        noted.__notes__ = [*getattr(error, "__notes__", ()), message]
        return error
    told.__cause__ = error
    return told


def _described(failure: ShardFailure) -> str:
    keys = [repr(key) for key in failure.keys[:_MOST_NAMED]]
    if len(failure.keys) > _MOST_NAMED:
        keys.append(f"{len(failure.keys) - _MOST_NAMED} more")
    of = f" ({'key' if len(failure.keys) == 1 else 'keys'} {', '.join(keys)})" if keys else ""
    return f"shard {failure.shard!r}{of}: {failure.error}"


def the_one(values: list[T], places: list[list[int]]) -> T:
    """Return the value of the only shard."""
    (value,) = values
    return value


def part_of(
    tensor: torch.Tensor | None, places: Sequence[int]
) -> tuple[torch.Tensor | None, Callable[[CUDAFuture[T]], CUDAFuture[T]]]:
    """Return the part of a per-key tensor that a shard fills, and a function to apply to the shard's future."""
    if tensor is None or len(places) == tensor.numel():  # the shard has all keys, in order
        return tensor, lambda future: future
    part = torch.zeros(len(places), dtype=tensor.dtype, device="cpu")

    def gather(future: CUDAFuture[T]) -> CUDAFuture[T]:
        def put(_: object) -> None:
            numbers = torch.int64 if part.dtype == torch.uint64 else part.dtype  # torch cannot index uint64
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                whole, some = (each.detach().view(numbers) for each in (tensor, part))
                whole.index_copy_(0, torch.tensor(places, dtype=torch.int64, device="cpu"), some)

        future.add_done_callback(put, executor=callback_thread)  # before the callback that joins the shards
        return future

    return part, gather


def total(values: list[int], places: list[list[int]]) -> int:
    """Return the bytes of all shards."""
    return sum(values)


def in_order(values: list[list[T]], places: list[list[int]]) -> list[T]:
    """Return the values of the shards in the order of the call's keys."""
    found = {i: value for at, some in zip(places, values, strict=True) for i, value in zip(at, some, strict=True)}
    return [found[i] for i in range(len(found))]


def nothing(values: list[None], *places: list[list[int]]) -> None:
    """Return None when all shards are done."""


def begun(begin: Callable[..., CUDAFuture[T]], *args: Any) -> CUDAFuture[T]:
    """Call `begin` and return its future; if `begin` raises, return a failed future."""
    try:
        return begin(*args)
    except Exception as e:
        return CUDAFuture.failed(e)


def error_of(part: CUDAFuture[Any]) -> BaseException | None:
    """Return the error of a future that is done. Its ``exception()`` would wait for devices."""
    try:
        part.value()
    except BaseException as e:
        return e
    return None
