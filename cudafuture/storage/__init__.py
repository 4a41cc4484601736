"""Files that are read and written past Python and the GIL, with futures: ``Engine`` and ``File``."""

from cudafuture.storage.engine import Engine, EngineStatistics, default_engine
from cudafuture.storage.file import File

__all__ = ["Engine", "EngineStatistics", "File", "default_engine"]
