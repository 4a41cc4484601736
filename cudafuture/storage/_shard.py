"""The shards of a store: their names, and their shares of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cudafuture._C import CUDAFuture
from cudafuture.errors import WorkerLostError
from cudafuture.storage.store import Store

__all__ = ["Failure", "Share", "blamed", "named"]

_MOST_NAMED = 8  # keys that an error names


class Share(NamedTuple):
    """What one shard has of a call."""

    shard: str
    keys: Sequence[str]
    future: CUDAFuture[Any]


class Failure(NamedTuple):
    """What has become of a share."""

    shard: str
    keys: Sequence[str]
    error: BaseException


def named(offloaders: Mapping[str, Store] | Sequence[Store]) -> dict[str, Store]:
    """Return shards by name, in the order of the names.

    Raises:
        ValueError: there are none; one of them comes twice, or two have one name, or one has none.
        TypeError: a name is no str.
    """
    pairs = offloaders.items() if isinstance(offloaders, Mapping) else [(_name_of(each), each) for each in offloaders]
    shards: dict[str, Store] = {}
    for name, shard in pairs:
        if not isinstance(name, str):
            raise TypeError(f"a shard's name is a str, not {name!r}")
        if name in shards:
            raise ValueError(f"two shards are called {name!r}: give a mapping of names to offloaders")
        shards[name] = shard
    if not shards:
        raise ValueError("no offloaders: at least one is wanted")
    if len({id(shard) for shard in shards.values()}) < len(shards):
        raise ValueError(f"one offloader stands for several of {sorted(shards)}")
    return dict(sorted(shards.items()))


def _name_of(shard: Store) -> str:
    """Return what a shard is called by itself: never its place in a list, which would say nothing of where keys lie."""
    for fact in ("worker", "dir"):
        if isinstance(name := getattr(shard, fact, None), str):
            return name
    raise ValueError(f"{shard!r} is of no worker and in no folder: give a mapping of names to offloaders")


def blamed(failures: Sequence[Failure]) -> BaseException:
    """Return the error of a call: that of the first share that failed, or else of the first whose shard is gone.

    It keeps its type. Where a worker is gone, or did not answer, it says which shards and which keys that concerns.
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


def _described(failure: Failure) -> str:
    keys = [repr(key) for key in failure.keys[:_MOST_NAMED]]
    if len(failure.keys) > _MOST_NAMED:
        keys.append(f"{len(failure.keys) - _MOST_NAMED} more")
    of = f" ({'key' if len(failure.keys) == 1 else 'keys'} {', '.join(keys)})" if keys else ""
    return f"shard {failure.shard!r}{of}: {failure.error}"
