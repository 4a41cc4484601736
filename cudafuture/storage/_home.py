"""The folders of stores: who has which, and what is left of those that have died.

::

    dir/.stores            locked while a store is made, swept or removed; goes with the last ephemeral store
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
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from cudafuture.errors import StorageError
from cudafuture.storage.engine import PAGE, Engine
from cudafuture.storage.file import File

__all__ = ["DurableHome", "EphemeralHome", "durable_home", "is_direct", "log_recovery"]

_logger = logging.getLogger("cudafuture.storage")

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
        """Remove the folder, and after the last one the file that was locked to make it."""
        home = Path(self.path)
        _remove(home)
        _close(self.lock)
        # Without waiting: the garbage collector may call this in a thread that is about to make another store.
        with contextlib.suppress(OSError), _locked(home.parent / ".stores", fcntl.LOCK_NB):
            if not any(home.parent.glob(f"{_PREFIX}*")) and not any(home.parent.glob(f"{_NEW}{_PREFIX}*")):
                (home.parent / ".stores").unlink()


class DurableHome:
    """The folder `dir`, of one process that writes, or of several that read."""

    def __init__(self, dir: str, *, read_only: bool = False) -> None:
        self.path, self.read_only = dir, read_only
        self.lock: int | None
        with _storage_errors(dir):
            if read_only:
                self.lock = _read_lock(dir)
                return
            for folder in _make(Path(dir)):
                with contextlib.suppress(PermissionError):  # a folder of others, which was there
                    _sync(folder.parent)
            self.lock = _lock_or_fail(dir, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
            try:
                if not _is_writable(dir):
                    raise PermissionError(errno.EACCES, "no right to write to the folder, its journal or a slab")
            except BaseException:
                _close(self.lock)
                raise
            with contextlib.suppress(OSError):  # on a full disk: then others do not hear who it is
                os.pwrite(self.lock, f"{os.getpid():<20}".encode(), 0)

    def leave(self) -> None:
        """Let others have it."""
        if self.lock is not None:
            _close(self.lock)


def _read_lock(dir: str) -> int | None:
    """Return the descriptor of a lock that readers share; None where a copy of a store has no file for it."""
    try:
        return _lock_or_fail(dir, os.O_RDONLY, fcntl.LOCK_SH)
    except FileNotFoundError:
        if not Path(dir).is_dir():
            raise
        return None


def _lock_or_fail(dir: str, flags: int, kind: int) -> int:
    lock = _open(Path(dir, "lock"), flags)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        _close(lock)
        message = f"{dir} is a durable store that process {owner} has open"
        raise StorageError(message, errno=errno.EBUSY, path=dir) from None
    except BaseException:
        _close(lock)
        raise
    return lock


def _is_writable(dir: str) -> bool:
    paths = [Path(dir), *Path(dir).glob("journal*"), *Path(dir).glob("slab-*")]
    return all(os.access(path, os.W_OK, effective_ids=True) for path in paths)


def durable_home(dir: str, read_only: bool) -> DurableHome:
    """Return the home of a durable store; where the folder cannot be written, one to read."""
    if read_only:
        return DurableHome(dir, read_only=True)
    try:
        return DurableHome(dir)
    except StorageError as e:
        if e.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not os.access(f"{dir}/journal", os.R_OK):
            raise
        home = DurableHome(dir, read_only=True)
        _logger.warning("%s; it is opened read-only", e)
        return home


def is_direct(home: Path, engine: Engine, direct: Literal["auto"] | bool, read_only: bool) -> bool:
    """Return whether files there bypass the page cache. The first file of a disk that does without logs that."""
    probe = next(home.glob("slab-*"), None) if read_only else home / ".cudafuture-probe"
    if probe is None:
        return False
    try:
        with File(probe, "r" if read_only else "w", engine=engine, direct=direct) as file:
            return file.is_direct and file._native.unit <= PAGE
    except StorageError:
        if direct is True:
            raise
        return False  # a disk that is full can be read all the same
    finally:
        if not read_only:
            probe.unlink(missing_ok=True)


def log_recovery(dir: str, read_only: bool, found: dict[str, Any]) -> None:
    """Warn of damage and of a torn batch that opening a durable store has found, and say what it has removed."""
    if found["has_lost_header"]:
        _logger.warning("%s/journal: one of its two headers is damaged; the other one is used", dir)
    if found["removed"]:
        _logger.info("%s: removed %s, which no key had, as after a crash", dir, ", ".join(found["removed"]))
    if found["torn_bytes"]:
        if read_only:
            where = "were left out"
        elif found["set_aside"]:
            where = f"were dropped; they are in {found['set_aside']}"
        else:
            where = "were dropped; the disk had no room for a copy of them"
        keys = ", ".join(map(repr, found["torn_keys"][:10])) + (", ..." if len(found["torn_keys"]) > 10 else "")
        _logger.warning(
            "%s/journal: its last %d bytes are not whole, as after a crash, and %s; keys in them: %s",
            dir,
            found["torn_bytes"],
            where,
            keys or "none",
        )


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
def _locked(path: Path, flags: int = 0) -> Iterator[None]:
    lock = _open_locked(path, flags)
    try:
        yield
    finally:
        _close(lock)


def _open_locked(path: Path, flags: int) -> int:
    while True:
        try:
            lock = _open(path, os.O_RDONLY)  # perhaps another user's: in a sticky folder O_CREAT would fail
        except FileNotFoundError:
            lock = _open(path, os.O_RDONLY | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | flags)
            if os.fstat(lock).st_nlink != 0:
                return lock
        except BaseException:
            _close(lock)
            raise
        _close(lock)  # the process that had the lock has removed the file


@contextlib.contextmanager
def _storage_errors(dir: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as e:
        raise StorageError(f"no store in {dir}: {e.strerror}", errno=e.errno, path=dir) from e
