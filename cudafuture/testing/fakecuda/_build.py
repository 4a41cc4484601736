"""Build of the fake CUDA libraries: once for each torch, into the user's cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BuildError", "Torch", "build", "installed_torch"]

SOURCES = Path(__file__).resolve().parents[1]
OPERATOR_PARTS = ("machine/operators", "fakecuda/operators")
RUNTIME_PARTS = ("machine", "fakecuda/devices", "fakecuda/cudart", "fakecuda/driver", "fakecuda/control")
RUNTIME = "libcudart.so.13"
NCCL = "libnccl.so.2"


class BuildError(RuntimeError):
    """Error of a build of the fake CUDA libraries; the message names the missing part and how to install it."""

    __module__ = "cudafuture.testing.fakecuda"


@dataclass(frozen=True)
class Torch:
    """Installed torch, and the CUDA packages that came with it. Nothing is imported to find them."""

    version: str
    folder: Path
    cuda: Path
    nccl: Path


def installed_torch() -> Torch:
    """Return the installed torch.

    Raises:
        BuildError: torch is missing, or it is not a build for CUDA 13, or the headers of its CUDA are missing.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(f"{sys.executable} has no torch; install a build for CUDA 13: pip install torch")
    folder = Path(spec.origin).parent
    version = importlib.metadata.version("torch")
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        raise BuildError(f"torch {version} in {folder} is a build without CUDA; install one for CUDA 13 from PyPI")
    cuda, nccl = folder.parent / "nvidia" / "cu13", folder.parent / "nvidia" / "nccl"
    if not (cuda / "lib" / RUNTIME).exists():
        raise BuildError(f"torch {version} in {folder} does not use {RUNTIME}; only builds for CUDA 13 can be run")
    if not (cuda / "include" / "crt" / "host_defines.h").exists():
        runtime = importlib.metadata.version("nvidia-cuda-runtime")
        raise BuildError(f"headers of CUDA are missing in {cuda}; run: pip install 'nvidia-cuda-crt<={runtime}'")
    return Torch(version, folder, cuda, nccl)


def build(cache: Path | None = None) -> Path:
    """Return the folder with the libraries for the installed torch; build them if the cache lacks them.

    Args:
        cache: the folder to keep libraries in; default: ``cudafuture/fakecuda`` in ``$XDG_CACHE_HOME`` or ``~/.cache``

    Raises:
        BuildError: torch or a compiler is missing, or the compiler failed.

    >>> (fakecuda.build() / "libcudart.so.13").exists()
    True
    """
    torch = installed_torch()
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        raise BuildError("a C++ compiler is missing; install g++, or name one in the environment variable CXX")
    parent = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cudafuture" / "fakecuda"
    folder = parent / f"torch-{torch.version}-{_fingerprint(torch, compiler)}"
    if set(" :") & set(str(folder)):
        raise BuildError(f"{folder} cannot be preloaded from; set XDG_CACHE_HOME to a path without ':' and spaces")
    if not folder.exists():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix="building-") as made:
            _Build(torch, compiler, Path(made)).run()
            shutil.copytree(made, made + "-done")  # the temporary folder stays for its own removal
        try:
            Path(made + "-done").rename(folder)  # atomically, so that no process uses an incomplete folder
        except OSError:
            shutil.rmtree(made + "-done")  # another process was faster
    return folder


def _sources() -> Iterator[Path]:
    for folder in ("machine", "fakecuda"):
        yield from sorted(f for f in (SOURCES / folder).rglob("*") if f.suffix in {".h", ".cpp"})


def _fingerprint(torch: Torch, compiler: list[str]) -> str:
    """Return a name that depends on all inputs of the libraries."""
    digest = hashlib.sha256(f"{torch} {compiler} {sys.version_info[:2]}".encode())
    for file in (*_sources(), Path(__file__)):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


class _Build:
    """One build, in its own folder."""

    def __init__(self, torch: Torch, compiler: list[str], folder: Path) -> None:
        self._torch = torch
        self._compiler = compiler
        self._folder = folder
        self._flags = ["-std=c++20", "-O2", "-g1", "-fPIC", f"-I{SOURCES}"]
        self._flags += [f"-I{torch.cuda / 'include'}", f"-I{torch.nccl / 'include'}"]

    def run(self) -> None:
        sys.stderr.write(f"fakecuda: building its libraries for torch {self._torch.version}, once\n")
        with ThreadPoolExecutor() as pool:
            operators = pool.submit(self._compile, "operators", self._sources(*OPERATOR_PARTS), self._torch_flags())
            self._build_runtime()
            self._build_nccl()
            operators.result()
        libraries = [
            f"-L{self._torch.folder / 'lib'}",
            "-ltorch_python",
            "-ltorch_cpu",
            "-lc10_cuda",
            "-lc10",
            f"./{RUNTIME}",
        ]
        self._link(["operators.o", *libraries], "libfakecuda_operators.so")
        for rest in (*self._folder.glob("*.o"), *self._folder.glob("*.cpp"), *self._folder.glob("*.map")):
            rest.unlink()
        self._write_backend()

    def _torch_flags(self) -> list[str]:
        headers = self._torch.folder / "include"
        return ["-w", "-DNDEBUG", f"-I{headers}", f"-I{headers / 'torch' / 'csrc' / 'api' / 'include'}"]

    def _sources(self, *parts: str) -> list[Path]:
        return [file for part in parts for file in sorted((SOURCES / part).glob("*.cpp"))]

    def _build_runtime(self) -> None:
        self._compile("runtime", self._sources(*RUNTIME_PARTS), ["-Wall", "-Wextra"])
        self._add_unsupported("runtime", self._torch.cuda / "lib" / RUNTIME, "cuda", "fakecuda_unsupported")
        exported = self._version_script(f"{RUNTIME} {{ global: cuda*; __cuda*; cu*; nvml*; fakecuda_*; local: *; }};")
        self._link(["runtime.o", "runtime_unsupported.o", exported, "-lpthread"], RUNTIME)
        # The driver's functions are in the runtime too: these libraries are empty, and need it.
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            self._link(["-Wl,--no-as-needed", f"./{RUNTIME}"], name)

    def _build_nccl(self) -> None:
        self._compile("nccl", self._sources("fakecuda/nccl"), ["-Wall", "-Wextra"])
        self._add_unsupported("nccl", self._torch.nccl / "lib" / NCCL, "nccl", "fakenccl_unsupported")
        exported = self._version_script("{ global: nccl*; fakenccl_*; local: *; };")
        self._link(["nccl.o", "nccl_unsupported.o", exported, f"./{RUNTIME}", "-lpthread"], NCCL)

    def _add_unsupported(self, name: str, real: Path, prefix: str, call: str) -> None:
        """Compile a stub for each function of the real library that the fake one lacks; it returns an error."""
        missing = sorted(self._symbols(prefix, "-D", str(real)) - self._symbols(prefix, f"{name}.o"))
        lines = ['extern "C" {', f"int {call}(const char* function);"]
        lines += [f'int {function}() {{ return {call}("{function}"); }}' for function in missing]
        source = self._folder / f"{name}_unsupported.cpp"
        source.write_text("\n".join([*lines, "}", ""]))
        self._compile(f"{name}_unsupported", [source])

    def _symbols(self, prefix: str, *arguments: str) -> set[str]:
        listed = self._output("nm", "--defined-only", *arguments)
        return set(re.findall(rf" [TW] (_*{prefix}\w+)", listed))

    def _version_script(self, text: str) -> str:
        file = self._folder / f"{len(list(self._folder.glob('*.map')))}.map"
        file.write_text(text + "\n")
        return f"-Wl,--version-script={file}"

    def _compile(self, name: str, sources: list[Path], flags: list[str] | None = None) -> None:
        unit = self._folder / f"{name}_unit.cpp"  # one, so that headers are parsed once
        unit.write_text("".join(f'#include "{source}"\n' for source in sources))
        self._output(*self._compiler, *self._flags, *(flags or []), "-c", unit.name, "-o", f"{name}.o")

    def _link(self, arguments: list[str], library: str) -> None:
        self._output(*self._compiler, "-shared", f"-Wl,-soname,{library}", *arguments, "-o", library)

    def _output(self, *command: str) -> str:
        try:
            done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise BuildError(f"{command[0]} is missing; install g++ and binutils") from None
        if done.returncode != 0:
            raise BuildError(f"{command[0]} failed to build the fake CUDA libraries:\n{done.stderr[-4000:]}")
        return done.stdout

    def _write_backend(self) -> None:
        """Write the module that torch loads on import, as it does for each ``torch.backends`` entry point."""
        python = self._folder / "python"
        information = python / "fakecuda_backend-0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: fakecuda-backend\nVersion: 0\n")
        (information / "entry_points.txt").write_text("[torch.backends]\nfakecuda = fakecuda_backend:load\n")
        (python / "fakecuda_backend.py").write_text(BACKEND)


BACKEND = '''"""Redirects torch's operators on CUDA tensors to the host, in a process that runs on fakecuda."""

import atexit
import ctypes
import pathlib
import sys


def load():
    if not hasattr(ctypes.CDLL(None), "fakecuda_launch"):
        return
    atexit.register(log_unread_races)
    ctypes.CDLL(str(pathlib.Path(__file__).parents[1] / "libfakecuda_operators.so"))
    import torch

    # Their kernels are not torch's operators; without them torch takes its own.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def log_unread_races():
    # Most programs have none, also because they never used a device; they import nothing here.
    count = ctypes.CDLL(None).fakecuda_untaken_races()
    if count == 0:
        return
    try:
        from cudafuture.testing.fakecuda._races import log_unread
    except ImportError as e:
        sys.stderr.write(f"fakecuda: the program took none of {count} race reports; showing them failed: {e}\\n")
    else:
        log_unread()
'''
