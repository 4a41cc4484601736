"""Gzip archives that rapidgzip unpacks; open ones are closed before the interpreter exits."""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import threading
import weakref
from typing import Any

from cudafuture.data._extra import extra

__all__ = ["GzipFile", "require_rapidgzip"]


def require_rapidgzip() -> Any:
    """Import rapidgzip.

    Raises:
        ImportError: it is not installed.
    """
    return extra("rapidgzip", "the index of a .tgz archive")


class GzipFile:
    """.tgz archive that rapidgzip unpacks, from its beginning or from a seek point.

    rapidgzip aborts a process whose interpreter exits while one of its files is open, for example in an iterator that
    the program keeps. Each file is therefore closed at exit. A lock orders that after the read of another thread.

    Args:
        path: the archive.
        options: of ``rapidgzip.RapidgzipFile``.
    """

    def __init__(self, path: str, **options: int) -> None:
        self._file: Any = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._file = require_rapidgzip().RapidgzipFile(path, **options)
        _open.add(self)

    def readinto(self, piece: bytearray) -> int:
        """Fill `piece` with the next bytes and return their number, 0 at the end."""
        with self._lock:
            return int(self._opened().readinto(piece))

    def read_at(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from an offset on."""
        with self._lock:
            self._opened().seek(offset)
            return bytes(self._file.read(size))

    def import_index(self, seek_points: bytes) -> None:
        """Use the seek points of `export_index`."""
        with self._lock:
            self._opened().import_index(io.BytesIO(seek_points))

    def export_index(self) -> bytes:
        """Return the collected seek points."""
        seek_points = io.BytesIO()
        with self._lock:
            self._opened().export_index(seek_points)
        return seek_points.getvalue()

    def close(self) -> None:
        """Close the archive. Closing it again does nothing."""
        if self._file is None:
            return
        if self._pid != os.getpid():  # a fork has no threads, and closing would wait for them: leak the file
            file, self._file = self._file, None
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(file))
            return
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.close()

    def _opened(self) -> Any:
        if self._file is None:
            raise ValueError("the archive is closed")
        return self._file

    def __del__(self) -> None:
        self.close()


_open: weakref.WeakSet[GzipFile] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for file in list(_open):
        file.close()
