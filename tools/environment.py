"""Installer of the packages that cudafuture needs, for the Python that runs this file. It skips those already there.

    python tools/environment.py build       torch, the build requirements, a compiler
    python tools/environment.py test lint   the extras of those names in pyproject.toml

pyproject.toml is the only list. pip is started only for what is missing, so a machine without a network works as long
as everything is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TORCH_WITHOUT_GPU = "torch==2.13.0"


def pyproject() -> dict[str, Any]:
    """Read pyproject.toml; Python 3.10 has no TOML reader of its own, but pip carries one."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
    data: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return data


def release(version: str) -> tuple[int, ...]:
    """Turn ``2.13.0+cpu`` into ``(2, 13, 0, 0)``: enough to compare the releases that are asked for here."""
    numbers = [int(n) for n in re.findall(r"\d+", version.partition("+")[0])]
    return tuple([*numbers, 0, 0, 0, 0][:4])


def fits(version: str, requirement: str) -> bool:
    """Return True if a version satisfies a requirement such as ``torch>=2.11,<2.16``."""
    found = release(version)
    compare = {
        ">=": operator.ge,
        "<=": operator.le,
        "==": operator.eq,
        "!=": operator.ne,
        ">": operator.gt,
        "<": operator.lt,
    }
    limits = re.findall(r"(>=|<=|==|!=|>|<)\s*([\w.+]+)", requirement)
    return all(compare[sign](found, release(limit)) for sign, limit in limits)


def is_satisfied(requirement: str) -> bool:
    """Return whether a distribution is installed that a requirement allows."""
    name = re.split(r"[<>=!~\[ ]", requirement, maxsplit=1)[0]
    try:
        return fits(importlib.metadata.version(name), requirement)
    except importlib.metadata.PackageNotFoundError:
        return False


def has_gpu() -> bool:
    """Ask the driver's own tool; where it is missing or fails there is no GPU that torch could use."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool], capture_output=True, check=False).returncode == 0


def installed_torch() -> str | None:
    """Return the version of the torch that would be imported, without the second that importing it takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    return found[1] if found else None


def torch_requirement(dependencies: list[str]) -> list[str]:
    """Return what to install for torch: nothing where it can be imported already, as it is then used as it is."""
    supported = next(d for d in dependencies if re.match(r"torch\b", d))
    version = installed_torch()
    if version is None:
        return [supported if has_gpu() else TORCH_WITHOUT_GPU]
    if not fits(version, supported):
        sys.exit(f"{sys.executable} has torch {version}; cudafuture wants {supported}. Choose another: make PYTHON=...")
    return []


def need_on_system(what: str, *packages: str) -> None:
    """Install Debian packages, or end with the command that does."""
    print(f"{what} is missing", file=sys.stderr)
    if subprocess.run([ROOT / "tools" / "apt.sh", *packages], check=False).returncode != 0:
        sys.exit(1)


def want_on_system(what: str, *packages: str) -> None:
    """Install Debian packages where that may be done, and go on without them where not."""
    print(f"{what} is missing", file=sys.stderr)
    if subprocess.run([ROOT / "tools" / "apt.sh", *packages], check=False, stdin=subprocess.DEVNULL).returncode != 0:
        print(f"going on without {what}", file=sys.stderr)


def has_liburing() -> bool:
    """Ask pkg-config, as the build does."""
    if shutil.which("pkg-config") is None:
        return False
    return subprocess.run(["pkg-config", "--exists", "liburing >= 2.3"], check=False).returncode == 0


def build_requirements(project: dict[str, Any]) -> list[str]:
    """Return what it takes to compile the native module and to import the result."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        need_on_system("a C++ compiler", "g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        need_on_system(f"Python.h of {sys.executable}", f"python{sys.version_info.major}.{sys.version_info.minor}-dev")
    if not has_liburing():
        want_on_system("liburing, with which files are read and written fastest", "liburing-dev", "pkg-config")
    dependencies: list[str] = project["tool"]["dynamic-metadata"][0]["dependencies"]
    wanted = torch_requirement(dependencies)
    wanted += [d for d in dependencies if not d.startswith("torch")]
    wanted += project["build-system"]["requires"]
    if shutil.which("ninja") is None:
        wanted.append("ninja")
    if not system_cmake_is_new_enough():
        wanted.append("cmake>=3.20")
    return wanted


def system_cmake_is_new_enough() -> bool:
    """Compare the cmake on the PATH with what CMakeLists.txt asks for."""
    if shutil.which("cmake") is None:
        return False
    answer = subprocess.run(["cmake", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version (\S+)", answer)
    return found is not None and release(found[1]) >= (3, 20)


def main(groups: list[str]) -> None:
    """Install what is missing of the named groups."""
    project = pyproject()
    extras: dict[str, list[str]] = project["project"]["optional-dependencies"]
    wanted: list[str] = []
    for group in groups:
        wanted += build_requirements(project) if group == "build" else extras[group]
    missing = [w for w in dict.fromkeys(wanted) if not is_satisfied(w)]
    if missing:
        sys.exit(subprocess.run([sys.executable, "-m", "pip", "install", *missing], check=False).returncode)


if __name__ == "__main__":
    main(sys.argv[1:])
