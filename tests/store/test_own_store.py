"""The store of docs/own-store.md: it has the methods of ``Store``, and keeps the contract that the page states."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cudafuture.errors import ChecksumError, InvalidStateError, NotFoundError
from cudafuture.io import digest
from cudafuture.store import DiskStore, Entry, ShardedStore, Store
from support.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("on_the_host")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-store.md"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Return an empty store of the class in the first code block of the page."""
    block = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert block is not None
    module = ModuleType("own_store")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block[1], PAGE.name, "exec"), vars(module))
    store: Store = module.DictStore()
    with store:
        yield store


def names_of(method: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]


def test_own_store_has_all_protocol_methods(store: Store) -> None:
    wanted = {name: member for name, member in vars(Store).items() if inspect.isfunction(member)}
    for name, method in wanted.items():
        if name not in ("__init__", "__subclasshook__", "__exit__"):
            assert names_of(getattr(type(store), name)) == names_of(method), name
    assert {"writev", "readv", "find", "flush"} <= wanted.keys()
    assert store.durable is False


def test_tensors_keep_dtype_shape_and_bits(store: Store) -> None:
    shapes = [(), (3,), (2, 0, 4), (5, 1, 7)]
    dtypes = [torch.bool, torch.int64, torch.bfloat16, torch.complex64]
    tensors = {f"{d} {s}": torch.arange(torch.Size(s).numel()).view(s).to(d) for d in dtypes for s in shapes}
    assert store.writev(tensors).wait(timeout=PATIENCE) == sum(tensor.nbytes for tensor in tensors.values())
    for key, got in zip(tensors, store.readv(tensors).wait(timeout=PATIENCE), strict=True):
        assert (got.dtype, got.shape) == (tensors[key].dtype, tensors[key].shape)
        assert torch.equal(got, tensors[key])
        assert store.stat(key) == Entry(key, got.dtype, got.shape, got.nbytes)
    out = torch.zeros(6, dtype=torch.int64)[::2]
    assert store.read("torch.int64 (3,)", out).wait(timeout=PATIENCE) is out
    assert out.tolist() == [0, 1, 2]


def test_later_tensor_changes_stay_outside(store: Store) -> None:
    tensor = torch.ones(4)
    store.write("key", tensor).wait(timeout=PATIENCE)
    tensor.zero_()
    store.read("key").wait(timeout=PATIENCE).zero_()
    assert store.read("key").wait(timeout=PATIENCE).tolist() == [1.0] * 4


def test_wrong_digest_fails_its_key_alone(store: Store) -> None:
    store.write("bad", torch.zeros(2)).wait(timeout=PATIENCE)
    tensors, written = {"good": torch.ones(3), "bad": torch.ones(2)}, torch.zeros(2, dtype=torch.bool)
    failed = store.writev(tensors, digests={"good": digest(tensors["good"]), "bad": 1}, written=written)
    assert isinstance(failed.exception(timeout=PATIENCE), ChecksumError)
    assert written.tolist() == [True, False]
    found = torch.zeros(2, dtype=torch.uint64)
    values = store.readv(["good", "bad"], digests=found).wait(timeout=PATIENCE)
    assert [value.tolist() for value in values] == [[1.0] * 3, [0.0] * 2]
    assert found.tolist() == [digest(value) for value in values]


def test_missing_key_fails_future_not_call(store: Store) -> None:
    store.write("key", torch.ones(2)).wait(timeout=PATIENCE)
    for future in (store.read("none"), store.readv(["key", "none"]), store.deletev(["key", "none"])):
        assert isinstance(future.exception(timeout=PATIENCE), NotFoundError)
    assert (store.keys(), len(store), "key" in store) == ([], 0, False)  # the key that existed is deleted
    assert store.find(["key"]).wait(timeout=PATIENCE) == [None]
    store.write("key", torch.ones(2)).wait(timeout=PATIENCE)
    with pytest.raises(ValueError, match="unlike"):
        store.read("key", torch.ones(3))
    with pytest.raises(NotFoundError):
        store.stat("none")
    store.close()
    for call in (store.keys, store.flush, lambda: store.write("key", torch.ones(1)), lambda: store.read("key")):
        with pytest.raises(InvalidStateError):
            call()


def test_own_store_serves_as_shard(store: Store, tmp_path: Path) -> None:
    with ShardedStore({"memory": store, "disk": DiskStore(tmp_path / "disk")}) as both:
        tensors = {f"{i}": torch.full((i,), float(i)) for i in range(50)}
        both.writev(tensors).wait(timeout=PATIENCE)
        assert 0 < len(store) < 50
        assert all(map(torch.equal, both.readv(tensors).wait(timeout=PATIENCE), tensors.values()))
        both.deletev(tensors).wait(timeout=PATIENCE)
        assert both.list_keys().wait(timeout=PATIENCE) == []
