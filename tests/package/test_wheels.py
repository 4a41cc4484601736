"""Wheels: their labels and folders, what pip resolves from them, and the three commands of docs/install.md."""

from __future__ import annotations

import email
import functools
import http.server
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.programs import make_programs
from support.soak import SOAK

pytestmark = pytest.mark.usefixtures("on_the_host")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "wheels.sh"
WORKFLOW = ROOT / ".github" / "workflows" / "wheels.yml"
PUBLIC = "0.2.0"

# The folder of wheels that an earlier `make wheels` has filled; otherwise CUDAFUTURE_SOAK=1 builds one.
BUILT = os.environ.get("CUDAFUTURE_TEST_WHEELS", "")

# It answers the script's question for an interpreter, and makes an environment by copying itself.
PYTHON = """#!/bin/sh
case "$*" in
  "-c import ensurepip"*) echo "$0" && exit 0 ;;
  "-c import torch"*) exit 1 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
case "$*" in $FAILS) echo "this went wrong" && exit 3 ;; esac
"""

USE = """
import cudafuture, rpc_ext
first = cudafuture.CUDAFuture()
last = first.then(lambda done: done.value() + 1).then(lambda done: done.value() + 1)
first.set_result(0)
assert last.wait(timeout=60) == 2
print(cudafuture.__file__)
"""


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def only(pattern: str, source: str) -> str:
    """Return the group of the only match of a pattern."""
    matches = re.findall(pattern, source, re.MULTILINE)
    assert len(matches) == 1, f"{pattern} has {len(matches)} matches"
    return str(matches[0])


def minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def combinations(*options: str) -> list[tuple[str, str]]:
    """Return the minor version of torch and the Python of each wheel that the script would build."""
    plan = subprocess.run([SCRIPT, "--dry-run", *options], capture_output=True, text=True, check=True).stdout
    return [(minor(torch), python) for torch, python in re.findall(r"^torch (\S+), Python (\S+)$", plan, re.MULTILINE)]


# ---- what pip resolves, with tiny wheels that contain only metadata


def fake_wheel(folder: Path, name: str, version: str, *requirements: str) -> Path:
    """Write a wheel that contains only metadata."""
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    metadata += [f"Requires-Dist: {requirement}\n" for requirement in requirements]
    with zipfile.ZipFile(wheel, "w") as archive:
        info = f"{name}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", "".join(metadata))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


class Machine:
    """A virtual environment with torch 2.13.0, an index of torch releases, and folders of wheels."""

    def __init__(self, folder: Path) -> None:
        self.torch = folder / "index"
        self.wheels = folder / "wheels"
        for release in ("2.13.0", "2.15.0"):
            fake_wheel(self.torch, "torch", release)
        self.venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.venv], check=True)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        self.environment["PIP_CONFIG_FILE"] = os.devnull
        self.pip("install", "torch==2.13.0")

    def add(self, folder: str, *torches: str) -> str:
        """Put wheels for minor versions of torch into a folder, and return the folder."""
        for torch in torches:
            label = "torch" + torch.replace(".", "")
            fake_wheel(self.wheels / folder, "cudafuture", f"{PUBLIC}+{label}", f"torch=={torch}.*")
        return str(self.wheels / folder)

    def pip(self, *arguments: str) -> str:
        """Run pip for the environment, without a network, and return its output."""
        command = [sys.executable, "-m", "pip", "--python", str(self.venv / "bin" / "python"), *arguments]
        command += ["--quiet", "--disable-pip-version-check", "--no-index", "--find-links", str(self.torch)]
        return subprocess.run(command, env=self.environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    def installs(self, *arguments: str) -> dict[str, str]:
        """Return the version of each package that `pip install` would install."""
        report = json.loads(self.pip("install", "--dry-run", "--report", "-", *arguments))
        packages = [each["metadata"] for each in report["install"]]
        return {package["name"]: package["version"] for package in packages}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--upgrade",)], ids=["install", "upgrade"])
def test_installed_torch_stays(machine: Machine, options: tuple[str, ...]) -> None:
    folder = machine.add("torch-2.13", "2.13")
    machine.add("torch-2.15", "2.15")
    found = machine.installs(*options, "cudafuture", "--find-links", folder)
    assert found == {"cudafuture": f"{PUBLIC}+torch213"}


@pytest.mark.slow
def test_mixed_folder_replaces_torch(machine: Machine) -> None:
    """The reason for one folder per minor version of torch; also a proof that the test above can fail."""
    folder = machine.add("mixed", "2.13", "2.15")
    found = machine.installs("cudafuture", "--find-links", folder)
    assert found == {"cudafuture": f"{PUBLIC}+torch215", "torch": "2.15.0"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Serve a folder over HTTP; return the folder and its address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_index_pages_keep_installed_torch(machine: Machine, served: tuple[Path, str]) -> None:
    folder, address = served
    minors = {"torch213": "2.13", "torch215": "2.15"}
    assets = [fake_wheel(folder, "cudafuture", f"{PUBLIC}+{label}", f"torch=={m}.*") for label, m in minors.items()]
    listed = [f"{address}/{wheel.name.replace('+', '%2B')}" for wheel in assets]
    listed += [f"{address}/cudafuture-{PUBLIC}.tar.gz", f"{address}/cudafuture-{PUBLIC}-py3-none-any.whl", ""]
    tool = [sys.executable, str(ROOT / "tools" / "wheel_index.py"), str(folder / "wheels")]
    subprocess.run(tool, input="\n".join(listed), text=True, check=True, stdout=subprocess.DEVNULL)
    pages = {page.parent.name: page.read_text() for page in folder.glob("wheels/*/index.html")}
    assert pages.keys() == {"torch-2.13", "torch-2.15"}
    assert [page.count("href=") for page in pages.values()] == [1, 1]
    found = machine.installs("cudafuture", "--find-links", f"{address}/wheels/torch-2.13/")
    assert found == {"cudafuture": f"{PUBLIC}+torch213"}


# ---- the script


@pytest.mark.parametrize("release", ["2.12.1", "2.13.0+cpu"])
def test_label_and_requirement_name_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    from scikit_build_core import build as backend

    source = tmp_path / "source"
    source.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "licenses", "tools"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
    label = "torch" + minor(release).replace(".", "")
    (command,) = re.findall(r"^ *(sed .* source/pyproject.toml) >", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    environment = os.environ | {"label": label}
    labelled = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE)
    (source / "pyproject.toml").write_bytes(labelled.stdout)
    monkeypatch.setattr(importlib.metadata, "version", {"torch": release}.__getitem__)
    monkeypatch.chdir(source)
    path = tmp_path / backend.prepare_metadata_for_build_wheel(str(tmp_path)) / "METADATA"
    metadata = email.message_from_string(path.read_text(encoding="utf-8"))
    public = only(r'^version = "(.*)"$', text("pyproject.toml"))
    assert "+" not in public
    assert metadata["Version"] == f"{public}+{label}"
    assert f"torch=={minor(release)}.*" in (metadata.get_all("Requires-Dist") or [])


def test_script_covers_matrix() -> None:
    torches = only(r'^TORCH="(.*)"$', text("tools/matrix.sh")).split()
    pythons = only(r'^PYTHON="(.*)"$', text("tools/matrix.sh")).split()
    absent = {tuple(each.split(":")) for each in only(r'^ABSENT="(.*)"$', text("tools/wheels.sh")).split()}
    every = [(minor(torch), python) for torch in torches for python in pythons]
    assert absent < set(every)
    assert combinations() == [pair for pair in every if pair not in absent]
    assert combinations("--torch", "2.13", "--python", "3.10 3.12") == [("2.13", "3.10"), ("2.13", "3.12")]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--torch", "2.10"],
        ["--python", "3.9"],
        ["--torch", "2.15", "--python", "3.10"],
        ["--torch"],
        ["--fast"],
        ["a", "b"],
    ],
)
def test_wrong_argument_is_refused(wrong: list[str]) -> None:
    run = subprocess.run([SCRIPT, *wrong], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("wheels.sh: ")


def test_help_names_every_option() -> None:
    shown = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"--(?:dry-run|torch|python|image)\b", shown))
    assert named == {"--dry-run", "--torch", "--python", "--image"}
    assert "set -u" not in shown


@pytest.mark.parametrize(
    ("fails", "pythons", "result"),
    [
        ("*torch==*", "3.11", "failed"),
        ("*environment.py*", "3.11", "failed"),
        ("nothing", "", "skipped"),  # and a script that builds nothing has failed
    ],
)
def test_failure_is_reason_and_status(tmp_path: Path, fails: str, pythons: str, result: str) -> None:
    names = ("awk", "cp", "cut", "dirname", "grep", "mkdir", "nproc", "rm", "sed", "sh", "tail", "tr")
    programs = make_programs(tmp_path, names, pythons, PYTHON)
    environment = {"PATH": str(programs), "HOME": str(tmp_path), "FAILS": fails}
    command = [str(SCRIPT), "--torch", "2.13", "--python", "3.11", str(tmp_path / "wheels")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    (row,) = re.findall(r"^2\.13\.0 +3\.11 +(\w+) +(.*)$", run.stdout, re.MULTILINE)
    assert row[0] == result
    assert ("this went wrong" if pythons else "there is no python3.11") in row[1]
    assert list(tmp_path.glob("wheels/*/*.whl")) == []


# ---- the workflow and the page


def test_workflow_builds_each_combination() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is of the extra lint")
    job = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["build"]
    matrix = job["strategy"]["matrix"]
    excluded = [(each["torch"], each["python"]) for each in matrix["exclude"]]
    every = [(torch, python) for torch in matrix["torch"] for python in matrix["python"]]
    assert [pair for pair in every if pair not in excluded] == combinations()
    (step,) = [step for step in job["steps"] if step.get("run", "").startswith("make ")]
    assert step["run"] == "make wheels TORCHES=${{ matrix.torch }} PYTHONS=${{ matrix.python }} IMAGE=$IMAGE"
    assert "manylinux_2_28" in step["env"]["IMAGE"]


def test_page_lists_each_combination() -> None:
    rows = re.findall(r"^\| (\d\.\d+) \| ([\d., ]+) \| .+ \|$", text("docs/install.md"), re.MULTILINE)
    assert [(torch, python) for torch, pythons in rows for python in pythons.split(", ")] == combinations()


def test_page_lists_each_extra() -> None:
    table = only(r"(?s)^\| extra \| brings \| for \|\n(.*?)\n\n", text("docs/install.md"))
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[1:]]
    section = only(r"(?s)^\[project.optional-dependencies\]$(.*?)^\[", text("pyproject.toml"))
    extras = re.findall(r"(?s)^(\w+) = \[(.*?)\]$", section, re.MULTILINE)
    contents = {extra: set(re.findall(r'"([A-Za-z][\w-]*)', wanted)) for extra, wanted in extras}
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} == contents.keys()
    for name, brings, _ in rows:
        if brings != "tools":
            assert set(brings.split(", ")) == contents[name.strip("`")]


def test_page_is_about_a_folder_of_the_matrix() -> None:
    assert re.fullmatch(r'pip install cudafuture --find-links "\$WHEELS/torch-(\S+)/"', command_below("From a wheel"))
    assert only(r"--find-links \S+/torch-([\d.]+)/", command_below("From a wheel")) in dict(combinations())


def test_page_quotes_finding_of_doctor() -> None:
    finding = only(r"^slow +io_uring: io_uring: Operation not permitted (\(.*\))$", text("docs/install.md"))
    assert finding in text("cudafuture/_C/io/ring.cpp")


# ---- the commands of the page, in fresh virtual environments


def command_below(heading: str) -> str:
    """Return the commands in the first block of shell below a heading of docs/install.md."""
    return only(rf"(?s)^## {heading}\n(?:(?!^## ).)*?^```sh\n(.*?)\n```$", text("docs/install.md"))


class Fresh:
    """A new virtual environment that sees the packages of this one, but not cudafuture.

    pip finds torch installed, so no test downloads it. The packages are outside of the environment, so pip leaves them.
    """

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "venv" / "bin"
        self.home = folder / "elsewhere"
        self.home.mkdir()
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        # It is older than the one that torch requires, and would hide it.
        self.output("python", "-m", "pip", "uninstall", "--yes", "setuptools")
        packages = folder / "packages"
        packages.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not re.match(r"_?_?(cudafuture|rpc_ext|pip|editable)", path.name) and path.suffix != ".pth":
                (packages / path.name).symlink_to(path)
        self.site = Path(self.output("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
        (self.site / "packages.pth").write_text(f"{packages}\n")

    def environment(self, **variables: str) -> dict[str, str]:
        foreign = ("PYTHON", "VENV", "JOBS", "MAKE", "MFLAGS", "CUDAFUTURE_", "VIRTUAL_ENV")
        found = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        torch = self.home / "constraints.txt"
        torch.write_text(f"torch=={importlib.metadata.version('torch')}\n")  # nothing may choose another
        return found | {"PATH": f"{self.bin}:{os.environ['PATH']}", "PIP_CONSTRAINT": str(torch)} | variables

    def run(self, command: list[str], folder: Path, **variables: str) -> str:
        """Run a command in a folder; return what it prints."""
        environment = self.environment(**variables)
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout.strip()

    def output(self, program: str, *arguments: str) -> str:
        """Run a program of the environment outside of any checkout; return what it prints."""
        return self.run([str(self.bin / program), *arguments], self.home)

    def shell(self, commands: str, folder: Path, **variables: str) -> None:
        """Run commands of the page in a folder."""
        self.run(["sh", "-eux", "-c", commands], folder, **variables)

    def check(self) -> Path:
        """Use the installed package; return the folder that it was imported from."""
        assert "io_uring" in self.output("cudafuture", "doctor", "--folder", str(self.home))
        return Path(self.output("python", "-c", USE)).parents[1]


@pytest.fixture
def fresh(tmp_path: Path) -> Fresh:
    return Fresh(tmp_path)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of wheels, one for this torch and Python among them."""
    if BUILT:
        return Path(BUILT).absolute()
    folder = tmp_path_factory.mktemp("wheels")
    torch = minor(importlib.metadata.version("torch"))
    python = "{}.{}".format(*sys.version_info[:2])
    command = [str(SCRIPT), "--torch", torch, "--python", python, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    logs = "".join(path.read_text()[-5000:] for path in folder.glob("*.log"))
    assert run.returncode == 0, run.stdout + run.stderr + logs
    return folder


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not SOAK and not BUILT, reason="builds a wheel; CUDAFUTURE_SOAK=1 does it")
def test_wheel_command_installs_and_uninstalls(fresh: Fresh, wheels: Path) -> None:
    torch = minor(importlib.metadata.version("torch"))
    command = re.sub(r"torch-[\d.]+/", f"torch-{torch}/", command_below("From a wheel"))
    before = set(fresh.site.iterdir())
    fresh.shell(command, fresh.home, WHEELS=str(wheels), PIP_NO_INDEX="1")
    assert fresh.check() == fresh.site
    version = fresh.output("python", "-c", "import importlib.metadata as m; print(m.version('cudafuture'))")
    assert version.endswith("+torch" + torch.replace(".", ""))
    fresh.shell(command_below("Uninstall"), fresh.home)
    assert set(fresh.site.iterdir()) == before


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not SOAK, reason="compiles everything once more; CUDAFUTURE_SOAK=1 does it")
def test_source_command_installs(fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scikit_build_core import build as backend

    monkeypatch.chdir(ROOT)
    archive = backend.build_sdist(str(tmp_path))
    shutil.unpack_archive(tmp_path / archive, tmp_path, filter="data")
    fresh.shell(command_below("From source"), tmp_path / archive.removesuffix(".tar.gz"))
    assert fresh.check() == fresh.site


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not SOAK, reason="compiles everything once more; CUDAFUTURE_SOAK=1 does it")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there is nothing to clone")
def test_clone_command_installs(fresh: Fresh, tmp_path: Path) -> None:
    # The Python with torch is this one: the environment of the clone sees its packages.
    fresh.shell(command_below("From a clone"), tmp_path, REPOSITORY=str(ROOT), PYTHON=sys.executable)
    clone = tmp_path / "cudafuture"
    fresh.bin = clone / ".venv" / "bin"
    assert fresh.check() == clone
