"""The types of stores. Read by mypy, never run."""

from __future__ import annotations

import torch
from typing_extensions import reveal_type

from cudafuture.store import DiskStore, ShardedStore, Store
from rpc_ext import RemoteStore


def uses(store: Store) -> None:
    reveal_type(store.write("key", torch.ones(1)))  # R: CUDAFuture[int]
    reveal_type(store.read("key").wait())  # R: Tensor
    reveal_type(store.readv(["key"]))  # R: CUDAFuture[list[Tensor]]
    reveal_type(store.keys())  # R: list[str]
    reveal_type(store.list_keys())  # R: CUDAFuture[list[str]]
    reveal_type(store.find(["key"]).wait()[0])  # R: Entry | None


def are_stores(local: DiskStore, sharded: ShardedStore, remote: RemoteStore) -> None:
    stores: list[Store] = [local, sharded, remote]
    for store in stores:
        with store as entered:
            uses(entered)
    uses(ShardedStore({"a": local, "b": remote, "c": sharded}))


class Own(RemoteStore):
    """A subclass of a store is a store, too."""


def enter_store(own: Own) -> None:
    uses(own)
    with own as same, DiskStore.salvage("states") as found:
        reveal_type(same)  # R: Own
        reveal_type(found.uncertain)  # R: frozenset[str]
