"""Stores of tensors by key: on one disk (``Offloader``), on several (``ShardedOffloader``), or your own (``Store``)."""

from cudafuture._C import Snapshot
from cudafuture.graph_breaks import break_graphs
from cudafuture.store.multipart_write import MultipartWrite
from cudafuture.store.offloader import Offloader
from cudafuture.store.protocol import Entry, OffloaderStatistics, Store
from cudafuture.store.salvage import SalvagedStore
from cudafuture.store.sharded_offloader import ShardedOffloader

__all__ = [
    "Entry",
    "MultipartWrite",
    "Offloader",
    "OffloaderStatistics",
    "SalvagedStore",
    "ShardedOffloader",
    "Snapshot",
    "Store",
]

break_graphs(*map(globals().get, __all__))
