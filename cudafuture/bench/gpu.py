"""Benchmarks of a real GPU: futures, copies, prefetching, collectives, storage and swapping; every limit is a row.

    cudafuture bench gpu [--only ROW ...] [--rounds N] [--json PATH] [--plot PATH] [--check]

Each row checks its data first. Ours and the peers run in the same process, by turns in a shuffled order; a row shows
medians over the rounds. ``--only copies`` takes all rows whose names begin with ``copies-``.

Files are in the folder CUDAFUTURE_BENCH_DIR, or the current one, which needs 3 GiB. On fake devices the rows are small
and only their logic runs: they are "rehearsed", without figures and limits::

    python -m cudafuture.testing.fakecuda -- python -m cudafuture bench gpu
"""

from __future__ import annotations

import torch

from cudafuture.bench import _gpu, _gpu_copies, _gpu_disk, _gpu_host
from cudafuture.bench._rows import Skipped, Suite

__all__ = ["SUITE"]


def require_gpu() -> None:
    """Raise where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise Skipped("there is no GPU: run it on one, or with python -m cudafuture.testing.fakecuda -- for its logic")


ROWS = _gpu_host.ROWS | _gpu_copies.ROWS | _gpu_disk.ROWS

SUITE = Suite("gpu", "A GPU, beside the peers", ROWS, rounds=15, takes_figures=not _gpu.IS_FAKE, prepare=require_gpu)
