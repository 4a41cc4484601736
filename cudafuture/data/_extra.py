"""Packages of the extra `tgz`, which are imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["extra"]


def extra(module: str, purpose: str) -> Any:
    """Import a module of the extra `tgz`.

    Raises:
        ImportError: the module is not installed; the message names the package.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = "Pillow" if module.startswith("PIL") else module
        raise ImportError(f"{purpose} needs {package}: run `pip install {package.lower()}`") from e
