"""Environment variables for a process, and its children, that run on fakecuda."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from cudafuture.testing.fakecuda._build import NCCL, RUNTIME, build

__all__ = ["Schedule", "environment"]

Schedule = Literal["lazy", "jitter", "eager"]

REAL_DRIVER = Path("/proc/driver/nvidia/version")
MOST_DEVICES = 64
MOST_SEED = 10**15
MOST_MEMORY = 10**9 << 20  # bytes


def environment(
    *,
    schedule: Schedule = "lazy",
    seed: int = 1,
    devices: int = 2,
    memory: int = 4 << 30,
    races: bool = False,
    verbose: bool = False,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    r"""Return environment variables for a process that runs on fake CUDA devices.

    The first call for a torch builds the libraries, in about half a minute, and keeps them in the user's cache.

    Args:
        schedule: the time at which an operation runs that no host thread waits for: ``lazy`` (late), ``jitter`` (after
            a random time) or ``eager`` (at once)
        seed: of the random times of ``jitter``
        devices: the number of devices, 0 to 64
        memory: of each device, in bytes
        races: detect races between streams; each process logs at its end the reports that it has not taken
        verbose: report contexts, skipped kernels and unsupported calls on stderr
        base: the variables to add to; default: those of this process

    Raises:
        BuildError: the libraries cannot be built here.
        RuntimeError: the machine has a CUDA driver.
        ValueError: the number of devices, the seed or the memory is out of range.

    >>> variables = fakecuda.environment(schedule="jitter", seed=3)
    >>> subprocess.check_output([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], env=variables)
    b'2\n'
    """
    if REAL_DRIVER.exists():
        raise RuntimeError(f"{REAL_DRIVER} exists, so this machine has a CUDA driver; run on the real devices instead")
    if not 0 <= devices <= MOST_DEVICES:
        raise ValueError(f"there can be 0 to {MOST_DEVICES} fake devices, not {devices}")
    if not 0 <= seed <= MOST_SEED:
        raise ValueError(f"a seed is 0 to {MOST_SEED}, not {seed}")
    if not 1 << 20 <= memory <= MOST_MEMORY:
        raise ValueError(f"a fake device has 1 MiB to {MOST_MEMORY >> 20} MiB of memory, not {memory} bytes")
    libraries = build()
    variables = dict(os.environ if base is None else base)
    # torch's libraries name the folders of NVIDIA's packages, which come before LD_LIBRARY_PATH.
    variables["LD_PRELOAD"] = _with(_with(variables.get("LD_PRELOAD"), libraries / NCCL), libraries / RUNTIME)
    variables["LD_LIBRARY_PATH"] = _with(variables.get("LD_LIBRARY_PATH"), libraries)
    variables["PYTHONPATH"] = _with(variables.get("PYTHONPATH"), libraries / "python")
    variables["FAKECUDA_SCHEDULE"] = schedule
    variables["FAKECUDA_SEED"] = str(seed)
    variables["FAKECUDA_DEVICES"] = str(devices)
    variables["FAKECUDA_MEMORY"] = str(memory >> 20)
    variables["FAKECUDA_RACES"] = str(int(races))
    variables["FAKECUDA_VERBOSE"] = str(int(verbose))
    return variables


def _with(paths: str | None, first: Path) -> str:
    rest = [path for path in (paths or "").split(":") if path and path != str(first)]
    return ":".join([str(first), *rest])
