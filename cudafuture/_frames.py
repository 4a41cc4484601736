"""The frames of the program that calls the library: for the line that makes a future, and for warnings."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch
import typing_extensions

__all__ = ["LIBRARY", "call_site", "is_called_from", "line_of", "warn"]

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_FOLDERS = (_HERE, _HERE.parent / "rpc_ext", _TORCH)  # torch calls an optimizer's step, and hooks
# torch marks some functions as deprecated with a wrapper of one of these.
_WRAPPERS = (typing_extensions.__file__, warnings.__file__)
LIBRARY = (*(str(folder) + os.sep for folder in _FOLDERS), *_WRAPPERS)


def call_site() -> str:
    """Return the innermost line outside of the library and torch, with its file and function."""
    return line_of(sys._getframe())  # its caller may be native, in a thread without other frames


def line_of(frame: FrameType | None) -> str:
    """Return the innermost line outside of the library and torch, of a thread that is in `frame`."""
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARY):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}()"


def warn(message: str) -> None:
    """Issue a RuntimeWarning for the innermost line outside of the library and torch."""
    frame: FrameType | None = sys._getframe(0)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARY):
        frame = frame.f_back
        level += 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def is_called_from(folder: Path) -> bool:
    """Return True if a file in `folder` called torch, which called the file that calls this function."""
    own = sys._getframe(1)
    skipped = (own.f_code.co_filename, str(_TORCH) + os.sep, *_WRAPPERS)
    frame: FrameType | None = own
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(str(folder) + os.sep)
