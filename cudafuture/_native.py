"""Refuses to go on where the native module is missing or was built for another torch.

Imported before anything else that touches ``cudafuture._C``. A native module that does not fit its torch would end in
an undefined symbol at best, and a checkout that is not built has a folder ``_C`` of C++ sources, which Python takes for
a package and imports without a word.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_SUPPORTED = "torch 2.12 to 2.15"


def _require_built() -> str:
    """Return the torch version that the native module was built against; ImportError where there is no such module."""
    try:
        from cudafuture._build_info import torch_version
    except ModuleNotFoundError:
        torch_version = ""
    native = importlib.util.find_spec("cudafuture._C")
    if not torch_version or native is None or not native.has_location:
        raise ImportError(
            f"cudafuture is not built: run `make setup` in its checkout (it was found in {Path(__file__).parent})"
        )
    return torch_version


def _require_same_torch(built: str) -> None:
    """Compare the minor version of the torch that is imported with the one that the native module was built against."""
    import torch

    found = str(torch.__version__)
    if found.split(".")[:2] != built.split(".")[:2]:
        raise ImportError(
            f"cudafuture was built against torch {built} but torch {found} is imported; install torch {built}, or "
            "build cudafuture again: `make clean setup` in its checkout, or `pip install --no-build-isolation`; "
            f"it supports {_SUPPORTED}"
        )


_require_same_torch(_require_built())
