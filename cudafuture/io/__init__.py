"""I/O without the GIL in its path: files whose reads and writes are futures, their engine, buffers and digests."""

from cudafuture.graph_breaks import break_graphs
from cudafuture.io._digests import Digest, digest, digests
from cudafuture.io.backends import BACKENDS, Backend
from cudafuture.io.buffer_pool import Buffer, BufferPool, empty
from cudafuture.io.engine import Engine, EngineStatistics, default_engine
from cudafuture.io.file import File
from cudafuture.io.gds import GDSFile

__all__ = [
    "BACKENDS",
    "Backend",
    "Buffer",
    "BufferPool",
    "Digest",
    "Engine",
    "EngineStatistics",
    "File",
    "GDSFile",
    "default_engine",
    "digest",
    "digests",
    "empty",
]

break_graphs(*map(globals().get, __all__))
