"""The store of docs/own-store.md. Its behaviour is tested with the contract of all stores, in remote_store."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture.store import DiskStore, ShardedStore, Store
from support.own_store import make_own_store
from support.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("on_the_host")


def names_of(method: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]


def test_own_store_has_all_protocol_methods() -> None:
    store = make_own_store()
    wanted = {name: member for name, member in vars(Store).items() if inspect.isfunction(member)}
    for name, method in wanted.items():
        if name not in ("__init__", "__subclasshook__", "__exit__"):
            assert names_of(getattr(type(store), name)) == names_of(method), name
    assert {"writev", "readv", "find", "flush"} <= wanted.keys()
    assert store.durable is False


def test_own_store_refuses_other_shape() -> None:
    with make_own_store() as store:
        store.write("key", torch.ones(2)).wait(timeout=PATIENCE)
        with pytest.raises(ValueError, match="unlike"):
            store.read("key", torch.ones(3))


def test_own_store_serves_as_shard(tmp_path: Path) -> None:
    store = make_own_store()
    with ShardedStore({"memory": store, "disk": DiskStore(tmp_path / "disk")}) as both:
        tensors = {f"{i}": torch.full((i,), float(i)) for i in range(50)}
        both.writev(tensors).wait(timeout=PATIENCE)
        assert 0 < len(store) < 50
        assert all(map(torch.equal, both.readv(tensors).wait(timeout=PATIENCE), tensors.values()))
        both.deletev(tensors).wait(timeout=PATIENCE)
        assert both.list_keys().wait(timeout=PATIENCE) == []
