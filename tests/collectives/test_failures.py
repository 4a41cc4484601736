"""Futures of collectives when a rank dies, stops, stays away, or issues another collective."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture
import cudafuture.distributed as cfd
from cudafuture import CUDAFuture
from cudafuture.distributed import CollectiveError, _operations
from support.ranks import run_ranks, short_group

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("failures")]

LONG = 40.0  # much more than any of them takes

# On rank 1 these need nothing of the others.
ENDS_WELL_ELSEWHERE = {"gather", "gather_single"}


# Of every row of the table; the sends are those of "recv" and "recv_object_list".
ROWS = [row.name for row in vars(_operations).values() if isinstance(row, _operations.DistributedOperation)]
NAMES = set(ROWS) - {"send", "send_object_list"}


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def several(count: int) -> list[torch.Tensor]:
    return [ones(4) for _ in range(count)]


def every_operation(rank: int, size: int, lost: int) -> dict[str, Callable[[cfd.ProcessGroup], CUDAFuture[Any]]]:
    """Yield every operation, such that ranks 0 and 1 need rank `lost` for it."""
    mine = several(size) if rank == lost else None
    at_0 = several(size) if rank == 0 else None
    peers = [r for r in range(size) if r != lost]
    return {
        "all_reduce": lambda g: g.all_reduce(ones(4)),
        "all_reduce_coalesced": lambda g: g.all_reduce_coalesced(several(2)),
        "broadcast": lambda g: g.broadcast(ones(4), lost),
        "reduce": lambda g: g.reduce(ones(4), 0),
        "all_gather": lambda g: g.all_gather(several(size), ones(4)),
        "all_gather_coalesced": lambda g: g.all_gather_coalesced([several(2) for _ in range(size)], several(2)),
        "all_gather_into_tensor": lambda g: g.all_gather_into_tensor(ones(4 * size), ones(4)),
        "gather": lambda g: g.gather(ones(4), at_0, 0),
        "gather_single": lambda g: g.gather_single(ones(4), ones(4 * size) if rank == 0 else None, 0),
        "scatter": lambda g: g.scatter(ones(4), mine, lost),
        "reduce_scatter": lambda g: g.reduce_scatter(ones(4), several(size)),
        "reduce_scatter_tensor": lambda g: g.reduce_scatter_tensor(ones(4), ones(4 * size)),
        "all_to_all": lambda g: g.all_to_all(several(size), several(size)),
        "all_to_all_single": lambda g: g.all_to_all_single(ones(size), ones(size)),
        "barrier": lambda g: g.barrier(),
        "monitored_barrier": lambda g: g.monitored_barrier(),
        "all_gather_object": lambda g: g.all_gather_object([None] * size, rank),
        "broadcast_object_list": lambda g: g.broadcast_object_list([rank], lost),
        "scatter_object_list": lambda g: g.scatter_object_list([None], list(range(size)), lost),
        "gather_object": lambda g: g.gather_object(rank, [None] * size if rank == 0 else None, 0),
        "recv": lambda g: (
            cudafuture.gather(*[g.send(ones(4), peer) for peer in peers]) if rank == lost else g.recv(ones(4), lost)
        ),
        "recv_object_list": lambda g: (
            cudafuture.gather(*[g.send_object_list([rank], peer) for peer in peers])
            if rank == lost
            else g.recv_object_list([None], lost)
        ),
        "batch_isend_irecv": lambda g: g.batch_isend_irecv(
            [dist.P2POp(dist.isend, ones(4), peer, g.group) for peer in peers]
            if rank == lost
            else [dist.P2POp(dist.irecv, ones(4), lost, g.group)]
        ),
    }


def lose_one(rank: int, size: int, lost: int, sent: int) -> dict[str, str]:
    """Issue everything, on a group for each, to a rank that is gone; then go on without it."""
    operations = every_operation(rank, size, lost)
    groups = {name: short_group(5) for name in operations}
    for future in [issue(groups[name]) for name, issue in operations.items()]:
        future.wait(timeout=LONG)
    dist.barrier()
    if rank == lost:
        os.kill(os.getpid(), sent)
    futures = {name: issue(groups[name]) for name, issue in operations.items()}
    results = {}
    for name, future in futures.items():
        error = future.exception(timeout=LONG)
        if isinstance(error, CollectiveError):
            assert name in str(error)
            assert error.operation == name
            assert (error.rank, error.group) == (rank, groups[name].group.group_name)
            assert error.sequence == 1
        results[name] = type(error).__name__
    survivors = cfd.ProcessGroup().new_group([r for r in range(size) if r != lost])
    assert survivors.all_reduce(ones(1)).wait(timeout=LONG).item() == size - 1
    return results


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_fails_every_future(sent: signal.Signals) -> None:
    results = run_ranks(3, lose_one, 3, 2, sent, lost=[2])
    for rank in (0, 1):
        well = {name for name, outcome in results[rank].items() if outcome == "NoneType"}
        assert well <= (ENDS_WELL_ELSEWHERE if rank == 1 else set())
        assert {o for name, o in results[rank].items() if name not in well} == {"CollectiveError"}
        assert results[rank].keys() == NAMES


def lose_one_in_a_chain(rank: int) -> None:
    """Lose a rank after callbacks have made their group, and before they make another."""
    group = short_group()
    known = group.all_reduce(ones(1)).then_async(lambda f: group.all_reduce(f.value()))
    assert known.wait(timeout=LONG).item() == 4
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    first = CUDAFuture.completed(None).then_async(lambda f: group.all_reduce(ones(1)), executor=group.queue)
    second = first.then_async(lambda f: group.all_reduce(ones(1)))
    for future in (first, second):
        error = future.exception(timeout=LONG)
        assert isinstance(error, CollectiveError)
        assert error.group == group.group.group_name


def test_lost_rank_fails_chain() -> None:
    run_ranks(2, lose_one_in_a_chain, lost=[1])


# ---- ranks that differ


MISMATCHES: dict[str, Callable[[int, cfd.ProcessGroup], CUDAFuture[Any]]] = {
    "all_reduce": lambda r, g: g.all_reduce(ones(4 + r)),
    "all_reduce, long": lambda r, g: g.all_reduce(ones(4 + 100_000 * r)),
    "all_reduce, dtype": lambda r, g: g.all_reduce(ones(4, dtype=torch.float32 if r else torch.float64)),
    "broadcast": lambda r, g: g.broadcast(ones(8 - 4 * r), 0),
    "all_gather": lambda r, g: g.all_gather([ones(4 + r), ones(4 + r)], ones(4 + r)),
    "reduce_scatter": lambda r, g: g.reduce_scatter(ones(4 + r), [ones(4 + r), ones(4 + r)]),
    "gather": lambda r, g: g.gather(ones(4 + r), several(2) if r == 0 else None),
    "all_to_all_single": lambda r, g: g.all_to_all_single(ones(4 + 2 * r), ones(4 + 2 * r)),
    "send": lambda r, g: g.send(ones(8), 1) if r == 0 else g.recv(ones(4), 0),
    "another operation": lambda r, g: g.all_reduce(ones(4)) if r else g.all_gather(several(2), ones(4)),
    "missing": lambda r, g: g.all_reduce(ones(4)) if r else CUDAFuture.completed(None),
}


def differ(rank: int) -> dict[str, str | None]:
    """Issue every mismatch on a group of its own, all at once; return the messages of the errors."""
    groups = {case: short_group() for case in MISMATCHES}
    futures = {case: issue(rank, groups[case]) for case, issue in MISMATCHES.items()}
    errors = {case: future.exception(timeout=LONG) for case, future in futures.items()}
    assert all(error is None or isinstance(error, CollectiveError) for error in errors.values()), errors
    dist.barrier()  # of the default group, which is as it was
    dist.destroy_process_group()
    return {case: None if error is None else str(error) for case, error in errors.items()}


def test_mismatched_ranks_get_errors_and_live() -> None:
    by_rank = run_ranks(2, differ)
    for case in MISMATCHES:
        messages = [found[case] for found in by_rank if found[case] is not None]
        assert messages, case
        if case not in ("another operation", "missing"):
            assert any("did not all give tensors of the same shape and dtype" in message for message in messages), case


def go_on_after_a_mismatch(rank: int) -> None:
    healthy = cfd.new_group()
    broken = short_group()
    assert isinstance(broken.all_reduce(ones(4 + rank)).exception(timeout=LONG), CollectiveError)
    for _ in range(3):
        assert healthy.all_reduce(ones(4)).wait(timeout=LONG).tolist() == [2.0] * 4
    later = broken.all_reduce(ones(4))
    assert isinstance(later.exception(timeout=LONG), CollectiveError)


def test_other_groups_survive_mismatch() -> None:
    run_ranks(2, go_on_after_a_mismatch)


# ---- what a rank does to itself


def refuse_gaps(rank: int) -> None:
    columns = ones(4, 4)[:, 1:]
    issues: list[Callable[[], object]] = [
        lambda: cfd.all_reduce(columns),
        lambda: cfd.broadcast(columns, 0),
        lambda: cfd.scatter(columns, [ones(4, 3)], 0),
        lambda: cfd.all_gather_into_tensor(ones(4, 4), ones(4, 4).t()),
        lambda: cfd.send(columns, 0),
    ]
    for issue in issues:
        with pytest.raises(ValueError, match="contiguous"):
            issue()
    turned = ones(4, 3).t()
    assert cfd.all_reduce(turned).wait(timeout=LONG) is turned


def test_tensors_with_gaps_are_refused() -> None:
    run_ranks(1, refuse_gaps)


def destroy_while_pending(rank: int) -> None:
    group = short_group()
    if rank == 1:
        pending: list[CUDAFuture[Any]] = [
            group.all_reduce(ones(4)),
            group.recv(ones(4), 0),
            group.all_gather_object([None, None], 1),
            group.all_reduce(ones(4)).then_async(lambda f: group.all_reduce(f.value())),
        ]
        dist.destroy_process_group()
        for future in pending:
            assert isinstance(future.exception(timeout=LONG), CollectiveError)
        with pytest.raises(ValueError, match="init_process_group"):
            cfd.all_reduce(ones(4))


def test_destroyed_group_fails_pending_futures() -> None:
    run_ranks(2, destroy_while_pending)


def be_late(rank: int) -> float:
    if rank == 0:
        future = cfd.all_reduce(ones(1))
        with pytest.raises(TimeoutError):
            future.wait(timeout=0.01)
        assert not future.done()
        assert not future.cancel()
        cfd.send(ones(1), 1).wait(timeout=LONG)
        return future.wait(timeout=LONG).item()
    cfd.recv(ones(1), 0).wait(timeout=LONG)  # rank 0 has given up waiting by then
    return cfd.all_reduce(ones(1)).wait(timeout=LONG).item()


def test_wait_timeout_keeps_future_usable() -> None:
    assert run_ranks(2, be_late) == [2.0, 2.0]


def drop_unseen(rank: int) -> str:
    records: list[logging.LogRecord] = []
    logged = threading.Event()

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)
            logged.set()

    logging.getLogger("cudafuture.future").addHandler(Kept())
    group = short_group(1)
    if rank == 0:
        future = group.all_reduce(ones(4))
        cudafuture.wait([future], timeout=LONG)
        del future  # the thread that completed it may hold it for a moment longer
        assert logged.wait(LONG)
    dist.barrier()
    return "".join(str(record.exc_info[1]) for record in records if record.exc_info)


def test_unseen_failure_is_logged_with_operation() -> None:
    logged = run_ranks(2, drop_unseen)
    assert logged[0].startswith("all_reduce #0 on group")
    assert logged[1] == ""


def recover_again(rank: int) -> None:
    everyone = cfd.ProcessGroup()
    pairs = [[0, 1], [0, 2], [1, 2], [0, 1]]
    for turn, pair in enumerate(pairs):
        if rank in pair:
            group = everyone.new_group(pair)
            assert group.all_reduce(ones(1)).wait(timeout=LONG).item() == 2, turn
            dist.destroy_process_group(group.group)
    dist.barrier()


def test_survivors_recover_any_number_of_times() -> None:
    run_ranks(3, recover_again)


def fork_and_send(rank: int) -> None:
    if rank == 0:
        cfd.barrier().wait(timeout=LONG)
        child = os.fork()
        if child == 0:
            refused = 0
            for issue in (lambda: cfd.send(ones(4) * 666, 1), lambda: cfd.all_reduce(ones(4))):
                try:
                    issue()
                except cudafuture.InvalidStateError:
                    refused += 1
            os._exit(0 if refused == 2 else 1)
        assert os.waitpid(child, 0)[1] == 0
        cfd.send(ones(4), 1).wait(timeout=LONG)
    else:
        cfd.barrier().wait(timeout=LONG)
        assert cfd.recv(ones(4), 0).wait(timeout=LONG).tensor.tolist() == [1.0] * 4
    assert cfd.all_reduce(ones(4)).wait(timeout=LONG).tolist() == [2.0] * 4


def test_forked_child_sends_nothing() -> None:
    run_ranks(2, fork_and_send)


def use_a_dead_group(rank: int) -> None:
    group = short_group(1)
    assert isinstance(group.all_reduce(ones(4 + rank)).exception(timeout=LONG), CollectiveError)
    if rank == 0:  # whose thread it was
        for future in (group.send(ones(1), 1), group.recv(ones(1), 1), group.all_reduce(ones(1)), group.barrier()):
            assert isinstance(future.exception(timeout=LONG), CollectiveError)
        refused = group.all_gather_object([None, None], 1)
        assert isinstance(refused.exception(timeout=LONG), CollectiveError)
        batch = group.batch_isend_irecv([dist.P2POp(dist.isend, ones(1), 1, group.group)])
        assert isinstance(batch.exception(timeout=LONG), CollectiveError)
    dist.barrier()


def test_dead_group_thread_hangs_nothing() -> None:
    run_ranks(2, use_a_dead_group)


def leave_while_a_thread_blocks(rank: int, kind: str) -> None:
    dist.barrier()
    if rank == 0 and kind == "objects":
        cfd.all_gather_object([None, None], 1)
    if rank == 0 and kind == "side group":
        queue = cfd.ProcessGroup().queue
        CUDAFuture.completed(0).then_async(lambda f: cfd.all_reduce(ones(1)), executor=queue)


@pytest.mark.parametrize("kind", ["objects", "side group"])
def test_process_exits_during_waiting_thread(kind: str) -> None:
    run_ranks(2, leave_while_a_thread_blocks, kind)
