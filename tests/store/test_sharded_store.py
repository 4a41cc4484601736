"""Several stores as one: the key determines the shard, and the keys lost with a dead shard are known."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, executors
from cudafuture.errors import InvalidStateError, NotFoundError, QuotaError, StorageError, WorkerLostError
from cudafuture.store import DiskStore, Entry, ShardedStore
from support.patience import PATIENCE
from support.storing import make_numbered, open_held_store

pytestmark = pytest.mark.usefixtures("on_the_host")

TENSORS = {f"tensor {i}": make_numbered(i, i) for i in range(60)}


class Far:
    """A store that stands for one on another worker, which may die. It records its calls, and can delay them."""

    def __init__(self, folder: Path, worker: str = "far", **options: Any) -> None:
        self.store = DiskStore(folder, **options)
        self.worker = worker
        self.calls: list[tuple[str, int]] = []  # and of how many keys they were
        self.futures: list[CUDAFuture[Any]] = []
        self.error: BaseException | None = None  # of all later calls
        self.gate: CUDAFuture[None] = CUDAFuture.completed(None)  # delays all calls until it is done

    def die(self) -> None:
        self.error = WorkerLostError(f"worker {self.worker!r} is gone", worker=self.worker)

    def _future(self, call: str, count: int, begin: Callable[[], CUDAFuture[Any]]) -> CUDAFuture[Any]:
        def start(_: object) -> CUDAFuture[Any]:
            return begin() if self.error is None else CUDAFuture.failed(self.error)

        self.calls.append((call, count))
        self.futures.append(self.gate.then_async(start, executor=executors.callback_thread))
        return self.futures[-1]

    def _expect_alive(self) -> None:
        if self.error is not None:
            raise self.error

    @property
    def durable(self) -> bool:
        return self.store.durable

    def write(self, key: str, tensor: torch.Tensor, *, priority: int = 0) -> CUDAFuture[int]:
        return self._future("write", 1, lambda: self.store.write(key, tensor, priority=priority))

    def writev(self, tensors: Mapping[str, torch.Tensor], **options: Any) -> CUDAFuture[int]:
        return self._future("writev", len(tensors), lambda: self.store.writev(tensors, **options))

    def read(
        self,
        key: str,
        out: torch.Tensor | None = None,
        device: torch.device | str | int | None = None,
        *,
        priority: int = 0,
    ) -> CUDAFuture[torch.Tensor]:
        return self._future("read", 1, lambda: self.store.read(key, out, device, priority=priority))

    def readv(
        self,
        keys: Iterable[str],
        outs: Sequence[torch.Tensor] | None = None,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> CUDAFuture[list[torch.Tensor]]:
        names = list(keys)
        return self._future("readv", len(names), lambda: self.store.readv(names, outs, device, **options))

    def delete(self, key: str) -> CUDAFuture[None]:
        return self._future("delete", 1, lambda: self.store.delete(key))

    def deletev(self, keys: Iterable[str]) -> CUDAFuture[None]:
        names = list(keys)
        return self._future("deletev", len(names), lambda: self.store.deletev(names))

    def flush(self) -> CUDAFuture[None]:
        return self._future("flush", 0, self.store.flush)

    def keys(self) -> list[str]:
        self._expect_alive()
        return self.store.keys()

    def __contains__(self, key: str) -> bool:
        self._expect_alive()
        return key in self.store

    def stat(self, key: str) -> Entry:
        self._expect_alive()
        return self.store.stat(key)

    def close(self) -> None:
        self.store.close()


def make_sharded(shards: Any) -> ShardedStore:
    """Return a sharded store of the given shards, some of which have only the methods that these tests call."""
    return ShardedStore(shards)


@pytest.fixture
def far(tmp_path: Path) -> Far:
    return Far(tmp_path / "far")


@pytest.fixture
def other(tmp_path: Path) -> Far:
    return Far(tmp_path / "other", "other")


@pytest.fixture
def near(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "near")


@pytest.fixture
def store(near: DiskStore, far: Far, other: Far) -> Iterator[ShardedStore]:
    """Return a store of one shard in this process and two on other workers."""
    with make_sharded({"near": near, "far": far, "other": other}) as store:
        yield store


def keys_of(store: ShardedStore, shard: str, keys: Iterable[str] = TENSORS) -> list[str]:
    return [key for key in keys if store.where(key) == shard]


def fill(store: ShardedStore) -> None:
    assert store.writev(TENSORS).wait(timeout=PATIENCE) == sum(tensor.nbytes for tensor in TENSORS.values())


def failure(future: CUDAFuture[Any]) -> BaseException:
    error = future.exception(timeout=PATIENCE)
    assert error is not None
    return error


def run_callbacks() -> None:
    """Wait until the callback thread has run all callbacks, and those that they have attached."""
    for _ in range(3):
        CUDAFuture.completed(None).then(lambda _: None, executor=executors.callback_thread).wait(timeout=PATIENCE)


# ---- where keys lie


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[dict[str, DiskStore]]:
    stores = {f"disk {i}": DiskStore(tmp_path / f"{i}") for i in range(6)}
    yield stores
    for store in stores.values():
        store.close()


KEYS = [f"layers.{i}.{name}" for i in range(1000) for name in ("weight", "bias", "exp_avg")]


def place_keys(shards: Mapping[str, DiskStore], **options: Any) -> dict[str, str]:
    store = ShardedStore(shards, **options)
    return {key: store.where(key) for key in KEYS}


def test_key_placement_is_stable(disks: dict[str, DiskStore]) -> None:
    store = ShardedStore(disks)
    assert "".join(store.where(f"layer {i}")[-1] for i in range(40)) == "4034000303001121325050401250354030215351"
    assert [store.where(key) for key in ("k", "é" * 512, "\n")] == ["disk 4", "disk 2", "disk 5"]


def test_shard_order_is_irrelevant(disks: dict[str, DiskStore]) -> None:
    expected = place_keys(disks)
    for order in itertools.islice(itertools.permutations(disks), 0, None, 97):
        assert place_keys({name: disks[name] for name in order}) == expected
    backwards = ShardedStore([*disks.values()][::-1])
    assert [backwards.where(key) for key in KEYS] == [ShardedStore([*disks.values()]).where(key) for key in KEYS]


def test_keys_are_spread_evenly(disks: dict[str, DiskStore]) -> None:
    counts = Counter(place_keys(disks).values())
    assert counts.keys() == disks.keys()
    assert all(abs(count / 500 - 1) < 0.15 for count in counts.values()), counts


def test_new_shard_takes_only_its_share(disks: dict[str, DiskStore]) -> None:
    after = place_keys(disks)
    for new in disks:
        before = place_keys({name: disk for name, disk in disks.items() if name != new})
        moved = {key for key in KEYS if before[key] != after[key]}
        assert moved == {key for key in KEYS if after[key] == new}
        assert abs(len(moved) / 500 - 1) < 0.15


def test_weights_are_key_shares(disks: dict[str, DiskStore]) -> None:
    equal = place_keys(disks)
    assert place_keys(disks, weights=dict.fromkeys(disks, 1.0)) == equal
    doubled = place_keys(disks, weights={"disk 2": 2})
    assert abs(Counter(doubled.values())["disk 2"] / (3000 * 2 / 7) - 1) < 0.15
    assert {doubled[key] for key in KEYS if doubled[key] != equal[key]} == {"disk 2"}  # no other shard gets a key


@pytest.mark.parametrize(
    "weights", [{"disk 0": 0}, {"disk 0": -1.0}, {"disk 0": float("inf")}, {"disk 0": float("nan")}, {"no such": 1}]
)
def test_invalid_weights_are_refused(disks: dict[str, DiskStore], weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        ShardedStore(disks, weights=weights)


def test_shards_have_names(near: DiskStore, far: Far, tmp_path: Path) -> None:
    store = make_sharded([near, far])
    assert dict(store.shards) == {str(tmp_path / "near"): near, "far": far}
    assert list(store.shards) == sorted(store.shards)
    assert dict(make_sharded({"a": far, "b": near}).shards) == {"a": far, "b": near}
    store.close()


def test_indistinguishable_shards_are_refused(near: DiskStore, far: Far, tmp_path: Path) -> None:
    with DiskStore(tmp_path / "near") as other:
        with pytest.raises(ValueError, match=r"two shards are called '.*near'"):
            ShardedStore([near, other])
        assert ShardedStore({"one": near, "two": other}).shards.keys() == {"one", "two"}
    with pytest.raises(ValueError, match="is used for several"):
        make_sharded({"one": far, "two": far})
    with pytest.raises(ValueError, match="give a mapping"):
        make_sharded([make_sharded([near, far])])
    with pytest.raises(TypeError, match="a shard's name is a str, not 1"):
        ShardedStore({1: far})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="at least one"):
        ShardedStore([])
    with pytest.raises(ValueError, match="at least one"):
        ShardedStore({})
    near.close()
    far.close()


# ---- the interface


def test_many_keys_make_one_shard_call(store: ShardedStore, far: Far, other: Far) -> None:
    fill(store)
    backwards = list(TENSORS)[::-1]
    for got, key in zip(store.readv(backwards).wait(timeout=PATIENCE), backwards, strict=True):
        assert torch.equal(got, TENSORS[key]), key
    outs = [torch.zeros_like(TENSORS[key]) for key in backwards]
    for got, out in zip(store.readv(backwards, outs).wait(timeout=PATIENCE), outs, strict=True):
        assert got is out
    assert all(torch.equal(out, TENSORS[key]) for key, out in zip(backwards, outs, strict=True))
    store.deletev(backwards).wait(timeout=PATIENCE)
    assert store.keys() == []
    for name, shard in {"far": far, "other": other}.items():
        count = len(keys_of(store, name))
        assert count > 1
        assert shard.calls == [("writev", count), ("readv", count), ("readv", count), ("deletev", count)]


def test_no_keys_make_no_call(store: ShardedStore, far: Far) -> None:
    assert store.writev({}).wait(timeout=PATIENCE) == 0
    assert store.readv([]).wait(timeout=PATIENCE) == []
    store.deletev([]).wait(timeout=PATIENCE)
    assert far.calls == []


class Noted(DiskStore):
    """A store in this process that records its last future."""

    last: CUDAFuture[Any]

    def write(self, *args: Any, **options: Any) -> CUDAFuture[int]:
        self.last = super().write(*args, **options)
        return self.last

    def readv(self, *args: Any, **options: Any) -> CUDAFuture[list[torch.Tensor]]:
        self.last = super().readv(*args, **options)
        return self.last


def test_local_shard_future_is_returned(tmp_path: Path) -> None:
    shards = {name: Noted(tmp_path / name) for name in "ab"}
    with ShardedStore(shards) as store:
        for key in TENSORS:
            write = store.write(key, TENSORS[key], priority=-1)
            assert write is shards[store.where(key)].last
            assert (write.priority, write.name) == (-1, f"write {key}")
            write.wait(timeout=PATIENCE)
        assert store.readv(keys_of(store, "a")) is shards["a"].last


def test_release_waits_for_all_shards(store: ShardedStore, far: Far) -> None:
    far.gate = CUDAFuture()
    tensors = {key: tensor.clone() for key, tensor in TENSORS.items()}
    (key, *_) = keys_of(store, "far")
    for write in (store.writev(tensors), store.write(key, tensors[key])):
        assert write.released is not None
        run_callbacks()
        assert not write.released.done()
    far.gate.set_result(None)
    write.wait(timeout=PATIENCE)
    again = store.writev(tensors)
    assert again.released is not None
    again.released.wait(timeout=PATIENCE)
    for tensor in tensors.values():
        tensor.zero_()
    again.wait(timeout=PATIENCE)
    assert all(map(torch.equal, store.readv(TENSORS).wait(timeout=PATIENCE), TENSORS.values()))
    assert store.readv(TENSORS).released is None


def test_sharded_operation_cannot_be_cancelled(store: ShardedStore, far: Far) -> None:
    far.gate = CUDAFuture()
    write = store.writev(TENSORS)
    assert not write.cancel()
    far.gate.set_result(None)
    assert write.wait(timeout=PATIENCE) == sum(tensor.nbytes for tensor in TENSORS.values())


def test_call_waits_for_all_shards(store: ShardedStore, far: Far, other: Far) -> None:
    far.gate = CUDAFuture()
    other.error = QuotaError("full")
    write = store.writev(TENSORS)
    assert failure(other.futures[-1]) is other.error
    run_callbacks()
    assert not write.done()
    far.gate.set_result(None)
    assert failure(write) is other.error
    assert sorted(far.keys()) == sorted(keys_of(store, "far"))


def test_flush_waits_for_all_shards(tmp_path: Path, far: Far) -> None:
    engine, near = open_held_store(tmp_path / "held")
    with engine, make_sharded({"near": near, "far": far}) as store:
        (key, *_) = keys_of(store, "near")
        write = store.write(key, make_numbered(3))
        flush = store.flush()
        assert far.futures[-1].wait(timeout=PATIENCE) is None
        run_callbacks()
        assert not flush.done()
        engine._native.release_held()
        flush.wait(timeout=PATIENCE)
        assert write.done()


def test_callback_thread_may_wait_for_calls(store: ShardedStore) -> None:
    write = store.writev(TENSORS)
    read = write.then(lambda _: store.readv(TENSORS).wait(timeout=PATIENCE), executor=executors.callback_thread)
    assert len(read.wait(timeout=PATIENCE)) == 60


def test_sharded_store_can_be_shard(near: DiskStore, far: Far, other: Far) -> None:
    with make_sharded({"one": make_sharded([near, far]), "two": other}) as store:
        fill(store)
        assert all(map(torch.equal, store.readv(TENSORS).wait(timeout=PATIENCE), TENSORS.values()))
        assert min(len(near), len(far.keys()), len(other.keys())) > 0
        assert len(store) == 60


def test_durability_requires_durable_shards(tmp_path: Path, near: DiskStore) -> None:
    with DiskStore(tmp_path / "a", durable=True) as a, DiskStore(tmp_path / "b", durable=True) as b:
        assert ShardedStore([a, b]).durable
        assert not ShardedStore([a, b, near]).durable
    near.close()


def test_misplaced_keys_are_ignored(near: DiskStore, far: Far, other: Far) -> None:
    with make_sharded({"near": near, "far": far}) as store:
        fill(store)
        more = make_sharded({"near": near, "far": far, "other": other})
        stayed = [key for key in TENSORS if more.where(key) == store.where(key)]
        assert 0 < len(stayed) < 60
        assert sorted(more.keys()) == sorted(stayed)
        assert [key for key in TENSORS if key in more] == stayed
        more.writev(TENSORS).wait(timeout=PATIENCE)
        assert (len(more), len(set(more.keys()))) == (60, 60)
    other.close()


# ---- what is refused


def test_one_shard_error_spares_other_shards(store: ShardedStore) -> None:
    (key, *_) = keys_of(store, "near")
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        store.write(key, [1, 2])  # type: ignore[arg-type]
    assert isinstance(failure(store.writev({**TENSORS, key: [1, 2]})), TypeError)  # type: ignore[dict-item]
    assert sorted(store.keys()) == sorted([*keys_of(store, "far"), *keys_of(store, "other")])
    with pytest.raises(ValueError, match="60 keys, and 1 tensors"):
        store.readv(TENSORS, [make_numbered(1)])
    with pytest.raises(ValueError, match="either out or device"):
        store.readv(TENSORS, list(TENSORS.values()), "cpu")


def test_shard_error_is_annotated_original(store: ShardedStore, far: Far) -> None:
    (key, *_) = keys_of(store, "far")
    far.error = StorageError("the disk has failed")
    assert failure(store.write(key, TENSORS[key])) is far.error
    assert f"shard 'far' (key {key!r}): the disk has failed" in getattr(far.error, "__notes__", [])
    assert store.lost() == {}


def test_close_closes_all_shards_despite_error(
    store: ShardedStore, near: DiskStore, far: Far, other: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise StorageError("it cannot be closed")

    with monkeypatch.context() as patch:
        patch.setattr(far, "close", fail)
        with pytest.raises(StorageError, match="cannot be closed"):
            store.close()
    for shard in (near, other.store):
        with pytest.raises(InvalidStateError, match="closed"):
            shard.flush()


# ---- what dies


@pytest.fixture
def partial_store(store: ShardedStore, far: Far) -> ShardedStore:
    """Return a filled store of three shards, one of which has died."""
    fill(store)
    far.die()
    return store


def test_dead_shard_error_names_shard_and_key(partial_store: ShardedStore) -> None:
    (key, *_) = keys_of(partial_store, "far")
    for future in (partial_store.read(key), partial_store.write(key, make_numbered(1)), partial_store.delete(key)):
        error = failure(future)
        assert isinstance(error, WorkerLostError)
        assert isinstance(error.__cause__, WorkerLostError)
        assert error.worker == "far"
        assert str(error) == f"shard 'far' (key {key!r}): worker 'far' is gone"
    for ask in (partial_store.stat, partial_store.__contains__):
        with pytest.raises(WorkerLostError, match=rf"shard 'far' \(key '{key}'\): worker 'far' is gone"):
            ask(key)


def test_dead_shard_error_lists_lost_keys(partial_store: ShardedStore, other: Far) -> None:
    gone = keys_of(partial_store, "far")
    assert len(gone) > 8
    message = f"shard 'far' (keys {', '.join(map(repr, gone[:8]))}, {len(gone) - 8} more): worker 'far' is gone"
    for future in (partial_store.readv(TENSORS), partial_store.writev(TENSORS), partial_store.deletev(TENSORS)):
        error = failure(future)
        assert isinstance(error, WorkerLostError)
        assert str(error) == message
    assert sorted(partial_store.lost()["far"]) == sorted(gone)
    other.die()
    (one, *_), (two, *_) = gone, keys_of(partial_store, "other")
    error = failure(partial_store.readv([one, two]))
    assert str(error) == (
        f"shard 'far' (key {one!r}): worker 'far' is gone; shard 'other' (key {two!r}): worker 'other' is gone"
    )
    assert isinstance(failure(partial_store.flush()), WorkerLostError)


def test_worker_loss_outranks_other_errors(partial_store: ShardedStore, other: Far) -> None:
    other.error = QuotaError("full")
    (one, *_), (two, *_) = keys_of(partial_store, "other"), keys_of(partial_store, "far")
    error = failure(partial_store.writev({one: make_numbered(1), two: make_numbered(1)}))
    assert isinstance(error, WorkerLostError)
    assert str(error).endswith(f"; shard 'other' (key {one!r}): full")


def test_other_shards_keep_working(partial_store: ShardedStore) -> None:
    there = [*keys_of(partial_store, "near"), *keys_of(partial_store, "other")]
    assert isinstance(failure(partial_store.readv(TENSORS)), WorkerLostError)
    for key in there:
        assert torch.equal(partial_store.read(key).wait(timeout=PATIENCE), TENSORS[key])
        assert partial_store.stat(key).nbytes == TENSORS[key].nbytes
        assert key in partial_store
    assert all(map(torch.equal, partial_store.readv(there).wait(timeout=PATIENCE), map(TENSORS.__getitem__, there)))
    assert isinstance(failure(partial_store.writev({key: make_numbered(2, 5) for key in TENSORS})), WorkerLostError)
    assert all(torch.equal(got, make_numbered(2, 5)) for got in partial_store.readv(there).wait(timeout=PATIENCE))
    partial_store.deletev(there).wait(timeout=PATIENCE)
    assert [partial_store.shards[name].keys() for name in ("near", "other")] == [[], []]


def test_listing_fails_without_dead_shard(partial_store: ShardedStore) -> None:
    for ask in (partial_store.keys, partial_store.__len__):
        with pytest.raises(WorkerLostError, match="shard 'far': worker 'far' is gone"):
            ask()
    shards = [shard for name, shard in partial_store.shards.items() if name not in partial_store.lost()]
    here = {key for shard in shards for key in shard.keys()}  # noqa: SIM118
    assert here == TENSORS.keys() - {*keys_of(partial_store, "far")}


def test_lost_lists_known_losses(partial_store: ShardedStore) -> None:
    assert partial_store.lost() == {}
    assert repr(partial_store) == "<ShardedStore of 'far', 'near', 'other'>"
    assert isinstance(failure(partial_store.flush()), WorkerLostError)
    assert partial_store.lost() == {"far": keys_of(partial_store, "far")}
    assert repr(partial_store) == "<ShardedStore of 'far', 'near', 'other'; lost: 'far'>"


def test_lost_lists_existing_keys(store: ShardedStore, far: Far) -> None:
    gone = keys_of(store, "far")
    deleted, refused, doubtful, *written = gone
    for key in (deleted, *written):
        store.write(key, TENSORS[key]).wait(timeout=PATIENCE)
    store.delete(deleted).wait(timeout=PATIENCE)
    far.error = QuotaError("full")
    assert failure(store.write(refused, TENSORS[refused])) is far.error
    far.die()
    assert isinstance(failure(store.write(doubtful, TENSORS[doubtful])), WorkerLostError)
    assert isinstance(failure(store.delete(written[0])), WorkerLostError)
    assert store.lost() == {"far": [*written, doubtful]}


def test_lost_includes_keys_of_partial_calls(store: ShardedStore, far: Far) -> None:
    first, second, third, *doubtful = keys_of(store, "far")
    store.writev({first: make_numbered(1), second: make_numbered(1)}).wait(timeout=PATIENCE)
    assert isinstance(failure(store.deletev([second, third])), NotFoundError)  # and the second one is gone
    far.error = QuotaError("full")
    assert failure(store.writev({key: make_numbered(1) for key in doubtful})) is far.error
    far.die()
    assert isinstance(failure(store.flush()), WorkerLostError)
    assert store.lost() == {"far": [first, *doubtful]}


@pytest.mark.parametrize("ask", ["keys", "read", "readv", "stat", "in"])
def test_lost_includes_observed_foreign_keys(far: Far, other: Far, near: DiskStore, ask: str) -> None:
    shards: dict[str, Any] = {"far": far, "near": near, "other": other}
    fill(ShardedStore(shards))
    with ShardedStore(shards) as store:
        first, *_ = gone = keys_of(store, "far")
        asks: dict[str, Callable[[], object]] = {
            "keys": store.keys,
            "read": lambda: store.read(first).wait(timeout=PATIENCE),
            "readv": lambda: store.readv(gone).wait(timeout=PATIENCE),
            "stat": lambda: store.stat(first),
            "in": lambda: first in store,
        }
        asks[ask]()
        far.die()
        assert isinstance(failure(store.read(first)), WorkerLostError)
        assert store.lost() == {"far": gone if ask in ("keys", "readv") else [first]}


def test_remaining_shards_form_new_store(
    partial_store: ShardedStore,
) -> None:
    assert isinstance(failure(partial_store.flush()), WorkerLostError)
    lost = partial_store.lost()
    left = ShardedStore({name: shard for name, shard in partial_store.shards.items() if name not in lost})
    assert {*left.keys()} == TENSORS.keys() - {*lost["far"]}
    assert all(left.where(key) == partial_store.where(key) for key in left.keys())  # noqa: SIM118
    left.writev({key: TENSORS[key] for key in lost["far"]}).wait(timeout=PATIENCE)
    assert all(map(torch.equal, left.readv(TENSORS).wait(timeout=PATIENCE), TENSORS.values()))


def test_silent_shard_is_not_lost(store: ShardedStore, far: Far) -> None:
    far.error = TimeoutError("no answer within 1 s")
    (key, *_) = keys_of(store, "far")
    error = failure(store.write(key, make_numbered(1)))
    assert type(error) is TimeoutError
    assert str(error) == f"shard 'far' (key {key!r}): no answer within 1 s"
    with pytest.raises(TimeoutError, match="shard 'far': no answer"):
        store.keys()
    assert store.lost() == {}
    far.die()
    assert isinstance(failure(store.flush()), WorkerLostError)
    assert store.lost() == {"far": [key]}  # it may have been written


def test_completion_error_fails_future(store: ShardedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ZeroDivisionError("of the inventory")

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(store._inventory, "ended", refuse)
    assert failure(store.writev(TENSORS)) is error
