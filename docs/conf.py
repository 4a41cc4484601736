"""Sphinx configuration: pages in Markdown, the reference from the docstrings, native signatures from the stub."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "cudafuture"
author = "The cudafuture authors"
copyright = "2026, The cudafuture authors"
release = importlib.metadata.version("cudafuture")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

default_role = "code"  # single backticks in docstrings
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"cudafuture {release}"

STUB = Path(__file__).parents[1] / "cudafuture" / "_C.pyi"


def signatures_of_the_stub() -> dict[str, tuple[str, str]]:
    """Return parameters and result of every method of the native classes: nanobind itself only knows `object`."""
    found: dict[str, tuple[str, str]] = {}
    classes = [node for node in ast.parse(STUB.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    for cls in classes:
        for method in [node for node in cls.body if isinstance(node, ast.FunctionDef)]:
            if method.args.args and method.args.args[0].arg in ("self", "cls"):
                del method.args.args[0]
            returns = ast.unparse(method.returns) if method.returns is not None else ""
            found[f"{cls.name}.{method.name}"] = f"({ast.unparse(method.args)})", returns
    return found


SIGNATURES = signatures_of_the_stub()


def use_the_stub(_: Sphinx, what: str, name: str, *rest: Any) -> tuple[str, str] | None:
    """Show a native method as the stub has it, and a native class with the parameters of its constructor."""
    arguments = rest[2]
    if arguments is None:  # a property, or a class without a constructor
        return None
    if what == "class":
        return SIGNATURES.get(f"{name.split('.')[-1]}.__init__", (arguments, ""))[0], ""
    return SIGNATURES.get(".".join(name.split(".")[-2:]))


def keep_sentences(_: Sphinx, what: str, __: str, ___: object, ____: object, lines: list[str]) -> None:
    """Keep napoleon from taking what stands before a property's colon for its type."""
    if what == "property":
        lines[:0] = ["..", ""]


def setup(app: Sphinx) -> None:
    """Hook into autodoc, before napoleon does."""
    app.connect("autodoc-process-signature", use_the_stub)
    app.connect("autodoc-process-docstring", keep_sentences, priority=400)
