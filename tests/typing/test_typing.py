"""mypy --strict reveals the types that the ``*_types.py`` files promise, and refuses what is in ``wrong_calls.py``.

A line says what is expected of it: ``# R: type`` is revealed, ``# E: code`` is an error of that kind. Lines without
either must be quiet. Those files are checked and never run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

mypy = pytest.importorskip("mypy.api")
pytestmark = pytest.mark.xdist_group("typing")  # mypy's cache is for one process at a time

OPTIONS = ["--config-file", "pyproject.toml", "--strict", "--no-pretty", "--no-color-output"]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = sorted(f for f in HERE.glob("*.py") if f != Path(__file__))

EXPECTED = re.compile(r"# (R|E): (.+)$")
REVEALED = re.compile(r'(?P<file>[^:]+):(?P<line>\d+): note: Revealed type is "(?P<text>.*)"')
ERROR = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): error: .*\[(?P<text>[\w-]+)\]")

Lines = dict[int, list[str]]  # messages of each line, found or expected


def plain(revealed: str) -> str:
    """Take the module out of every name in a type, and write a union as one writes it."""
    short = re.sub(r"\b[A-Za-z_]\w*\.(?=\w)", "", revealed)
    return re.sub(r"Union\[([^\[\]]*)\]", lambda m: m[1].replace(", ", " | "), short)


def run_mypy(files: list[Path]) -> dict[str, Lines]:
    """Return what mypy says, by file name and line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # where pyproject.toml says how strict
        output, complaints, _ = mypy.run([*OPTIONS, *(str(f) for f in files)])
    assert not complaints, complaints
    said: dict[str, Lines] = {f.name: defaultdict(list) for f in files}
    for text in output.splitlines():
        if match := REVEALED.match(text):
            said[Path(match["file"]).name][int(match["line"])].append(f"R: {plain(match['text'])}")
        elif match := ERROR.match(text):
            said[Path(match["file"]).name][int(match["line"])].append(f"E: {match['text']}")
    return said


def read_expected(file: Path) -> Lines:
    found = ((n, EXPECTED.search(line)) for n, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1))
    return {n: [f"{match[1]}: {match[2]}"] for n, match in found if match}


def disagreements(said: Lines, wanted: Lines) -> list[str]:
    """Compare line by line. A wrong call may have errors of other kinds too: which, depends on the version of mypy."""
    found = []
    for line in sorted(said.keys() | wanted.keys()):
        says, wants = said.get(line, []), wanted.get(line, [])
        if says != wants and not (wants and wants[0].startswith("E: ") and wants[0] in says):
            found.append(f"line {line}: {', '.join(says) or 'nothing'}, but wanted was {', '.join(wants) or 'nothing'}")
    return found


@pytest.fixture(scope="module")
def messages() -> dict[str, Lines]:
    return run_mypy(CASES)


# Checking what torch says about its types takes a while where nothing is cached yet.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("mypy")]


@pytest.mark.parametrize("file", CASES, ids=lambda f: f.stem)
def test_mypy_output_matches_expectations(file: Path, messages: dict[str, Lines]) -> None:
    wanted = read_expected(file)
    assert wanted, "a file of cases expects something"
    assert disagreements(messages[file.name], wanted) == []


def test_wrong_expectation_is_found(tmp_path: Path) -> None:
    case = tmp_path / "doctored_types.py"
    case.write_text(
        "from cudafuture import CUDAFuture\n"
        "reveal_type(CUDAFuture.completed(1))  # R: CUDAFuture[str]\n"
        "CUDAFuture.failed(1)\n"
        "CUDAFuture.failed(ValueError())  # E: arg-type\n"
    )
    assert disagreements(run_mypy([case])[case.name], read_expected(case)) == [
        "line 2: R: CUDAFuture[int], but wanted was R: CUDAFuture[str]",
        "line 3: E: arg-type, but wanted was nothing",
        "line 4: nothing, but wanted was E: arg-type",
    ]
