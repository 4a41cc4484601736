"""Ctrl-C at a chosen line."""

from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable
from typing import Any


def interrupt_at(line: int, places: str | tuple[str, ...], body: Callable[[], object]) -> bool:
    """Run `body`, and raise KeyboardInterrupt at the line with that number, counted as lines of files run.

    `places` are the beginnings of the files' names. Returns False where fewer lines have run. The garbage collector is
    off meanwhile: an interrupt in a finalizer of an earlier object would be one that nothing can catch.
    """
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(places):
            return None
        # Python itself cannot unlock a lock when Ctrl-C comes between `with` and its block.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith("with "):
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    collects = gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        body()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        if collects:
            gc.enable()
    return count >= line
