"""Tensors on disk, past Python and the GIL, with futures: ``Engine`` and ``File``, and by name: ``Offloader``."""

from cudafuture.storage.engine import Engine, EngineStatistics, default_engine
from cudafuture.storage.file import File
from cudafuture.storage.offloader import Entry, Offloader, OffloaderStatistics

__all__ = ["Engine", "EngineStatistics", "Entry", "File", "Offloader", "OffloaderStatistics", "default_engine"]
