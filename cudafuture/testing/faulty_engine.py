"""Storage engine whose disk fails on request of a test."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from cudafuture._arguments import expect_number
from cudafuture.io.engine import BackendName, Engine

__all__ = ["FaultyEngine"]


class FaultyEngine(Engine):
    """Storage engine on which I/O fails by number, or by chance from a seed.

    An I/O is one request to the kernel: one block of a read or write, of `block_size` bytes at most. A block that was
    interrupted or cut short is requested again, and counts again. ``statistics().blocks`` counts the I/Os of a run
    without faults, so a test can fail each one in turn.

    Args:
        at: errnos by the numbers of the I/Os that fail, from 1 on. EAGAIN and EINTR are retried, like the kernel's.
        seed: of the random faults.
        io_error, no_space, again, interrupted: rates of I/Os that fail with EIO, writes with ENOSPC, I/Os with EAGAIN
            and EINTR: from 0 to 1.
        cut_short, late: rates of I/Os that move less than requested, and of results that arrive after later ones.
        held: hold all results until ``release_held()``.
        queue_depth, block_size, threads, max_pending: as for ``Engine``; so is `backend`.

    Raises:
        ValueError: a number is below 1, a code is not an errno, or a rate is not between 0 and 1.

    >>> import errno
    >>> import torch
    >>> from cudafuture.io import File
    >>> with FaultyEngine(at={2: errno.EIO}) as engine, File("numbers", "w", engine=engine) as file:
    ...     good, bad = file.write(torch.ones(4)), file.write(torch.ones(4), 16)
    ...     good.wait(), bad.exception().errno == errno.EIO
    (16, True)
    """

    def __init__(
        self,
        backend: BackendName = "auto",
        *,
        at: Mapping[int, int] | None = None,
        seed: int = 0,
        io_error: float = 0.0,
        no_space: float = 0.0,
        again: float = 0.0,
        interrupted: float = 0.0,
        cut_short: float = 0.0,
        late: float = 0.0,
        held: bool = False,
        queue_depth: int = 32,
        block_size: int = 1 << 19,
        threads: int = 8,
        max_pending: int | None = None,
    ) -> None:
        for number, code in (at or {}).items():
            if number < 1 or code not in errno.errorcode:
                raise ValueError(f"at={{{number}: {code}}}: I/Os count from 1, and fail with an errno")
        rates = {
            "io_error": io_error,
            "no_space": no_space,
            "again": again,
            "interrupted": interrupted,
            "cut_short": cut_short,
            "late": late,
        }
        for name, rate in rates.items():
            expect_number(name, rate)
            if not 0 <= rate <= 1:
                raise ValueError(f"{name}={rate} is not between 0 and 1")
        super().__init__(
            backend,
            queue_depth=queue_depth,
            block_size=block_size,
            threads=threads,
            max_pending=max_pending,
            _faults={"at": dict(at or {}), "seed": seed, "held": held, **rates},
        )

    def release_held(self) -> None:
        """Release the results of an engine that holds them, from now on.

        >>> with FaultyEngine(held=True) as engine:
        ...     engine.release_held()
        """
        self._native.release_held()
