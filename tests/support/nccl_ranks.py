"""Functions of ranks over NCCL that lose a rank on the way."""

from __future__ import annotations

import datetime as dt
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture
import cudafuture.distributed as cfd
from cudafuture import CUDAFuture
from cudafuture.distributed import CollectiveError
from support.backends import NCCL
from support.ranks import run_ranks

LONG = 60.0  # seconds; much more than anything takes
SECONDS = 3.0  # the timeout of groups that lose a rank

GOES_ON = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "10",
    "TORCH_FR_BUFFER_SIZE": "0",
}
"""The variables of docs/collectives.md for a program that continues after a failure."""


def run_nccl(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call the function on `size` ranks with a GPU each; skip where there are fewer."""
    if not dist.is_nccl_available():
        pytest.skip("needs NCCL, which this build of torch does not have")
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, one for each rank, and there are {torch.cuda.device_count()}")
    return run_ranks(size, function, *args, **{"backend": NCCL, "environment": GOES_ON} | options)


def ones(size: int = 64) -> torch.Tensor:
    return torch.ones(size, device="cuda")


def meet(place: str, rank: int, ranks: Sequence[int]) -> None:
    """Wait for the ranks in the store: no rank leaves before all have finished."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{place}/{rank}", "")
    store.wait([f"{place}/{r}" for r in ranks])


def group_that_loses(rank: int, lost: int, sent: signal.Signals, seconds: float = SECONDS) -> cfd.ProcessGroup:
    """Make a group, use it, and let one rank die or stop."""
    group = cfd.new_group(timeout=dt.timedelta(seconds=seconds))
    group.all_reduce(ones()).wait(timeout=LONG)
    meet("used", rank, group.ranks())
    if rank == lost:
        os.kill(os.getpid(), sent)
    return group


def issue_all(group: cfd.ProcessGroup) -> dict[str, CUDAFuture[Any]]:
    """Issue operations that take the lost rank, and attach what follows them."""
    size = group.size()
    parts = [group.all_reduce(ones()), group.broadcast(ones(), group_src=0)]
    return {
        "all_reduce": parts[0],
        "broadcast": parts[1],
        "then": group.all_reduce(ones()).then(lambda f: f.value().mul_(0.5)),
        "then on the host": group.all_reduce(ones()).then(lambda f: len(f.value())),
        "then_async": group.reduce_scatter_tensor(ones(), ones(64 * size)).then_async(
            lambda f: group.all_gather_into_tensor(ones(64 * size), f.value())
        ),
        "gather": cudafuture.gather(*parts),
        "collect_all": cudafuture.collect_all(parts),
        "collect_any": cudafuture.collect_any(parts),
        "from_torch": of_torch(group),
        "barrier": group.barrier(),
    }


def of_torch(group: cfd.ProcessGroup) -> CUDAFuture[Any]:
    """Return the future of torch's own all_reduce, which raises at the call once the communicator is aborted."""
    try:
        return CUDAFuture.from_torch(dist.all_reduce(ones(), group=group.group, async_op=True))
    except dist.DistBackendError:
        return CUDAFuture.failed(CollectiveError("refused at the call"))


def error_of(future: CUDAFuture[Any]) -> str:
    """Return the name of the error with which the future ends."""
    try:
        future.wait(timeout=LONG)
    except Exception as e:
        return type(e).__name__
    return "success"


def lose_one(rank: int, lost: int, sent: signal.Signals) -> dict[str, str]:
    group = group_that_loses(rank, lost, sent)
    futures = issue_all(group)
    outcomes = {name: error_of(future) for name, future in futures.items()}
    for future in futures.values():
        assert isinstance(future.late_error or future.exception(), CollectiveError)
    return outcomes


def describe_a_loss(rank: int, lost: int) -> None:
    """Check what the error of a lost rank says."""
    group = group_that_loses(rank, lost, signal.SIGKILL)
    future = group.all_reduce(ones(8))
    with pytest.raises(CollectiveError, match=r"all_reduce #\d+ on group .* of float32\[8\]") as failure:
        future.wait(timeout=LONG)
    error = failure.value
    assert (error.operation, error.rank, error.group) == ("all_reduce", rank, group.group.group_name)
    assert error.shapes == ((8,),)
    assert isinstance(error.__cause__, dist.DistBackendError)
    assert future.done()
    assert isinstance(future.late_error, CollectiveError)
    with pytest.raises(CollectiveError):
        future.ready()


def go_on_without(rank: int, size: int, lost: int) -> float:
    """Lose a rank, and reduce among the others."""
    group = group_that_loses(rank, lost, signal.SIGKILL)
    error = error_of(group.all_reduce(ones()))
    assert error == "CollectiveError", error
    survivors = cfd.ProcessGroup().new_group([r for r in range(size) if r != lost])
    total: float = survivors.all_reduce(ones()).wait(timeout=LONG).sum().item()
    return total


def lose_one_after_another(rank: int, size: int, order: list[int]) -> list[dict[str, str]]:
    """Lose the ranks in that order; after each loss the others make a group and go on."""
    outcomes: list[dict[str, str]] = []
    for i, lost in enumerate(order):
        rest = [r for r in range(size) if r not in order[:i]]
        group = cfd.ProcessGroup().new_group(rest, dt.timedelta(seconds=SECONDS))
        assert group.all_reduce(ones()).wait(timeout=LONG)[0].item() == len(rest)
        meet(f"used {i}", rank, rest)
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        outcomes.append({name: error_of(future) for name, future in issue_all(group).items()})
    return outcomes


def stay_alive(rank: int, lost: int) -> None:
    """Lose a rank, learn of it, and do not end: something else has to end this process."""
    group = group_that_loses(rank, lost, signal.SIGKILL)
    assert error_of(group.all_reduce(ones())) == "CollectiveError"
    threading.Event().wait()


def finish_before(rank: int, lost: int) -> list[str]:
    """Finish some operations, lose a rank, and ask for those again."""
    group = cfd.new_group(timeout=dt.timedelta(seconds=SECONDS))
    before = [group.all_reduce(ones()) for _ in range(4)]
    children = [future.then(lambda f: f.value().mul_(0.5)) for future in before]
    for future in [*before, *children]:
        future.wait(timeout=LONG)
    meet("finished", rank, group.ranks())
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    assert error_of(group.all_reduce(ones())) == "CollectiveError"
    return [error_of(future) for future in [*before, *children]]
