"""Answers of a Python to tools/gpu_check.sh.

python tools/gpu_check.py facts                  versions and devices, in one line
python tools/gpu_check.py machine                facts about the machine: the driver, compilers, packages, disks, memory
python tools/gpu_check.py installed FOLDER       import the package; fail unless it is in FOLDER and as in the checkout
python tools/gpu_check.py options COUNT SECONDS  the options of pytest, for COUNT processes and SECONDS for each test
"""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The module that has to be there, and the options for pytest. The project's own options ask for all of them.
PLUGINS = {
    "xdist": ["-pxdist", "--dist=loadgroup"],
    "pytest_timeout": ["-ptimeout"],
    "hypothesis": ["-phypothesispytest"],
}

COMMANDS = (
    "nvidia-smi",
    "nvcc --version",
    "c++ --version",
    "uname -srm",
    "nproc --all",
    "free -g",
    "df -h / /tmp /dev/shm",
    "cat /proc/sys/kernel/io_uring_disabled",
    f"{sys.executable} -m pip list",
)


def facts() -> str:
    """Return the versions, and the devices by their own names."""
    import torch

    if not torch.cuda.is_available():
        return f"Python {platform.python_version()}, torch {torch.__version__}, no CUDA"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cuda = f"CUDA {torch.version.cuda}, {', '.join(names)}"
    return f"Python {platform.python_version()}, torch {torch.__version__}, {cuda}"


def machine() -> str:
    """Print the output of each command, and the error where one is missing."""
    for command in COMMANDS:
        print(f"$ {command}", flush=True)
        try:
            subprocess.run(command.split(), stderr=subprocess.STDOUT, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired) as e:
            print(e)
    return ""


def import_from(folder: str) -> str:
    """Import the packages and their native modules, out of that folder and no other."""
    for name in (
        "cudafuture",
        "cudafuture._C",
        "cudafuture._c10d",
        "cudafuture.testing.sim._C",
        "rpc_ext",
        "rpc_ext._C",
    ):
        where = importlib.import_module(name).__file__ or "nowhere"
        if not Path(where).is_relative_to(folder):
            sys.exit(f"{name} comes from {where}, not from what was built in {folder}")
    if stale := find_outdated(Path(importlib.import_module("cudafuture").__file__ or "").parents[1]):
        sys.exit(f"the package differs from the checkout in {', '.join(stale)}; run make gpu-kit again")
    return folder


def find_outdated(folder: Path) -> list[str]:
    """Return the Python files of the checkout that differ from the installed ones."""
    files = [
        f.relative_to(ROOT)
        for name in ("cudafuture", "cudafuture_c10d", "rpc_ext")
        for f in (ROOT / name).rglob("*.py")
    ]
    return sorted(
        str(f)
        for f in files
        if f.name != "_build_info.py"
        and not ((folder / f).is_file() and (folder / f).read_bytes() == (ROOT / f).read_bytes())
    )


def options(processes: str, seconds: str) -> str:
    """Return replacements of the project's own options of pytest, which name plugins that may be missing here."""
    words = [
        "-o",
        "addopts=",
        "--import-mode=importlib",
        "--disable-plugin-autoload",
        "-pcudafuture.testing.plugin",
        "-pgpu_results",
        "-v",
        "-rfE",
    ]
    for module, wanted in PLUGINS.items():
        if find_spec(module) is not None:
            words += wanted
    if "-pxdist" in words:
        words += ["-n", processes]
    if "-ptimeout" in words:
        words += ["--timeout", seconds]
    return " ".join([*words, "-W", "ignore::pytest.PytestConfigWarning"])  # settings of plugins that are missing


if __name__ == "__main__":
    words: dict[str, Callable[..., str]] = {
        "facts": facts,
        "machine": machine,
        "installed": import_from,
        "options": options,
    }
    print(words[sys.argv[1]](*sys.argv[2:]))
