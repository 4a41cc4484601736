"""What tools/gpu_check.sh asks a Python about itself, a word each.

python tools/gpu_check.py facts              versions and devices, in one line
python tools/gpu_check.py installed FOLDER   where cudafuture is imported from; fails unless that is in FOLDER
python tools/gpu_check.py options COUNT      the options of pytest, for so many processes and the plugins that are there
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

# The module that has to be there, and the options for pytest. The project's own options ask for all of them.
PLUGINS = {
    "xdist": ["-pxdist", "--dist=loadgroup"],
    "pytest_timeout": ["-ptimeout"],
    "hypothesis": ["-phypothesispytest"],
}


def facts() -> str:
    """Name what is measured: versions, and the devices by their own names."""
    import torch

    if not torch.cuda.is_available():
        return f"Python {platform.python_version()}, torch {torch.__version__}, no CUDA"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cuda = f"CUDA {torch.version.cuda}, {', '.join(names)}"
    return f"Python {platform.python_version()}, torch {torch.__version__}, {cuda}"


def installed(folder: str) -> str:
    """Import the packages and their native modules, out of that folder and no other."""
    for name in ("cudafuture", "cudafuture._C", "cudafuture.testing._sim", "rpc_ext", "rpc_ext._C"):
        where = importlib.import_module(name).__file__ or "nowhere"
        if not Path(where).is_relative_to(folder):
            sys.exit(f"{name} comes from {where}, not from what was built in {folder}")
    return folder


def options(processes: str) -> str:
    """Stand in for the project's own options of pytest, which name plugins that may be missing here."""
    words = [
        "-o",
        "addopts=",
        "--import-mode=importlib",
        "--disable-plugin-autoload",
        "-pcudafuture.testing.plugin",
        "-ra",
    ]
    for module, wanted in PLUGINS.items():
        if find_spec(module) is not None:
            words += wanted
    if "-pxdist" in words:
        words += ["-n", processes]
    return " ".join([*words, "-W", "ignore::pytest.PytestConfigWarning"])  # settings of plugins that are missing


if __name__ == "__main__":
    words: dict[str, Callable[..., str]] = {"facts": facts, "installed": installed, "options": options}
    print(words[sys.argv[1]](*sys.argv[2:]))
