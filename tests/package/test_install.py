"""`pip install .`, without an editable checkout behind it: built, installed elsewhere, and used there."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support.soak import SOAK

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "licenses", "cmake", "cudafuture", "rpc_ext")

USE = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import cudafuture
from cudafuture import CUDAFuture, submit
assert CUDAFuture.completed(1).then(lambda f: f.value() + 1).wait() == 2
assert submit(divmod, 7, 2).wait() == (3, 1)
import rpc_ext
with rpc_ext.init_rpc("alone", rank=0, world_size=1, init_method="tcp://127.0.0.1:0"):
    assert rpc_ext.rpc_sync("alone", divmod, (7, 2)) == (3, 1)
print(cudafuture.__file__)
"""


def test_the_licences_of_what_is_linked_statically_are_installed() -> None:
    installed = importlib.metadata.distribution("cudafuture")
    texts = {path.name: path.read_text() for path in installed.files or () if "licenses" in path.parts}
    assert "Wenzel Jakob" in texts["nanobind.txt"]
    assert "Thibaut Goetghebuer-Planchon" in texts["robin_map.txt"]
    assert "Jens Axboe" in texts["liburing.txt"]
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()


def test_the_docs_name_no_extra_that_cannot_be_installed() -> None:
    """The library is on no package index: an extra is installed from a checkout."""
    known = importlib.metadata.metadata("cudafuture").get_all("Provides-Extra") or ()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for package, extra in re.findall(r"""pip install [^\n`]*?["' ]([\w.]+)\[(\w+)\]""", page.read_text()):
            assert package == ".", f"{page.name}: {package}[{extra}] is on no index"
            assert extra in known, f"{page.name}: there is no extra {extra}"


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="compiles everything once more; CUDAFUTURE_SOAK=1 does it")
def test_a_plain_install_works_without_the_checkout(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in PARTS:
        part = ROOT / name
        ignored = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
        shutil.copytree(part, source / name, ignore=ignored) if part.is_dir() else shutil.copy(part, source / name)
    scripts = sysconfig.get_path("scripts")
    environment = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"}  # cmake and ninja may be there
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, str(source)], env=environment, check=True, capture_output=True, timeout=1800)
    shutil.rmtree(source)
    # -S: the editable checkout, if there is one, is not on the path, but then neither is torch.
    command = [sys.executable, "-I", "-S", "-c", USE, str(target), sysconfig.get_path("purelib")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.stderr == ""
    assert Path(run.stdout.strip()).is_relative_to(target)
    assert not list(target.rglob("*.cpp"))
