"""The files in which processes keep their progress in each process group (``core/progress.h``)."""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GroupProgress", "ProcessProgress", "is_alive", "not_issued_by", "progress_in", "read_progress", "start_of"]

_HEADER = struct.Struct("=8s4i64s104x")  # as ProgressFile::Layout
_GROUP = struct.Struct("=64s40s2i3q32s24x")  # as GroupRecord
_LARGEST = _HEADER.size + 512 * _GROUP.size
_MAGIC = b"cfprog1\0"


@dataclass(frozen=True)
class GroupProgress:
    """Progress of one process in one process group."""

    name: str
    id: str  # the same on all ranks of the group; empty: the ranks could not agree
    rank: int
    size: int
    issued: int  # operations
    ended: int
    issued_at: int  # of the last one, nanoseconds of CLOCK_MONOTONIC
    last: str  # its name


@dataclass(frozen=True)
class ProcessProgress:
    """Progress of one process. A negative rank: it is not known."""

    process: int
    rank: int
    world_size: int
    worker: str
    groups: tuple[GroupProgress, ...]

    def group(self, id_: str) -> GroupProgress | None:
        """Return the progress in the group with an id; None: the process is not in it, or the id is empty.

        The last record counts: a group that was destroyed and made again on one store has the same id.
        """
        return next((group for group in reversed(self.groups) if id_ and group.id == id_), None)


def read_progress(path: Path) -> ProcessProgress | None:
    """Read the file of a process; None: there is none, or another version has written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(_LARGEST) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return None
    if len(data) < _HEADER.size:
        return None
    magic, process, rank, size, count, worker = _HEADER.unpack_from(data)
    if magic != _MAGIC or len(data) < _HEADER.size + count * _GROUP.size:
        return None
    groups = [_GROUP.unpack_from(data, _HEADER.size + i * _GROUP.size) for i in range(count)]
    return ProcessProgress(process, rank, size, _text(worker), tuple(map(_group, groups)))


def _group(fields: tuple[bytes, bytes, int, int, int, int, int, bytes]) -> GroupProgress:
    name, id_, rank, size, issued, ended, issued_at, last = fields
    return GroupProgress(_text(name), _text(id_), rank, size, issued, ended, issued_at, _text(last))


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")


def progress_in(folder: Path) -> Iterator[ProcessProgress]:
    """Yield the progress of each process that has a file in `folder`."""
    for path in sorted(folder.glob("*.progress")):
        progress = read_progress(path)
        if progress is not None:
            yield progress


def is_alive(process: int) -> bool:
    """Return True if there is a process with this number, of any user."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def start_of(process: int) -> float | None:
    """Return the time at which a process started, in seconds since the epoch, to a hundredth; None: there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def not_issued_by(folder: str, group: str, number: int) -> str:
    """Name the ranks of a group on this machine that have not issued an operation; the native module calls this.

    Args:
        folder: of the files; empty: there are none.
        group: id of the group.
        number: of the operation, from 0.
    """
    if not folder or not group:
        return ""
    try:
        if os.lstat(folder).st_uid != os.geteuid():  # another user's
            return ""
    except OSError:
        return ""
    late: dict[int, str] = {}
    for process in progress_in(Path(folder)):
        progress = process.group(group)
        if progress is not None and progress.issued <= number:
            rank = process.rank if process.rank >= 0 else progress.rank
            late[rank] = f"rank {rank}" + ("" if is_alive(process.process) else ", which is dead")
    return " and ".join(late[rank] for rank in sorted(late))
