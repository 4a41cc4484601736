"""Sphinx configuration: pages in Markdown, the reference from the docstrings, native signatures from the stub."""

from __future__ import annotations

import ast
import builtins
import importlib.metadata
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils.nodes import Text
from sphinx.addnodes import desc_parameter, pending_xref

if TYPE_CHECKING:
    from docutils.nodes import document
    from sphinx.application import Sphinx

project = "cudafuture"
author = "The cudafuture authors"
copyright = "2026, The cudafuture authors"
release = importlib.metadata.version("cudafuture")

extensions = [
    *("myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"),
    *("sphinx_copybutton", "sphinx_design"),
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
templates_path = ["_templates"]

default_role = "code"  # single backticks in docstrings
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# A reference that leads nowhere is a warning, except these, which signatures and lists of exceptions contain.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|typing|typing_extensions|collections|concurrent|contextlib|datetime|io|os|pathlib|queue)\..*"),
    (r"py:class", r"(\w+\.)*[A-Z]\d?"),  # type variables
    (r"py:class", r"(\w+\.)*_\w+(\.\w+)*"),  # private names
    (r"py:class", r"HostExecutor|TorchFuture|Work"),  # names of the stub
    (r"py:class", r"BufferLoan|cudafuture\.combine\.AsCompleted"),  # classes without an entry
    (r"py:class", r"dict\[str"),  # the first part of dict[str, A | None], which Sphinx divides
    (r"py:(class|exc)", r".* .*"),  # words in place of a type, such as "any exception"
]

copybutton_exclude = ".linenos, .gp, .go"  # copies what a person types, without prompts and output

html_theme = "furo"
html_title = f"cudafuture {release}"

if tags.has("online"):  # noqa: F821, Sphinx defines `tags`
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
    sidebar = ("brand", "search", "scroll-start", "navigation", "versions", "scroll-end")
    html_sidebars = {"**": [f"sidebar/{part}.html" for part in sidebar]}

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
    """Keep napoleon from reading the words before the first colon in the docstring of a value as its type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def unlink_builtins(_: Sphinx, page: document) -> None:
    """Show built-in types without a link: Sphinx would link `bytes` to an attribute of that name."""
    for reference in list(page.findall(pending_xref)):
        if reference["refdomain"] == "py" and hasattr(builtins, reference["reftarget"]):
            reference.replace_self(reference.children)


def remove_modules(_: Sphinx, page: document) -> None:
    """Remove the modules from the types of a signature that Sphinx cannot parse, such as ``~typing.~P``."""
    for parameter in page.findall(desc_parameter):
        for text in list(parameter.findall(Text)):
            if "~" in text:
                text.parent.replace(text, Text(re.sub(r"~(\w+\.)*", "", text)))


def setup(app: Sphinx) -> None:
    """Hook into autodoc, before napoleon does."""
    app.connect("autodoc-process-signature", use_the_stub)
    app.connect("autodoc-process-docstring", keep_sentences, priority=400)
    app.connect("doctree-read", unlink_builtins)
    app.connect("doctree-read", remove_modules)
