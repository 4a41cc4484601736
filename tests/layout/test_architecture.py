"""The pages on the inside agree with the code: rooms are the layers, and files and functions exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from layout.test_python_layers import CUDAFUTURE, RPC_EXT
from layout.tree import PACKAGE, ROOT, source_files

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Rooms")[2].partition("|---|---|\n")[2].partition("\n\n")[0]
SIMULATOR = (ROOT / "docs" / "simulated-accelerator-internals.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w./]+\.(?:py|cpp|h))`", PAGE + SIMULATOR)))
PLACES = re.findall(r"`([A-Z]\w*::\w+|[A-Za-z_]\w*(?:\.\w+)?)`(?: and `[\w:]+`)* in `([\w./]+\.(?:py|cpp|h))`", PAGE)

THREAD = re.compile(r'"((?:cudafuture|rpc_ext)-[a-z]+)')


def rooms_on_page() -> list[set[str]]:
    """Return the rooms of each row of the page's first table, from the bottom up."""
    return [{*re.findall(r"`([\w.]+)`", row.split("|")[1])} for row in reversed(TABLE.splitlines())]


def public_rooms() -> list[set[str]]:
    """Return the public rooms of each layer, and the native module, from the bottom up."""
    rows = [{name for name in row if name == "_C" or not name.startswith("_")} for row in CUDAFUTURE]
    calls = {"rpc_ext" if name != "store" else "rpc_ext.store" for row in RPC_EXT for name in row}
    return [row for row in rows if row] + [{name} for name in sorted(calls)]


def file_of(name: str) -> Path | None:
    """Return the file that the page means: its path is from the checkout, the package or a room of the package."""
    folders = (
        ROOT,
        PACKAGE,
        *(PACKAGE / room for room in ("distributed", "io", "prefetch", "pipeline", "data", "testing")),
    )
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def test_page_shows_the_layers() -> None:
    assert rooms_on_page() == public_rooms()


@pytest.mark.parametrize("name", NAMED)
def test_named_file_exists(name: str) -> None:
    assert file_of(name) is not None


@pytest.mark.parametrize(("symbol", "name"), PLACES)
def test_named_function_is_in_its_file(symbol: str, name: str) -> None:
    file = file_of(name)
    assert file is not None
    *owner, function = re.split(r"::|\.", symbol)
    text = file.read_text(encoding="utf-8")
    pattern = rf"\b{symbol}\b" if owner and file.suffix == ".cpp" else rf"(?:class|def) {function}\b|\b{function}\("
    assert re.search(pattern, text), f"{name} has no {symbol}"


def test_page_names_every_thread() -> None:
    files = [file for file in source_files() if "testing" not in file.parts]
    names = {name for file in files for name in THREAD.findall(file.read_text(encoding="utf-8"))}
    assert len(names) > 15
    assert {name for name in names if not re.search(rf"`{name}\b", PAGE)} == set()


def test_page_names_files_and_functions() -> None:
    assert len(NAMED) > 30
    assert len(PLACES) > 10
