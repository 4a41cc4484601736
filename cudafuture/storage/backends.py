"""TensorNVMe's backends by name, and the engines that stand for them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import torch

from cudafuture.storage.engine import Engine, default_engine
from cudafuture.storage.file import File

__all__ = ["get_backends", "probe_backend"]

_ENGINES: dict[str, Literal["io_uring", "auto", "threads"]] = {"uring": "io_uring", "aio": "auto", "pthread": "threads"}
_MOST_THREADS = 1024


def get_backends() -> set[str]:
    """Return the names that DiskOffloader and AsyncFileWriter take for `backend`.

    ``"uring"``: io_uring. ``"aio"``: what serves best here, io_uring or threads. ``"pthread"``: threads.

    >>> sorted(get_backends())
    ['aio', 'pthread', 'uring']
    """
    return set(_ENGINES)


def probe_backend(backend: str) -> bool:
    """Say whether a backend of that name works here: bytes that it writes to a temporary file can be read again.

    ``"uring"`` does not where the kernel or a sandbox forbids io_uring. Who asks for it all the same gets threads.

    >>> probe_backend("pthread"), probe_backend("tape")
    (True, False)
    """
    if backend not in _ENGINES:
        return False
    written, read = torch.arange(64, device="cpu"), torch.zeros(64, dtype=torch.int64, device="cpu")
    try:
        with (
            Engine(_ENGINES[backend], queue_depth=2, block_size=4096, threads=2) as engine,
            tempfile.TemporaryDirectory() as folder,
            File(Path(folder) / "probe", "w+", engine=engine) as file,
        ):
            file.write(written).wait()
            file.read(read).wait()
    except OSError:  # a StorageError too
        return False
    return torch.equal(written, read)


def engine_of(backend: str, n_entries: int, given: Engine | None) -> tuple[Engine, bool]:
    """Return the engine that was given, or what serves a backend; and whether it is a new one, for the caller to close.

    ``"uring"`` and ``"aio"`` share the engine of the process; ``"pthread"`` has `n_entries` threads of its own.

    Raises:
        ValueError: there is no backend of that name, or `n_entries` is less than 1.
    """
    if backend not in _ENGINES:
        raise ValueError(f"backend={backend!r}: one of {', '.join(sorted(_ENGINES))} is wanted")
    if n_entries < 1:
        raise ValueError(f"n_entries={n_entries}: at least one operation has to be pending")
    if given is not None:
        return given, False
    if backend == "pthread":
        return Engine("threads", threads=min(n_entries, _MOST_THREADS)), True
    return default_engine(), False
