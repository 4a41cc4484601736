"""Classes of an archive that is read without an index."""

from __future__ import annotations

from cudafuture.data._archive_stream import open_stream
from cudafuture.data._faults import IGNORED, Fault
from cudafuture.data._index_source import log_ignored
from cudafuture.data._tar import members_of

__all__ = ["scan_classes"]


def scan_classes(path: str) -> tuple[list[str], Fault | None]:
    """Read an archive once; return its classes, sorted, and the fault that stopped the read, or None."""
    classes: set[str] = set()
    ignored: list[str] = []
    fault = None
    try:
        with open_stream(path) as stream:
            for member in members_of(stream):
                if member.fault is None:
                    classes.add(member.label)
                elif member.fault.reason == IGNORED:
                    ignored.append(member.name)
    except Fault as e:
        fault = e.with_traceback(None)
    log_ignored(path, ignored)
    return sorted(classes), fault
