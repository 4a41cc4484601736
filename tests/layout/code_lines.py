"""Count of a file's lines of code: without docstrings, comments and blank lines."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

MOST = 400  # lines of code

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

# Strings and comments of C++: the texts that are no code. The pages for Python's help() are raw strings.
_CPP = re.compile(
    r"""(?P<hidden> //[^\n]* | /\*.*?\*/ | \bR"(?P<end>[^(\s]*)\(.*?\)(?P=end)" )
      | "(?:\\.|[^"\\\n])*" | (?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'""",
    re.VERBOSE | re.DOTALL,
)


def code_lines(file: Path) -> int:
    """Return the number of lines of code of a Python or C++ file."""
    source = file.read_text(encoding="utf-8")
    return python_code_lines(source) if file.suffix == ".py" else cpp_code_lines(source)


def python_code_lines(source: str) -> int:
    """Return the number of lines of code in Python."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def cpp_code_lines(source: str) -> int:
    """Return the number of lines of code in C++."""
    code = _CPP.sub(lambda found: "\n" * found[0].count("\n") if found["hidden"] else found[0], source)
    return sum(bool(line.strip()) for line in code.splitlines())


def long_files(files: Iterable[Path]) -> list[str]:
    """Return a line for each file that has more lines of code than a reader follows in one sitting."""
    counted = ((code_lines(file), file) for file in files)
    return [f"{file} has {lines} lines of code, more than {MOST}" for lines, file in counted if lines > MOST]
