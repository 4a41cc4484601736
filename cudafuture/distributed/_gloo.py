"""What Gloo cannot survive by itself: a message that is larger than this rank expects.

Gloo ends the process then. The native module stops Gloo's thread instead; what it told is kept here for the errors of
the collectives that time out because of it.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from torch.distributed import distributed_c10d as c10d

from cudafuture import _C
from cudafuture.distributed._group import groups

__all__ = ["failures"]

_logger = logging.getLogger("cudafuture.distributed")
_started = False  # the thread that fails overdue collectives
_PAUSE = 0.1  # seconds between two looks at what is overdue
_GRACE = 0.5  # seconds that a healthy group gets to say so itself

failures: list[str] = []
"""What Gloo's threads died of, in order."""


def _keep_groups(message: str) -> object:
    """Return every group there is: one of them cannot be destroyed any more, and which one nobody knows."""
    global _started
    failures.append(message)
    if not _started:
        try:
            threading.Thread(target=_fail_overdue, name="cudafuture-gloo", daemon=True).start()
            _started = True
        except RuntimeError:  # the system has no more threads; the next failure tries again
            _logger.exception("overdue collectives cannot be failed: no thread could be started")
    companions = [companion for _, state in list(groups.values()) for companion in state.companions()]
    return [*c10d._world.pg_map, *companions]


def _fail_overdue() -> None:
    """Fail what the dead thread would have completed: Gloo waits for it beyond its own timeout."""
    pause = threading.Event()
    while not pause.wait(_PAUSE):
        try:
            _C.fail_overdue(_GRACE, _note_broken)
        except Exception:  # the thread goes on: others are overdue, too
            _logger.exception("overdue collectives could not be failed")


def _note_broken(issue: Any) -> None:
    issue.group.is_broken = True


_C.survive_gloo(_keep_groups)
