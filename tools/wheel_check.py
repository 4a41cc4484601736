"""Check of an installed wheel, in a virtual environment that is not a checkout's.

    python tools/wheel_check.py WHEEL

The wheel contains no library of torch, and its label names the torch that it requires. The installed package imports,
has io_uring, and runs a chain of futures. An AssertionError names what is wrong.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import zipfile
from pathlib import Path


def check_contents(wheel: Path) -> None:
    """Raise AssertionError if the wheel contains a library of torch, or its native modules are incomplete."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if re.search(r"\.so(\.\d+)*$", name)]
    foreign = [name for name in libraries if re.match(r"lib(torch|c10|shm|gomp|cu)", Path(name).name)]
    assert not foreign, f"{wheel.name} contains libraries of torch: {foreign}"
    modules = sorted(name.partition(".")[0] for name in libraries)
    expected = ["cudafuture/_C", "cudafuture/_c10d", "cudafuture/testing/sim/_C", "rpc_ext/_C"]
    assert modules == expected, f"{wheel.name} contains {modules}, not {expected}"


def check_metadata() -> None:
    """Raise AssertionError unless the label of the version names the minor version of torch that is required."""
    installed = importlib.metadata.distribution("cudafuture")
    label = installed.version.partition("+")[2]
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    assert label == f"torch{major}{minor}", f"version {installed.version} was installed beside torch {major}.{minor}"
    required = [each for each in installed.requires or [] if re.match(r"torch\b", each)]
    assert required == [f"torch=={major}.{minor}.*"], f"the wheel requires {required}"


def check_use() -> None:
    """Raise AssertionError unless the installed package works."""
    import cudafuture
    import cudafuture_c10d
    import rpc_ext
    from cudafuture.io import Engine

    for package in (cudafuture, cudafuture_c10d, rpc_ext):
        found = Path(package.__file__ or "").resolve()
        assert found.is_relative_to(Path(sys.prefix).resolve()), f"{package.__name__} was imported from {found}"
    last = first = cudafuture.CUDAFuture[int](name="first")
    for _ in range(1000):
        last = last.then(lambda done: done.value() + 1)
    first.set_result(0)
    assert last.wait(timeout=60) == 1000
    with Engine() as engine:  # a sandbox may forbid io_uring, but the wheel has it
        assert "without liburing" not in engine._native.why_not_io_uring, engine._native.why_not_io_uring


if __name__ == "__main__":
    check_contents(Path(sys.argv[1]))
    check_metadata()
    check_use()
