"""Files of the checkout, with their imports and includes, for the layout tests. Nothing is executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "cudafuture"
NATIVE = PACKAGE / "_C"
C10D = PACKAGE / "_c10d"
TESTING = PACKAGE / "testing"
RPC = ROOT / "rpc_ext"
RPC_NATIVE = RPC / "_C"
CPP_TESTS = ROOT / "tests" / "cpp"

NATIVE_MODULES = {
    "cudafuture._C",
    "cudafuture._c10d",
    "cudafuture._build_info",
    "cudafuture.testing.sim._C",
    "rpc_ext._C",
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def python_files(*packages: str) -> list[Path]:
    """Return the Python files of the named packages of this checkout; a package need not exist yet."""
    return sorted(f for p in packages for f in (ROOT / p).rglob("*.py") if "__pycache__" not in f.parts)


def cpp_files(*folders: str) -> list[Path]:
    """Return the C++ files in the named folders of cudafuture/_C, or in all of it."""
    return _cpp_files(NATIVE, folders)


def interface_headers() -> list[Path]:
    """Return the headers of the native module that other modules may include."""
    return [f for f in cpp_files("api") if f.suffix == ".h" and f.stem != "implementation"]


def machine_files(*folders: str) -> list[Path]:
    """Return the C++ files in the named folders of cudafuture/testing, or in all of it."""
    return _cpp_files(TESTING, folders)


def rpc_files() -> list[Path]:
    """Return the C++ files of rpc_ext/_C."""
    return _cpp_files(RPC_NATIVE, ())


def cpp_test_files() -> list[Path]:
    """Return the C++ files of tests/cpp."""
    return _cpp_files(CPP_TESTS, ())


def c10d_files() -> list[Path]:
    """Return the C++ files of cudafuture/_c10d."""
    return _cpp_files(C10D, ())


def source_files() -> list[Path]:
    """Return the Python and C++ files of both packages."""
    python = python_files("cudafuture", "cudafuture_c10d", "rpc_ext")
    return [*python, *cpp_files(), *c10d_files(), *machine_files(), *rpc_files()]


def include_root(file: Path) -> Path:
    """Return the folder that a C++ file's own headers are named from: each native module has one."""
    return next((root for root in (C10D, TESTING, RPC_NATIVE) if file.is_relative_to(root)), NATIVE)


def _cpp_files(root: Path, folders: tuple[str, ...]) -> list[Path]:
    below = [root / f for f in folders] or [root]
    return sorted(f for folder in below for f in folder.rglob("*") if f.suffix in {".h", ".cpp"})


def module_name(file: Path) -> str:
    """Turn the path of a Python file into the name that it is imported by."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    """Return whether a dotted name is a module of this checkout; the native one is, built or not."""
    path = ROOT.joinpath(*name.split("."))
    return name in NATIVE_MODULES or path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(file: Path, *, top_level_only: bool = False) -> set[str]:
    """Return the dotted names that a Python file imports, down to the module: not the names taken out of it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    package = module_name(file) if file.name == "__init__.py" else module_name(file).rpartition(".")[0]
    found: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(_from(node, package))
    return found


def _from(node: ast.ImportFrom, package: str) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    for alias in node.names:
        inside = f"{base}.{alias.name}"
        yield inside if is_module(inside) else base


def read_all(tree: ast.Module) -> list[str] | None:
    """Return ``__all__`` as it is written, or None where there is none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            names: list[str] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            return names
    return None


def includes(file: Path) -> list[tuple[str, Path | None]]:
    """Return what a C++ file includes: the name as written, and the file where it is one of ours."""
    found: list[tuple[str, Path | None]] = []
    for _, name in INCLUDE.findall(file.read_text(encoding="utf-8")):
        ours = next((p.resolve() for p in (include_root(file) / name, file.parent / name) if p.is_file()), None)
        found.append((name, ours))
    return found
