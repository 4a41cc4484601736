"""Multipart writes: separate calls write the parts of a tensor, and a commit applies them together."""

from __future__ import annotations

import errno
import gc
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.errors import ChecksumError, InvalidStateError, QuotaError, StorageError
from cudafuture.io import Engine, digest
from cudafuture.store import DiskStore, MultipartWrite
from support.child import Child
from support.patience import PATIENCE
from support.storing import MIB, contents, error_number, expect, get, open_held_store, slabs

pytestmark = pytest.mark.usefixtures("on_the_host")

LEAF = 1 << 16
SIZES = [0, 1, 4095, 4097, LEAF, LEAF + 1, 5 * LEAF - 100, MIB + 12345]


def begin(store: DiskStore, key: str, size: int) -> MultipartWrite:
    return store.begin_write(key, torch.uint8, [size])


def cut(size: int, leaves: int = 2) -> list[tuple[int, int]]:
    """Return the begin and the end of each part of the given number of leaves."""
    return [(at, min(at + leaves * LEAF, size)) for at in range(0, size, leaves * LEAF)]


def put_all(write: MultipartWrite, tensor: torch.Tensor, leaves: int = 2) -> list[CUDAFuture[int]]:
    return [write.put(at, tensor[at:end]) for at, end in cut(tensor.nbytes, leaves)]


def bytes_in_use(store: DiskStore) -> int:
    s = store.statistics()
    assert s.pending == 0
    return s.used


# ---- commit


@pytest.mark.parametrize("size", SIZES)
def test_commit_stores_all_parts(store: DiskStore, size: int) -> None:
    tensor = contents(size)
    write = begin(store, "x", size)
    assert write.nbytes == size
    parts = put_all(write, tensor)
    assert write.commit(digest=digest(tensor)).wait(timeout=PATIENCE) == size
    assert [part.wait(timeout=PATIENCE) for part in parts] == [end - at for at, end in cut(size)]
    assert all(part.released is not None and part.released.done() for part in parts)
    expect(store, {"x": tensor})


def test_begin_write_sets_dtype_and_shape(store: DiskStore) -> None:
    tensor = torch.randn(3, 7, 5000, dtype=torch.complex64)
    write = store.begin_write("x", tensor.dtype, tensor.shape)
    raw = tensor.flatten().view(torch.uint8)
    for at, end in cut(raw.numel()):
        write.put(at, raw[at:end])
    write.commit().wait(timeout=PATIENCE)
    assert store.stat("x").shape == tensor.shape
    assert torch.equal(get(store, "x"), tensor)


def test_scalar_has_one_part(store: DiskStore) -> None:
    write = store.begin_write("x", torch.float64, [])
    write.put(0, torch.tensor(2.5, dtype=torch.float64))
    write.commit().wait(timeout=PATIENCE)
    assert get(store, "x").item() == 2.5


@pytest.mark.parametrize("size", SIZES)
def test_multipart_digest_equals_plain_digest(store: DiskStore, size: int) -> None:
    tensor = contents(size)
    store.write("x", tensor).wait(timeout=PATIENCE)
    (plain,) = store.snapshots(["x"])
    write = begin(store, "x", size)
    put_all(write, tensor)
    write.commit().wait(timeout=PATIENCE)
    (multipart,) = store.snapshots(["x"])
    assert plain is not None
    assert multipart is not None
    assert (multipart.digest, multipart.seed) == (plain.digest, plain.seed)
    assert multipart.version > plain.version


def test_readers_see_old_tensor_until_commit(store: DiskStore) -> None:
    old, new = contents(200_000, 1), contents(300_000, 2)
    store.write("x", old).wait(timeout=PATIENCE)
    write = begin(store, "x", 300_000)
    for part in put_all(write, new):
        part.wait(timeout=PATIENCE)
        assert torch.equal(get(store, "x"), old)
    write.commit().wait(timeout=PATIENCE)
    expect(store, {"x": new})


def test_new_key_is_missing_until_commit(store: DiskStore) -> None:
    write = begin(store, "x", 3)
    write.put(0, contents(3)).wait(timeout=PATIENCE)
    assert "x" not in store
    assert store.keys() == []
    write.commit().wait(timeout=PATIENCE)
    assert store.keys() == ["x"]


def test_commit_orders_write_among_changes(store: DiskStore) -> None:
    write = begin(store, "x", 1000)
    write.put(0, contents(1000, 1)).wait(timeout=PATIENCE)
    store.write("x", contents(10, 2)).wait(timeout=PATIENCE)
    write.commit().wait(timeout=PATIENCE)
    expect(store, {"x": contents(1000, 1)})
    write = begin(store, "x", 1000)
    write.put(0, contents(1000, 3))
    committed, deleted = write.commit(), store.delete("x")
    committed.wait(timeout=PATIENCE)
    deleted.wait(timeout=PATIENCE)
    expect(store, {})


def test_commit_waits_for_parts_in_flight(tmp_path: Path) -> None:
    engine, store = open_held_store(tmp_path)
    write = begin(store, "x", 300_000)
    parts = put_all(write, contents(300_000))
    committed = write.commit()
    assert not committed.done()
    assert not any(part.done() for part in parts)
    engine._native.release_held()
    assert committed.wait(timeout=PATIENCE) == 300_000
    assert all(part.done() for part in parts)
    assert torch.equal(get(store, "x"), contents(300_000))
    store.close()


def test_flush_waits_for_parts_only(tmp_path: Path) -> None:
    engine, store = open_held_store(tmp_path)
    write = begin(store, "x", 10)
    store.flush().wait(timeout=PATIENCE)
    part = write.put(0, contents(10))
    flushed = store.flush()
    assert not flushed.done()
    engine._native.release_held()
    flushed.wait(timeout=PATIENCE)
    assert part.done()
    store.close()


# ---- refused parts


@pytest.mark.parametrize(
    ("at", "size"),
    [(1, LEAF), (0, LEAF - 1), (LEAF, 1), (-LEAF, LEAF), (2 * LEAF, LEAF), (3 * LEAF, 0), (1 << 64, 0)],
)
def test_part_needs_whole_leaves(store: DiskStore, at: Any, size: int) -> None:
    write = begin(store, "x", 2 * LEAF + 100)
    with pytest.raises(ValueError, match="must lie in the tensor, begin at a multiple of 64 KiB"):
        write.put(at, contents(size))
    put_all(write, contents(2 * LEAF + 100))
    write.commit().wait(timeout=PATIENCE)
    expect(store, {"x": contents(2 * LEAF + 100)})


def test_no_byte_is_put_twice(store: DiskStore) -> None:
    tensor = contents(4 * LEAF)
    write = begin(store, "x", 4 * LEAF)
    write.put(LEAF, tensor[LEAF : 3 * LEAF])
    for first, last in ((1, 2), (2, 3), (0, 2), (2, 4), (0, 4)):
        with pytest.raises(ValueError, match="belong to an earlier part"):
            write.put(first * LEAF, tensor[first * LEAF : last * LEAF])
    write.put(0, tensor[:LEAF])
    write.put(3 * LEAF, tensor[3 * LEAF :])
    write.commit().wait(timeout=PATIENCE)
    expect(store, {"x": tensor})


def test_part_must_be_contiguous_on_host(store: DiskStore) -> None:
    write = begin(store, "x", 100)
    with pytest.raises(ValueError, match="contiguous"):
        write.put(0, contents(200)[::2])
    with pytest.raises((TypeError, ValueError)):
        write.put(0, torch.empty(100, dtype=torch.uint8, device="meta"))
    with pytest.raises(TypeError):
        write.put(0, [1])  # type: ignore[arg-type]
    write.abort()


@pytest.mark.parametrize("wrong", [-1, 1 << 64, "7", 1.5])
def test_digests_are_64_bit_numbers(store: DiskStore, wrong: Any) -> None:
    write = begin(store, "x", 10)
    with pytest.raises(ValueError, match="a digest is a number of 64 bits"):
        write.put(0, contents(10), digest=wrong)
    write.put(0, contents(10))
    with pytest.raises(ValueError, match="a digest is a number of 64 bits"):
        write.commit(digest=wrong)
    write.commit().wait(timeout=PATIENCE)


# ---- refused writes


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("", torch.uint8, [1]), ValueError),
        (("a\0b", torch.uint8, [1]), ValueError),
        ((1, torch.uint8, [1]), TypeError),
        (("x", "uint8", [1]), TypeError),
        (("x", torch.quint8, [1]), TypeError),
        (("x", torch.uint8, [-1]), ValueError),
        (("x", torch.uint8, ["1"]), ValueError),
        (("x", torch.uint8, 1), TypeError),
        (("x", torch.uint8, [1 << 40, 1 << 40]), ValueError),
        (("x", torch.uint8, [1] * 1025), ValueError),
    ],
)
def test_begin_write_checks_arguments_like_write(store: DiskStore, arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        store.begin_write(*arguments)
    with pytest.raises(ValueError, match="priority"):
        store.begin_write("x", torch.uint8, [1], priority=1)
    assert bytes_in_use(store) == 0


def test_open_write_uses_capacity(engine: Engine, durable: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=durable, capacity=MIB) as store:
        write = begin(store, "x", 600_000)
        assert bytes_in_use(store) == 600_000
        with pytest.raises(QuotaError):
            begin(store, "y", 600_000)
        assert error_number(store.write("y", contents(600_000))) == errno.EDQUOT
        assert bytes_in_use(store) == 600_000
        write.abort()
        write.abort()
        assert bytes_in_use(store) == 0
        store.write("y", contents(600_000)).wait(timeout=PATIENCE)
        expect(store, {"y": contents(600_000)})


def test_full_disk_refuses_write(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine) as store:
        with pytest.raises(StorageError):
            store.begin_write("x", torch.uint8, [1 << 60])
        assert bytes_in_use(store) == 0


def test_read_only_store_refuses_write(engine: Engine, tmp_path: Path) -> None:
    DiskStore(tmp_path, engine=engine, durable=True).close()
    with DiskStore(tmp_path, engine=engine, durable=True, read_only=True) as store:
        with pytest.raises(StorageError, match="read-only") as raised:
            begin(store, "x", 10)
        assert raised.value.errno == errno.EROFS


# ---- failures


def test_commit_fails_without_all_bytes(store: DiskStore) -> None:
    store.write("x", contents(5)).wait(timeout=PATIENCE)
    write = begin(store, "x", 3 * LEAF)
    write.put(0, contents(LEAF))
    committed = write.commit()
    with pytest.raises(InvalidStateError, match=f"{2 * LEAF} of {3 * LEAF} bytes were not put"):
        committed.wait(timeout=PATIENCE)
    expect(store, {"x": contents(5)})


@pytest.mark.parametrize("when", ["before", "after"])
def test_wrong_part_digest_fails_write(store: DiskStore, when: str) -> None:
    store.write("x", contents(5)).wait(timeout=PATIENCE)
    tensor = contents(3 * LEAF)
    write = begin(store, "x", 3 * LEAF)
    good = write.put(0, tensor[:LEAF], digest=digest(tensor[:LEAF]))
    wrong = write.put(LEAF, tensor[LEAF:], digest=7)
    if when == "after":
        assert isinstance(wrong.exception(timeout=PATIENCE), ChecksumError)
    committed = write.commit()
    for failed in (wrong, committed):
        with pytest.raises(ChecksumError, match=r"'x'.*digest"):
            failed.wait(timeout=PATIENCE)
    assert good.wait(timeout=PATIENCE) == LEAF
    assert wrong.released is not None
    assert wrong.released.done()
    expect(store, {"x": contents(5)})
    assert store.statistics().checksum_errors == 0


@pytest.mark.parametrize("size", SIZES)
def test_wrong_commit_digest_fails(store: DiskStore, size: int) -> None:
    write = begin(store, "x", size)
    put_all(write, contents(size))
    with pytest.raises(ChecksumError, match=r"'x'.*digest"):
        write.commit(digest=digest(contents(size)) ^ 1).wait(timeout=PATIENCE)
    expect(store, {})


def test_empty_part_has_empty_digest(store: DiskStore) -> None:
    empty = torch.empty(0)
    write = begin(store, "x", 0)
    assert write.put(0, empty, digest=digest(empty)).wait(timeout=PATIENCE) == 0
    write.commit().wait(timeout=PATIENCE)
    write = begin(store, "y", 0)
    assert isinstance(write.put(0, empty, digest=7).exception(timeout=PATIENCE), ChecksumError)
    assert isinstance(write.commit().exception(timeout=PATIENCE), ChecksumError)
    assert store.keys() == ["x"]


@pytest.mark.parametrize("durable_too", [False, True], ids=["ephemeral", "durable"])
def test_engine_error_fails_commit(tmp_path: Path, durable_too: bool) -> None:
    with (
        Engine("threads", block_size=1 << 18, _faults={"at": {2: errno.EIO}}) as engine,
        DiskStore(tmp_path, engine=engine, durable=durable_too) as store,
    ):
        write = begin(store, "x", 4 * LEAF)
        parts = []
        for at, end in cut(4 * LEAF, 1):
            parts.append(write.put(at, contents(end - at)))
            parts[-1].exception(timeout=PATIENCE)
        assert [error_number(part) for part in parts] == [0, errno.EIO, 0, 0]
        assert bytes_in_use(store) == 4 * LEAF
        assert error_number(write.commit()) == errno.EIO
        expect(store, {})
        write = begin(store, "x", LEAF)
        write.put(0, contents(LEAF))
        write.commit().wait(timeout=PATIENCE)
        expect(store, {"x": contents(LEAF)})


def test_closed_engine_fails_part(tmp_path: Path) -> None:
    engine = Engine("threads", block_size=1 << 18)
    store = DiskStore(tmp_path, engine=engine)
    write = begin(store, "x", 10)
    engine.close()
    part = write.put(0, contents(10))
    assert isinstance(part.exception(timeout=PATIENCE), InvalidStateError)
    assert part.released is not None
    assert part.released.done()
    assert isinstance(write.commit().exception(timeout=PATIENCE), InvalidStateError)
    assert bytes_in_use(store) == 0
    store.close()


# ---- the end of a write


@pytest.mark.parametrize("how", ["commit", "abort", "close"])
def test_ended_write_refuses_calls(store: DiskStore, how: str) -> None:
    write = begin(store, "x", 2 * LEAF)
    if how == "commit":
        put_all(write, contents(2 * LEAF))
        write.commit().wait(timeout=PATIENCE)
    elif how == "abort":
        write.abort()
    else:
        store.close()
    call: Callable[[], object]
    for call in (lambda: write.put(0, contents(LEAF)), write.commit):
        with pytest.raises(InvalidStateError, match=r"committed|aborted|closed"):
            call()
    write.abort()


def test_closed_store_refuses_begin_write(store: DiskStore) -> None:
    store.close()
    with pytest.raises(InvalidStateError, match="closed"):
        begin(store, "x", 1)


def test_abort_after_commit_changes_nothing(tmp_path: Path) -> None:
    engine, store = open_held_store(tmp_path)
    write = begin(store, "x", 10)
    write.put(0, contents(10))
    committed = write.commit()
    write.abort()
    del write
    engine._native.release_held()
    assert committed.wait(timeout=PATIENCE) == 10
    expect(store, {"x": contents(10)})
    store.close()


def test_abort_frees_room_after_parts_end(tmp_path: Path) -> None:
    engine, store = open_held_store(tmp_path, capacity=MIB)
    write = begin(store, "x", 600_000)
    part = write.put(0, contents(LEAF))
    write.abort()
    assert store.statistics().used == 600_000
    engine._native.release_held()
    assert part.wait(timeout=PATIENCE) == LEAF
    assert store.statistics().used == 0
    store.close()


def test_dropped_write_is_aborted(store: DiskStore) -> None:
    write = begin(store, "x", 3 * LEAF)
    part = write.put(0, contents(LEAF))
    del write
    gc.collect()
    assert part.wait(timeout=PATIENCE) == LEAF
    assert bytes_in_use(store) == 0
    assert store.keys() == []


def test_close_aborts_open_writes(engine: Engine, durable: bool, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, engine=engine, durable=durable)
    writes = [begin(store, key, 2 * LEAF) for key in ("x", "y")]
    part = writes[0].put(0, contents(LEAF))
    store.close()
    assert part.wait(timeout=PATIENCE) == LEAF
    assert slabs(tmp_path) == []
    with pytest.raises(InvalidStateError):
        writes[1].commit()


def test_write_keeps_store_alive(engine: Engine, tmp_path: Path) -> None:
    write = begin(DiskStore(tmp_path, engine=engine), "x", 10)
    gc.collect()
    write.put(0, contents(10))
    assert write.commit().wait(timeout=PATIENCE) == 10


# ---- durable stores


def test_committed_write_survives_reopening(engine: Engine, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        write = begin(store, "x", 300_000)
        put_all(write, contents(300_000))
        write.commit().wait(timeout=PATIENCE)
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        expect(store, {"x": contents(300_000)})


KILLED = """
import sys, torch
from cudafuture.store import DiskStore
store = DiskStore(sys.argv[1], durable=True)
store.write("old", torch.ones(1000)).wait()
committed, open_one = (store.begin_write(key, torch.uint8, [100_000]) for key in ("committed", "open"))
for write in (committed, open_one):
    write.put(0, torch.ones(65536, dtype=torch.uint8)).wait()
committed.put(65536, torch.ones(100_000 - 65536, dtype=torch.uint8))
committed.commit().wait()
say("ready")
hear()
"""


def test_killed_process_leaves_no_open_write(engine: Engine, tmp_path: Path) -> None:
    with Child(KILLED, str(tmp_path)) as process:
        assert process.hear() == "ready"
        process.send(signal.SIGKILL)
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        expect(store, {"old": torch.ones(1000), "committed": torch.ones(100_000, dtype=torch.uint8)})


# ---- many threads


def test_threads_put_parts_in_any_order(store: DiskStore) -> None:
    """Each thread takes parts from one shuffled list of all parts of several writes, and the last one commits."""
    numbers = random.Random(1)
    model = {f"{i}": contents(numbers.randrange(1, 20 * LEAF), i) for i in range(8)}
    writes = {key: begin(store, key, tensor.nbytes) for key, tensor in model.items()}
    parts = [(key, at, end) for key, tensor in model.items() for at, end in cut(tensor.nbytes, 1)]
    left = {key: len(cut(tensor.nbytes, 1)) for key, tensor in model.items()}
    numbers.shuffle(parts)
    lock, committed = threading.Lock(), []

    def work() -> None:
        while True:
            with lock:
                if not parts:
                    return
                key, at, end = parts.pop()
            writes[key].put(at, model[key][at:end])
            with lock:
                left[key] -= 1
                is_last = left[key] == 0
            if is_last:
                committed.append(writes[key].commit(digest=digest(model[key])))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in committed:
        each.wait(timeout=PATIENCE)
    expect(store, model)


def test_racing_calls_put_each_part_once(store: DiskStore) -> None:
    tensor = contents(16 * LEAF)
    write, start = begin(store, "x", 16 * LEAF), threading.Barrier(4)
    put: list[int] = []

    def work() -> None:
        start.wait(PATIENCE)
        for at, end in cut(16 * LEAF, 1):
            try:
                write.put(at, tensor[at:end])
            except ValueError:
                continue
            put.append(at)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(put) == [at for at, _ in cut(16 * LEAF, 1)]
    write.commit().wait(timeout=PATIENCE)
    expect(store, {"x": tensor})
