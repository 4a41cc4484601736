"""Python ends at ``bind/``: nothing below it sees a Python header, not even through another header."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from layout.tree import NATIVE, cpp_files, includes

# Which folders a folder may include from, besides itself.
BELOW = {"core": set(), "storage": {"core"}, "bind": {"core", "storage"}}

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

FILES = cpp_files()


def ids(file: Path) -> str:
    return str(file.relative_to(NATIVE))


def folder(file: Path) -> str:
    return file.relative_to(NATIVE).parts[0]


def reached(file: Path) -> dict[str, str]:
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
def test_every_folder_has_a_layer(file: Path) -> None:
    assert folder(file) in BELOW


@pytest.mark.parametrize("file", cpp_files("core", "storage"), ids=ids)
def test_no_python_header_below_bind(file: Path) -> None:
    for header, by in reached(file).items():
        assert not PYTHON_HEADER.fullmatch(header), f"{header} is included by {by}; Python belongs into bind/"


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_includes_point_down(file: Path) -> None:
    allowed = BELOW[folder(file)] | {folder(file)}
    for name, ours in includes(file):
        if ours is not None:
            assert ours.is_relative_to(NATIVE), f"{name} is outside cudafuture/_C"
            assert folder(ours) in allowed, f"{folder(file)}/ may not include {name}"


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_our_headers_are_named_from_the_include_root(file: Path) -> None:
    for name, ours in includes(file):
        assert ours is None or (NATIVE / name).is_file(), f'write #include "{folder(file)}/{name}"'
        assert ours is not None or name.split("/")[0] not in BELOW, f"there is no {name}"


@pytest.mark.parametrize("file", [f for f in cpp_files("core", "storage") if f.suffix == ".cpp"], ids=ids)
def test_every_source_has_its_header(file: Path) -> None:
    header = file.with_suffix(".h")
    assert header.is_file(), f"{ids(file)} has no {header.name}"
    assert header in [ours for _, ours in includes(file)], f"{ids(file)} does not include {header.name}"


def test_there_are_sources_to_look_at() -> None:
    assert FILES
