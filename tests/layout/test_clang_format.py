"""The formatter of C++: `make lint` gives it every file, and it leaves drawings alone."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from layout.tree import ROOT

SUFFIXES = {".h", ".hpp", ".cpp", ".cc", ".cu"}
FOLDERS = ("cudafuture", "rpc_ext", "tests", "examples", "tools")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_lint_formats_every_cpp_file() -> None:
    steps = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (command,) = [step for step in steps.splitlines() if "clang_format" in step]
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    assert len(files) > 300
    assert {ROOT / word for word in command.split() if Path(word).suffix in SUFFIXES} == set(files)


def formatted(source: str) -> str:
    """Return a header after the formatter."""
    command = [sys.executable, "-c", "import clang_format; clang_format.clang_format()", "--assume-filename=queue.h"]
    return subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(importlib.util.find_spec("clang_format") is None, reason="clang-format is of the extra lint")
@pytest.mark.parametrize("indent", [3, 5])
def test_drawings_are_left_alone_and_prose_is_broken(indent: int) -> None:
    drawing = "//" + " " * indent + "producer " + "─" * 110 + "► consumer\n//" + " " * 40 + "▲\n"
    prose = "// " + "word " * 30 + "\n"
    assert formatted(f"// A queue.\n//\n{drawing}//\n// End.\n#pragma once\n").count(drawing) == 1
    assert formatted(f"// A queue.\n{drawing}#pragma once\n").count(drawing) == 1
    assert max(map(len, formatted(prose).splitlines())) <= 120
