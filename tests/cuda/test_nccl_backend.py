"""The c10d backend "cudafuture" over NCCL, with Gloo for the host in the same group."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support import nccl_backend
from support.nccl_ranks import run_nccl

pytestmark = [pytest.mark.cuda, pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("nccl-backend")]

SIZE = 3


@pytest.mark.parametrize(
    "function",
    [
        nccl_backend.use_futures,
        nccl_backend.follow_on_another_stream,
        nccl_backend.compare,
        nccl_backend.coalesce,
        nccl_backend.own_options,
    ],
)
def test_backend_over_nccl(function: Callable[[int, int], None]) -> None:
    run_nccl(SIZE, function, SIZE, backend="cudafuture")


def test_groups_below_a_bound_one() -> None:
    run_nccl(SIZE, nccl_backend.make_groups, SIZE, backend="cudafuture", binds_device=True)
