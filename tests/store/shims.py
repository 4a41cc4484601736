"""Shared libraries that intercept calls of libc by LD_PRELOAD."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def compile_shim(source: str, folder: Path) -> Path:
    """Compile a library from C; skip the test without a compiler."""
    compiler = shutil.which("cc") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler")
    (folder / "shim.c").write_text("#define _GNU_SOURCE\n" + source)
    library = folder / "shim.so"
    command = [compiler, "-x", "c", "-shared", "-fPIC", "-o", str(library), str(folder / "shim.c"), "-ldl"]
    subprocess.run(command, check=True)
    return library
