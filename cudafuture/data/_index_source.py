"""Source of an archive's index: its sidecar, this process's memory, or a new build."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from pathlib import Path

from cudafuture.data._archive_index import ArchiveIndex, build_index, identity_of
from cudafuture.data._faults import Fault
from cudafuture.data._rapidgzip import require_rapidgzip
from cudafuture.data._sidecar import DamagedSidecarError, read_sidecar, sidecar_of, write_sidecar
from cudafuture.errors import ArchiveError

__all__ = ["index_of", "log_ignored", "log_once"]

_NAMES = 10  # of ignored members, in a log record
_log = logging.getLogger("cudafuture.data")
_logged: set[str] = set()
_in_memory: weakref.WeakValueDictionary[Path, ArchiveIndex] = weakref.WeakValueDictionary()


def log_once(message: str) -> None:
    """Log a warning, once per process."""
    if message not in _logged:
        _logged.add(message)
        _log.warning("%s", message)


def log_ignored(path: str, names: Sequence[str]) -> None:
    """Log the number of ignored members of an archive, and the first ones of their names."""
    if names:
        shown = ", ".join(map(repr, names[:_NAMES])) + (", ..." if len(names) > _NAMES else "")
        log_once(f"{path}: members that are not images by name or first bytes are ignored ({len(names)}): {shown}")


def index_of(path: str, required: bool) -> ArchiveIndex | None:
    """Return the index of an archive, and store a new one in its sidecar; return None if no index is possible.

    Raises:
        ArchiveError, ImportError: no index is possible, but one is required.
        OSError: the archive cannot be read.
    """
    try:
        index = _kept(path)
        return _build(path) if index is None else index
    except (Fault, ArchiveError, ImportError) as e:
        if not required:
            text = str(e.error(path) if isinstance(e, Fault) else e)
            log_once(f"{path} is read without an index, so every worker unpacks all of it: {text}")
            return None
        if isinstance(e, Fault):
            raise e.error(path) from e
        raise


def _kept(path: str) -> ArchiveIndex | None:
    """Return the index in the sidecar or in memory, if it belongs to the current archive."""
    index = None
    try:
        index = read_sidecar(path)
    except DamagedSidecarError as e:
        log_once(f"{sidecar_of(path)} is not usable and is built again: {e}")
    except OSError as e:
        log_once(f"{sidecar_of(path)} cannot be read: {e}")
    if index is None:
        index = _in_memory.get(Path(path).absolute())
        if index is not None and index.identity != identity_of(path):
            return None
    if index is not None and index.packing == "gzip":
        require_rapidgzip()
    return index


def _build(path: str) -> ArchiveIndex:
    index = build_index(path)
    try:
        write_sidecar(path, index)
    except OSError as e:
        _in_memory[Path(path).absolute()] = index
        log_once(f"the index of {path} stays in the memory of this process: its sidecar cannot be written: {e}")
    return index
