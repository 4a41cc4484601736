"""Checks of a machine: whether the library can do here what it is for, and how to mend what it cannot.

::

    examine(folder) ──► CHECKS, and those of other packages (entry points of ENTRY_POINTS)
                            each ──► Diagnosis: its State is ok, slow or broken; with advice

A package adds a check by an entry point of the group ENTRY_POINTS.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from cudafuture._build_info import torch_version
from cudafuture._path import path_text
from cudafuture.graph_breaks import break_graphs
from cudafuture.io import Engine, File, empty
from cudafuture.statistics import text_of_bytes

__all__ = ["CHECKS", "ENTRY_POINTS", "Check", "Diagnosis", "State", "examine"]

State = Literal["ok", "slow", "broken"]
ENTRY_POINTS = "cudafuture.doctor"
_PAGE = 4096
_CAP_IPC_LOCK = 14  # <linux/capability.h>
_BLOCK = 1 << 20  # bytes
_SECONDS = 1.5  # for writing, and again for reading
_ROOM = 256 << 20  # bytes, at most, for the check of the disk's speed


@dataclass(frozen=True)
class Diagnosis:
    """Result of a check."""

    name: str
    state: State
    """ "slow": it works, but not as fast as it could, or a part is missing; "broken": programs that need it fail."""
    found: str
    advice: str = ""
    """Advice how to mend it."""

    def as_json(self) -> dict[str, str]:
        """Return the fields by name.

        >>> Diagnosis("disk", "ok", "2 GB/s").as_json()["state"]
        'ok'
        """
        return asdict(self)


Check = Callable[[Path], Iterator[Diagnosis]]
"""A check yields what it finds; its argument is the folder for files of stores. Errors count as findings."""


def examine(folder: str | os.PathLike[str] | None = None) -> Iterator[Diagnosis]:
    """Yield what the checks of this machine find, each when it is known; it takes some 5 seconds.

    Args:
        folder: where stores and swapped state will be; None: the folder for temporary files.

    >>> next(examine()).name
    'torch'
    """
    where = Path(tempfile.gettempdir() if folder is None else folder)
    for check in [*CHECKS, *_checks_of_others()]:
        try:
            yield from check(where)
        except Exception as e:  # a check that fails is a finding
            yield Diagnosis(getattr(check, "__name__", "check").strip("_"), "broken", f"{type(e).__name__}: {e}")


def _checks_of_others() -> Iterator[Check]:
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            yield entry.load()
        except Exception as e:  # of another package
            error = f"{type(e).__name__}: {e}"
            yield lambda _, entry=entry, error=error: iter(  # type: ignore[misc]
                [Diagnosis(entry.name, "broken", f"its check does not load: {error}")]
            )


def _torch(_: Path) -> Iterator[Diagnosis]:
    versions = f"torch {torch.__version__}, built for {torch_version}, Python {platform.python_version()}"
    yield Diagnosis("torch", "ok", versions)  # another minor version does not import


def _devices(_: Path) -> Iterator[Diagnosis]:
    if not torch.accelerator.is_available():
        has_cuda = torch.version.cuda is not None
        advice = "torch is a CUDA build, but finds no device: see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        simulated = "programs can be tested on the simulated accelerator: cudafuture.testing.sim"
        yield Diagnosis("devices", "slow" if has_cuda else "ok", "none", advice if has_cuda else simulated)
        return
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    name = torch.cuda.get_device_name(0) if kind is not None and kind.type == "cuda" else ""
    yield Diagnosis("devices", "ok", f"{count} of type {kind}{', ' + name if name else ''}")


def _gloo(_: Path) -> Iterator[Diagnosis]:
    if not dist.is_available() or not dist.is_gloo_available():
        yield Diagnosis("gloo", "broken", "this build of torch has no Gloo", "install a build with torch.distributed")
        return
    try:
        group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=10))
        tensor = torch.ones(1, dtype=torch.float32, device="cpu")
        group.allreduce([tensor]).wait()
    except RuntimeError as e:
        advice = (
            f"Gloo looks for the address of this machine's name, {socket.gethostname()!r}: give the name an address in "
            "/etc/hosts, or name an interface: GLOO_SOCKET_IFNAME=lo on one machine"
        )
        yield Diagnosis("gloo", "broken", str(e).splitlines()[0], advice)
        return
    yield Diagnosis("gloo", "ok", "all_reduce on one rank")


def _nccl(_: Path) -> Iterator[Diagnosis]:
    if not torch.cuda.is_available():
        yield Diagnosis("nccl", "ok", "not needed: no CUDA device")
    elif not dist.is_nccl_available():
        yield Diagnosis("nccl", "broken", "this build of torch has no NCCL", "install a CUDA build of torch for Linux")
    else:
        yield Diagnosis("nccl", "ok", ".".join(map(str, torch.cuda.nccl.version())))


def _names(_: Path) -> Iterator[Diagnosis]:
    for name, advice in (
        ("localhost", "add `127.0.0.1 localhost` to /etc/hosts"),
        (socket.gethostname(), "add the name with an address of this machine to /etc/hosts"),
    ):
        try:
            address = socket.getaddrinfo(name, None)[0][4][0]
        except OSError as e:
            yield Diagnosis(f"name {name}", "broken", str(e), advice)
        else:
            yield Diagnosis(f"name {name}", "ok", str(address))


def _ports(_: Path) -> Iterator[Diagnosis]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname(), timeout=5):
            yield Diagnosis("ports", "ok", f"a connection over loopback, port {server.getsockname()[1]}")


def _io_uring(_: Path) -> Iterator[Diagnosis]:
    engine = Engine()
    if engine.backend == "io_uring":
        yield Diagnosis("io_uring", "ok", f"kernel {platform.release()}")
        return
    advice = (
        "reads and writes use threads, which cost more of the processor. Allow io_uring: a container needs a seccomp "
        "profile that permits io_uring_setup, io_uring_enter and io_uring_register; the host "
        "`sysctl kernel.io_uring_disabled=0`; a build from source the headers of liburing"
    )
    yield Diagnosis("io_uring", "slow", engine._native.why_not_io_uring, advice)


def _memory(_: Path) -> Iterator[Diagnosis]:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _may_lock():
        yield Diagnosis("locked memory", "ok", "no limit")
    else:
        state: State = "ok" if soft >= 64 << 20 else "slow"
        advice = "" if state == "ok" else "`ulimit -l unlimited`, or LimitMEMLOCK=infinity in the unit of the service"
        yield Diagnosis("locked memory", state, f"at most {text_of_bytes(soft)}", advice)


def _may_lock() -> bool:
    """Return True if this process has the capability that lifts the limit; containers take it from root."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def _disk(folder: Path) -> Iterator[Diagnosis]:
    """Write and read a file as a store does, and measure it."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Diagnosis(
            "disk", "broken", f"no file can be made in {folder}", "name a folder that you may write: --folder"
        )
        return
    free = shutil.disk_usage(folder).free
    size = min(_ROOM, free // 4) // _BLOCK * _BLOCK
    if size < _BLOCK:
        yield Diagnosis(
            "disk", "broken", f"{text_of_bytes(free)} free in {folder}", "free some room, or name another: --folder"
        )
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix="doctor-of-cudafuture-") as made:
        path = Path(path_text(made)) / "speed"
        with File(str(path), "w+") as file:
            path.unlink()  # nothing stays, whatever becomes of this process
            if not file.is_direct:
                advice = (
                    "reads and writes go through the page cache, which costs a copy and memory: use a folder on ext4 "
                    "or xfs on a local disk (tmpfs, overlayfs and network file systems have no O_DIRECT)"
                )
                yield Diagnosis("O_DIRECT", "slow", f"not in {folder}", advice)
            else:
                yield Diagnosis("O_DIRECT", "ok", f"in {folder}, blocks of {_PAGE} bytes")
            blocks = [empty(_BLOCK) for _ in range(8)]
            written = _rate(lambda at, block: file.write(block, at), blocks, size)
            read = _rate(lambda at, block: file.read(block, at), blocks, written[1])
            through = "" if file.is_direct else ", through the page cache"
    text = (
        f"{text_of_bytes(written[0])}/s written, {text_of_bytes(read[0])}/s read{through}, {text_of_bytes(free)} free"
    )
    is_slow = min(written[0], read[0]) < 200e6
    advice = "an NVMe disk does 1 GB/s and more: is this a network disk, or one with a limit?" if is_slow else ""
    yield Diagnosis("disk", "slow" if is_slow else "ok", text, advice)


def _rate(operation: Callable[..., object], blocks: list[torch.Tensor], size: int) -> tuple[float, int]:
    """Run an operation on consecutive blocks, 8 at a time; return bytes a second, and the bytes."""
    pending: list[object] = []
    begin, at = time.monotonic(), 0
    while at < size and time.monotonic() - begin < _SECONDS:
        if len(pending) == len(blocks):
            pending.pop(0).wait()  # type: ignore[attr-defined]
        pending.append(operation(at, blocks[at // _BLOCK % len(blocks)]))
        at += _BLOCK
    for one in pending:
        one.wait()  # type: ignore[attr-defined]
    return at / max(time.monotonic() - begin, 1e-9), at


def _gds(_: Path) -> Iterator[Diagnosis]:
    if not torch.cuda.is_available():
        return
    try:
        import kvikio  # noqa: F401
    except ImportError:
        yield Diagnosis(
            "GDS", "slow", "kvikio is missing", "pip install 'cudafuture[gds]': GDSFile then reads into the GPU"
        )
        return
    if Path("/proc/driver/nvidia-fs").exists():
        yield Diagnosis("GDS", "ok", "kvikio and nvidia-fs")
    else:
        yield Diagnosis("GDS", "slow", "the kernel module nvidia-fs is not loaded", "load it: `modprobe nvidia-fs`")


def _home(_: Path) -> Iterator[Diagnosis]:
    from cudafuture.config import config

    folder = config.debug_dir
    if not folder:
        yield Diagnosis("debug sockets", "ok", "switched off")
        return
    with contextlib.suppress(OSError):
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        yield Diagnosis("debug sockets", "ok", folder)
    else:
        advice = (
            "`python -m cudafuture ps` cannot ask processes: set CUDAFUTURE_DEBUG_DIR to a folder that you may write"
        )
        yield Diagnosis("debug sockets", "slow", f"no socket can be made in {folder}", advice)


CHECKS: tuple[Check, ...] = (_torch, _devices, _gloo, _nccl, _names, _ports, _io_uring, _memory, _disk, _gds, _home)
break_graphs(Diagnosis, examine)
