"""Sharded store of tensors by key on several disks: the name of a key selects its disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import torch
from typing_extensions import Self

from cudafuture import _C
from cudafuture._arguments import expect_mapping
from cudafuture._C import CUDAFuture
from cudafuture.combine import collect_all
from cudafuture.errors import InvalidStateError, WorkerLostError
from cudafuture.executors import callback_thread
from cudafuture.store import _shard
from cudafuture.store._inventory import Inventory, Verb
from cudafuture.store._rendezvous_hash import RendezvousHash
from cudafuture.store._shard import ShardFailure, Share, blamed, named
from cudafuture.store.arguments import (
    device_to_read_into,
    expect_one_for_each,
    expect_tensors,
    expected_digests,
    listed_keys,
    tensors_to_fill,
)
from cudafuture.store.disk_store import DiskStore
from cudafuture.store.protocol import Entry, Store

__all__ = ["ShardedStore"]

T = TypeVar("T")


class ShardedStore:
    """Several stores that are used as one: each key lies on one of them, its shard. The interface is ``DiskStore``'s.

    Only the names of the key and of the shards select the shard, by rendezvous hashing: it is the one with the highest
    hash (XXH3) of both names. Every process that gives the shards the same names therefore finds the same keys, in any
    order of the shards. If one of n shards is added or removed, 1/n of the keys belong elsewhere, and the others stay.
    Nothing is moved automatically: keys on a shard where they do not belong are not found.

    A call with one key is a call of its shard, and, with a shard in this process, returns its future. A call with many
    keys calls each shard that has some of them once, and is done when all of those are done. It cannot be cancelled,
    nor can any call of a remote shard. ``released`` of a write completes when no shard needs the tensors any more.

    A shard whose worker has died fails its calls with WorkerLostError, which names the shard and the keys; the other
    shards continue. ``lost()`` returns the keys that are lost with it. Its keys stay its own: they are not written to
    another shard, where no reader would look. A store of the remaining shards still has all keys on these shards, and
    distributes the lost shard's keys over them.

    Args:
        stores: local ones, remote ones, or both. A mapping gives their names; otherwise the name of a remote one is
            its ``worker``, that of a local one its ``dir``, and the names must differ. Give names if stores outlive a
            process: moving a folder changes its name.
        weights: relative shares of the keys, by shard name; the default is 1.

    Raises:
        ValueError: no stores, one of them twice, two with the same name, or one without a name; a weight is not
            positive, or names no shard.
        TypeError: a name is not a str.

    The idea is Thaler and Ravishankar's, "A name-based mapping scheme for rendezvous" (University of Michigan, 1996)
    and "Using name-based mappings to increase hit rates" (IEEE/ACM Transactions on Networking 6(1), 1998); the weights
    are the logarithmic method of Schindelhauer and Schomaker, "Weighted distributed hash tables" (SPAA 2005).

    >>> store = ShardedStore([DiskStore("one disk"), DiskStore("another disk")])
    >>> store.writev({f"layer {i}": torch.full((2,), float(i)) for i in range(100)}).wait()
    800
    >>> store.read("layer 7").wait()
    tensor([7., 7.])
    """

    def __init__(
        self, stores: Mapping[str, Store] | Sequence[Store], *, weights: Mapping[str, float] | None = None
    ) -> None:
        self._shards = named(stores)
        if weights is not None:
            expect_mapping("weights", weights, "{name of a shard: share}")
        self._rendezvous = RendezvousHash(self._shards, weights or {})
        self._closed = False
        # A shard in this process dies with this process.
        self._inventory = Inventory(name for name, shard in self._shards.items() if not isinstance(shard, DiskStore))

    @property
    def shards(self) -> Mapping[str, Store]:
        """The stores by name, in the order of the names."""
        return MappingProxyType(self._shards)

    @property
    def durable(self) -> bool:
        """True if all shards outlive their process."""
        return all(shard.durable for shard in self._shards.values())

    def where(self, key: str) -> str:
        """Return the name of the shard that a key belongs to, also if the key does not exist.

        Raises:
            TypeError, ValueError: the key is not valid.

        >>> store = ShardedStore({"a": DiskStore("one disk"), "b": DiskStore("another disk")})
        >>> [store.where(key) for key in ("weight", "bias", "step")]
        ['b', 'a', 'b']
        """
        return self._rendezvous.where(key)

    def lost(self) -> dict[str, list[str]]:
        """Return the lost shards, by name, each with the keys that are known to be on it.

        A shard is lost when one of its calls has failed with WorkerLostError. This method asks no shard, and does not
        block: ``keys()`` asks all. A key is known if this object has written, read or listed it there and not deleted
        it, or if the outcome of its write is unknown.

        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).lost()
        {}
        """
        return self._inventory.lost()

    # ---- writing

    def write(self, key: str, tensor: torch.Tensor, *, priority: int = 0) -> CUDAFuture[int]:
        """Write a tensor under a key, and replace the previous one; see ``DiskStore.write``.

        >>> store = ShardedStore([DiskStore("one disk"), DiskStore("another disk")])
        >>> store.write("weight", torch.eye(3)).wait()
        36
        """
        return self._ask(
            "write", [key], lambda shard, _: shard.write(key, tensor, priority=priority), _shard.the_one, priority
        )

    def writev(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        priority: int = 0,
        digests: Mapping[str, int] | None = None,
        written: torch.Tensor | None = None,
    ) -> CUDAFuture[int]:
        """Write many tensors under their keys; see ``DiskStore.writev``. Each shard refuses its share separately.

        >>> store = ShardedStore([DiskStore("one disk"), DiskStore("another disk")])
        >>> store.writev({"weight": torch.eye(3), "bias": torch.zeros(3)}).wait()
        48
        """
        expect_tensors(tensors)
        items = list(tensors.items())
        expected_digests(tensors, digests)
        expect_one_for_each(written, torch.bool, len(items), "written")
        if written is not None:
            with torch.inference_mode(written.is_inference()), torch.no_grad():
                written.fill_(False)

        def begin(shard: Store, places: Sequence[int]) -> CUDAFuture[int]:
            some = dict(items[i] for i in places)
            sums = None if digests is None else {key: digests[key] for key in some if key in digests}
            part, gather = _shard.part_of(written, places)
            return gather(shard.writev(some, priority=priority, digests=sums, written=part))

        return self._ask("write", [key for key, _ in items], begin, _shard.total, priority)

    # ---- reading

    def read(
        self,
        key: str,
        out: torch.Tensor | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
    ) -> CUDAFuture[torch.Tensor]:
        """Return a future of the tensor that was written under a key; see ``DiskStore.read``.

        >>> store = ShardedStore([DiskStore("one disk"), DiskStore("another disk")])
        >>> store.write("weight", torch.arange(3)).wait()
        24
        >>> store.read("weight").wait()
        tensor([0, 1, 2])
        """
        return self._ask(
            "read", [key], lambda shard, _: shard.read(key, out, device, priority=priority), _shard.the_one, priority
        )

    def readv(
        self,
        keys: Iterable[str],
        outs: Sequence[torch.Tensor] | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
        digests: torch.Tensor | None = None,
    ) -> CUDAFuture[list[torch.Tensor]]:
        """Return a future of many tensors, in the order of the keys; see ``DiskStore.readv``.

        >>> store = ShardedStore([DiskStore("one disk"), DiskStore("another disk")])
        >>> store.writev({"weight": torch.ones(2), "bias": torch.zeros(1)}).wait()
        12
        >>> store.readv(["bias", "weight"]).wait()
        [tensor([0.]), tensor([1., 1.])]
        """
        names = listed_keys(keys)
        device = None if device is None else device_to_read_into(outs, device)
        given = None if outs is None else tensors_to_fill(outs, len(names))
        expect_one_for_each(digests, torch.uint64, len(names), "digests")

        def begin(shard: Store, places: Sequence[int]) -> CUDAFuture[list[torch.Tensor]]:
            into = None if given is None else [given[i] for i in places]
            part, gather = _shard.part_of(digests, places)
            return gather(shard.readv([names[i] for i in places], into, device, priority=priority, digests=part))

        return self._ask("read", names, begin, _shard.in_order, priority)

    # ---- keys

    def keys(self) -> list[str]:
        """Return all keys: shard by shard in the order of their names, each shard's keys in its own order.

        It asks every shard, and blocks. If a shard does not answer, it raises instead of omitting keys: list the others
        through ``shards``.

        Raises:
            WorkerLostError: a shard is lost; the error names it.

        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).keys()
        []
        """
        found: list[str] = []
        for name in self._shards:
            with self._asking(name) as shard:
                here = [key for key in shard.keys() if self.where(key) == name]  # noqa: SIM118
            self._inventory.found(name, here)
            found += here
        return found

    def __contains__(self, key: str) -> bool:
        name = self.where(key)
        with self._asking(name, key) as shard:
            found = key in shard
        self._inventory.found(name, [key] if found else [])
        return found

    def __len__(self) -> int:
        return len(self.keys())

    def stat(self, key: str) -> Entry:
        """Return dtype, shape and size of the tensor of a key. It asks the key's shard, and blocks.

        Raises:
            NotFoundError: the key does not exist.
            WorkerLostError: its shard is lost.

        >>> store = ShardedStore([DiskStore("one disk"), DiskStore("another disk")])
        >>> store.write("weight", torch.eye(3)).wait()
        36
        >>> store.stat("weight")
        Entry(key='weight', dtype=torch.float32, shape=torch.Size([3, 3]), nbytes=36)
        """
        name = self.where(key)
        with self._asking(name, key) as shard:
            entry = shard.stat(key)
        self._inventory.found(name, [key])
        return entry

    def find(self, keys: Iterable[str]) -> CUDAFuture[list[Entry | None]]:
        """Return a future of the entry of each key, None if the key does not exist.

        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).find(["weight"]).wait()
        [None]
        """
        names = listed_keys(keys)

        def merged(found: list[list[Entry | None]], places: list[list[int]]) -> list[Entry | None]:
            entries = _shard.in_order(found, places)
            for entry in entries:
                if entry is not None:
                    self._inventory.found(self.where(entry.key), [entry.key])
            return entries

        return self._ask("ask", names, lambda shard, places: shard.find([names[i] for i in places]), merged)

    def list_keys(self) -> CUDAFuture[list[str]]:
        """Return a future of ``keys()``, in the same order.

        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).list_keys().wait()
        []
        """
        self._expect_open()
        shares = [Share(name, (), _shard.begun(shard.list_keys)) for name, shard in self._shards.items()]

        def merged(found: list[list[str]]) -> list[str]:
            keys = []
            for name, listing in zip(self._shards, found, strict=True):
                here = [key for key in listing if self.where(key) == name]
                self._inventory.found(name, here)
                keys += here
            return keys

        return self._joined("list keys", shares, merged)

    def delete(self, key: str) -> CUDAFuture[None]:
        """Delete a key; see ``DiskStore.delete``.

        >>> store = ShardedStore([DiskStore("one disk"), DiskStore("another disk")])
        >>> store.write("weight", torch.eye(3)).wait()
        36
        >>> store.delete("weight").wait()
        >>> "weight" in store
        False
        """
        return self._ask("delete", [key], lambda shard, _: shard.delete(key), _shard.nothing)

    def deletev(self, keys: Iterable[str]) -> CUDAFuture[None]:
        """Delete many keys; see ``DiskStore.deletev``.

        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).deletev([]).wait()
        """
        names = listed_keys(keys)
        return self._ask(
            "delete", names, lambda shard, places: shard.deletev([names[i] for i in places]), _shard.nothing
        )

    # ---- the end

    def flush(self) -> CUDAFuture[None]:
        """Return a future that completes when all writes and deletions so far are done; see ``DiskStore.flush``.

        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).flush().wait()
        """
        self._expect_open()
        shares = [Share(name, (), _shard.begun(shard.flush)) for name, shard in self._shards.items()]
        return self._joined("flush", shares, _shard.nothing)

    def trim(self) -> int:
        """Remove the empty files of all shards; return their bytes.

        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).trim()
        0
        """
        removed = 0
        for name in self._shards:
            with self._asking(name) as shard:
                removed += shard.trim()
        return removed

    def close(self) -> None:
        """Close all shards, even if closing one of them fails.

        >>> ShardedStore([DiskStore("one disk"), DiskStore("another disk")]).close()
        """
        self._closed = True
        with contextlib.ExitStack() as stack:
            for shard in self._shards.values():
                stack.callback(shard.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        gone = f"; lost: {', '.join(map(repr, lost))}" if (lost := self.lost()) else ""
        return f"<ShardedStore of {', '.join(map(repr, self._shards))}{gone}>"

    # ---- implementation

    def _expect_open(self) -> None:
        if self._closed:
            raise InvalidStateError("the store is closed")

    def _ask(
        self,
        verb: Verb,
        keys: Sequence[str],
        begin: Callable[[Store, list[int]], CUDAFuture[Any]],
        merge: _shard.Merge[T],
        priority: int = 0,
    ) -> CUDAFuture[T]:
        """Begin a call on each shard that has some of the keys, given by position; return the future of all shares."""
        self._expect_open()
        places: dict[str, list[int]] = {}
        for i, key in enumerate(keys):
            places.setdefault(self.where(key), []).append(i)
        if len(places) == 1:
            (name,) = places
            with self._asking(name, *keys) as shard:
                started = begin(shard, places[name])
            if name not in self._inventory:
                return started
            shares = [Share(name, keys, started)]
        else:
            shares = [
                Share(n, [keys[i] for i in at], _shard.begun(begin, self._shards[n], at)) for n, at in places.items()
            ]
        what = f"{verb} {keys[0] if len(keys) == 1 else f'{len(keys)} keys'}"
        return self._joined(what, shares, lambda values: merge(values, list(places.values())), priority, verb)

    def _joined(
        self,
        what: str,
        shares: Sequence[Share],
        merge: Callable[[list[Any]], T],
        priority: int = 0,
        verb: Verb = "ask",
    ) -> CUDAFuture[T]:
        """Return the future of all shares: done when all are done, so that no shard uses a tensor any more."""
        future: CUDAFuture[T] = CUDAFuture(name=what, priority=priority, executor=callback_thread)
        future.set_running_or_notify_cancel()  # the shards use the memory, so it cannot be cancelled

        def ended(_: object) -> None:
            error: BaseException | None
            try:
                failures = []
                for name, keys, part in shares:
                    error = _shard.error_of(part)
                    self._inventory.ended(verb, name, keys, error)
                    if error is not None:
                        failures.append(ShardFailure(name, keys, error))
                error = blamed(failures) if failures else None
                values = [] if failures else [merge([part.value() for _, _, part in shares])]
            except BaseException as e:  # for example, a shard returned a wrong value
                error = e
            if error is None:
                future.set_result(values[0])
            else:
                _C.fail(future, error)

        parts = collect_all([share.future for share in shares])
        parts.then(ended, priority=priority, executor=callback_thread)  # on streams ordered after those of the parts
        if verb == "write":
            sources = collect_all([share.future.released or share.future for share in shares])
            future.released = sources.then(lambda _: None)
        return future

    @contextlib.contextmanager
    def _asking(self, name: str, *keys: str) -> Iterator[Store]:
        """Yield a shard, and add its name to errors of the block.

        Raises:
            InvalidStateError: the store is closed.
        """
        self._expect_open()
        try:
            yield self._shards[name]
        except (WorkerLostError, TimeoutError) as error:
            self._inventory.ended("ask", name, keys, error)
            raise blamed([ShardFailure(name, keys, error)])  # noqa: B904 - it has the error as its cause
