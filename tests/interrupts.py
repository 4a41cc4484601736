"""Ctrl-C at a chosen line of a package."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from typing import Any


def interrupt_at(line: int, folder: str, body: Callable[[], object]) -> bool:
    """Run `body`, and raise KeyboardInterrupt at that line of a folder, counted as they run. False: it has fewer."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(folder):
            return None
        # Python itself cannot unlock a lock when Ctrl-C comes between `with` and its block.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith("with "):
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        body()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return count >= line
