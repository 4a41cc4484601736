"""The folders of stores: who has which, and what is left of those that have died.

::

    dir/.stores            locked while a store is made or swept
    dir/.new-store-*       one that is being made, or removed
    dir/store-*/lease      locked while an ephemeral store lives
    dir/lock               locked while a durable store is open; holds the pid of who has it

Locks are flock's, which the kernel drops with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cudafuture.errors import StorageError

__all__ = ["DurableHome", "EphemeralHome"]

_PREFIX = "store-"
_NEW = ".new-"
_locks: set[int] = set()  # descriptors that hold locks, or are about to


def _leave_to_parent() -> None:
    """Close a forked child's copies of the locks: else they would be held until it ends, too."""
    for lock in list(_locks):
        os.close(lock)
    _locks.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class EphemeralHome:
    """A folder of its own inside `dir`, which is swept when its process is gone."""

    def __init__(self, dir: str) -> None:
        with _storage_errors(dir):
            _make(Path(dir))
            with _locked(Path(dir, ".stores")):
                _sweep(Path(dir))
                new = Path(tempfile.mkdtemp(prefix=_NEW + _PREFIX, dir=dir))
                try:
                    self.lock = _locked_lease(new / "lease")
                except BaseException:
                    shutil.rmtree(new, ignore_errors=True)
                    raise
                self.path = str(new.rename(new.with_name(new.name.removeprefix(_NEW))))

    def leave(self) -> None:
        """Remove the folder."""
        _remove(Path(self.path))
        _close(self.lock)


class DurableHome:
    """The folder `dir`, of one process at a time."""

    def __init__(self, dir: str) -> None:
        self.path = dir
        with _storage_errors(dir):
            for folder in _make(Path(dir)):
                _sync(folder.parent)
            self.lock = _open(Path(dir, "lock"))
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(self.lock, 32, 0).decode().strip() or "unknown"
                _close(self.lock)
                message = f"{dir} is a durable store that process {owner} has open"
                raise StorageError(message, errno=errno.EBUSY, path=dir) from None
            with contextlib.suppress(OSError):  # on a full disk: then others do not hear who it is
                os.pwrite(self.lock, f"{os.getpid():<20}".encode(), 0)

    def leave(self) -> None:
        """Let others have it."""
        _close(self.lock)


def _sweep(dir: Path) -> None:
    """Remove what is left of stores whose process is gone. Called with the lock of the folder."""
    for unfinished in dir.glob(f"{_NEW}{_PREFIX}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for home in dir.glob(f"{_PREFIX}*"):
        try:
            lease = _open(home / "lease", os.O_RDWR)
        except OSError:  # its owner has just removed it; or it is no such folder
            continue
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _remove(home)
        finally:
            _close(lease)


def _remove(home: Path) -> None:
    """Remove a store, whose name is the first to go: so what is left of it when this is cut short is swept, too."""
    with contextlib.suppress(OSError):
        home = home.rename(home.with_name(_NEW + home.name))
    shutil.rmtree(home, ignore_errors=True)


def _make(folder: Path) -> list[Path]:
    """Make a folder, and those that it is in; return it and those that were not there, the outermost first."""
    missing = [folder, *itertools.takewhile(lambda parent: not parent.exists(), folder.parents)]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _locked_lease(path: Path) -> int:
    lease = _open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lease, fcntl.LOCK_EX)
    return lease


def _open(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    lock = os.open(path, flags | os.O_CLOEXEC, 0o666)
    _locks.add(lock)
    return lock


def _close(lock: int) -> None:
    _locks.discard(lock)
    os.close(lock)


def _sync(folder: Path) -> None:
    """Have the names in a folder survive a crash."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        lock = _open(path, os.O_RDONLY)  # another user's, perhaps: where that is sticky it must not be asked to be made
    except FileNotFoundError:
        lock = _open(path, os.O_RDONLY | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        _close(lock)


@contextlib.contextmanager
def _storage_errors(dir: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as e:
        raise StorageError(f"no store in {dir}: {e.strerror}", errno=e.errno, path=dir) from e
