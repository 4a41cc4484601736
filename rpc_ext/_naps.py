"""Waiting that Ctrl-C ends, whenever it comes.

Python looks for signals before it waits for a lock, and when a signal wakes it. One that comes in between, or that
another thread got, is seen when the wait is over. So nobody waits long at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["wait"]

_LONGEST = 0.25  # seconds


def wait(nap: Callable[[float], bool], timeout: float = math.inf) -> bool:
    """Call `nap` with the seconds that it may wait, until it returns True; return False after `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        left = max(0.0, end - time.monotonic())
        if nap(min(left, _LONGEST)):
            return True
        if not left:
            return False
