"""Reports of the race detector of the simulated accelerator."""

from __future__ import annotations

import atexit
import contextlib
import logging

from cudafuture.testing.machine._reports import Detection, RaceError, Report, ReportQueue, Site
from cudafuture.testing.sim import _C as _native
from cudafuture.testing.sim._accelerator import is_enabled, settings

__all__ = ["RaceError", "Report", "Site", "detect_races", "races", "raise_races"]

_logger = logging.getLogger("cudafuture.testing.sim")


def _take_new() -> list[Report]:
    found = _native.take_reports()
    return [Report(kind, summary, _site(earlier), _site(later)) for kind, summary, earlier, later in found]


def _site(parts: tuple[str, str] | None) -> Site | None:
    return None if parts is None else Site.of(*parts)


def _generation() -> object:
    return settings() if is_enabled() else None


_reports = ReportQueue(_take_new, _generation, _logger)


def races() -> list[Report]:
    """Return the reports since the last call, and clear them. Print each with ``str()``, which shows both places.

    >>> sim.enable()
    >>> with torch.Stream("sim"):
    ...     x = torch.ones(4, device="sim")
    >>> total = x.sum()
    >>> [report.kind for report in sim.races()]
    ['race']
    """
    return _reports.take()


class _SimDetection(Detection):
    def __enter__(self) -> None:
        if not settings().detect:
            raise RuntimeError("the simulated accelerator does not detect races: call sim.enable(detect=True)")
        super().__enter__()


def detect_races() -> contextlib.AbstractContextManager[None]:
    """Raise RaceError at the end of the block if a race was found in it. Earlier reports are dropped.

    If the block raises something else, a wrong value for instance, the reports become a note of that exception.

    >>> sim.enable()
    >>> with sim.detect_races():
    ...     with torch.Stream("sim"):
    ...         x = torch.ones(4, device="sim")
    ...     total = x.sum()
    Traceback (most recent call last):
        ...
    cudafuture.testing.sim.RaceError: race: aten::sum on the default stream of sim:0 reads 16 bytes ...
    """
    return _SimDetection(_reports)


def raise_races() -> None:
    """Raise RaceError if there are reports that the program has not taken."""
    __tracebackhide__ = True
    _reports.raise_or_note(None)


def _log_unread() -> None:
    with contextlib.suppress(RuntimeError):  # a forked child has no accelerator
        _reports.log_unread()


atexit.register(_log_unread)
