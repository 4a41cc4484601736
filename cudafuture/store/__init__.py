"""Stores of tensors by key: on one disk (``DiskStore``), on several (``ShardedStore``), or your own (``Store``)."""

from cudafuture._C import Snapshot
from cudafuture.graph_breaks import break_graphs
from cudafuture.store import arguments
from cudafuture.store.disk_store import DiskStore, SalvagedStore
from cudafuture.store.multipart_write import MultipartWrite
from cudafuture.store.protocol import DiskStoreStatistics, Entry, Store
from cudafuture.store.sharded_store import ShardedStore

__all__ = [
    "DiskStore",
    "DiskStoreStatistics",
    "Entry",
    "MultipartWrite",
    "SalvagedStore",
    "ShardedStore",
    "Snapshot",
    "Store",
]

break_graphs(*map(globals().get, __all__), *map(vars(arguments).get, arguments.__all__))
