"""Reports of the race detector."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
from dataclasses import dataclass

from cudafuture.testing import _sim as _native
from cudafuture.testing.sim._accelerator import settings

__all__ = ["RaceError", "Report", "Site", "detect_races", "races"]

_logger = logging.getLogger("cudafuture.testing.sim")
_noted: list[tuple[object, Report]] = []
"""Reports that are notes of an exception, each with the settings of its accelerator."""


@dataclass(frozen=True)
class Site:
    """Site of a host action: the operation, and the Python stack, outermost call first."""

    operation: str
    stack: tuple[str, ...]

    @classmethod
    def of(cls, operation: str, stack: str) -> Site:
        """Return the site of an operation and the lines of a stack, without the frames of pytest's runner."""
        frames = stack.splitlines()
        runners = [i for i, frame in enumerate(frames) if "/_pytest/" in frame or "/pluggy/" in frame]
        return cls(operation, tuple(frames[runners[-1] + 1 :] if runners else frames))

    def __str__(self) -> str:
        return "\n".join([self.operation, *(f"  {line}" for line in self.stack)])


@dataclass(frozen=True)
class Report:
    """Finding of the race detector.

    ``kind`` is ``race`` (two streams touch the same bytes, one writes, and neither waits for the other), ``reuse``
    (memory was reused while another stream may still use it: ``record_stream`` is missing), ``host_race``
    (the host touches pinned memory that a copy in flight uses), ``wrong_device`` or ``error``.
    """

    kind: str
    summary: str
    earlier: Site | None
    later: Site | None

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.summary}"]
        if self.earlier is not None:
            lines.append(f"first: {self.earlier}")
        if self.later is not None:
            lines.append(f"then: {self.later}" if self.earlier is not None else f"at: {self.later}")
        return "\n".join(lines)


class RaceError(AssertionError):
    """Error of a program that does not order its device work. ``reports`` has the findings.

    Make the stream of the later access wait for the earlier one: ``stream.wait_stream()``, ``stream.wait_event()``, or
    the ``wait()`` of a future. If memory was reused, call ``tensor.record_stream()`` for each stream that uses the
    tensor, other than the one that it was allocated on.
    """

    __module__ = "cudafuture.testing.sim"  # its public module

    def __init__(self, reports: list[Report]) -> None:
        self.reports = reports
        super().__init__("\n\n".join(map(str, reports)))


def races() -> list[Report]:
    """Return the reports since the last call, and clear them.

    >>> sim.enable()
    >>> with torch.Stream("sim"):
    ...     x = torch.ones(4, device="sim")
    >>> total = x.sum()
    >>> [report.kind for report in sim.races()]
    ['race']
    """
    kept = [report for accelerator, report in _noted if accelerator is settings()]
    _noted.clear()
    return kept + [
        Report(kind, summary, _site(earlier), _site(later)) for kind, summary, earlier, later in _native.take_reports()
    ]


class _Detection(contextlib.ContextDecorator):
    """Block of `detect_races`. A generator would add the frame of contextlib to each report of a test."""

    def __enter__(self) -> None:
        if not settings().detect:
            raise RuntimeError("the simulated accelerator does not detect races: call sim.enable(detect=True)")
        races()

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        __tracebackhide__ = True
        found = races()
        if found and error is None:
            raise RaceError(found)
        if found and error is not None:
            _noted.extend((settings(), report) for report in found)  # the program may catch the error
            _add_note(error, "\n\n".join(["The race detector reports, which may be the cause:", *map(str, found)]))


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
    return _Detection()


def _add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        _logger.warning("%s", note)


def _log_what_nobody_took() -> None:
    _noted.clear()
    found: list[Report] = []
    with contextlib.suppress(RuntimeError):  # a forked child has no accelerator
        found = [report for report in races() if report.kind != "error"]  # torch has raised the errors
    if found:
        _logger.warning("the program took none of %d reports of the race detector; the first: %s", len(found), found[0])


atexit.register(_log_what_nobody_took)


def _site(parts: tuple[str, str] | None) -> Site | None:
    return None if parts is None else Site.of(*parts)
