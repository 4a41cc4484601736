"""Number of lines that a call executes: work that does not depend on the speed of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import cudafuture

PACKAGE = Path(cudafuture.__file__).parent
FOLDERS = tuple(str(PACKAGE / folder) for folder in ("swap", "compat"))


def count_lines(call: Callable[[], object]) -> int:
    """Return how many lines of swap and compat a call executes in this thread, each iteration of a loop counted."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename.startswith(FOLDERS) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
