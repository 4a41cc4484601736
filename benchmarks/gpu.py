"""Benchmarks of a real GPU: futures, copies, prefetching, collectives, storage and swapping; every limit is a row.

    python benchmarks/gpu.py [--only NAME ...] [--rounds N] [--json [PATH]] [--check]

Each row checks its data first. Ours and the peers run in the same process, by turns in a shuffled order; a row shows
medians over the rounds. ``--only copies`` takes all rows whose names begin with ``copies-``. With ``--json`` the file
is written after each row, so that a run that is cut leaves what it has measured.

Files are in the folder CUDAFUTURE_BENCH_DIR, or the current one, which needs 3 GiB. On fake devices the rows are small
and only their logic runs: they are "rehearsed", without figures and limits::

    python -m cudafuture.testing.fakecuda -- python benchmarks/gpu.py
"""

from __future__ import annotations

import sys

import torch

from _rows import run

if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("there is no GPU: run it on one, or with python -m cudafuture.testing.fakecuda -- for its logic")
    import _gpu
    import _gpu_copies
    import _gpu_disk
    import _gpu_host

    limits = _gpu_host.ROWS | _gpu_copies.ROWS | _gpu_disk.ROWS
    sys.exit(run("gpu", "A GPU, beside the peers", limits, rounds=15, takes_figures=not _gpu.IS_FAKE))
