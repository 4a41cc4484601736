"""``rpc_ext`` uses only public names of ``cudafuture``: in imports, attributes, and strings of its C++ files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from layout.tree import PACKAGE, ROOT, is_module, module_name, python_files, read_all, rpc_files


def is_public(module: str, name: str | None = None) -> bool:
    """Return whether a module of cudafuture, or a name in it, is public: the module lists the name in ``__all__``."""
    parts = [*module.split("."), *([] if name is None else [name])]
    if name is not None and is_module(f"{module}.{name}"):
        module, name = f"{module}.{name}", None
    file = ROOT.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    if any(re.match("_(?!_)", part) for part in parts) or not file.is_file():
        return False
    listed = read_all(ast.parse(file.read_text(encoding="utf-8"))) or []
    return name is None or name in listed or name.startswith("__")


def private_names() -> set[str]:
    """Return the names with one underscore that cudafuture gives attributes, methods, functions and classes."""
    found: set[str] = set()
    for file in [*python_files("cudafuture"), PACKAGE / "_C.pyi"]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
    return {name for name in found if re.match("_(?!_)", name)}


PRIVATE = private_names()

MODULE = re.compile(r"cudafuture(?:\.\w+)*")

# A module of cudafuture in a string, and the name that C++ takes out of it: python("m", "n"), import("m").attr("n").
IN_STRING = re.compile(rf'"({MODULE.pattern})"(?:\s*\)?\s*(?:,|\.attr\()\s*"(\w+)")?')


def own_objects(tree: ast.Module) -> set[int]:
    """Return the nodes that are objects of the file's own classes: self and cls, and parameters annotated as such.

    In a class that derives from one of cudafuture, self is not one of them.
    """
    foreign = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cudafuture"
        for alias in node.names
    }
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own: set[int] = set()
    for scope in ast.walk(tree):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {arg.arg for arg in scope.args.args if words_in(arg.annotation) & {cls.name for cls in classes}}
            names |= {"self", "cls"}
            own |= {id(node) for node in ast.walk(scope) if isinstance(node, ast.Name) and node.id in names}
    for cls in classes:
        if any(words_in(base) & foreign for base in cls.bases):
            own -= {id(node) for node in ast.walk(cls)}
    return own


def words_in(node: ast.expr | None) -> set[str]:
    return set() if node is None else set(re.findall(r"\w+", ast.unparse(node)))


def private_uses(source: str) -> list[str]:
    """Return the uses, in a Python file of another package, of what is private to cudafuture.

    These are names that are not public, imported or taken out of a module that was imported; attributes with the name
    of a private one of cudafuture, which the file's own objects may have; and strings that name a private attribute or
    a module of cudafuture, but not those of ``__slots__``.
    """
    tree = ast.parse(source)
    own = own_objects(tree)
    modules = imported_modules(tree)
    found = private_strings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cudafuture":
            found += [f"{node.module}.{a.name}" for a in node.names if not is_public(node.module or "", a.name)]
        elif isinstance(node, ast.Import):  # import names from it
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == "cudafuture"]
        elif isinstance(node, ast.Attribute):
            module = module_of(node.value, modules)
            is_private = node.attr in PRIVATE and id(node.value) not in own
            if is_private or (module is not None and not is_public(module, node.attr)):
                found.append(ast.unparse(node))
    return found


def private_strings(tree: ast.Module) -> list[str]:
    """Return the strings that name a module of cudafuture, a private attribute, or a path of attributes with one."""
    slots = [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__slots__"]
    own = {id(node) for value in slots for node in ast.walk(value)}
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in own]
    texts = [string for string in strings if isinstance(string, str)]
    return [text for text in texts if MODULE.fullmatch(text) or not PRIVATE.isdisjoint(text.split("."))]


def imported_modules(tree: ast.Module) -> dict[str, str]:
    """Return the modules of cudafuture that a file imports, by their name in the file."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and MODULE.fullmatch(node.module or "")
        for alias in node.names
        if is_module(f"{node.module}.{alias.name}")
    }


def module_of(node: ast.expr, modules: dict[str, str]) -> str | None:
    """Return the module of cudafuture that an expression names, or None."""
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    above = module_of(node.value, modules) if isinstance(node, ast.Attribute) else None
    return f"{above}.{node.attr}" if isinstance(node, ast.Attribute) and is_module(f"{above}.{node.attr}") else None


def private_uses_in_cpp(source: str) -> list[str]:
    """Return the strings in a C++ file of another package that name something private to cudafuture.

    A string may name a module of cudafuture only beside the public name that is taken out of it.
    """
    modules = [
        f"{module}.{name}" for module, name in IN_STRING.findall(source) if not (name and is_public(module, name))
    ]
    return modules + [name for name in re.findall(r'"(_\w+)"', source) if name in PRIVATE]


@pytest.mark.parametrize("file", python_files("rpc_ext"), ids=module_name)
def test_rpc_ext_uses_the_public_api_only(file: Path) -> None:
    assert private_uses(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("file", rpc_files(), ids=lambda f: f.name)
def test_the_native_module_of_rpc_ext_uses_the_public_api_only(file: Path) -> None:
    assert private_uses_in_cpp(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "store._native.access()",
        "self.buffers._native",
        "stores[0]._native",
        "class Store: ...\ndef close(store: DiskStore): store._native",
        "class Session:\n    def f(self): self.store._native",
        "getattr(store, '_native')",
        "hasattr(store, '_native')",
        "vars(store)['_native']",
        "attrgetter('store._native')",
        "from cudafuture import swap\nswap.Unit",
        "from cudafuture import io\nio.engine.PAGE",
        "from cudafuture import io as files\nfiles._digests",
        "from cudafuture.io import engine\nengine.PAGE",
        'importlib.import_module("cudafuture.io").Missing',
        'io = importlib.import_module("cudafuture.io")\nio.aligned',
        "from cudafuture import _C",
        "from cudafuture._frames import call_site",
        "from cudafuture.store import _home",
        "from cudafuture.store.disk_store import is_direct",
        "from cudafuture.ownership import ENABLED",
        "from cudafuture.nothing import a",
        "import cudafuture.io",
        'importlib.import_module("cudafuture._tensors")',
        "from cudafuture.io import BufferPool\nclass Pool(BufferPool):\n    def f(self): self._native",
    ],
)
def test_a_private_name_is_found_in_python(source: str) -> None:
    assert private_uses(source)


@pytest.mark.parametrize(
    "source",
    [
        "class Sessions:\n    def add(self): self._native.add(token)",
        "class Store: ...\ndef close(store: Store | None): store._native",
        "rref._limited(1.0)",
        "from cudafuture import CUDAFuture, __version__, executors",
        "from cudafuture.io import Digest",
        "from cudafuture import executors, io\nexecutors.inline, io.Digest, io.engine.Engine",
        "from rpc_ext import _C",
        'hmac.digest(secret, b"cudafuture messages", "sha256")',
    ],
)
def test_a_public_name_is_allowed_in_python(source: str) -> None:
    assert private_uses(source) == []


@pytest.mark.parametrize(
    ("source", "is_private"),
    [
        ('python("cudafuture.io", "digest")', False),
        ('python("cudafuture.io",\n  "aligned")', True),
        ('python("cudafuture._frames", "call_site")', True),
        ('py::module_::import("cudafuture.errors").attr("TensorError")', False),
        ('py::module_::import("cudafuture.errors").attr("Missing")', True),
        ('py::module_::import("cudafuture._C")', True),
        ('auto m = py::module_::import("cudafuture.io"); m.attr("aligned")', True),
        ('store.attr("_native").attr("access")()', True),
        ('bytes_of(derived(key, "cudafuture seal: head"))', False),
    ],
)
def test_a_private_name_is_found_in_cpp(source: str, is_private: bool) -> None:
    assert bool(private_uses_in_cpp(source)) == is_private
