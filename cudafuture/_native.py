"""Guard against a native module that is missing or was built for another torch.

It is imported before any module that touches ``cudafuture._C``. A native module of another torch fails with an
undefined symbol at best. A checkout that is not built has a folder ``_C`` of C++ sources, which Python imports as a
package without an error.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_SUPPORTED = "torch 2.11 to 2.15"


def _require_built() -> str:
    """Return the torch version that the native module was built against; raise ImportError if it is not built."""
    try:
        from cudafuture._build_info import torch_version
    except ModuleNotFoundError:
        torch_version = ""
    native = importlib.util.find_spec("cudafuture._C")
    if not torch_version or native is None or not native.has_location:
        raise ImportError(_not_built())
    return torch_version


def _not_built() -> str:
    """Return the message for sources without a native module, which may hide an installed package."""
    found = Path(__file__).parent
    for other in (Path(entry, found.name) for entry in sys.path):
        if (other / "_build_info.py").exists() and not other.samefile(found):
            return (
                f"cudafuture is not built in {found}, which hides the package that is installed in {other}: "
                f"{found.parent} comes first in sys.path. Run Python in another folder, or build it: run `make setup` "
                f"in {found.parent}"
            )
    return f"cudafuture is not built: run `make setup` in its checkout (it was found in {found})"


def _require_same_torch(built: str) -> None:
    """Raise ImportError unless the imported torch has the minor version that the native module was built against."""
    import torch

    found = str(torch.__version__)
    if found.split(".")[:2] != built.split(".")[:2]:
        raise ImportError(
            f"cudafuture was built against torch {built} but torch {found} is imported; run "
            f"`pip install 'torch=={'.'.join(built.split('.')[:2])}.*'`, or build cudafuture again in its checkout: "
            f"`make clean setup`, or `pip install --no-build-isolation .`; it supports {_SUPPORTED}"
        )


_require_same_torch(_require_built())
