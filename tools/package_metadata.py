"""The metadata of the package that depends on the build: a provider for scikit-build-core, named in pyproject.toml.

- A wheel requires the minor version of torch that its native module is built against. The sdist requires the range of
  supported versions, and marks its requirements as dynamic.
- The description is the README without its links into the checkout, which lead nowhere on a package index.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NO_TORCH = (
    "cudafuture is built against the installed torch, and the Python that builds it has none. pip builds in an "
    "environment without your torch unless it gets --no-build-isolation. Install torch, then run: "
    "pip install {requires} cmake ninja && pip install --no-build-isolation ."
)


class Provider:
    """The hooks that scikit-build-core calls; https://dynamic-metadata.readthedocs.io defines them."""

    _is_sdist = False

    def build_state(self, build_state: str) -> None:
        """Keep what is built: ``sdist``, or one of the states of a wheel."""
        self._is_sdist = build_state == "sdist"

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        """Return the fields in which a wheel differs from its sdist."""
        return {"dependencies": True}

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields for the `dependencies` of the settings; raise SystemExit where a wheel has no torch."""
        dependencies: list[str] = settings["dependencies"]
        if not self._is_sdist:
            dependencies = [_installed_requirement() if re.match(r"torch\b", d) else d for d in dependencies]
        readme = Path("README.md").read_text(encoding="utf-8")
        text = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", readme)
        return {"dependencies": dependencies, "readme": {"content-type": "text/markdown", "text": text}}


def _installed_requirement() -> str:
    """Return the requirement of the installed torch's minor version."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        text = Path("pyproject.toml").read_text(encoding="utf-8")
        requires = re.search(r"^requires = \[(.*)\]$", text, re.MULTILINE)
        raise SystemExit(_NO_TORCH.format(requires=requires[1].replace(",", "") if requires else "")) from None
    major, minor = version.split(".")[:2]
    return f"torch=={major}.{minor}.*"
