"""The contract of ``Store``: behaviour that local, sharded and remote stores share, and most of it every own store."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, collect_all, submit, wait_all
from cudafuture.errors import ChecksumError, InvalidStateError, NotFoundError
from cudafuture.io import digest
from cudafuture.store import DiskStore, Entry, ShardedStore, Store
from rpc_ext import RemoteStore
from support.patience import PATIENCE
from support.soak import soak_count
from support.storing import LARGE, MIB, SMALL, make_numbered

FLOATS = 16 * MIB // 4  # float32s in 16 MiB: larger tensors reach a remote store in several parts


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements. They can be compared for every dtype."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if dtype, shape and all bits are equal."""
    return (tensor.dtype, tensor.shape) == (other.dtype, other.shape) and torch.equal(bits(tensor), bits(other))


def is_uniform(tensor: torch.Tensor) -> bool:
    """Return True if all elements are equal: the tensor is no mixture of two."""
    return bool((tensor == tensor[0]).all())


def get(store: Store, key: str) -> torch.Tensor:
    return store.read(key).wait(timeout=PATIENCE)


def put(store: Store, key: str, tensor: torch.Tensor) -> None:
    assert store.write(key, tensor).wait(timeout=PATIENCE) == tensor.nbytes


def failure(future: CUDAFuture[Any]) -> BaseException:
    error = future.exception(timeout=PATIENCE)
    assert error is not None
    return error


def release(store: Store, write: CUDAFuture[Any]) -> None:
    """Wait until the tensors of a write belong to the caller. Every store of the library has a future for that."""
    if write.released is not None:
        write.released.wait(timeout=PATIENCE)
    else:
        assert not isinstance(store, DiskStore | ShardedStore | RemoteStore)
        write.exception(timeout=PATIENCE)


# ---- round trips

SIZES = [0, 1, 7, 1023, 1024, 1025, 16384, 32767, 32768, 65536, LARGE + 1]  # float32s


def test_tensors_of_every_size_round_trip(any_store: Store) -> None:
    store = any_store
    for size in SIZES:
        tensor = make_numbered(size, size)
        put(store, "tensor", tensor)
        assert same(get(store, "tensor"), tensor)
        out = torch.full_like(tensor, -1)
        assert store.read("tensor", out).wait(timeout=PATIENCE) is out
        assert same(out, tensor)
        assert store.stat("tensor") == Entry("tensor", torch.float32, torch.Size([size]), 4 * size)


def test_tensors_above_16_mib_round_trip(store: Store) -> None:
    for size in (FLOATS, 2 * FLOATS + 1):
        tensor = make_numbered(size, size)
        put(store, "tensor", tensor)
        assert same(store.read("tensor", device="cpu", priority=-1).wait(timeout=PATIENCE), tensor)
        out = torch.full_like(tensor, -1)
        assert store.readv(["tensor"], [out]).wait(timeout=PATIENCE)[0] is out
        assert same(out, tensor)
        assert store.stat("tensor") == Entry("tensor", torch.float32, torch.Size([size]), 4 * size)


def test_many_tensors_round_trip_in_any_order(any_store: Store) -> None:
    store = any_store
    sizes = [1, 15, 16, 17, 1000, 1024, 5000, 20000, 32768, 40000, 100000, 0] * 8
    tensors = {f"tensor {i}": make_numbered(size, i) for i, size in enumerate(sizes)}
    assert store.writev(tensors).wait(timeout=PATIENCE) == sum(t.nbytes for t in tensors.values())
    assert sorted(store.keys()) == sorted(tensors)
    assert len(store) == len(tensors)
    order = sorted(tensors, key=lambda key: key[::-1])
    for key, got in zip(order, store.readv(order).wait(timeout=PATIENCE), strict=True):
        assert same(got, tensors[key]), key
    outs = [torch.zeros_like(tensors[key]) for key in order]
    for got, out in zip(store.readv(order, outs).wait(timeout=PATIENCE), outs, strict=True):
        assert got is out
    assert all(same(out, tensors[key]) for key, out in zip(order, outs, strict=True))
    store.deletev(order[::2]).wait(timeout=PATIENCE)
    assert sorted(store.keys()) == sorted(order[1::2])


DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint16,
    torch.int64,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def test_dtype_and_shape_are_kept(any_store: Store) -> None:
    shapes = [(), (3,), (1,), (2, 0, 4), (5, 1, 7), (300, 200)]
    tensors = {
        f"{dtype} {shape}": torch.arange(torch.Size(shape).numel()).remainder(2).view(shape).to(dtype)
        for dtype, shape in itertools.product(DTYPES, shapes)
    }
    any_store.writev(tensors).wait(timeout=PATIENCE)
    for key, got in zip(tensors, any_store.readv(tensors).wait(timeout=PATIENCE), strict=True):
        assert same(got, tensors[key]), key
    outs = [torch.ones_like(tensor) for tensor in tensors.values()]
    any_store.readv(tensors, outs).wait(timeout=PATIENCE)
    assert all(map(same, outs, tensors.values()))
    entries = [Entry(key, tensor.dtype, tensor.shape, tensor.nbytes) for key, tensor in tensors.items()]
    assert any_store.find(tensors).wait(timeout=PATIENCE) == entries
    for entry in entries[::7]:
        assert any_store.stat(entry.key) == entry
        assert same(get(any_store, entry.key), tensors[entry.key])


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "every third column": lambda t: t[:, ::3],
    "rows from the middle": lambda t: t[7:200],
    "expanded": lambda t: t[:1].expand(100, -1),
    "requires grad": lambda t: t.clone().requires_grad_(),
    "conjugate": lambda t: torch.complex(t, t + 1).conj(),
    "negative": lambda t: torch.complex(t, t + 1).conj().imag,
}


def test_views_are_stored_by_element(any_store: Store) -> None:
    store = any_store
    for (name, view), rows in itertools.product(VIEWS.items(), [16, 600]):
        tensor = view(make_numbered(rows * 300).reshape(rows, 300))
        put(store, "view", tensor)
        assert same(get(store, "view"), tensor), name
        out = torch.zeros(tensor.shape[1], tensor.shape[0], dtype=tensor.dtype).t()
        store.read("view", out).wait(timeout=PATIENCE)
        assert same(out, tensor), name


def test_strided_tensors_above_16_mib_round_trip(store: Store) -> None:
    tensor = make_numbered(FLOATS + 8).reshape(8, -1).t()
    put(store, "tensor", tensor)
    out = torch.zeros(8, tensor.shape[0]).t()
    assert store.read("tensor", out).wait(timeout=PATIENCE) is out
    assert same(out, tensor)


def test_replacement_may_change_size(every_store: Store) -> None:
    store = every_store
    for size in (SMALL, LARGE, 0, LARGE + 5, SMALL, FLOATS + 5, 1):
        tensor = make_numbered(size, size)
        put(store, "tensor", tensor)
        assert same(get(store, "tensor"), tensor)
    assert (len(store), store.keys()) == (1, ["tensor"])


def test_calls_without_keys_do_nothing(every_store: Store) -> None:
    store = every_store
    assert store.writev({}).wait(timeout=PATIENCE) == 0
    assert store.readv([]).wait(timeout=PATIENCE) == []
    store.deletev([]).wait(timeout=PATIENCE)
    assert store.find([]).wait(timeout=PATIENCE) == []
    assert store.keys() == []


def test_key_given_twice_is_read_twice(every_store: Store) -> None:
    store = every_store
    tensors = {f"{i}": make_numbered(1000 + i, i) for i in range(6)}
    store.writev(tensors).wait(timeout=PATIENCE)
    got = store.readv([*tensors, *tensors]).wait(timeout=PATIENCE)
    assert all(map(same, got, [*tensors.values()] * 2))


def test_futures_have_priority_of_call(store: Store) -> None:
    keys = [f"{i}" for i in range(4)]
    for priority in (0, -1, -5):
        asked: list[CUDAFuture[Any]] = [
            store.write("0", make_numbered(3), priority=priority),
            store.writev({key: make_numbered(3) for key in keys}, priority=priority),
        ]
        wait_all(asked, timeout=PATIENCE)
        asked += [store.read("0", priority=priority), store.readv(keys, priority=priority)]
        wait_all(asked, timeout=PATIENCE)
        assert [future.priority for future in asked] == [priority] * 4
    assert same(get(store, "0"), make_numbered(3))


def test_futures_name_operation_and_key(store: Store) -> None:
    keys = [f"{i}" for i in range(4)]
    put(store, "key", make_numbered(1))
    write = store.writev({key: make_numbered(3) for key in keys})
    assert write.name == "write 4 keys"
    write.wait(timeout=PATIENCE)
    assert store.write("key", make_numbered(1)).name == "write key"
    assert store.read("key").name == "read key"
    assert store.readv(keys).name == "read 4 keys"
    assert store.delete("key").name == "delete key"
    assert store.deletev(keys).name == "delete 4 keys"
    flush = store.flush()
    assert flush.name == "flush"
    flush.wait(timeout=PATIENCE)


# ---- the memory of tensors


def test_released_tensor_may_change(every_store: Store) -> None:
    store = every_store
    for size in (0, 3, LARGE, FLOATS + 1):
        tensor = make_numbered(size)
        write = store.write("tensor", tensor)
        release(store, write)
        tensor.zero_()
        write.wait(timeout=PATIENCE)
        get(store, "tensor").zero_()  # belongs to the caller
        assert same(get(store, "tensor"), make_numbered(size))
        assert store.read("tensor").released is None


def test_tensors_of_call_are_released_together(every_store: Store) -> None:
    store = every_store
    tensors = {f"{i}": make_numbered(size, i) for i, size in enumerate([0, 10, 1000, LARGE, FLOATS + 3])}
    write = store.writev(tensors)
    release(store, write)
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    write.wait(timeout=PATIENCE)
    assert all(map(same, store.readv(expected).wait(timeout=PATIENCE), expected.values()))


def test_reads_fill_inference_tensors(every_store: Store) -> None:
    store = every_store
    put(store, "tensor", make_numbered(SMALL))
    with torch.inference_mode():
        out = torch.zeros(SMALL)
    store.read("tensor", out).wait(timeout=PATIENCE)
    assert same(out, make_numbered(SMALL))


# ---- digests and outcomes


def test_write_verifies_digest(any_store: Store) -> None:
    store = any_store
    sizes = [0, 1, 1000, LARGE, FLOATS + 1, SMALL, 0, LARGE + 1, 5, 70_000]
    tensors = {f"{i}": make_numbered(size, i) for i, size in enumerate(sizes)}
    expected = {key: digest(tensor) for key, tensor in tensors.items()}
    written = torch.zeros(10, dtype=torch.bool)
    store.writev(tensors, digests=expected, written=written).wait(timeout=PATIENCE)
    assert written.all()
    others = {key: tensor + 1 for key, tensor in tensors.items()}
    wrong = {key: expected[key] for key in ("2", "3", "4")}
    failed = store.writev(
        others, digests={key: digest(others[key]) for key in ("0", "5", "7")} | wrong, written=written
    )
    assert isinstance(failure(failed), ChecksumError)
    release(store, failed)
    assert written.tolist() == [f"{i}" not in wrong for i in range(10)]
    for key, tensor in tensors.items():
        assert same(get(store, key), tensor if key in wrong else others[key]), key


def test_wrong_digest_error_names_key(every_store: Store) -> None:
    store = every_store
    for size in (0, 1, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, LARGE, FLOATS + 1):
        put(store, "old", make_numbered(size))
        for key in ("old", "new"):
            error = failure(
                store.writev({key: make_numbered(size, 1)}, digests={key: digest(make_numbered(size)) ^ (not size)})
            )
            assert isinstance(error, ChecksumError)
            assert "digest" in str(error)
            assert key in str(error) + " ".join(getattr(error, "__notes__", [key]))  # no notes before Python 3.11
        assert store.keys() == ["old"]
        assert same(get(store, "old"), make_numbered(size))


def test_reads_return_digests(any_store: Store) -> None:
    store = any_store
    tensors = {f"{i}": make_numbered(size, i) for i, size in enumerate([0, 1, 1000, 1 << 14, LARGE, FLOATS + 1])}
    store.writev(tensors).wait(timeout=PATIENCE)
    keys = [*sorted(tensors, reverse=True), "2"]
    for outs in (None, [torch.zeros_like(tensors[key]) for key in keys]):
        found = torch.zeros(len(keys), dtype=torch.uint64)
        got = store.readv(keys, outs, digests=found).wait(timeout=PATIENCE)
        assert found.tolist() == [digest(tensor) for tensor in got] == [digest(tensors[key]) for key in keys]


def test_digests_ignore_strides(every_store: Store) -> None:
    store = every_store
    tensor = make_numbered(6000).reshape(60, 100).t()
    store.writev({"tensor": tensor}, digests={"tensor": digest(tensor)}).wait(timeout=PATIENCE)
    found, out = torch.zeros(1, dtype=torch.uint64), torch.zeros(60, 100).t()
    store.readv(["tensor"], [out], digests=found).wait(timeout=PATIENCE)
    assert found.tolist() == [digest(tensor)] == [digest(out)]


def test_outcomes_mark_unwritten_tensors(every_store: Store) -> None:
    store = every_store
    tensors = {f"{i}": make_numbered(size, i) for i, size in enumerate([0, 5, SMALL, LARGE, 3, FLOATS + 1])}
    written = torch.ones(6, dtype=torch.bool)
    failed = store.writev(tensors, digests=dict.fromkeys(["0", "3", "5"], 7), written=written)
    assert isinstance(failure(failed), ChecksumError)
    assert written.tolist() == [False, True, True, False, True, False]
    assert sorted(store.keys()) == ["1", "2", "4"]
    store.writev(tensors, written=written).wait(timeout=PATIENCE)
    assert written.all()


def test_outcomes_and_digests_fill_inference_tensors(store: Store) -> None:
    tensors = {f"{i}": make_numbered(100 * i + 1, i) for i in range(6)} | {"large": make_numbered(LARGE)}
    with torch.inference_mode():
        written = torch.zeros(len(tensors), dtype=torch.bool)
        found = torch.zeros(len(tensors), dtype=torch.uint64)
    store.writev(tensors, written=written).wait(timeout=PATIENCE)
    assert written.all()
    store.readv(tensors, digests=found).wait(timeout=PATIENCE)
    assert found.tolist() == [digest(tensor) for tensor in tensors.values()]


def test_invalid_digest_is_refused(every_store: Store) -> None:
    store = every_store
    tensors = {"a": make_numbered(3), "b": make_numbered(4)}
    wrong: Any
    for wrong in (None, -1, 1 << 64, 1.5, "7"):
        with pytest.raises(ValueError, match=f"'b'.* not {re.escape(repr(wrong))}"):
            store.writev(tensors, digests={"a": digest(tensors["a"]), "b": wrong})
    assert store.keys() == []


def test_digests_of_unwritten_keys_are_refused(every_store: Store) -> None:
    store = every_store
    with pytest.raises(ValueError, match="not written: 'X', 'y'"):
        store.writev({"x": make_numbered(3)}, digests={"X": 7, "y": 8, "x": 9})
    assert store.keys() == []


PLACES: dict[str, Callable[[torch.dtype], Any]] = {
    "too long": lambda dtype: torch.zeros(3, dtype=dtype),
    "too short": lambda dtype: torch.zeros(1, dtype=dtype),
    "empty": lambda dtype: torch.zeros(0, dtype=dtype),
    "two dimensions": lambda dtype: torch.zeros((2, 1), dtype=dtype),
    "another dtype": lambda dtype: torch.zeros(2, dtype=torch.int64),
    "on the meta device": lambda dtype: torch.zeros(2, dtype=dtype, device="meta"),
    "not contiguous": lambda dtype: torch.zeros(4, dtype=dtype)[::2],
}


def test_outcome_tensors_need_one_element_per_key(every_store: Store) -> None:
    store = every_store
    tensors = {"x": make_numbered(3), "y": make_numbered(4)}
    for place in PLACES.values():
        with pytest.raises((TypeError, ValueError), match=r"tensor"):
            store.writev(tensors, written=place(torch.bool))
    assert store.keys() == []
    store.writev(tensors).wait(timeout=PATIENCE)
    for place in PLACES.values():
        with pytest.raises((TypeError, ValueError), match=r"tensor"):
            store.readv(["x", "y"], digests=place(torch.uint64))


def test_missing_key_returns_no_digest(every_store: Store) -> None:
    store = every_store
    found = torch.zeros(1, dtype=torch.uint64)
    assert isinstance(failure(store.readv(["missing"], digests=found)), NotFoundError)
    assert found.tolist() == [0]


# ---- keys

NAMES = ["k", "a/../b", "../../x", "/etc/passwd", "key with spaces", "クダ", "\n", "x" * 1000, "é" * 500, "%", "."]


def test_key_is_text_of_1_to_1000_bytes(store: Store, tmp_path: Path) -> None:
    def files() -> list[str]:
        return sorted(path.name for path in tmp_path.rglob("*") if not path.name.startswith("slab-"))

    before = files()
    for key in NAMES:
        put(store, key, make_numbered(3, len(key)))
        assert store.keys() == [key]
        assert key in store
        assert same(get(store, key), make_numbered(3, len(key)))
        assert files() == before
        store.delete(key).wait(timeout=PATIENCE)
        assert store.keys() == []


def calls_with_key(store: Store, key: Any) -> list[Callable[[], object]]:
    return [
        lambda: store.write(key, make_numbered(1)),
        lambda: store.writev({"good": make_numbered(1), key: make_numbered(1)}),
        lambda: store.read(key),
        lambda: store.readv(["good", key]),
        lambda: store.delete(key),
        lambda: store.deletev(["good", key]),
        lambda: store.stat(key),
        lambda: store.find([key]),
        lambda: key in store,
    ]


def test_invalid_text_changes_nothing(store: Store) -> None:
    put(store, "good", make_numbered(5))
    for key in ("", "x" * 1025, "é" * 513, "a\0b", "\0", "\ud800"):
        for call in calls_with_key(store, key):
            with pytest.raises(ValueError, match=r"key|NUL|surrogates"):
                call()
    assert store.keys() == ["good"]
    assert same(get(store, "good"), make_numbered(5))


def test_non_string_keys_are_refused(store: Store) -> None:
    put(store, "good", make_numbered(5))
    key: Any
    for key in (b"bytes", 3, None):
        for call in calls_with_key(store, key):
            with pytest.raises(TypeError):
                call()
        with pytest.raises(TypeError, match="a key is a str"):
            store.write(key, make_numbered(1))
    assert store.keys() == ["good"]
    assert same(get(store, "good"), make_numbered(5))


def test_missing_key_raises_not_found_error(every_store: Store) -> None:
    store = every_store
    for key in ("missing", "a b", "クダ"):
        for future in (store.read(key), store.read(key, torch.zeros(3)), store.delete(key)):
            error = failure(future)
            assert isinstance(error, NotFoundError)
            assert isinstance(error, KeyError)
            assert str(error).partition(";")[0] == f"there is no key {key!r}"  # a remedy may follow
            if hasattr(error, "__notes__"):
                assert any(f" {key}" in note for note in error.__notes__), error.__notes__
        with pytest.raises(NotFoundError) as caught:
            store.stat(key)
        assert str(caught.value).partition(";")[0] == f"there is no key {key!r}"
        assert key not in store
    assert store.find(["missing"]).wait(timeout=PATIENCE) == [None]


def test_missing_key_fails_call_for_many_keys(every_store: Store) -> None:
    store = every_store
    keys = [f"{i}" for i in range(10)]
    store.writev({key: make_numbered(3) for key in keys}).wait(timeout=PATIENCE)
    for future in (store.readv([*keys, "missing"]), store.deletev([*keys[:5], "missing", *keys[5:]])):
        error = failure(future)
        assert isinstance(error, NotFoundError)
        assert str(error).partition(";")[0] == "there is no key 'missing'"
    assert store.keys() == []


def test_deleting_key_twice_fails_and_deletes(every_store: Store) -> None:
    store = every_store
    put(store, "x", make_numbered(1))
    assert isinstance(failure(store.deletev(["x", "x"])), NotFoundError)
    assert "x" not in store


def test_store_handles_2000_keys(store: Store) -> None:
    keys = [f"{i}" for i in range(2000)]
    tensors = {key: torch.full((1 + i % 40, i % 3), i, dtype=torch.int16) for i, key in enumerate(keys)}
    entries = [Entry(key, torch.int16, tensor.shape, tensor.nbytes) for key, tensor in tensors.items()]
    store.writev(tensors).wait(timeout=PATIENCE)
    found = store.find([*keys, "missing", "7"]).wait(timeout=PATIENCE)
    assert found == [*entries, None, entries[7]]
    assert store.list_keys().wait(timeout=PATIENCE) == store.keys()
    assert (sorted(store.keys()), len(store)) == (sorted(keys), 2000)
    assert all(map(same, store.readv(keys).wait(timeout=PATIENCE), tensors.values()))
    store.deletev(keys).wait(timeout=PATIENCE)
    assert store.keys() == []


def test_store_handles_300_calls(store: Store) -> None:
    tensors = {f"{i}": make_numbered(50 * i, i) for i in range(300)}
    wait_all([store.write(key, tensor) for key, tensor in tensors.items()], timeout=PATIENCE)
    assert all(map(same, wait_all([store.read(key) for key in tensors], timeout=PATIENCE), tensors.values()))
    wait_all([store.delete(key) for key in tensors], timeout=PATIENCE)
    assert store.keys() == []


def test_keys_are_listed_in_write_order(store: Store) -> None:
    """A sharded store lists the keys of one shard after those of another."""

    def shard_by_shard(keys: str) -> list[str]:
        if not isinstance(store, ShardedStore):
            return [*keys]
        return [key for shard in store.shards for key in keys if store.where(key) == shard]

    for key in "abcdefgabda":
        put(store, key, make_numbered(1))
    assert store.keys() == shard_by_shard("cefgbda")
    assert store.list_keys().wait(timeout=PATIENCE) == shard_by_shard("cefgbda")
    store.deletev(["a", "c"]).wait(timeout=PATIENCE)
    assert store.keys() == shard_by_shard("efgbd")


def test_trim_removes_empty_files(store: Store, tmp_path: Path) -> None:
    put(store, "large", make_numbered(LARGE * 8))
    assert [*tmp_path.rglob("slab-*")]
    store.delete("large").wait(timeout=PATIENCE)
    assert store.trim() >= 4 * LARGE * 8
    assert [*tmp_path.rglob("slab-*")] == []
    assert store.trim() == 0


# ---- bad input


def test_out_needs_stored_dtype_and_shape(store: Store) -> None:
    put(store, "tensor", make_numbered(6))
    for out in (torch.zeros(5), torch.zeros(2, 3), torch.zeros(6, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"tensor of .*loat.*\[6\]"):  # at the call, or from the future
            store.read("tensor", out).wait(timeout=PATIENCE)
        with pytest.raises(ValueError, match=r"tensor of .*loat.*\[6\]"):
            store.readv(["tensor", "tensor"], [torch.zeros(6), out]).wait(timeout=PATIENCE)
    with pytest.raises(ValueError, match="1 keys, and 2 tensors"):
        store.readv(["tensor"], [torch.zeros(6), torch.zeros(6)])
    for call in (
        lambda: store.read("tensor", torch.zeros(6), "cpu"),
        lambda: store.readv(["tensor"], [torch.zeros(6)], "cpu"),
    ):
        with pytest.raises(ValueError, match="either out or device"):
            call()
    assert same(get(store, "tensor"), make_numbered(6))


def test_invalid_priorities_are_refused(store: Store) -> None:
    wrong: list[tuple[Any, type[Exception]]] = [(1, ValueError), (5, ValueError), (1.5, TypeError), ("1", TypeError)]
    for priority, error in wrong:
        with pytest.raises(error, match="priority"):
            store.write("x", make_numbered(1), priority=priority)
        with pytest.raises(error, match="priority"):
            store.read("x", priority=priority)
    assert store.keys() == []


NO_TENSORS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 2],
    "None": lambda: None,
    "number": lambda: 3,
    "sparse": lambda: torch.ones(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
}


def test_values_without_memory_are_refused(store: Store) -> None:
    for make in NO_TENSORS.values():
        with pytest.raises(TypeError, match=r"torch\.Tensor|memory|meta"):
            store.write("x", make())
    tensor = make_numbered(SMALL)
    tensor.untyped_storage().resize_(4)
    with pytest.raises(ValueError, match="storage of the tensor has 4 bytes, but its elements need"):
        store.write("x", tensor)
    assert store.keys() == []


# ---- order of operations


def is_ordered(store: Store, key: str) -> bool:
    """Return True if reads of this key wait for writes in flight. In a local store they do not."""
    if isinstance(store, ShardedStore):
        return isinstance(store.shards[store.where(key)], RemoteStore)
    return isinstance(store, RemoteStore)


def test_last_write_in_flight_wins(every_store: Store) -> None:
    store = every_store
    for number in range(soak_count(100)):
        sizes = [LARGE, SMALL] if number % 2 else [SMALL, LARGE]  # a small one may finish first
        wait_all([store.write("tensor", make_numbered(size, number)) for size in sizes], timeout=PATIENCE)
        assert same(get(store, "tensor"), make_numbered(sizes[-1], number))
        changes: list[CUDAFuture[Any]] = [store.write("tensor", make_numbered(LARGE)), store.delete("tensor")]
        wait_all(changes, timeout=PATIENCE)
        assert "tensor" not in store
    sizes = [10, FLOATS + 10, 300_000, 20, FLOATS + 5, 5]
    wait_all([store.write("tensor", make_numbered(size, size)) for size in sizes], timeout=PATIENCE)
    assert same(get(store, "tensor"), make_numbered(5, 5))


def test_consecutive_operations_take_effect_in_order(store: Store) -> None:
    """A read in a remote store sees the write before it. In a local one it may also see an earlier tensor."""
    sizes = [10, FLOATS + 10, 300_000, 20]
    keys = [f"{i}" for i in range(3)]  # in the store of two shards both have some
    for turn in range(soak_count(20)):
        base = float(turn * 10)
        for key in keys:
            put(store, key, torch.full((5,), base))
        size_of = {base: 5} | {base + 1 + i: size for i, size in enumerate(sizes)}
        for key in keys:
            reads = []
            for number, size in list(size_of.items())[1:]:
                store.write(key, torch.full((size,), number))
                reads.append(store.read(key))
            deleted = store.delete(key)
            missing = store.read(key)
            for i, read in enumerate(reads):
                found = read.wait(timeout=PATIENCE)
                number = float(found[0])
                possible = [base + 1 + i] if is_ordered(store, key) else list(size_of)[: i + 2]
                assert number in possible
                assert same(found, torch.full((size_of[number],), number))
            deleted.wait(timeout=PATIENCE)
            assert missing.exception(timeout=PATIENCE) is not None or not is_ordered(store, key)
            assert isinstance(failure(store.read(key)), NotFoundError)


def test_read_during_replacement_sees_old_or_new(every_store: Store) -> None:
    store = every_store
    for size in (SMALL, LARGE, FLOATS + 7):
        put(store, "tensor", torch.full((size,), 0.0))
        for turn in range(1, soak_count(30)):
            write = store.write("tensor", torch.full((size,), float(turn)))
            reads = [store.read("tensor") for _ in range(3)]
            write.wait(timeout=PATIENCE)
            for read in reads:
                found = read.wait(timeout=PATIENCE)
                assert found[0] in (turn - 1, turn)
                assert is_uniform(found)
            assert get(store, "tensor")[0] == turn


def test_callbacks_can_start_operations(every_store: Store) -> None:
    store = every_store
    keys = [f"{i}" for i in range(30)]
    store.writev({key: make_numbered(SMALL, i) for i, key in enumerate(keys)}).wait(timeout=PATIENCE)

    def double(key: str, done: CUDAFuture[torch.Tensor]) -> CUDAFuture[int]:
        return store.write(key, done.value().mul_(2))

    doubled = [store.read(key).then_async(partial(double, key)) for key in keys]
    assert wait_all(doubled, timeout=PATIENCE) == [4 * SMALL] * 30
    for i, got in enumerate(store.readv(keys).wait(timeout=PATIENCE)):
        assert same(got, 2 * make_numbered(SMALL, i))


class Model:
    """A dictionary beside a store: one thread applies random operations to both, and compares them."""

    SIZES = (0, 1, 100, 5000, 70_000, LARGE)

    def __init__(self, store: Store, thread: int) -> None:
        self._store = store
        self._random = random.Random(thread)
        self._keys = [f"{thread}/{i}" for i in range(6)]  # no other thread uses these
        self._tensors: dict[str, torch.Tensor] = {}
        self._number = 0

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self._random.choice([self._write, self._write, self._read, self._read, self._delete, self._find])()
        mine = [key for key in self._store.keys() if key in self._keys]  # noqa: SIM118
        assert sorted(mine) == sorted(self._tensors)

    def _some_keys(self) -> list[str]:
        return self._random.sample(self._keys, self._random.choice([1, 1, 2, 4]))

    def _write(self) -> None:
        self._number += 1
        tensors = {key: make_numbered(self._random.choice(self.SIZES), self._number) for key in self._some_keys()}
        self._store.writev(tensors).wait(timeout=PATIENCE)
        self._tensors |= tensors

    def _read(self) -> None:
        keys = self._some_keys()
        if not {*keys} <= {*self._tensors}:
            assert isinstance(failure(self._store.readv(keys)), NotFoundError)
            return
        outs = [torch.empty_like(self._tensors[key]) for key in keys] if self._random.random() < 0.5 else None
        got = self._store.readv(keys, outs).wait(timeout=PATIENCE)
        assert all(map(same, got, map(self._tensors.__getitem__, keys)))

    def _delete(self) -> None:
        keys = self._some_keys()
        error = self._store.deletev(keys).exception(timeout=PATIENCE)
        assert (error is None) == ({*keys} <= {*self._tensors})
        for key in keys:
            self._tensors.pop(key, None)

    def _find(self) -> None:
        entries = self._store.find(self._keys).wait(timeout=PATIENCE)
        assert {entry.key: entry.nbytes for entry in entries if entry} == {
            k: t.nbytes for k, t in self._tensors.items()
        }
        key = self._random.choice(self._keys)
        assert (key in self._store) == (key in self._tensors)


def test_store_is_dictionary_for_each_thread(every_store: Store) -> None:
    store = every_store
    begin = threading.Barrier(4)

    def run(thread: int) -> None:
        begin.wait(PATIENCE)
        Model(store, thread).run(soak_count(400))

    wait_all([submit(run, thread) for thread in range(4)], timeout=2 * PATIENCE)


def test_concurrent_writers_never_mix_tensors(every_store: Store) -> None:
    store = every_store
    keys = ["small", "large", "above 16 MiB"]
    sizes = dict(zip(keys, (SMALL, LARGE, FLOATS + 3), strict=True))

    def run(thread: int) -> None:
        for turn in range(soak_count(30)):
            number = float(thread * 1000 + turn)
            store.writev({key: torch.full((size,), number) for key, size in sizes.items()}).wait(timeout=PATIENCE)
            for key, got in zip(keys, store.readv(keys).wait(timeout=PATIENCE), strict=True):
                assert got.shape == (sizes[key],)
                assert is_uniform(got)

    wait_all([submit(run, thread) for thread in range(3)], timeout=2 * PATIENCE)


# ---- flush and close


def test_flush_waits_for_earlier_changes(every_store: Store) -> None:
    store = every_store
    put(store, "deleted", make_numbered(1))
    changes: list[CUDAFuture[Any]] = [store.write(f"{i}", make_numbered(LARGE, i)) for i in range(10)]
    changes.append(store.delete("deleted"))
    store.flush().wait(timeout=PATIENCE)
    assert all(change.done() for change in changes)
    store.flush().wait(timeout=PATIENCE)


def expect_done(store: Store, futures: list[CUDAFuture[Any]]) -> None:
    """Check that futures are done. A sharded store completes its own a moment after those of a remote shard."""
    if isinstance(store, ShardedStore):
        collect_all(futures).wait(timeout=PATIENCE)
    assert all(future.done() for future in futures)


def test_close_waits_for_operations_in_flight(store: Store) -> None:
    put(store, "large", make_numbered(FLOATS + 3))
    asked: list[CUDAFuture[Any]] = [store.write(f"{i}", make_numbered(LARGE, i)) for i in range(5)]
    asked += [store.read("large"), store.delete("missing")]
    store.close()
    expect_done(store, asked)
    assert same(asked[5].value(), make_numbered(FLOATS + 3))
    assert isinstance(asked[6].exception(), NotFoundError)


def test_closed_store_refuses_calls(every_store: Store) -> None:
    store = every_store
    write = store.write("tensor", make_numbered(LARGE))
    with store as entered:
        assert entered is store
    expect_done(store, [write])
    calls: list[Callable[[], object]] = [
        lambda: store.write("tensor", make_numbered(1)),
        lambda: store.writev({"tensor": make_numbered(1)}),
        lambda: store.read("tensor"),
        lambda: store.readv(["tensor"]),
        lambda: store.readv([]),
        lambda: store.delete("tensor"),
        lambda: store.deletev(["tensor"]),
        store.flush,
        store.keys,
        lambda: "tensor" in store,
        lambda: len(store),
        lambda: store.stat("tensor"),
        lambda: store.find(["tensor"]),
        lambda: store.find([]),
        store.list_keys,
        store.trim,
    ]
    for call in calls:
        with pytest.raises(InvalidStateError, match="closed"):
            call()
    store.close()
