"""TensorNVMe's backends by name, and the engines that implement them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from cudafuture._arguments import expect_int
from cudafuture.io.engine import BackendName, Engine, default_engine
from cudafuture.io.file import File

__all__ = ["get_backends", "probe_backend"]

_ENGINES: dict[str, BackendName] = {"uring": "io_uring", "aio": "auto", "pthread": "threads"}
_MOST_THREADS = 1024


def get_backends() -> set[str]:
    """Return the names that DiskOffloader and AsyncFileWriter accept as `backend`.

    ``"uring"``: io_uring. ``"aio"``: the best available, io_uring or threads. ``"pthread"``: threads.

    >>> sorted(get_backends())
    ['aio', 'pthread', 'uring']
    """
    return set(_ENGINES)


def probe_backend(backend: str) -> bool:
    """Return True if a backend works here: it writes bytes to a temporary file and reads them back.

    ``"uring"`` does not work if the kernel or a sandbox forbids io_uring. Selecting it then uses threads.

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
    except OSError:  # StorageError is an OSError
        return False
    return torch.equal(written, read)


def engine_of(backend: str, n_entries: int, given: Engine | None) -> tuple[Engine, bool]:
    """Return the given engine, or the engine of a backend; and True if it is new, so that the caller must close it.

    ``"uring"`` and ``"aio"`` share the engine of the process; ``"pthread"`` has its own `n_entries` threads.

    Raises:
        TypeError: `n_entries` is not an int.
        ValueError: the backend does not exist, or `n_entries` is less than 1.
    """
    if backend not in _ENGINES:
        raise ValueError(f"backend={backend!r} does not exist; use one of {', '.join(sorted(_ENGINES))}")
    if expect_int("n_entries", n_entries) < 1:
        raise ValueError(f"n_entries={n_entries} is less than 1: at least one operation must be allowed to be pending")
    if given is not None:
        return given, False
    if backend == "pthread":
        return Engine("threads", threads=min(n_entries, _MOST_THREADS)), True
    return default_engine(), False
