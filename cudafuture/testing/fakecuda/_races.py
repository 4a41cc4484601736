"""Races between streams of fake CUDA devices."""

from __future__ import annotations

import contextlib
import logging

from cudafuture.testing.fakecuda._library import library, text
from cudafuture.testing.machine._reports import Detection, Report, ReportQueue, Site

__all__ = ["detect_races", "log_unread", "races"]


def _take_new() -> list[Report]:
    if not library().fakecuda_detects_races():
        raise RuntimeError("this process does not detect races; run: python -m cudafuture.testing.fakecuda --races")
    return [_report(each) for each in text("fakecuda_take_races").split("\x1d") if each]


def _report(fields: str) -> Report:
    """Return the report in a text of ``control/control.cpp``."""
    kind, summary, *sites = fields.split("\x1e")
    found: dict[str, Site] = {}
    for site in filter(None, sites):
        side, operation, stack = site.split("\x1f")
        found[side] = Site.of(operation, stack)
    return Report(kind, summary, found.get("earlier"), found.get("later"))


_reports = ReportQueue(_take_new, library, logging.getLogger("cudafuture.testing.fakecuda"))


def log_unread() -> None:
    """Log the races that the program has not taken: the module that torch loads calls it at the end of the process."""
    _reports.log_unread()


def races() -> list[Report]:
    """Return the races found since the last call, each pair of code sites once. Print each with ``str()``.

    Races are found when an operation is enqueued, from the order that streams and events impose, and not from the time
    at which operations run. But a query that finds an event or a stream finished orders all later work of the process
    after it, also a query of torch's allocators or of the NCCL watchdog, and its success depends on time. So a race can
    stay hidden in one run and show in another: use the schedule ``lazy``, or ``jitter`` with several seeds.

    Every report has the kind ``race``. torch's caching allocators reuse memory without a call of the runtime, so early
    reuse is a ``race`` of the next write. In "stream 5 of cuda:0", 5 is the number of streams that the process had
    created before, on all devices. torch creates the 32 streams of a pool together.

    Raises:
        RuntimeError: the process was started without race detection.

    >>> with torch.cuda.stream(torch.cuda.Stream()):
    ...     x = torch.ones(4, device="cuda")
    >>> total = x.sum()
    >>> [report.kind for report in fakecuda.races()]
    ['race']
    """
    return _reports.take()


def detect_races() -> contextlib.AbstractContextManager[None]:
    """Raise RaceError at the end of the block if a race was found in it. Earlier races are dropped.

    If the block raises something else, the reports become a note of that exception.

    >>> with fakecuda.detect_races():
    ...     with torch.cuda.stream(torch.cuda.Stream()):
    ...         x = torch.ones(4, device="cuda")
    ...     total = x.sum()
    Traceback (most recent call last):
        ...
    cudafuture.testing.sim.RaceError: race: aten::sum on the default stream of cuda:0 reads 16 bytes ...
    """
    return Detection(_reports)
