"""The supported versions of torch and Python: every file that names them names the same ones."""

from __future__ import annotations

import re

import pytest

from layout.tree import ROOT


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def minor(version: str) -> tuple[int, int]:
    major, number = version.split(".")[:2]
    return int(major), int(number)


def find(pattern: str, name: str) -> tuple[str, ...]:
    """Return the groups of the only match of a pattern in a file."""
    matches = list(re.finditer(pattern, text(name), re.MULTILINE))
    assert len(matches) == 1, f"{name} has {len(matches)} matches of {pattern}"
    return matches[0].groups()


def span(pattern: str, name: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the oldest and the newest minor version that a file names."""
    oldest, newest = find(pattern, name)
    return minor(oldest), minor(newest)


def read_list(variable: str) -> list[str]:
    """Return the words of a list in tools/matrix.sh."""
    return find(rf'^{variable}="([^"]+)"$', "tools/matrix.sh")[0].split()


TORCH = [minor(version) for version in read_list("TORCH")]
PYTHON = [minor(version) for version in read_list("PYTHON")]
ENDS = (TORCH[0], TORCH[-1])
AFTER = (ENDS[1][0], ENDS[1][1] + 1)


def test_matrix_runs_every_minor_version_once() -> None:
    for versions in (TORCH, PYTHON):
        first, last = versions[0], versions[-1]
        assert versions == [(first[0], n) for n in range(first[1], last[1] + 1)]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", release) for release in read_list("TORCH"))


def test_matrix_has_reference_versions() -> None:
    assert minor(find(r"^REFERENCE_TORCH=(\S+)$", "tools/matrix.sh")[0]) in TORCH
    assert minor(find(r"^REFERENCE_PYTHON=(\S+)$", "tools/matrix.sh")[0]) in PYTHON
    assert minor(find(r"^GPU_TORCH=(\S+)$", "tools/matrix.sh")[0]) in TORCH
    assert minor(find(r"^GPU_PYTHON=(\S+)$", "tools/matrix.sh")[0]) in PYTHON


def test_readme_names_matrix_versions() -> None:
    assert span(r"torch (\d\.\d+) to (\d\.\d+), CPU and CUDA", "README.md") == ENDS
    assert span(r"^Linux; Python (\d\.\d+) to (\d\.\d+);", "README.md") == (PYTHON[0], PYTHON[-1])
    python, torch = find(r"each torch on Python (\S+), with torch (\S+) on each Python", "README.md")
    assert find(r"^REFERENCE_TORCH=(\S+)$", "tools/matrix.sh") == (torch,)
    assert find(r"^REFERENCE_PYTHON=(\S+)$", "tools/matrix.sh") == (python,)
    torch, python = find(r"and with torch (\S+) on Python (\S+) alone", "README.md")
    assert find(r"^GPU_TORCH=(\S+)$", "tools/matrix.sh") == (torch,)
    assert find(r"^GPU_PYTHON=(\S+)$", "tools/matrix.sh") == (python,)


def test_pyproject_matches_matrix_versions() -> None:
    assert span(r'"torch>=([\d.]+),<([\d.]+)"', "pyproject.toml") == (TORCH[0], AFTER)
    assert minor(find(r'^requires-python = ">=([\d.]+)"', "pyproject.toml")[0]) == PYTHON[0]
    classified = re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', text("pyproject.toml"))
    assert [minor(version) for version in classified] == PYTHON


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_docs_install_build_requirements(page: str) -> None:
    required = re.findall(r'"([^"]+)"', find(r"^requires = \[(.*)\]$", "pyproject.toml")[0])
    assert re.findall(r'"([^"]+)"', find(r"^pip install (.*) cmake ninja ", page)[0]) == required


def test_cmake_warns_outside_matrix() -> None:
    pattern = r"TORCH_VERSION VERSION_LESS (\S+) OR TORCH_VERSION VERSION_GREATER_EQUAL ([\d.]+)"
    assert span(pattern, "cmake/torch.cmake") == (TORCH[0], AFTER)
    assert span(r"tested with torch (\d\.\d+) to (\d\.\d+);", "cmake/torch.cmake") == ENDS
    assert minor(find(r"find_package\(Python (\S+) REQUIRED", "CMakeLists.txt")[0]) == PYTHON[0]


def test_import_guard_names_matrix_versions() -> None:
    assert span(r'^_SUPPORTED = "torch (\S+) to (\S+)"$', "cudafuture/_native.py") == ENDS


def test_environment_torch_is_in_matrix() -> None:
    release = find(r'^TORCH_WITHOUT_GPU = "torch==(\S+)"$', "tools/environment.py")[0]
    assert release in read_list("TORCH")


def test_gpu_kit_combination_is_in_matrix() -> None:
    (release,) = find(r"^TORCH=(\S+)", "tools/gpu_kit.sh")
    assert release in read_list("TORCH")
    assert minor(release) == minor(find(r"^GPU_TORCH=(\S+)$", "tools/matrix.sh")[0])
    assert find(r"^PYTHON=(\S+)", "tools/gpu_kit.sh") == find(r"^GPU_PYTHON=(\S+)$", "tools/matrix.sh")


def test_environment_refuses_older_python() -> None:
    major, number = find(r"sys\.version_info < \((\d+), (\d+)\)", "tools/venv.sh")
    assert (int(major), int(number)) == PYTHON[0]
    assert minor(find(r"needs Python (\d\.\d+) or newer", "tools/venv.sh")[0]) == PYTHON[0]


def test_linters_check_for_oldest_python() -> None:
    assert find(r'^target-version = "py(\d+)"', "pyproject.toml") == ("{}{}".format(*PYTHON[0]),)
    assert minor(find(r'^python_version = "([\d.]+)"', "pyproject.toml")[0]) == PYTHON[0]
