"""Conversion of paths to the form that the native engine takes."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["path_text"]


def path_text(path: str | os.PathLike[str], name: str = "path") -> str:
    """Return a path as text; errors of its type call it `name`.

    Raises:
        TypeError: `path` is not a path, or a path of bytes.
        ValueError: it is empty, not UTF-8 (a surrogate stands for a byte that is not), or has a NUL.
    """
    text: Any = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        remedy = ": decode it with os.fsdecode()" if isinstance(text, bytes) else ""
        raise TypeError(f"{name} is a str or an os.PathLike of one, not {path!r}{remedy}")
    if not text:
        raise ValueError(f"{name} is empty; the current folder is '.'")
    if "\0" in text:
        raise ValueError(f"the path {text!r} has a NUL, which no path has")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"the path {text!r} is not UTF-8, but the engine takes no other: rename it ({e})") from None
    return text
