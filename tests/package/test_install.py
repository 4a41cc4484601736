"""`pip install .`, without an editable checkout behind it: built, installed elsewhere, and used there."""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from email.message import Message
from pathlib import Path

import pytest
from scikit_build_core import build as backend

from support.soak import SOAK

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    *("CHANGELOG.md", "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "cmake", "cudafuture", "cudafuture_c10d"),
    "licenses",
    *("pyproject.toml", "rpc_ext", "tools"),
}

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


def test_licences_of_linked_code_are_installed() -> None:
    installed = importlib.metadata.distribution("cudafuture")
    texts = {path.name: path.read_text() for path in installed.files or () if "licenses" in path.parts}
    assert "Wenzel Jakob" in texts["nanobind.txt"]
    assert "Thibaut Goetghebuer-Planchon" in texts["robin_map.txt"]
    assert "Jens Axboe" in texts["liburing.txt"]
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the sdist and unpack it."""
    folder = tmp_path_factory.mktemp("sdist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = backend.build_sdist(str(folder))
    with tarfile.open(folder / name) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.glob("cudafuture-*/")
    return unpacked


def metadata_of(path: Path) -> Message:
    """Return the fields and the description in a metadata file."""
    return email.message_from_string(path.read_text(encoding="utf-8"))


def wheel_metadata(sdist: Path, folder: Path) -> Message:
    """Return the metadata of a wheel that would be built from an unpacked sdist; write it to a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(sdist)
        return metadata_of(folder / backend.prepare_metadata_for_build_wheel(str(folder)) / "METADATA")


def test_sdist_has_only_build_files(sdist: Path) -> None:
    assert {path.name for path in sdist.iterdir()} == PARTS
    assert [path.name for path in (sdist / "tools").iterdir()] == ["package_metadata.py"]
    assert {path.name for path in (sdist / "licenses").iterdir()} >= {"nanobind.txt", "liburing.txt"}
    metadata = metadata_of(sdist / "PKG-INFO")
    (torch_range,) = [r for r in metadata.get_all("Requires-Dist") or () if r.startswith("torch")]
    assert "<" in torch_range
    assert ">=" in torch_range
    assert metadata.get_all("Dynamic") == ["Requires-Dist"]


@pytest.mark.parametrize("installed", [None, "2.12.1", "2.15.0a0+git1234567", "2.13.0+cu130"])
def test_wheel_requires_torch_minor_version(
    sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None
) -> None:
    installed = installed or importlib.metadata.version("torch")
    monkeypatch.setattr(importlib.metadata, "version", {"torch": installed}.__getitem__)
    required = wheel_metadata(sdist, tmp_path).get_all("Requires-Dist") or ()
    major, minor = installed.split(".")[:2]
    assert [r for r in required if r.startswith("torch")] == [f"torch=={major}.{minor}.*"]


def test_build_without_torch_explains_itself(sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(SystemExit) as caught:
        wheel_metadata(sdist, tmp_path)
    assert 'pip install "scikit-build-core>=' in str(caught.value)
    assert "pip install --no-build-isolation ." in str(caught.value)


def test_description_has_no_checkout_links(sdist: Path, tmp_path: Path) -> None:
    """A package index shows the description, and none of the files that a relative link leads to."""
    for metadata in (metadata_of(sdist / "PKG-INFO"), wheel_metadata(sdist, tmp_path)):
        text = metadata.get_payload()
        assert isinstance(text, str)
        assert "# cudafuture" in text
        assert re.findall(r"\]\((?!https?://)", text) == []
        assert re.findall(r"^\[[^]]+\]:\s*(?!https?://)", text, re.MULTILINE) == []
        assert re.findall(r"""(?:href|src)=["'](?!https?://)""", text) == []


def test_docs_name_only_installable_extras() -> None:
    """The library is on no package index: an extra is installed from a checkout."""
    known = importlib.metadata.metadata("cudafuture").get_all("Provides-Extra") or ()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for package, extra in re.findall(r"""pip install [^\n`]*?["' ]([\w.]+)\[(\w+)\]""", page.read_text()):
            assert package == ".", f"{page.name}: {package}[{extra}] is on no index"
            assert extra in known, f"{page.name}: there is no extra {extra}"


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="compiles everything once more; CUDAFUTURE_SOAK=1 does it")
def test_plain_install_works_without_checkout(sdist: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    scripts = sysconfig.get_path("scripts")
    environment = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"}  # cmake and ninja may be there
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target", str(target)]
    source = shutil.copytree(sdist, tmp_path / "source")
    subprocess.run([*pip, str(source)], env=environment, check=True, capture_output=True, timeout=1800)
    shutil.rmtree(source)
    # -S: the editable checkout, if there is one, is not on the path, but then neither is torch.
    command = [sys.executable, "-I", "-S", "-c", USE, str(target), sysconfig.get_path("purelib")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.stderr == ""
    assert Path(run.stdout.strip()).is_relative_to(target)
    environment["PYTHONPATH"] = sysconfig.get_path("purelib")
    for names in [("cudafuture", "rpc_ext"), ("rpc_ext", "cudafuture")]:
        script = Path(__file__).with_name("one_core.py")
        subprocess.run([sys.executable, "-S", str(script), str(target), *names], env=environment, check=True)
    bench = ["-m", "cudafuture", "bench", "core", "--only", "await", "--rounds", "1"]
    environment["PYTHONPATH"] = f"{target}:{sysconfig.get_path('purelib')}"
    subprocess.run([sys.executable, "-S", *bench], env=environment, check=True, cwd=tmp_path)
    testing = Path("cudafuture", "testing")
    sources = {file.relative_to(target).parents[-4] for file in target.rglob("*.cpp")}
    assert sources == {testing / "fakecuda", testing / "machine"}  # fakecuda builds them when it is first used
