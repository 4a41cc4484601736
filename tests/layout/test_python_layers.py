"""An import only points down the layers, or stays inside its package."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

from layout.tree import PACKAGE, ROOT, cpp_files, imports, is_module, module_name, python_files

# Lowest first. The modules of one row do not import each other.
CUDAFUTURE = (
    ("errors", "config", "graph_breaks", "_arguments", "_build_info", "_frames", "_log", "_path", "_progress"),
    ("statistics",),
    ("_native", "_tensors", "_modes"),
    ("_C",),
    ("_c10d",),
    ("_submit_pool", "openmetrics"),
    ("streams", "executors", "timer", "_await", "_work", "_xxhash"),
    ("transfer", "ownership", "debug", "trace"),
    ("future",),
    ("combine",),
    ("distributed", "io", "prefetch", "data"),
    ("pipeline",),
    ("store", "doctor"),
    ("swap",),
    ("compat",),
    ("testing",),
    ("bench",),
    ("cli",),
    ("__main__",),
)
RPC_EXT = (
    ("_C",),
    (
        "_engine",
        "_failure",
        "_listeners",
        "_statistics",
    ),
    ("_codec", "_creation", "_device_order", "_rendezvous"),
    ("_destination", "_devices", "_handlers", "_handshake", "_staging"),
    ("_options", "_serve", "_shutdown"),
    ("_agent", "_call", "_doctor"),
    ("session",),
    ("_batching", "_channel"),
    ("calls",),
    ("barrier", "rref", "watch"),
    ("store",),
    ("_bench",),
)
# An adapter may import the private modules of the rooms that it adapts, a benchmark writes a trace file, the simulated
# accelerator and fakecuda share a machine, and the pytest plugin raises the races of the simulated accelerator.
ADAPTED = {
    "cudafuture.bench": ("cudafuture.trace",),
    "cudafuture.compat.deepspeed": ("cudafuture.swap",),
    "cudafuture.compat.tensornvme": ("cudafuture.store", "cudafuture.io"),
    "cudafuture.compat.torchgpipe": ("cudafuture.pipeline",),
    "cudafuture.testing": ("cudafuture.testing.sim",),
    "cudafuture.testing.fakecuda": ("cudafuture.testing.machine",),
    "cudafuture.testing.sim": ("cudafuture.testing.machine",),
}
PACKAGES = {"cudafuture": CUDAFUTURE, "rpc_ext": RPC_EXT}
ENTRY_POINT = "cudafuture_c10d"  # torch imports it, and it imports cudafuture when a group is created
ROW_OF = {f"{p}.{name}": row for p, rows in PACKAGES.items() for row, names in enumerate(rows) for name in names}

# Modules that the native module imports by name while it runs. No arrow, as long as they import nothing from above.
CALLED_BY_NATIVE = {
    "errors",
    "_arguments",
    "_frames",
    "_log",
    "_progress",
    "_tensors",
    "_await",
    "_work",
    "_xxhash",
    "_c10d",
}

FILES = python_files(*PACKAGES)
BELOW_THE_FRONT_DOOR = [f for f in FILES if module_name(f) not in PACKAGES]


def room(module: str) -> str:
    """Return the part of a module's name that has a row: ``cudafuture.io`` for ``cudafuture.io.engine``."""
    return ".".join(module.split(".")[:2])


def own_imports(file: Path) -> list[str]:
    """Return what a file imports of its own package."""
    return sorted(i for i in imports(file) if i.split(".")[0] == module_name(file).split(".")[0])


def ids(file: Path) -> str:
    return module_name(file)


@pytest.mark.parametrize("file", BELOW_THE_FRONT_DOOR, ids=ids)
def test_every_module_has_row(file: Path) -> None:
    assert room(module_name(file)) in ROW_OF, f"give {module_name(file)} a row in {Path(__file__).name}"


@pytest.mark.parametrize("file", BELOW_THE_FRONT_DOOR, ids=ids)
def test_imports_point_down(file: Path) -> None:
    here = room(module_name(file))
    for target in own_imports(file):
        assert target not in PACKAGES, "import the module that has the name, not the front door, which imports it all"
        there = room(target)
        assert there == here or ROW_OF[there] < ROW_OF[here], f"{target} is not below {module_name(file)}"


@pytest.mark.parametrize("file", cpp_files(), ids=lambda f: f.name)
def test_native_module_calls_only_allowed_modules(file: Path) -> None:
    for name in re.findall(r'"cudafuture\.(\w+)"', file.read_text(encoding="utf-8")):
        assert name in CALLED_BY_NATIVE, f"the native module may not import cudafuture.{name}"
        assert is_module(f"cudafuture.{name}"), f"there is no cudafuture.{name}"


def test_front_door_imports_no_tool() -> None:
    assert "cudafuture.testing" not in {room(i) for i in own_imports(PACKAGE / "__init__.py")}


def is_of_rpc_ext(module: str) -> bool:
    return module.split(".")[0] == "rpc_ext"


@pytest.mark.parametrize("file", python_files("cudafuture"), ids=ids)
def test_lower_layers_ignore_rpc_ext(file: Path) -> None:
    assert not any(is_of_rpc_ext(i) for i in imports(file))


@pytest.mark.parametrize("source", ["import rpc_ext", "from rpc_ext import RRef", "import rpc_ext.store as store"])
def test_import_of_rpc_ext_is_found(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: source)
    assert any(is_of_rpc_ext(i) for i in imports(PACKAGE / "example.py"))


def is_of_store(module: str) -> bool:
    """Return whether a module belongs to remote stores, which are built on remote calls, or measures them."""
    return room(module) in {"rpc_ext.store", "rpc_ext._bench"}


def chain_to_store(file: Path) -> list[str]:
    """Return the imports that lead from a file to a module of remote stores, or an empty list."""
    by_name = {module_name(f): f for f in python_files("rpc_ext")}
    chains = [[module_name(file)]]
    seen = set(chains[0])
    for chain in chains:
        if is_of_store(chain[-1]):
            return chain
        for target in own_imports(by_name[chain[-1]]) if chain[-1] in by_name else []:
            if target not in seen and target not in PACKAGES:
                seen.add(target)
                chains.append([*chain, target])
    return []


CALLS = [f for f in BELOW_THE_FRONT_DOOR if room(module_name(f)).startswith("rpc_ext.")]


@pytest.mark.parametrize("file", [f for f in CALLS if not is_of_store(module_name(f))], ids=ids)
def test_remote_calls_import_no_remote_stores(file: Path) -> None:
    chain = chain_to_store(file)
    assert not chain, f"remote calls must not import remote stores: {' imports '.join(chain)}"


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_private_modules_stay_in_their_folder(file: Path) -> None:
    importer = module_name(file) if file.name == "__init__.py" else module_name(file).rpartition(".")[0]
    for target in own_imports(file):
        parts = target.split(".")
        for depth, part in enumerate(parts):
            folder = ".".join(parts[:depth])
            if part.startswith("_") and folder not in PACKAGES:
                is_inside = (importer + ".").startswith(folder + ".")
                assert is_inside or folder in ADAPTED.get(importer, ()), f"{target} is private to {folder}"


def test_no_files_import_each_other() -> None:
    modules = {module_name(file): file for file in FILES}
    graph = {name: {target for target in own_imports(file) if target in modules} for name, file in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a circle


@pytest.mark.parametrize("face", ["sim", "fakecuda"])
def test_simulated_machines_share_the_parts_below_them_alone(face: str) -> None:
    allowed = (f"cudafuture.testing.{face}", "cudafuture.testing.machine")
    for file in [f for f in FILES if f.is_relative_to(PACKAGE / "testing" / face)]:
        for target in own_imports(file):
            assert not target.startswith("cudafuture.testing") or target.startswith(allowed), f"{file} imports {target}"


@pytest.mark.parametrize("file", [f for f in BELOW_THE_FRONT_DOOR if f.name == "__init__.py"], ids=ids)
def test_package_exports_only_its_list(file: Path) -> None:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        assert not isinstance(node, ast.For), "the loop variable stays behind as an attribute of the package"
        for alias in getattr(node, "names", ()):
            assert alias.name != alias.asname, f"{alias.name} is exported, but not in __all__"


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_import_needs_only_declared_dependencies(file: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert declared is not None
    allowed = {re.match(r"\w+", d)[0] for d in re.findall(r'"([^"]+)"', declared[1])}  # type: ignore[index]
    if room(module_name(file)) == "cudafuture.testing":
        allowed |= {"pytest"}  # the plugin's host
    if room(module_name(file)) == "cudafuture.bench":
        allowed |= {"PIL", "numpy", "rich"}  # load() and run() say which is missing
    for target in imports(file, top_level_only=True):
        top = target.split(".")[0]
        assert top in allowed | PACKAGES.keys() | {ENTRY_POINT} or top in sys.stdlib_module_names, (
            f"{top} is not in dependencies"
        )
