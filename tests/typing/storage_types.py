"""The types of stores. Read by mypy, never run."""

from __future__ import annotations

import torch
from typing_extensions import reveal_type

from cudafuture.store import Offloader, ShardedOffloader, Store
from rpc_ext import RemoteOffloader


def uses(store: Store) -> None:
    reveal_type(store.write("key", torch.ones(1)))  # R: CUDAFuture[int]
    reveal_type(store.read("key").wait())  # R: Tensor
    reveal_type(store.readv(["key"]))  # R: CUDAFuture[list[Tensor]]
    reveal_type(store.keys())  # R: list[str]
    reveal_type(store.list_keys())  # R: CUDAFuture[list[str]]
    reveal_type(store.find(["key"]).wait()[0])  # R: Entry | None


def are_stores(local: Offloader, sharded: ShardedOffloader, remote: RemoteOffloader) -> None:
    stores: list[Store] = [local, sharded, remote]
    for store in stores:
        with store as entered:
            uses(entered)
    uses(ShardedOffloader({"a": local, "b": remote, "c": sharded}))


class Own(RemoteOffloader):
    """A subclass of a store is a store, too."""


def entered(own: Own) -> None:
    uses(own)
    with own as same, Offloader.salvage("states") as found:
        reveal_type(same)  # R: Own
        reveal_type(found.uncertain)  # R: frozenset[str]
