"""Programs that hang, each in its own way: `ps` names the culprit and its line."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cudafuture import debug
from support.child import Child
from support.patience import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_the_host")]

PROLOGUE = """
import os, sys, threading
import torch, torch.distributed as dist
import cudafuture.distributed as cfd
from cudafuture import CUDAFuture, collect_any, debug, gather, submit

never = threading.Event()

def begin(rank, size, store, backend):
    dist.init_process_group(backend, init_method=f"file://{store}", rank=int(rank), world_size=int(size))

if len(sys.argv) == 5:
    begin(*sys.argv[1:])
    rank = dist.get_rank()
"""


class Programs:
    """Scripts that hang, and the report about them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.children: list[Child] = []

    def start(self, script: str, *arguments: str) -> Child:
        sockets = {"CUDAFUTURE_DEBUG_DIR": str(self.folder / "sockets"), "CUDAFUTURE_DEBUG": "origin"}
        code = f"{PROLOGUE}exec(compile({script!r}, 'program.py', 'exec'))"
        child = Child(code, *arguments, environment=sockets)
        self.children.append(self._stack.enter_context(child))
        return child

    def start_ranks(self, size: int, script: str, backend: str = "gloo") -> list[Child]:
        """Start a script on each rank of a group."""
        store = str(self.folder / "store")
        return [self.start(script, str(rank), str(size), store, backend) for rank in range(size)]

    def expect(self, *texts: str) -> None:
        """Ask until the report has all of the texts, which are regular expressions."""
        end = time.monotonic() + PATIENCE
        while True:
            report = str(debug.look_at([child.process.pid for child in self.children], self.folder / "sockets"))
            missing = [text for text in texts if not re.search(text, report)]
            if not missing:
                return
            errors = "".join(child.errors() for child in self.children)
            assert time.monotonic() < end, f"{missing} is missing in\n{report}\n{errors}"


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with ExitStack() as stack:
        yield Programs(tmp_path, stack)


def line(number: int) -> str:
    """Return the text of a line of the script, from 1."""
    return f"program.py:{number}"


def test_lost_producer(programs: Programs) -> None:
    programs.start("""parts = gather(CUDAFuture(name="kept"), CUDAFuture(name="read"))
parts.wait()
""")
    programs.expect(
        rf"awaited by thread 'MainThread' at {line(2)}",
        rf"future 'read', [^\n]*made at {line(1)} [^\n]*\(lost: only combinations refer to it",
    )


def test_mismatched_order(programs: Programs) -> None:
    programs.start_ranks(
        2,
        """t = torch.ones(4)
if rank == 0:
    cfd.all_reduce(t).wait()
else:
    cfd.broadcast(t, 0).wait()
""",
    )
    programs.expect(
        rf"all_reduce #0 of group '0'[^\n]*made at {line(3)}[^\n]*, has broadcast #0 of group '0'[^\n]*"
        rf"made at {line(5)}[^\n]* in its place there",
    )


def test_dead_worker(programs: Programs) -> None:
    programs.start("""debug.name_process(worker="loader")
debug.register(CUDAFuture(name="begins the socket"))
say("named")
hear()
""").hear()
    programs.children[0].send(signal.SIGKILL)
    programs.children[0].process.wait()
    programs.start("""read = CUDAFuture(name="read of shard 3")
debug.register(read, debug.OperationPlace.find("worker", "loader", "on"))
gather(read).wait()
""")
    programs.expect(
        r"worker 'loader' \(process \d+\): it is dead",
        r"worker 'loader' \(process \d+\) holds up process \d+: read of shard 3 on worker 'loader'[^\n]*; it is dead",
    )


def test_stopped_rank(programs: Programs) -> None:
    ranks = programs.start_ranks(
        2,
        """t = torch.ones(4)
cfd.all_reduce(t).wait()
if rank == 1:
    say("ready")
    hear()
cfd.all_reduce(t).wait()
""",
    )
    ranks[1].hear()
    ranks[1].stop()
    programs.expect(
        r"rank 1 \(process \d+\) holds up rank 0 [^\n]*all_reduce #1 of group '0' [^\n]*is not issued there "
        r"\(its last one was all_reduce #0\); it is stopped",
        rf"awaited by thread 'MainThread' at {line(6)}",
    )


def test_full_pool_of_submit(programs: Programs) -> None:
    programs.start("""def blocks():
    never.wait()
for _ in range(64):
    submit(blocks)
submit(int).wait()
""")
    programs.expect(
        rf"submit of 'int', [^\n]*\(its callback has not begun\)\n *awaited by thread 'MainThread' at {line(5)}",
        rf"behind blocks at {line(1)}, for [\d.]+ s in thread",
    )


def test_callback_waits_for_itself(programs: Programs) -> None:
    programs.start("""def wait_for_child(_):
    gather(child, CUDAFuture.completed(1)).wait()
parent = CUDAFuture(name="loss")
child = parent.then(wait_for_child)
threading.Thread(target=parent.set_result, args=(1,)).start()
child.wait()
""")
    programs.expect(
        rf"deadlock: then of 'loss'[^\n]*wait_for_child at {line(1)}[^\n]*which waits at {line(2)}"
        r"[^\n]* waits for gather of 2[^\n]* waits for then of 'loss'"
        r"|deadlock: gather of 2[^\n]* waits for then of 'loss'",
    )


def test_write_behind_disk_that_does_not_answer(programs: Programs, tmp_path: Path) -> None:
    programs.start(
        """from cudafuture.io import Engine
from cudafuture.store import DiskStore
store = DiskStore(sys.argv[1], engine=Engine("threads", threads=2, _faults={"held": True}))
store.write("opt/3", torch.ones(1024)).wait()
""",
        str(tmp_path / "disk"),
    )
    programs.expect(
        rf"write opt/3 of store '{tmp_path}/disk[^']*' \(4 KiB\)[^\n]*\n *awaited by thread 'MainThread' at {line(4)}"
    )


def test_call_without_room(programs: Programs) -> None:
    store = str(programs.folder / "rpc")
    for rank in range(2):
        programs.start(
            """from support.rpc_workers import begin, hold
from rpc_ext import rpc_async
begin(int(sys.argv[1]), 2, sys.argv[2], max_in_flight=1)
if sys.argv[1] == "0":
    first = rpc_async("callee", hold)
    rpc_async("callee", hold)
never.wait()
""",
            str(rank),
            store,
        )
    programs.expect(
        rf"room for a call to worker 'callee'[^\n]*\n *awaited by thread 'MainThread' at {line(6)}",
        r"hold on callee \([^\n]*\), ",
        r"holds up worker 'caller'",
    )


def test_loader_that_blocks(programs: Programs) -> None:
    programs.start("""from cudafuture import prefetch
def load():
    yield torch.ones(1)
    never.wait()
    yield torch.ones(1)
for batch in prefetch(load(), "cpu"):
    pass
""")
    programs.expect(
        rf"prefetch #1 by loader 'load at {line(2)}'[^\n]*\n *awaited by thread 'MainThread' at {line(6)}",
    )


def test_cell_without_input(programs: Programs) -> None:
    programs.start("""from cudafuture.pipeline import Pipeline
class Blocks(torch.nn.Module):
    def forward(self, x):
        never.wait()
        return x
loss = torch.nn.functional.l1_loss
pipeline = Pipeline([Blocks(), torch.nn.Linear(1, 1)], microbatches=2, loss=loss)
pipeline.step(torch.ones(2, 1), torch.ones(2, 1))
""")
    programs.expect(
        r"message [^\n]*\n *awaited by thread '[^']*'",
        r"row 0 of the step [^\n]*\n(?:.*\n)?.*",
        rf"awaited by thread 'MainThread' at {line(8)}",
    )


def test_queue_blocked_by_callback(programs: Programs) -> None:
    programs.start_ranks(
        1,
        """t = torch.ones(4)
def blocks(_):
    never.wait()
cfd.all_reduce(t).then(blocks)
cfd.all_reduce(t).then(lambda f: f.value()).wait()
""",
    )
    programs.expect(
        rf"then of 'all_reduce', [^\n]*made at {line(5)} [^\n]*\(its callback has not begun\)\n"
        rf" *awaited by thread 'MainThread' at {line(5)}[^\n]*\n *behind blocks at {line(2)}, for",
    )


def test_cycle_over_two_ranks(programs: Programs) -> None:
    programs.start_ranks(
        2,
        """t = torch.ones(4)
one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
for group in (one, two):
    cfd.all_reduce(t, group=group).wait()
first, second = (one, two) if rank == 0 else (two, one)
cfd.all_reduce(t, group=first).wait()
cfd.all_reduce(t, group=second).wait()
""",
    )
    programs.expect(
        r"deadlock, [^\n]*:\n *rank (\d) [^\n]* waits for rank \d [^\n]*: all_reduce #1 of group '\d'[^\n]* is "
        rf"not issued[^\n]*it waits at {line(6)}[^\n]*\n *rank \d [^\n]* waits for rank \1",
    )


def test_works_that_wait_for_each_other(programs: Programs) -> None:
    programs.start_ranks(
        2,
        """t = torch.ones(4)
dist.all_reduce(t)
if rank == 0:
    dist.all_reduce(t)
else:
    dist.recv(t, 0)
""",
        backend="cudafuture",
    )
    programs.expect(
        rf"deadlock, [^\n]*:\n  rank 0 [^\n]* waits for rank 1 [^\n]*: all_reduce #1 of group .0. \(16 B\)[^\n]* is "
        rf"not issued there \(its last one was all_reduce #0\); it waits at {line(4)}[^\n]*\n"
        rf"  rank 1 [^\n]* waits for rank 0 [^\n]*: recv with rank 0 of group '0' \(16 B\)[^\n]* is not matched "
        rf"there; it waits at {line(6)}",
    )


def test_two_recvs_without_a_send(programs: Programs) -> None:
    programs.start_ranks(2, "cfd.recv(torch.ones(4), src=1 - rank).wait()")
    programs.expect(
        r"deadlock, [^\n]*:\n  rank 0 [^\n]* waits for rank 1 [^\n]*: recv with rank 1 of group '0' [^\n]* is not m",
        r"  rank 1 [^\n]* waits for rank 0 [^\n]*: recv with rank 0 of group '0' [^\n]*, is not matched there",
    )


def test_barrier_that_one_rank_does_not_enter(programs: Programs) -> None:
    programs.start_ranks(2, "dist.monitored_barrier(cfd.wrap()) if rank == 0 else never.wait()")
    programs.expect(r"monitored_barrier of group '0'[^\n]*\n    awaited by thread 'MainThread'")
