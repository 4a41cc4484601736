"""The count of lines of code, and the warning about long files."""

from __future__ import annotations

from pathlib import Path

import pytest

from layout.code_lines import MOST, code_lines, long_files
from layout.tree import source_files

PYTHON = '''"""Module of

two functions."""

# A comment.
LIMIT = 3  # bytes
"""Limit."""


def first() -> str:
    """Return a text."""
    return """a

# text"""


async def second(
    argument: int,
) -> None:
    """Do nothing."""
'''

CPP = r"""// A header, with a "quote.
#pragma once

/* A comment
   of two lines */ int before = 10'000;  // it's code

inline constexpr const char* doc = R"(A page

int not_code;
)";
inline constexpr const char* other =
    R"x(A page )" that goes on)x";
const char* url = "https://example.org /* ";
char quote = '"';  // "
int after;
"""


def test_docstrings_comments_and_blank_lines_of_python_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(PYTHON)
    assert code_lines(file) == 1 + 4 + 3


def test_comments_pages_and_blank_lines_of_cpp_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "example.h"
    file.write_text(CPP)
    assert code_lines(file) == 1 + 1 + 2 + 2 + 3


@pytest.mark.parametrize(("name", "comment", "code"), [("a.py", "# no code", "x = 1"), ("a.cpp", "// no code", "f();")])
def test_only_code_makes_a_file_long(tmp_path: Path, name: str, comment: str, code: str) -> None:
    file = tmp_path / name
    file.write_text("\n".join([comment, code, ""] * MOST))
    assert long_files([file]) == []
    file.write_text("\n".join([comment, code, ""] * (MOST + 1)))
    assert long_files([file]) == [f"{file} has {MOST + 1} lines of code, more than {MOST}"]


def test_every_source_is_counted() -> None:
    assert {file.suffix for file in source_files()} == {".py", ".h", ".cpp"}
    assert all(code_lines(file) <= len(file.read_text(encoding="utf-8").splitlines()) for file in source_files())
