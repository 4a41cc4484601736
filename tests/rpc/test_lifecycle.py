"""Beginning and ending RPC: again and again, alone and together, in time and too late, and in the midst of calls."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudafuture.distributed as cfd
import rpc_ext
from cudafuture import CUDAFuture, InvalidStateError, collect_all
from cudafuture.errors import WorkerLostError
from cudafuture.testing import torchrun
from rpc_ext import rpc_async, rpc_sync
from support.child import Child
from support.ranks import run_ranks
from support.rpc_callees import SHARED_MEMORY, alone, thread_names, wait_for
from support.rpc_workers import (
    LONG,
    NAMES,
    SECRET,
    begin,
    complete_held,
    count_held,
    held,
    hold,
    release,
    same,
    wait_for_release,
)
from support.soak import soak_count

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("rpc-lifecycle")]


# ---- many calls, and calls that make calls


def call_from_callbacks(rank: int, store: str, threads: int, calls: int, workers: int) -> int:
    """Make calls from several threads; each answer's callback makes the next one and counts its answer."""
    begin(rank, 2, store, num_worker_threads=workers, transports=SHARED_MEMORY)
    peer = NAMES[1 - rank]
    wrong: list[Any] = []

    def call(first: int) -> None:
        def next_call(done: CUDAFuture[int]) -> CUDAFuture[int]:
            return rpc_async(peer, same, (done.value() + 1,))

        futures = [rpc_async(peer, same, (i,)).then_async(next_call) for i in range(first, first + calls // threads)]
        wrong.extend(i for i, future in enumerate(futures, first) if future.wait(timeout=LONG) != i + 1)

    many = [threading.Thread(target=call, args=(i * calls,)) for i in range(threads)]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()
    made = rpc_ext.statistics().destinations[peer]
    rpc_ext.shutdown()
    assert not wrong
    assert made.failed == 0
    return made.calls


def answer_after_the_end(rank: int, store: str) -> list[str]:
    """Complete, and drop, futures that are answers of a session that is over."""
    errors = []
    for turn in range(3):
        begin(rank, 2, f"{store}{turn}", transports=SHARED_MEMORY)
        futures = [rpc_async(1 - rank, hold) for _ in range(20)]
        wait_for(lambda: rpc_sync(1 - rank, count_held) == 20)
        dist.barrier()
        rpc_ext.shutdown(graceful=False)
        errors += [repr(future.exception(timeout=LONG)) for future in futures]
        begin(rank, 2, f"{store}{turn}again")
        del held[::2]
        assert complete_held("too late") == 10
        rpc_ext.shutdown()
    return errors


def test_reply_may_arrive_after_end(tmp_path: Path) -> None:
    for errors in run_ranks(2, answer_after_the_end, str(tmp_path / "store")):
        assert len(errors) == 60
        assert {error.split("(")[0] for error in errors} <= {"InvalidStateError", "WorkerLostError"}


@pytest.mark.soak
@pytest.mark.parametrize("workers", [1, 16])
def test_callbacks_of_eight_threads_call_again(tmp_path: Path, workers: int) -> None:
    calls = soak_count(10_000)
    made = run_ranks(2, call_from_callbacks, str(tmp_path / "store"), 8, calls, workers)
    assert made == [2 * calls, 2 * calls]


def wait_in_a_callback(rank: int, store: str, workers: int) -> list[int]:
    """Wait for another reply in a callback, which has a thread of its own."""
    begin(rank, 2, store, num_worker_threads=workers)
    peer = NAMES[1 - rank]
    futures = [rpc_async(peer, same, (i,)).then(lambda f: rpc_sync(peer, same, (-f.value(),))) for i in range(50)]
    answers = [future.wait(timeout=LONG) for future in futures]
    rpc_ext.shutdown()
    return answers


@pytest.mark.parametrize("workers", [1, 4])
def test_callback_may_wait_for_call(tmp_path: Path, workers: int) -> None:
    wanted = [-i for i in range(50)]
    assert run_ranks(2, wait_in_a_callback, str(tmp_path / "store"), workers) == [wanted, wanted]


# ---- shutdown in the midst of calls


def shut_down_gracefully(rank: int, store: str) -> None:
    session = begin(rank, 2, store)
    if rank == 0:
        futures = [rpc_async("callee", hold) for _ in range(100)]
        wait_for(lambda: rpc_sync("callee", count_held) == 100)

        def release_them() -> None:
            wait_for(lambda: session.is_ending)
            assert not any(future.done() for future in futures)
            rpc_sync("callee", complete_held, ("late",))

        thread = threading.Thread(target=release_them)
        thread.start()
        rpc_ext.shutdown(timeout=LONG)
        thread.join()
        assert [future.value() for future in futures] == ["late"] * 100
    else:
        rpc_ext.shutdown(timeout=LONG)
    with pytest.raises(InvalidStateError, match="has ended"):
        rpc_async(0, same, (1,))


def test_graceful_shutdown_waits_for_calls(tmp_path: Path) -> None:
    run_ranks(2, shut_down_gracefully, str(tmp_path / "store"))


def serve_to_the_end(rank: int, store: str, timeout: float) -> list[int]:
    begin(rank, 2, store)
    dist.barrier()
    answers = [rpc_sync(1, same, (i,)) for i in range(100)] if rank == 0 else []
    rpc_ext.shutdown(timeout=timeout if rank == 1 else LONG)
    return answers


def test_serving_worker_ends_with_others(tmp_path: Path) -> None:
    assert run_ranks(2, serve_to_the_end, str(tmp_path / "store"), math.inf) == [list(range(100)), []]


@pytest.mark.parametrize("timeout", [-1, math.nan, 0], ids=["negative", "nan", "0"])
def test_invalid_shutdown_timeout_ends_nothing(tmp_path: Path, timeout: float) -> None:
    with alone(tmp_path / "store"):
        with pytest.raises(ValueError, match="timeout is"):
            rpc_ext.shutdown(timeout=timeout)
        assert rpc_sync("me", same, (1,)) == 1


@pytest.mark.parametrize("what", ["start_timeout", "rpc_timeout"])
@pytest.mark.parametrize("timeout", [0, -1, math.nan])
def test_session_without_time_does_not_begin(tmp_path: Path, what: str, timeout: float) -> None:
    with pytest.raises(ValueError, match=r"math\.inf for no limit"), alone(tmp_path / "store", **{what: timeout}):
        pass
    with alone(tmp_path / "store", **{what: math.inf}):
        assert rpc_sync("me", same, (1,)) == 1


def call_over_sockets(rank: int, store: str) -> int:
    begin(rank, 2, store, transports=["uv"] if rank else SHARED_MEMORY)  # they use what both have
    answer: int = rpc_sync(1 - rank, same, (rank,))
    threads = thread_names()
    assert any("UV" in thread for thread in threads)
    assert ("TP_SHM_reactor" in threads) == (rank == 0)
    rpc_ext.shutdown(timeout=LONG)
    return answer


def test_messages_use_chosen_transports(tmp_path: Path) -> None:
    assert run_ranks(2, call_over_sockets, str(tmp_path / "store")) == [0, 1]


TRANSPORTS = """
import sys
import rpc_ext
from support.rpc_callees import thread_names

with rpc_ext.init_rpc("me", rank=0, world_size=1, init_method=f"file://{sys.argv[1]}"):
    say("TP_SHM_reactor" in thread_names())
"""


@pytest.mark.parametrize(("transports", "has_shared_memory"), [("uv", "False"), ("shm,uv", "True")])
def test_environment_selects_transports(tmp_path: Path, transports: str, has_shared_memory: str) -> None:
    environment = {"CUDAFUTURE_RPC_TRANSPORTS": transports, "TP_SOCKET_IFNAME": "lo"}
    with Child(TRANSPORTS, str(tmp_path / "store"), environment=environment) as process:
        assert process.hear() == has_shared_memory
        assert process.end() == 0


@pytest.mark.parametrize("wrong", [[], ["post"]], ids=["none", "unknown"])
def test_unknown_transport_is_refused(tmp_path: Path, wrong: list[str]) -> None:
    with pytest.raises(ValueError, match="one or more of ibv, shm, uv"), alone(tmp_path / "s", transports=wrong):
        pass


def shut_down_at_once(rank: int, store: str) -> list[str]:
    session = begin(rank, 2, store, num_worker_threads=1 + rank)
    dist.barrier()
    errors = []
    if rank == 0:
        blocked = rpc_async("caller", wait_for_release)
        here = rpc_ext.remote("caller", same, (1,))  # never made: the only thread is held
        there = rpc_ext.remote("callee", hold)
        futures = [rpc_async("callee", hold) for _ in range(100)]
        futures += [there.get_future(), here.get_future()]
        futures += [future.then_async(lambda f: f) for future in futures]
        with rpc_ext.batch("callee"):
            futures.append(rpc_async("callee", hold))
            threading.Thread(target=lambda: (wait_for(lambda: session.is_ending), release.set())).start()  # type: ignore[func-returns-value]
            rpc_ext.shutdown(graceful=False)
        errors = [repr(future.exception(timeout=LONG)) for future in futures]
        blocked.exception(timeout=LONG)  # it may have been answered: its gate is open
    else:
        late = rpc_async("caller", hold).exception(timeout=LONG)
        assert isinstance(late, WorkerLostError)
        assert late.worker == "caller"
        rpc_ext.shutdown(graceful=False)
    return errors


def test_immediate_shutdown_fails_pending_calls(tmp_path: Path) -> None:
    errors = run_ranks(2, shut_down_at_once, str(tmp_path / "store"))[0]
    assert len(errors) == 2 * 102 + 1
    for error in errors:
        assert error.startswith("InvalidStateError"), error
        assert "RPC was shut down" in error


def leave_a_function_behind(rank: int, store: str) -> bool:
    """Give up a call whose function continues."""
    begin(rank, 2, store)
    if rank == 0:
        with pytest.raises(TimeoutError, match="wait_for_release on worker 'callee' has not answered within"):
            rpc_sync("callee", wait_for_release, timeout=0.2)
    rpc_ext.shutdown(timeout=LONG)
    release.set()
    begin(rank, 2, store + "again")
    answered: bool = rpc_sync(1 - rank, same, (True,))
    rpc_ext.shutdown(timeout=LONG)
    return answered


def test_hanging_function_does_not_delay_shutdown(tmp_path: Path) -> None:
    assert run_ranks(2, leave_a_function_behind, str(tmp_path / "store")) == [True, True]


# ---- again and again


def has_come_to(store: dist.Store, key: str, count: int) -> bool:
    return store.add(key, 0) == count


def begin_again(rank: int, port: int) -> list[list[str]]:
    """Start worlds of different sizes at one store, of which each process has seen a different number."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    seen = []
    for turn, size in enumerate([3, 2, 1, 3, 2, 3, 3]):
        if rank >= size:
            continue
        for graceful in (True, False):
            session = rpc_ext.init_rpc(NAMES[rank], rank=rank, world_size=size, secret=SECRET, start_timeout=LONG)
            seen.append(session.workers)
            peers = [(rank + i) % size for i in range(size)]
            assert collect_all([rpc_async(peer, same, (turn,)) for peer in peers]).wait(timeout=LONG)
            assert rpc_ext.remote(peers[-1], same, (turn,)).to_here() == turn
            if not graceful:
                store.add(f"{turn}", 1)
                # no worker leaves before all are answered
                wait_for(functools.partial(has_come_to, store, f"{turn}", size))
            rpc_ext.shutdown(graceful)
    return seen


def test_worlds_succeed_in_same_processes() -> None:
    """They meet at a store that outlives them, as under torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seen = run_ranks(3, begin_again, store.port)
    assert [len(worlds) for worlds in seen] == [14, 12, 8]
    assert seen[0][:6] == [list(NAMES)] * 2 + [list(NAMES[:2])] * 2 + [list(NAMES[:1])] * 2


def begin_twice(rank: int, store: str) -> None:
    with begin(0, 1, store):
        with pytest.raises(InvalidStateError, match="has begun in this process already"):
            begin(0, 1, store)
        assert rpc_sync(0, same, (1,)) == 1
    for use in (rpc_ext.shutdown, rpc_ext.statistics):
        with pytest.raises(InvalidStateError, match="has not begun, or has ended"):
            use()


def test_rpc_refuses_second_start(tmp_path: Path) -> None:
    run_ranks(1, begin_twice, str(tmp_path / "store"))


def come_alone(rank: int, store: str) -> None:
    for size, missing in ((2, "1"), (4, "1, 2, 3")):
        with pytest.raises(TimeoutError, match=f"worker {missing} of {size} has not arrived within 0.5 s"):
            begin(0, size, store, start_timeout=0.5)
    with pytest.raises(TimeoutError, match=r"worker 1 of 2 has not arrived within 0\.5 s"):
        rpc_ext.init_rpc(rank=0, world_size=2, init_method="tcp://127.0.0.1:0", secret=SECRET, start_timeout=0.5)
    with begin(0, 1, store) as session:
        assert session.workers == ["caller"]


def test_absent_worker_is_named(tmp_path: Path) -> None:
    run_ranks(1, come_alone, str(tmp_path / "store"))


def be_namesakes(rank: int, store: str) -> None:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options: dict[str, Any] = {"rank": rank, "world_size": 2, "secret": SECRET, "start_timeout": LONG}
    with pytest.raises(ValueError, match="needs a name of its own; the names are me, me"):
        rpc_ext.init_rpc("me", init_method=f"file://{store}", **options)
    with rpc_ext.init_rpc(f"me{rank}", init_method=f"file://{store}again", **options):
        assert rpc_sync(1 - rank, same, (rank,)) == rank


def test_duplicate_worker_name_is_refused(tmp_path: Path) -> None:
    run_ranks(2, be_namesakes, str(tmp_path / "store"))


def raise_of_the_body() -> None:
    raise LookupError("of the body")


def raise_in_the_body(rank: int, store: str) -> None:
    """Raise in the body of one worker, which ends at once; the others notice when they call."""
    if rank == 0:
        with pytest.raises(LookupError, match="of the body"), begin(rank, 2, store):
            rpc_sync("callee", raise_of_the_body)
    else:
        with pytest.raises(WorkerLostError, match="worker 'caller'"), begin(rank, 2, store):
            rpc_sync("caller", hold)
    with pytest.raises(InvalidStateError, match="has ended"):
        rpc_ext.statistics()


def test_session_body_error_is_raised(tmp_path: Path) -> None:
    run_ranks(2, raise_in_the_body, str(tmp_path / "store"))


# ---- beside others


def call_beside_collectives(rank: int, store: str) -> None:
    with begin(rank, 2, store):
        for i in range(20):
            reduced = cfd.all_reduce(torch.full((1000,), float(rank)))
            answer = rpc_async(1 - rank, same, (torch.full((1000,), float(i)),))
            both = answer.then_async(lambda f, reduced=reduced: reduced.then(lambda r: r.value() + f.value()))  # type: ignore[misc]
            assert both.wait(timeout=LONG).tolist() == [i + 1.0] * 1000
    assert cfd.all_reduce(torch.ones(1)).wait(timeout=LONG).item() == 2


def test_calls_and_collectives_run_together(tmp_path: Path) -> None:
    run_ranks(2, call_beside_collectives, str(tmp_path / "store"))


TORCHRUN = """
import os, torch, torch.distributed as dist, rpc_ext
dist.init_process_group("gloo")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for turn in range(2):
    with rpc_ext.init_rpc() as session:
        assert session.workers == [f"worker{i}" for i in range(size)]
        answers = [rpc_ext.rpc_async(to, torch.add, (torch.ones(2), rank)) for to in session.workers]
        total = torch.stack([answer.wait() for answer in answers]).sum()
        dist.all_reduce(total)
dist.destroy_process_group()
os.write(1, f"{rank}: {total.item():g}\\n".encode())
"""


def test_torchrun_provides_rpc_settings(tmp_path: Path) -> None:
    script, secret = tmp_path / "script.py", tmp_path / "secret"
    script.write_text(TORCHRUN)
    secret.write_text(SECRET)
    environment = {
        "TP_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDAFUTURE_RPC_SECRET_FILE": str(secret),
    }
    finished = torchrun(script, 2, env=environment)
    assert sorted(finished.stdout.splitlines()) == ["0: 12", "1: 12"]


SPAWN = """
import sys, torch
import torch.multiprocessing as mp
import rpc_ext

def run(rank, store):
    with rpc_ext.init_rpc(rank=rank, world_size=2, init_method=f"file://{store}", secret="of the spawned ones"):
        assert rpc_ext.rpc_sync(1 - rank, torch.neg, (torch.ones(1),)).item() == -1

if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
"""


def test_spawned_processes_are_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWN)
    command = [sys.executable, str(script), str(tmp_path / "store")]
    finished = subprocess.run(
        command, env=os.environ | {"TP_SOCKET_IFNAME": "lo"}, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert finished.returncode == 0, finished.stderr
