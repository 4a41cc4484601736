"""Snapshots: the tensors of keys at one time, and reads of parts of them."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture.errors import ChecksumError, InvalidStateError
from cudafuture.io import Digest, Engine, digest
from cudafuture.store import DiskStore, Snapshot
from support.patience import PATIENCE
from support.storing import MIB, contents, error_number, flip, get, open_held_store, slabs

pytestmark = pytest.mark.usefixtures("on_the_host")

LEAF = 1 << 16


def take(store: DiskStore, key: str) -> Snapshot:
    """Return a snapshot of an existing key."""
    (snapshot,) = store.snapshots([key])
    assert snapshot is not None
    return snapshot


def make_out(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def read_whole(store: DiskStore, snapshot: Snapshot) -> torch.Tensor:
    """Read all bytes of a snapshot."""
    out = make_out(snapshot.nbytes)
    assert store.read_parts([(snapshot, 0, out)]).wait(timeout=PATIENCE) is None
    return out


# ---- snapshots


def test_snapshot_describes_tensor(store: DiskStore) -> None:
    tensor = torch.randn(3, 0, 7), torch.randn(4, 5, dtype=torch.float64), torch.tensor(1, dtype=torch.int16)
    store.writev({f"{i}": each for i, each in enumerate(tensor)}).wait(timeout=PATIENCE)
    for key, each in zip("012", tensor, strict=True):
        snapshot = take(store, key)
        assert (snapshot.key, snapshot.dtype, snapshot.nbytes) == (key, each.dtype, each.nbytes)
        assert type(snapshot.shape) is torch.Size
        assert snapshot.shape == each.shape
        assert repr(snapshot) == f"<Snapshot of '{key}', version {snapshot.version}, {each.nbytes} bytes>"


def test_missing_key_has_no_snapshot(store: DiskStore) -> None:
    store.write("x", contents(3)).wait(timeout=PATIENCE)
    found = store.snapshots(key for key in ("y", "x", "z"))
    assert [None if each is None else each.key for each in found] == [None, "x", None]
    assert store.snapshots(["y"]) == [None]
    assert store.snapshots([]) == []
    with pytest.raises(TypeError):
        store.snapshots([1])  # type: ignore[list-item]


def test_one_call_takes_consistent_snapshots(store: DiskStore) -> None:
    keys = [f"{i}" for i in range(10)]
    store.writev(dict.fromkeys(keys, torch.zeros(1))).wait(timeout=PATIENCE)
    over = threading.Event()
    found: list[list[Snapshot | None]] = []

    def look() -> None:
        while not over.is_set():
            found.append(store.snapshots(keys))

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(1, 30):
        tensors = dict.fromkeys(keys, torch.tensor([float(number)]))
        store.writev(tensors, atomic=True).wait(timeout=PATIENCE)
    over.set()
    thread.join()
    for each in found:
        versions = [snapshot.version for snapshot in each if snapshot is not None]
        assert versions == list(range(versions[0], versions[0] + len(keys)))


def test_version_grows_with_every_write(store: DiskStore) -> None:
    versions = []
    for key in ("x", "y", "x", "x"):
        store.write(key, contents(3)).wait(timeout=PATIENCE)
        versions.append(take(store, key).version)
    store.link({"z": "y"}).wait(timeout=PATIENCE)
    versions.append(take(store, "z").version)
    assert versions == sorted(set(versions))
    assert take(store, "y").version == versions[1]


def test_version_survives_reopening(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        for key in ("x", "y", "x"):
            store.write(key, contents(3)).wait(timeout=PATIENCE)
        before = {key: take(store, key).version for key in ("x", "y")}
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        assert {key: take(store, key).version for key in ("x", "y")} == before
        store.write("y", contents(4)).wait(timeout=PATIENCE)
        assert take(store, "y").version > max(before.values())


def test_links_share_seeded_digest(store: DiskStore, request: pytest.FixtureRequest) -> None:
    tensor = contents(3 * LEAF + 5)
    store.write("x", tensor).wait(timeout=PATIENCE)
    store.link({"y": "x"}).wait(timeout=PATIENCE)
    parts = Digest(tensor.nbytes)
    parts.add(LEAF, tensor[LEAF:])
    parts.add(0, tensor[:LEAF])
    x, y = take(store, "x"), take(store, "y")
    assert (x.digest, x.seed) == (y.digest, y.seed)
    is_checked = "unchecked" not in request.node.name
    assert x.digest == (parts.value(x.seed) if is_checked else None)
    assert parts.value() == parts.value(0) == digest(tensor)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seed_is_64_bit_number(seed: int) -> None:
    with pytest.raises(ValueError, match="a seed is a number of 64 bits"):
        Digest(0).value(seed)


def test_snapshot_keeps_bytes(store: DiskStore) -> None:
    tensor = contents(200_000)
    store.write("x", tensor).wait(timeout=PATIENCE)
    snapshot = take(store, "x")
    store.write("x", contents(200_000, 1)).wait(timeout=PATIENCE)
    store.delete("x").wait(timeout=PATIENCE)
    store.write("y", contents(200_000, 2)).wait(timeout=PATIENCE)
    assert store.statistics().used == 400_000
    assert torch.equal(read_whole(store, snapshot), tensor)
    del snapshot
    gc.collect()
    assert store.statistics().used == 200_000


def test_snapshot_outlives_store(engine: Engine, durable: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        store.write("x", contents(10)).wait(timeout=PATIENCE)
        snapshot = take(store, "x")
    assert snapshot.nbytes == 10
    with pytest.raises(InvalidStateError, match="closed"):
        store.read_parts([(snapshot, 0, make_out(10))])
    with pytest.raises(InvalidStateError, match="closed"):
        store.snapshots(["x"])
    other = DiskStore(tmp_path, engine=engine, durable=durable)
    with other, pytest.raises(ValueError, match="'x' is of another store"):
        other.read_parts([(snapshot, 0, make_out(10))])


# ---- parts


def test_parts_are_read_in_any_order(store: DiskStore) -> None:
    tensor = contents(MIB + 777)
    store.write("x", tensor).wait(timeout=PATIENCE)
    snapshot = take(store, "x")
    places = [(0, 1), (LEAF, LEAF), (0, tensor.nbytes), (3 * LEAF, 100_000), (2 * LEAF, LEAF), (16 * LEAF, 777)]
    places += [(LEAF, 0), (0, 0), (5 * LEAF, 400_000)]
    outs, told = [make_out(size) for _, size in places], torch.zeros(len(places), dtype=torch.uint64)
    parts = [(snapshot, at, out) for (at, _), out in zip(places, outs, strict=True)]
    store.read_parts(iter(parts), digests=told).wait(timeout=PATIENCE)
    for (at, size), out in zip(places, outs, strict=True):
        assert torch.equal(out, tensor[at : at + size])
    assert told.tolist() == [digest(out) for out in outs]


def test_parts_combine_to_snapshot_digest(store: DiskStore, request: pytest.FixtureRequest) -> None:
    tensor = contents(MIB + 777)
    store.write("x", tensor).wait(timeout=PATIENCE)
    snapshot, received = take(store, "x"), Digest(tensor.nbytes)
    for at in range(0, tensor.nbytes, 5 * LEAF):
        out = make_out(min(5 * LEAF, tensor.nbytes - at))
        store.read_parts([(snapshot, at, out)]).wait(timeout=PATIENCE)
        received.add(at, out)
    if "unchecked" not in request.node.name:
        assert received.value(snapshot.seed) == snapshot.digest


def test_adjacent_tensors_share_transfers(store: DiskStore) -> None:
    tensors = {f"{i}": contents(100 + i, i) for i in range(500)}
    store.writev(tensors).wait(timeout=PATIENCE)
    snapshots = store.snapshots(tensors)
    before = store.statistics().transfers
    outs = [make_out(tensor.nbytes) for tensor in tensors.values()]
    told = torch.zeros(500, dtype=torch.uint64)
    parts = [(snapshot, 0, out) for snapshot, out in zip(snapshots, outs, strict=True) if snapshot is not None]
    store.read_parts(parts, digests=told).wait(timeout=PATIENCE)
    assert store.statistics().transfers - before <= 2
    for out, tensor in zip(outs, tensors.values(), strict=True):
        assert torch.equal(out, tensor)
    assert told.tolist() == [digest(tensor) for tensor in tensors.values()]


def test_many_single_part_reads_complete(store: DiskStore) -> None:
    tensors = {f"{i}": contents(4096, i) for i in range(300)}
    store.writev(tensors).wait(timeout=PATIENCE)
    outs = {key: make_out(4096) for key in tensors}
    reads = [store.read_parts([(take(store, key), 0, out)]) for key, out in outs.items()]
    for read in reads:
        read.wait(timeout=PATIENCE)
    assert all(torch.equal(outs[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("priority", [-1, 0])
def test_empty_read_is_done_at_once(store: DiskStore, priority: int) -> None:
    store.write("x", torch.empty(0)).wait(timeout=PATIENCE)
    assert store.read_parts([], priority=priority).wait(timeout=PATIENCE) is None
    told = torch.zeros(1, dtype=torch.uint64)
    store.read_parts([(take(store, "x"), 0, make_out(0))], digests=told, priority=priority).wait(timeout=PATIENCE)
    assert told.item() == digest(torch.empty(0))


def test_tensors_live_until_read_is_done(tmp_path: Path) -> None:
    engine, store = open_held_store(tmp_path)
    written = store.write("x", contents(1000))
    engine._native.release_held()
    written.wait(timeout=PATIENCE)
    snapshot = take(store, "x")
    reads = [
        store.read_parts([(snapshot, 0, make_out(1000))], digests=torch.zeros(1, dtype=torch.uint64)) for _ in "123"
    ]
    del reads[1], snapshot
    gc.collect()
    for read in reads:
        read.wait(timeout=PATIENCE)
    store.close()


# ---- damage and wrong arguments


def test_only_whole_tensors_are_checked(engine: Engine, tmp_path: Path) -> None:
    tensor = contents(3 * LEAF)
    with DiskStore(tmp_path, engine=engine) as store:
        store.write("x", tensor).wait(timeout=PATIENCE)
        (slab,) = slabs(tmp_path)
        flip(slab, 5)
        snapshot, out = take(store, "x"), make_out(LEAF)
        with pytest.raises(ChecksumError, match="'x'"):
            store.read_parts([(snapshot, 0, out), (snapshot, 0, make_out(3 * LEAF))]).wait(timeout=PATIENCE)
        store.read_parts([(snapshot, 0, out)]).wait(timeout=PATIENCE)
        assert not torch.equal(out, tensor[:LEAF])
        received = Digest(3 * LEAF)
        received.add(0, out)
        received.add(LEAF, tensor[LEAF:])
        assert received.value(snapshot.seed) != snapshot.digest
        assert store.statistics().checksum_errors == 1


def test_engine_error_fails_read(tmp_path: Path) -> None:
    engine = Engine("threads", block_size=1 << 18, _faults={"at": {2: 5}})
    with engine, DiskStore(tmp_path, engine=engine) as store:
        store.write("x", contents(1000)).wait(timeout=PATIENCE)
        out = make_out(1000)
        assert error_number(store.read_parts([(take(store, "x"), 0, out)])) == 5
        store.read_parts([(take(store, "x"), 0, out)]).wait(timeout=PATIENCE)
        assert torch.equal(out, get(store, "x"))


@pytest.mark.parametrize(
    ("at", "out", "error"),
    [
        (1, lambda: make_out(1), ValueError),
        (-LEAF, lambda: make_out(1), ValueError),
        (0, lambda: make_out(2 * LEAF + 1), ValueError),
        (2 * LEAF, lambda: make_out(1), ValueError),
        (3 * LEAF, lambda: make_out(0), ValueError),
        (1 << 64, lambda: make_out(0), ValueError),
        (0, lambda: torch.zeros(4), ValueError),
        (0, lambda: make_out(8)[::2], ValueError),
        (0, lambda: torch.empty(4, dtype=torch.uint8, device="meta"), (TypeError, ValueError)),
        (0, lambda: [0], TypeError),
    ],
)
def test_invalid_parts_are_refused(store: DiskStore, at: Any, out: Any, error: type[Exception]) -> None:
    store.write("x", contents(2 * LEAF)).wait(timeout=PATIENCE)
    with pytest.raises(error):
        store.read_parts([(take(store, "x"), at, out())])


def test_part_is_snapshot_offset_and_tensor(store: DiskStore) -> None:
    store.write("x", contents(3)).wait(timeout=PATIENCE)
    snapshot = take(store, "x")
    wrong: Any
    for wrong in (None, (snapshot, 0), [snapshot, 0, make_out(3)], (None, 0, make_out(3)), ("x", 0, make_out(3))):
        with pytest.raises(TypeError, match="a tuple of a Snapshot"):
            store.read_parts([wrong])
    for told in (torch.zeros(2, dtype=torch.uint64), torch.zeros(1)):
        with pytest.raises(ValueError, match="digests: pass a tensor"):
            store.read_parts([(snapshot, 0, make_out(3))], digests=told)
