"""Conversion of paths to the form that the native engine takes."""

from __future__ import annotations

import os

__all__ = ["path_text"]


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as text.

    Raises:
        TypeError: `path` is not a path, or a path of bytes.
        ValueError: it is not UTF-8 (a surrogate stands for a byte that is not), or has a NUL.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path is a str or an os.PathLike of one, not {path!r}")
    if "\0" in text:
        raise ValueError(f"the path {text!r} has a NUL")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"the path {text!r} is not UTF-8, so no file can have it: {e}") from None
    return text
