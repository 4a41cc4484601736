"""Survival of a message that is larger than this rank expects, on which Gloo would end the process.

The native module stops Gloo's thread instead. This module keeps the thread's error for the collectives that time out
because of it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from torch.distributed import distributed_c10d as c10d

from cudafuture import _C
from cudafuture.distributed._group import groups
from cudafuture.timer import schedule

__all__ = ["failures"]

_logger = logging.getLogger("cudafuture.distributed")
_INTERVAL = 0.1  # seconds between two checks for overdue collectives
_GRACE = 0.5  # seconds that a healthy group gets to report its own timeout

failures: list[str] = []
"""The errors that ended Gloo's threads, in order."""


def _keep_groups(message: str) -> object:
    """Return every group: one of them cannot be destroyed any more, and the error does not show which one."""
    failures.append(message)
    try:
        schedule(_overdue_check, time.perf_counter() + _INTERVAL)
    except RuntimeError:  # the system has no more threads; the next failure tries again
        _logger.exception("overdue collectives stay pending: no thread could be started to fail them")
    side_groups = [side_group for _, state in list(groups.values()) for side_group in state.side_groups()]
    return [*c10d._world.pg_map, *side_groups]


class _OverdueCheck:
    """Failing of the collectives that the dead thread would have completed.

    Gloo waits for its thread beyond its own timeout.
    """

    def look(self, now: float) -> float:
        """Fail the overdue collectives; return the time of the next check. Called by the timer thread."""
        try:
            _C.fail_overdue(_GRACE, _note_broken)
        except Exception:  # other collectives may be overdue
            _logger.exception("failing overdue collectives raised an error; they are tried again")
        return now + _INTERVAL


_overdue_check = _OverdueCheck()


def _note_broken(issue: Any) -> None:
    issue.group.is_broken = True


_C.survive_gloo(_keep_groups)
