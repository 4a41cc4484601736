"""A checkout that is not built, and a build for another torch, say so when they are imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from layout.tree import PACKAGE, RPC


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with an unbuilt copy of the packages and a torch that is only a version."""
    ignored = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    for package in (PACKAGE, RPC):
        shutil.copytree(package, tmp_path / package.name, ignore=ignored)
    # `cudafuture/__init__.py` imports the guard first; later imports need more than a fake torch.
    (tmp_path / "torch.py").write_text('__version__ = "2.13.0+cpu"\n')
    return tmp_path


def build(checkout: Path, *, torch: str) -> None:
    """Leave what a build leaves, as far as the guard looks at it; the native module cannot be loaded before torch."""
    package = checkout / "cudafuture"
    package.joinpath("_build_info.py").write_text(f'torch_version = "{torch}"\n')
    package.joinpath("_C.py").write_text('raise ImportError("undefined symbol")\n')


def error_of(checkout: Path, statement: str = "import cudafuture", *, after: Path | None = None) -> str:
    """Run a statement in an interpreter that sees the copy and the standard library only; return its last line.

    `after` is a folder at the end of sys.path.
    """
    code = f"import sys; sys.path.insert(0, {str(checkout)!r}); sys.path.append({str(after)!r})\n{statement}"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=checkout)
    return run.stderr.strip().splitlines()[-1] if run.returncode else ""


@pytest.mark.parametrize("package", [PACKAGE, RPC], ids=lambda package: package.name)
def test_unbuilt_checkout_is_explained(checkout: Path, package: Path) -> None:
    error = error_of(checkout, f"import {package.name}")
    assert error.startswith("ImportError: ")
    assert "not built" in error
    assert "make setup" in error


@pytest.mark.parametrize("package", [PACKAGE, RPC], ids=lambda package: package.name)
def test_unbuilt_checkout_names_hidden_package(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, package: Path
) -> None:
    site = tmp_path_factory.mktemp("site")
    (site / "cudafuture").mkdir()
    build(site, torch="2.13.0")
    error = error_of(checkout, f"import {package.name}", after=site)
    assert f"{checkout / 'cudafuture'}, which hides the package that is installed in {site / 'cudafuture'}" in error
    assert "Run Python in another folder" in error


def test_build_without_module_counts_as_unbuilt(checkout: Path) -> None:
    build(checkout, torch="2.13.0")
    (checkout / "cudafuture" / "_C.py").unlink()
    assert "not built" in error_of(checkout)


def test_other_torch_minor_names_both_versions(checkout: Path) -> None:
    build(checkout, torch="2.12.1+cpu")
    error = error_of(checkout)
    assert error.startswith("ImportError: ")
    assert "2.12.1+cpu" in error
    assert "2.13.0+cpu" in error
    assert "run `pip install 'torch==2.12.*'`" in error
    assert "it supports torch 2." in error


@pytest.mark.parametrize("built", ["2.13.0+cpu", "2.13.0+cu130", "2.13.1"])
def test_same_torch_minor_is_accepted(checkout: Path, built: str) -> None:
    build(checkout, torch=built)
    (checkout / "cudafuture" / "__init__.py").write_text("")
    assert error_of(checkout, "import cudafuture._native") == ""
