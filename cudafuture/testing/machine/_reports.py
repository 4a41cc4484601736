"""Reports of the race detector, and the block that raises them."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Detection", "RaceError", "Report", "ReportQueue", "Site"]


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
    (the host touches pinned memory that a copy in flight uses), ``wrong_device`` or ``error``. ``fakecuda`` reports
    ``race`` alone: it does not see torch's allocator hand out memory, so that reuse is a ``race`` of the next write.

    ``str()`` of a report is the text for a reader: the kind, the sentence, and both sites.
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


class ReportQueue:
    """Reports that the program has not taken yet.

    Args:
        take_new: takes the detector's new reports.
        generation: returns an object that changes when the devices start afresh, and None while they are off. Reports
            of an earlier generation are dropped.
        logger: of unread reports, and of the notes in Python 3.10, whose exceptions have none.
    """

    def __init__(
        self, take_new: Callable[[], list[Report]], generation: Callable[[], object], logger: logging.Logger
    ) -> None:
        self._take_new = take_new
        self._generation = generation
        self._logger = logger
        self._noted: list[tuple[object, Report]] = []  # reports that are notes of an exception, with their generation

    def take(self) -> list[Report]:
        """Return the reports since the last call, and clear them."""
        kept = [report for generation, report in self._noted if generation is self._generation()]
        self._noted.clear()
        return kept + self._take_new()

    def log_unread(self) -> None:
        """Log, as the process ends, the reports that no exception shows; errors are left out: torch raised them."""
        self._noted.clear()
        found = [report for report in self._take_new() if report.kind != "error"]
        if found:
            text = "the program took none of %d reports of the race detector; the first: %s"
            self._logger.warning(text, len(found), found[0])

    def raise_or_note(self, error: BaseException | None) -> None:
        """Raise RaceError for the reports, or make them a note of `error`."""
        __tracebackhide__ = True
        found = self.take()
        if not found:
            return
        if error is None:
            raise RaceError(found)
        self._noted.extend((self._generation(), report) for report in found)  # the program may catch the error
        note = "\n\n".join(["The race detector reports, which may be the cause:", *map(str, found)])
        if sys.version_info >= (3, 11):
            error.add_note(note)
        else:
            self._logger.warning("%s", note)


class Detection(contextlib.ContextDecorator):
    """Block of a detect_races(). A generator would add the frame of contextlib to each report of a test."""

    def __init__(self, reports: ReportQueue) -> None:
        self._reports = reports

    def __enter__(self) -> None:
        self._reports.take()

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        __tracebackhide__ = True
        self._reports.raise_or_note(error)
