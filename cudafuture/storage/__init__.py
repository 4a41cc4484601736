"""Tensor storage without the GIL in its path: files with futures (``File``), and stores by key (``Offloader``)."""

from cudafuture._C import Snapshot
from cudafuture.storage._digests import Digest, digest, digests
from cudafuture.storage.buffer_pool import Buffer, BufferPool, empty
from cudafuture.storage.engine import Engine, EngineStatistics, default_engine
from cudafuture.storage.file import File
from cudafuture.storage.gds import GDSFile
from cudafuture.storage.multipart_write import MultipartWrite
from cudafuture.storage.offloader import Offloader
from cudafuture.storage.salvage import SalvagedStore
from cudafuture.storage.sharded_offloader import ShardedOffloader
from cudafuture.storage.store import Entry, OffloaderStatistics, Store

__all__ = [
    "Buffer",
    "BufferPool",
    "Digest",
    "Engine",
    "EngineStatistics",
    "Entry",
    "File",
    "GDSFile",
    "MultipartWrite",
    "Offloader",
    "OffloaderStatistics",
    "SalvagedStore",
    "ShardedOffloader",
    "Snapshot",
    "Store",
    "default_engine",
    "digest",
    "digests",
    "empty",
]
