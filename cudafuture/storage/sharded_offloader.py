"""Tensors by name on several disks: each key has one, which its name decides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import torch

from cudafuture._C import CUDAFuture
from cudafuture.combine import collect_all
from cudafuture.errors import InvalidStateError, WorkerLostError
from cudafuture.executors import callback_thread
from cudafuture.storage import _shard
from cudafuture.storage._inventory import Inventory, Verb
from cudafuture.storage._rendezvous import Rendezvous
from cudafuture.storage._shard import Failure, Share, blamed, named
from cudafuture.storage._sharded_keys import ShardedKeys
from cudafuture.storage.offloader import Offloader
from cudafuture.storage.store import Store, expect_one_for_each, expected_digests

__all__ = ["ShardedOffloader"]

T = TypeVar("T")


class ShardedOffloader(ShardedKeys):
    """Several stores that are used as one: each key lies on one of them, its shard. The interface is ``Offloader``'s.

    The names of the key and of the shards alone decide which shard that is, by rendezvous hashing: it is the one with
    the highest hash (XXH3) of both names. So every process that gives the shards the same names finds the same keys, in
    whatever order it gives them; and where one of n shards is added or taken away, 1/n of the keys belong elsewhere,
    and the others stay where they are. Nothing is moved by itself: what lies where it does not belong is not seen.

    The call of one key is a call of its shard, and with a shard in this process, its future. A call of many keys is one
    call of each shard that has some of them, and done when all of those are. Once it is made, it cannot be cancelled;
    nor can any call of a shard elsewhere. ``released`` of a write completes when no shard needs the tensors any more.

    A shard whose worker has died fails what is asked of it with WorkerLostError, which names the shard and the keys;
    the others go on. ``lost()`` says what is gone with it. Its keys stay its own: nothing is written where nobody would
    look for it. A store of the shards that are left has all their keys, and spreads the others over them.

    Args:
        offloaders: local ones, remote ones, or both. A mapping gives their names; otherwise that of a remote one is its
            ``worker``, that of a local one its ``dir``, and they have to differ. Give names where stores outlive a
            process: a folder that has moved is another name.
        weights: what share of the keys shards get, in proportion to each other, by name; 1 where nothing is said.

    Raises:
        ValueError: no offloaders, one of them twice, two with the same name, or one whose name cannot be told; a weight
            that is not positive, or is that of no shard.
        TypeError: a name that is no str.

    The idea is Thaler and Ravishankar's, "A name-based mapping scheme for rendezvous" (University of Michigan, 1996)
    and "Using name-based mappings to increase hit rates" (IEEE/ACM Transactions on Networking 6(1), 1998); the weights
    are the logarithmic method of Schindelhauer and Schomaker, "Weighted distributed hash tables" (SPAA 2005).

    >>> store = ShardedOffloader([Offloader("one disk"), Offloader("another disk")])
    >>> store.writev({f"layer {i}": torch.full((2,), float(i)) for i in range(100)}).wait()
    800
    >>> store.read("layer 7").wait()
    tensor([7., 7.])
    """

    def __init__(
        self, offloaders: Mapping[str, Store] | Sequence[Store], *, weights: Mapping[str, float] | None = None
    ) -> None:
        self._shards = named(offloaders)
        self._rendezvous = Rendezvous(self._shards, weights or {})
        self._closed = False
        # A shard in this process dies with it.
        self._inventory = Inventory(name for name, shard in self._shards.items() if not isinstance(shard, Offloader))

    @property
    def shards(self) -> Mapping[str, Store]:
        """The offloaders by name, in the order of the names."""
        return MappingProxyType(self._shards)

    @property
    def durable(self) -> bool:
        """Whether all shards outlive their process."""
        return all(shard.durable for shard in self._shards.values())

    def where(self, key: str) -> str:
        """Return the name of the shard that a key belongs to, whether it is there or not.

        Raises:
            TypeError, ValueError: no such key can be.

        >>> store = ShardedOffloader({"a": Offloader("one disk"), "b": Offloader("another disk")})
        >>> [store.where(key) for key in ("weight", "bias", "step")]
        ['b', 'a', 'b']
        """
        return self._rendezvous.where(key)

    def lost(self) -> dict[str, list[str]]:
        """Return which shards are gone, and what with them: for each by name the keys that are known to be there.

        A shard is gone when something that was asked of it has failed with WorkerLostError. This asks nothing, and does
        not wait: ``keys()`` asks all. A key is known when this object has written, read or listed it there and not
        deleted it, or when it is not known whether a write was done.

        >>> ShardedOffloader([Offloader("one disk"), Offloader("another disk")]).lost()
        {}
        """
        return self._inventory.lost()

    # ---- futures

    def write(self, key: str, tensor: torch.Tensor, *, priority: int = 0) -> CUDAFuture[int]:
        """Put a tensor under a key, in place of what was there; see ``Offloader.write``.

        >>> store = ShardedOffloader([Offloader("one disk"), Offloader("another disk")])
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
        """Put many tensors under their keys; see ``Offloader.writev``. A shard refuses its share alone.

        >>> store = ShardedOffloader([Offloader("one disk"), Offloader("another disk")])
        >>> store.writev({"weight": torch.eye(3), "bias": torch.zeros(3)}).wait()
        48
        """
        items = list(tensors.items())
        expected_digests(tensors, digests)
        expect_one_for_each(written, torch.bool, len(items), "outcomes")
        if written is not None:
            with torch.inference_mode(written.is_inference()), torch.no_grad():
                written.fill_(False)

        def begin(shard: Store, places: Sequence[int]) -> CUDAFuture[int]:
            some = dict(items[i] for i in places)
            sums = None if digests is None else {key: digests[key] for key in some if key in digests}
            part, gather = _shard.part_of(written, places)
            return gather(shard.writev(some, priority=priority, digests=sums, written=part))

        return self._ask("write", [key for key, _ in items], begin, _shard.total, priority)

    def read(
        self,
        key: str,
        out: torch.Tensor | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
    ) -> CUDAFuture[torch.Tensor]:
        """Get the tensor that was written under a key; see ``Offloader.read``.

        >>> store = ShardedOffloader([Offloader("one disk"), Offloader("another disk")])
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
        """Get many tensors, in the order of the keys; see ``Offloader.readv``.

        >>> store = ShardedOffloader([Offloader("one disk"), Offloader("another disk")])
        >>> store.writev({"weight": torch.ones(2), "bias": torch.zeros(1)}).wait()
        12
        >>> store.readv(["bias", "weight"]).wait()
        [tensor([0.]), tensor([1., 1.])]
        """
        names = list(keys)
        if outs is not None and device is not None:
            raise ValueError("pass either out or device, not both: out already has a device")
        if outs is not None and len(outs) != len(names):
            raise ValueError(f"{len(names)} keys, and {len(outs)} tensors to be filled")
        expect_one_for_each(digests, torch.uint64, len(names), "digests")

        def begin(shard: Store, places: Sequence[int]) -> CUDAFuture[list[torch.Tensor]]:
            into = None if outs is None else [outs[i] for i in places]
            part, gather = _shard.part_of(digests, places)
            return gather(shard.readv([names[i] for i in places], into, device, priority=priority, digests=part))

        return self._ask("read", names, begin, _shard.in_order, priority)

    def delete(self, key: str) -> CUDAFuture[None]:
        """Forget a key; see ``Offloader.delete``.

        >>> store = ShardedOffloader([Offloader("one disk"), Offloader("another disk")])
        >>> store.write("weight", torch.eye(3)).wait()
        36
        >>> store.delete("weight").wait()
        >>> "weight" in store
        False
        """
        return self._ask("delete", [key], lambda shard, _: shard.delete(key), _shard.nothing)

    def deletev(self, keys: Iterable[str]) -> CUDAFuture[None]:
        """Forget many keys; see ``Offloader.deletev``.

        >>> ShardedOffloader([Offloader("one disk"), Offloader("another disk")]).deletev([]).wait()
        """
        names = list(keys)
        return self._ask(
            "delete", names, lambda shard, places: shard.deletev([names[i] for i in places]), _shard.nothing
        )

    def flush(self) -> CUDAFuture[None]:
        """Return a future that completes when all writes and deletions so far are done; see ``Offloader.flush``.

        >>> ShardedOffloader([Offloader("one disk"), Offloader("another disk")]).flush().wait()
        """
        self._expect_open()
        shares = [Share(name, (), _shard.begun(shard.flush)) for name, shard in self._shards.items()]
        return self._joined("flush", shares, _shard.nothing)

    def close(self) -> None:
        """Close all shards, also when one of them fails to.

        >>> ShardedOffloader([Offloader("one disk"), Offloader("another disk")]).close()
        """
        self._closed = True
        with contextlib.ExitStack() as stack:
            for shard in self._shards.values():
                stack.callback(shard.close)

    def __enter__(self) -> ShardedOffloader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        gone = f"; lost: {', '.join(map(repr, lost))}" if (lost := self.lost()) else ""
        return f"<ShardedOffloader of {', '.join(map(repr, self._shards))}{gone}>"

    # ---- how

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
        """Begin a call on each shard that has some of the keys, given by their places; return the future of all."""
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
        """Return the future of all shares: done when they all are, so that no shard uses a tensor any more."""
        future: CUDAFuture[T] = CUDAFuture(name=what, priority=priority, executor=callback_thread)
        future.set_running_or_notify_cancel()  # the shards have the memory: nobody can cancel that

        def ended(_: object) -> None:
            error: BaseException | None
            try:
                failures = []
                for name, keys, part in shares:
                    error = _shard.error_of(part)
                    self._inventory.ended(verb, name, keys, error)
                    if error is not None:
                        failures.append(Failure(name, keys, error))
                error = blamed(failures) if failures else None
                values = [] if failures else [merge([part.value() for _, _, part in shares])]
            except BaseException as e:  # a shard has not given what was asked for, say
                error = e
            if error is None:
                future.set_result(values[0])
            else:
                future.set_exception(error)

        parts = collect_all([share.future for share in shares])
        parts.then(ended, priority=priority, executor=callback_thread)  # on streams that come after those of the parts
        if verb == "write":
            sources = collect_all([share.future.released or share.future for share in shares])
            future.released = sources.then(lambda _: None)
        return future

    @contextlib.contextmanager
    def _asking(self, name: str, *keys: str) -> Iterator[Store]:
        """Give a shard, and have its error say which one it is.

        Raises:
            InvalidStateError: the store is closed.
        """
        self._expect_open()
        try:
            yield self._shards[name]
        except (WorkerLostError, TimeoutError) as error:
            self._inventory.ended("ask", name, keys, error)
            raise blamed([Failure(name, keys, error)])  # noqa: B904 - which has it for its cause
