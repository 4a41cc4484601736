"""Names of files, each one noun, and what public modules offer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from layout.tree import (
    C10D,
    NATIVE,
    PACKAGE,
    ROOT,
    RPC,
    RPC_NATIVE,
    TESTING,
    python_files,
    read_all,
    source_files,
)

NOT_NOUNS = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}

PYTHON = python_files("cudafuture", "rpc_ext")
PUBLIC = [f for f in PYTHON if not any(p.startswith("_") and p != "__init__.py" for p in f.relative_to(ROOT).parts)]


def ids(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", source_files(), ids=ids)
def test_every_name_is_a_noun(file: Path) -> None:
    for part in file.relative_to(ROOT).with_suffix("").parts:
        assert not NOT_NOUNS & set(part.strip("_").split("_")), f"{part} says nothing about what is in it"


def bound_names(body: list[ast.stmt]) -> set[str]:
    """Return the names that a module's top level binds, also in its ifs and trys."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                for part in getattr(node, inner, []):
                    names |= bound_names(part.body if isinstance(part, ast.ExceptHandler) else [part])
    return names


def isort_key(name: str) -> tuple[int, str]:
    """Return the key by which ruff sorts, constants, then classes, then the rest: ``__all__``."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2), name


@pytest.mark.parametrize("file", PUBLIC, ids=ids)
def test_public_modules_define_all(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = read_all(tree)
    assert names is not None, "a public module has an __all__"
    assert names == sorted(set(names), key=isort_key), "__all__ is sorted and names a thing once"
    missing = set(names) - bound_names(tree.body)
    assert not missing, f"{sorted(missing)} in __all__ but not in the module"


@pytest.mark.parametrize("file", PUBLIC, ids=ids)
def test_public_modules_have_docstring(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("folder", [NATIVE, C10D, RPC_NATIVE], ids=ids)
def test_cpp_folder_is_no_package(folder: Path) -> None:
    assert not list(folder.rglob("*.py"))


@pytest.mark.parametrize("package", [PACKAGE, RPC], ids=ids)
def test_types_are_shipped(package: Path) -> None:
    assert (package / "py.typed").is_file()
    assert (package / "_C.pyi").is_file()


@pytest.mark.parametrize("package", [PACKAGE, RPC], ids=ids)
def test_stub_parses(package: Path) -> None:
    ast.parse((package / "_C.pyi").read_text(encoding="utf-8"))


def test_wheel_has_packages_without_private_sources() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (packages, excluded) = (
        re.search(rf"^wheel.{key} = (\[.*?\])$", text, re.MULTILINE | re.DOTALL) for key in ("packages", "exclude")
    )
    assert packages is not None
    assert ast.literal_eval(packages[1]) == [PACKAGE.name, "cudafuture_c10d", RPC.name]
    assert excluded is not None
    sources = {NATIVE, C10D, RPC_NATIVE, *(TESTING / "sim" / part for part in ("bind", "device", "ops", "runtime"))}
    assert {f"{ids(folder)}/**" for folder in sources} < set(ast.literal_eval(excluded[1]))
