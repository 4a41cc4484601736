"""Only ``bind/`` and ``api/`` include Python: nothing below them sees a Python header, not even through another one.

There are four native modules, and none includes from another, but for the interface of the core's module in ``api/``,
whose headers need no other of its headers. The simulated accelerator and the libraries of fakecuda stand on
``testing/machine/``. Only its ``operators/``, those of fakecuda, and the simulated accelerator above its ``runtime/``
see torch. In the modules of ``rpc_ext`` and of the c10d backend each header with its source is a layer, and so are the
folders of the seals and of remote stores.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from layout.tree import (
    C10D,
    NATIVE,
    ROOT,
    RPC_NATIVE,
    TESTING,
    c10d_files,
    cpp_files,
    include_root,
    includes,
    interface_headers,
    machine_files,
    rpc_files,
)

# The folders that a folder may include from, besides itself; in rpc_ext, the headers.
LAYERS = {
    NATIVE: {
        "core": set(),
        "io": {"core"},
        "store": {"core", "io"},
        "bind": {"core", "io", "store"},
        "api": {"core", "io", "store", "bind"},
    },
    C10D: {"holder": set(), "work": {"holder"}, "backend": {"work"}, "module": {"backend", "work"}},
    TESTING: {
        "machine": set(),
        "machine/operators": {"machine"},
        "sim/runtime": {"machine"},
        "sim/device": {"machine", "sim/runtime"},
        "sim/ops": {"machine", "machine/operators", "sim/device", "sim/runtime"},
        "sim/bind": {"machine", "machine/operators", "sim/device", "sim/ops", "sim/runtime"},
        "fakecuda/devices": {"machine"},
        "fakecuda/cudart": {"fakecuda/devices", "machine"},
        "fakecuda/driver": {"fakecuda/cudart", "fakecuda/devices", "machine"},
        "fakecuda/control": {"fakecuda/cudart", "fakecuda/devices", "machine"},
        "fakecuda/operators": {"fakecuda/control", "fakecuda/devices", "machine", "machine/operators"},
        "fakecuda/nccl": {"fakecuda/devices", "machine"},
    },
    RPC_NATIVE: {
        "sendable": set(),
        "private": set(),
        "references": {"private"},
        "autograd": {"private"},
        "receiving": set(),
        "python": set(),
        "clock": set(),
        "histogram": set(),
        "seal": {"python"},
        "message_handler": set(),
        "destination": {"clock", "histogram", "python"},
        "callback": {"message_handler", "python", "references", "seal"},
        "rendezvous": {"python"},
        "agent": {"callback", "python", "rendezvous", "seal", "sendable"},
        "channel": {"agent", "clock", "destination", "message_handler", "python"},
        "store/wire": set(),
        "store/service": {"clock", "histogram", "message_handler", "python", "store/wire"},
        "store/client": {"channel", "clock", "histogram", "python", "sendable", "store/wire"},
        "module": {
            "agent",
            "autograd",
            "channel",
            "destination",
            "histogram",
            "message_handler",
            "python",
            "receiving",
            "references",
            "sendable",
            "store/client",
            "store/service",
        },
    },
}
SHARED = {str(f.relative_to(NATIVE)) for f in interface_headers()}  # other modules include them, too
RPC_WITHOUT_PYTHON = {
    *(
        "announcement",
        "autograd",
        "clock",
        "counters",
        "crypto",
        "histogram",
        "message_handler",
        "private",
        "receiving",
        "references",
        "seal",
        "sendable",
        "symbols",
    )
}

# Python's own headers, the two binding libraries', and those of torch that include Python.h themselves.
PYTHON_HEADER = re.compile(
    r"""(.*/)?(Python|structmember|frameobject|datetime|pythread)\.h
      | (nanobind|pybind11|cpython)/.*
      | torch/(extension|python)\.h
      | torch/csrc/(Device|Dtype|DynamicTypes|Event|Exceptions|Generator|Layout|Module|PyInterpreter\w*|QScheme
                   |Size|Storage|StorageMethods|Stream|THP\w*|TypeInfo|Types|python_\w+|serialization|utils)\.h
      | torch/csrc/.*/(\w*python\w*|\w*pybind\w*|[Pp]y\w*|object_ptr|THP\w*)\.(h|hpp)
      | torch/csrc/(utils/(?!byte_order|variadic|memory|schema_info|cpp_stacktraces|init).*)
    """,
    re.VERBOSE,
)

TORCH_HEADER = re.compile(r"(ATen|c10|caffe2|torch)/.*")
KNOW_TORCH = {"machine/operators", "sim/device", "sim/ops", "sim/bind", "fakecuda/operators"}


def needs_no_python(file: Path) -> bool:
    """Return whether a file of rpc_ext's module must see no Python header."""
    return file.stem in RPC_WITHOUT_PYTHON or (
        file.parent in (RPC_NATIVE / "store" / "wire", RPC_NATIVE / "store" / "service") and file.stem != "bind"
    )


FILES = [*cpp_files(), *c10d_files(), *machine_files(), *rpc_files()]
CORE_AND_SIM = [*cpp_files("core", "io", "store"), *machine_files("machine", "sim/runtime", "sim/device", "sim/ops")]
BELOW_BIND = [*CORE_AND_SIM, *machine_files("fakecuda"), *(f for f in rpc_files() if needs_no_python(f))]

# The files of ops/ that only register operators offer nothing to include, and neither does the one that makes a module.
HAVE_HEADERS = [
    f for f in [*CORE_AND_SIM, *c10d_files(), *rpc_files()] if f.parent.name != "ops" and f.stem != "module"
]


def ids(file: Path) -> str:
    return str(file.relative_to(ROOT))


def folder(file: Path) -> str:
    """Return the layer that a file is in: the name of its folder, or its own where there are none."""
    first, *others = file.relative_to(include_root(file)).parts
    return f"{first}/{others[0]}" if len(others) > 1 else Path(first).stem


def foreign_headers(file: Path) -> dict[str, str]:
    """Return every foreign header that a file sees through our own headers, with the file that includes it."""
    found: dict[str, str] = {}
    todo, seen = [file], {file}
    while todo:
        here = todo.pop()
        for name, ours in includes(here):
            if ours is None:
                found[name] = ids(here)
            elif ours not in seen:
                seen.add(ours)
                todo.append(ours)
    return found


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_every_folder_has_layer(file: Path) -> None:
    assert folder(file) in LAYERS[include_root(file)]


@pytest.mark.parametrize("file", BELOW_BIND, ids=ids)
def test_no_python_header_below_bind(file: Path) -> None:
    for header, by in foreign_headers(file).items():
        assert not PYTHON_HEADER.fullmatch(header), f"{header} is included by {by}; Python does not belong there"


@pytest.mark.parametrize("file", [f for f in machine_files() if folder(f) not in KNOW_TORCH], ids=ids)
def test_machines_know_no_torch(file: Path) -> None:
    for header, by in foreign_headers(file).items():
        assert not TORCH_HEADER.fullmatch(header), f"{header} is included by {by}; only {KNOW_TORCH} know torch"


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_includes_point_down(file: Path) -> None:
    root = include_root(file)
    allowed = LAYERS[root][folder(file)] | {folder(file)}
    for name, ours in includes(file):
        if ours is not None:
            assert ours.is_relative_to(root), f"{name} is outside {root.name}"
            assert folder(ours) in allowed, f"{folder(file)}/ may not include {name}"


def test_other_modules_include_interface_alone() -> None:
    files = [*rpc_files(), *c10d_files()]
    shared = {name for file in files for name, ours in includes(file) if not ours and (NATIVE / name).is_file()}
    assert shared <= SHARED


@pytest.mark.parametrize("file", interface_headers(), ids=ids)
def test_interface_includes_no_other_header(file: Path) -> None:
    assert {ours for _, ours in includes(file)} <= {None, *interface_headers()}
    assert not [header for header in foreign_headers(file) if PYTHON_HEADER.fullmatch(header)]


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_headers_are_named_from_include_root(file: Path) -> None:
    root = include_root(file)
    for name, ours in includes(file):
        assert ours is None or (root / name).is_file(), f'write #include "{folder(file)}/{name}"'
        assert ours is not None or name in SHARED or name.rpartition("/")[0] not in LAYERS[root], f"there is no {name}"


def test_no_two_headers_share_an_include_path() -> None:
    where: dict[str, list[str]] = {}
    for file in [f for f in FILES if f.suffix == ".h"]:
        where.setdefault(str(file.relative_to(include_root(file))), []).append(ids(file))
    assert len(where) > 100
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


@pytest.mark.parametrize("file", [f for f in HAVE_HEADERS if f.suffix == ".cpp"], ids=ids)
def test_every_source_has_its_header(file: Path) -> None:
    header = file.with_suffix(".h")
    assert header.is_file(), f"{ids(file)} has no {header.name}"
    assert header in [ours for _, ours in includes(file)], f"{ids(file)} does not include {header.name}"


def test_sources_are_found() -> None:
    assert cpp_files()
    assert {folder(f) for f in machine_files()} == LAYERS[TESTING].keys()
    assert {folder(f) for f in rpc_files()} == LAYERS[RPC_NATIVE].keys()
    assert {folder(f) for f in c10d_files()} == LAYERS[C10D].keys()
