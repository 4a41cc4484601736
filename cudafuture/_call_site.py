"""Line of the program that called the library, for messages of the debugging modes."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["call_site"]

_PACKAGE = Path(__file__).parent
_PACKAGES = (f"{_PACKAGE}/", f"{_PACKAGE.with_name('rpc_ext')}/")


def call_site() -> str:
    """Return the innermost line outside of the library's packages."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGES):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}()"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
