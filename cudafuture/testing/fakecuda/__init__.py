"""CUDA devices without a GPU: torch's CUDA build runs on a replacement of the CUDA runtime.

torch's own CUDA code runs: streams, guards, caching allocators, contexts, captures, sticky errors, and over a fake NCCL
``ProcessGroupNCCL``. Devices are host memory, streams are queues, and torch's host kernels run in the stream in place
of CUDA's kernels. Start a program on it with::

    python -m cudafuture.testing.fakecuda --schedule jitter --seed 3 -- pytest tests

A ``Schedule`` is one of these words:

==========  =========================================================================================================
schedule    time at which an operation runs that no host thread waits for
==========  =========================================================================================================
``lazy``    late, so that a program that forgot to wait reads NaN, which fresh memory is filled with
``jitter``  after a random time, chosen by the seed
``eager``   at once
==========  =========================================================================================================

With ``--races``, ``detect_races()`` raises and ``races()`` returns the pairs of operations that nothing orders.

Kernels that are not torch's operators (Triton, custom kernels) are skipped and counted. The driver's behaviour is
modelled after its documentation, and times mean nothing. A test that fails here has found a bug. A test that passes
here can still fail on a GPU.
"""

from cudafuture.testing.fakecuda._build import BuildError, build
from cudafuture.testing.fakecuda._controls import (
    CudaHold,
    CudaStatistics,
    contexts,
    fail,
    fail_allocations,
    hold,
    release,
    reset_context,
    skipped_kernels,
    statistics,
)
from cudafuture.testing.fakecuda._environment import Schedule, environment
from cudafuture.testing.fakecuda._library import is_active
from cudafuture.testing.fakecuda._races import detect_races, races
from cudafuture.testing.machine._reports import RaceError, Report

__all__ = [
    "BuildError",
    "CudaHold",
    "CudaStatistics",
    "RaceError",
    "Report",
    "Schedule",
    "build",
    "contexts",
    "detect_races",
    "environment",
    "fail",
    "fail_allocations",
    "hold",
    "is_active",
    "races",
    "release",
    "reset_context",
    "skipped_kernels",
    "statistics",
]
