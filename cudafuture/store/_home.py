"""Folders of stores: their locks, and the removal of folders whose process has died.

::

    dir/.stores            locked while a store is created, swept or removed; removed with the last ephemeral store
    dir/.new-store-*       a store that is being created, or removed
    dir/store-*/lease      locked while an ephemeral store lives
    dir/lock               locked while a durable store is open; holds the pid of its process

The locks are flock's, which the kernel drops with the process, however the process ends.
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
from cudafuture.io.engine import PAGE, Engine
from cudafuture.io.file import File

__all__ = ["DurableHome", "EphemeralHome", "durable_home", "is_direct", "log_recovery"]

_logger = logging.getLogger("cudafuture.store")

_PREFIX = "store-"
_NEW = ".new-"
_locks: set[int] = set()  # descriptors that hold locks, or wait for them


def _leave_to_parent() -> None:
    """Close a forked child's copies of the locks, which would otherwise be held until the child exits."""
    for lock in list(_locks):
        os.close(lock)
    _locks.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class EphemeralHome:
    """Folder of one ephemeral store inside `dir`, which another store removes after its process has died."""

    def __init__(self, dir: str) -> None:
        with _disk_errors(dir):
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
        """Remove the folder, and after the last one the file that was locked to create it."""
        home = Path(self.path)
        _remove(home)
        _close(self.lock)
        # Do not block: the garbage collector may call this in a thread that is creating another store.
        with contextlib.suppress(OSError), _locked(home.parent / ".stores", fcntl.LOCK_NB):
            if not any(home.parent.glob(f"{_PREFIX}*")) and not any(home.parent.glob(f"{_NEW}{_PREFIX}*")):
                (home.parent / ".stores").unlink()


class DurableHome:
    """Folder `dir` of a durable store, of one process that writes, or of several that read."""

    def __init__(self, dir: str, *, read_only: bool = False) -> None:
        self.path, self.read_only = dir, read_only
        self.lock: int | None
        with _disk_errors(dir):
            if read_only:
                self.lock = _read_lock(dir)
                return
            for folder in _make(Path(dir)):
                with contextlib.suppress(PermissionError):  # another user's folder, which existed before
                    _sync(folder.parent)
            self.lock = _lock_or_fail(dir, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
            try:
                if not _is_writable(dir):
                    raise PermissionError(errno.EACCES, "no right to write to the folder, its journal or a slab")
            except BaseException:
                _close(self.lock)
                raise
            with contextlib.suppress(OSError):  # a full disk: other processes then cannot name this one
                os.pwrite(self.lock, f"{os.getpid():<20}".encode(), 0)

    def leave(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            _close(self.lock)


def _read_lock(dir: str) -> int | None:
    """Return the descriptor of a lock that readers share; None if a copy of a store has no lock file."""
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
        file = os.fstat(lock)
        is_own = any(os.path.samestat(os.fstat(other), file) for other in _locks if other != lock)
        _close(lock)
        if is_own:
            message = f"{dir} is a durable store that this process has open: use that DiskStore, or close it first"
        else:
            message = f"{dir} is a durable store that process {owner} has open: end it, or use another folder"
        raise StorageError(message, errno=errno.EBUSY, path=dir) from None
    except BaseException:
        _close(lock)
        raise
    return lock


def _is_writable(dir: str) -> bool:
    paths = [Path(dir), *Path(dir).glob("journal*"), *Path(dir).glob("slab-*")]
    return all(os.access(path, os.W_OK, effective_ids=True) for path in paths)


def durable_home(dir: str, read_only: bool) -> DurableHome:
    """Return the home of a durable store; if the folder cannot be written, return a read-only one."""
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
    """Return True if files there bypass the page cache. The first file of a disk that does not is logged."""
    probe = next(home.glob("slab-*"), None) if read_only else home / ".cudafuture-probe"
    if probe is None:
        return False
    try:
        with File(probe, "r" if read_only else "w", engine=engine, direct=direct) as file:
            return file.is_direct and file._native.unit <= PAGE
    except StorageError:
        if direct is True:
            raise
        return False  # a full disk can still be read
    finally:
        if not read_only:
            probe.unlink(missing_ok=True)


def log_recovery(dir: str, read_only: bool, found: dict[str, Any]) -> None:
    """Log the damage and the torn batch that opening a durable store found, and the files that it removed."""
    if found["has_lost_header"]:
        _logger.warning("%s/journal: one of its two headers is damaged; the other one is used", dir)
    if found["removed"]:
        _logger.info("%s: removed %s, which no key uses, as after a crash", dir, ", ".join(found["removed"]))
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
    """Remove the remains of stores whose process has died. The caller holds the lock of the folder."""
    for unfinished in dir.glob(f"{_NEW}{_PREFIX}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for home in dir.glob(f"{_PREFIX}*"):
        try:
            lease = _open(home / "lease", os.O_RDWR)
        except OSError:  # its owner has just removed it, or it is not a store
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
    """Rename a store, then remove it: if this is cut short, the remains are swept too."""
    with contextlib.suppress(OSError):
        home = home.rename(home.with_name(_NEW + home.name))
    shutil.rmtree(home, ignore_errors=True)


def _make(folder: Path) -> list[Path]:
    """Create a folder and its parents; return the folder and the parents that did not exist, the outermost first."""
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
    """Sync a folder, so that the names in it survive a crash."""
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
            lock = _open(path, os.O_RDONLY)  # possibly another user's: in a sticky folder O_CREAT would fail
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
def _disk_errors(dir: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as e:
        reason = "it is a file; pass a folder" if e.errno == errno.EEXIST else e.strerror
        raise StorageError(f"no store can be opened in {dir}: {reason}", errno=e.errno, path=dir) from e
