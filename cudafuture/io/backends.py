"""Table of the backends that move bytes between files and memory, ``BACKENDS``, and what each of them needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cudafuture.errors import StorageError
from cudafuture.io.engine import PAGE, BackendName, Engine
from cudafuture.io.file import File
from cudafuture.io.gds import GDSFile, why_no_gds

__all__ = ["BACKENDS", "Backend"]


@dataclass(frozen=True)
class Backend:
    """Row of the table of backends.

    >>> import torch
    >>> threads = next(backend for backend in BACKENDS if backend.name == "threads")
    >>> threads.needs, threads.why_not()
    ('nothing', None)
    >>> with threads.open("numbers", "w+") as file:
    ...     file.write(torch.arange(4)).wait()
    32
    """

    name: str
    needs: str
    """requirements on the machine and the installation"""
    open: Callable[..., File]
    """open a file, given its path and mode, and optionally ``direct``, as for ``File``"""
    why_not: Callable[[], str | None]
    """return the reason why the backend does not work here, or None if it works"""


def _of_engine(name: BackendName, needs: str) -> Backend:
    """Return the row of a backend of ``Engine``. Each file that it opens has an engine of its own."""

    def open_file(
        path: str | os.PathLike[str],
        mode: Literal["r", "r+", "w", "w+"] = "r",
        *,
        direct: Literal["auto"] | bool = "auto",
    ) -> File:
        return File(path, mode, engine=Engine(name), direct=direct)

    def why_not() -> str | None:
        try:
            Engine(name, queue_depth=1, block_size=PAGE, threads=1).close()
        except StorageError as e:
            return str(e)
        return None

    return Backend(name, needs, open_file, why_not)


BACKENDS: tuple[Backend, ...] = (
    _of_engine("io_uring", needs="a kernel and a sandbox that permit io_uring, and a build with liburing"),
    _of_engine("threads", needs="nothing"),
    Backend("gds", needs="KvikIO", open=GDSFile, why_not=why_no_gds),
)
"""The table: one row for each backend."""
