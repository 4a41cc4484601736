"""The plugin itself: functions in several processes, and every way in which they can go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from cudafuture.testing import World, WorldError
from cudafuture.testing._worker_pool import Worker, dump_stacks

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("world")]


class OwnError(Exception):
    """Of this module, which a worker cannot import."""


def pids(world: World) -> list[int]:
    return world.run(os.getpid)


def runs(pid: int) -> bool:
    """Return whether a process runs; a zombie, which waits for its parent, does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def expect_a_new_world(world: World, old: list[int]) -> None:
    """Check that the processes of a failed run are gone, and that the next run has others."""
    assert not any(psutil.pid_exists(pid) for pid in old), "not even as zombies"
    assert not set(pids(world)) & set(old)
    assert world.run(dist.get_rank) == list(range(world.size))


@pytest.mark.world(2)
def test_function_returns_results_by_rank(world: World) -> None:
    factor = 3

    def total(start: int, *, step: int) -> float:
        tensor = torch.tensor([float(start + step * dist.get_rank() * factor)])
        dist.all_reduce(tensor)
        return tensor.item()

    assert world.run(total, 1, step=2) == [8.0, 8.0]


@pytest.mark.world(2)
def test_processes_serve_several_worlds(world: World) -> None:
    first = pids(world)
    assert sorted(pids(world)) == sorted(first)
    assert world.run(lambda: dist.get_world_size()) == [2, 2]


@pytest.mark.world(1)
class TestTheClosestMarkerGivesTheSize:
    def test_of_class(self, world: World) -> None:
        assert (world.size, world.run(dist.get_world_size)) == (1, [1])

    @pytest.mark.world(3)
    def test_of_function(self, world: World) -> None:
        assert (world.size, world.run(dist.get_world_size)) == (3, [3, 3, 3])


@pytest.mark.world(2)
def test_failures_keep_traceback_and_type(world: World) -> None:
    old = pids(world)

    def fail() -> None:
        rank = dist.get_rank()
        if rank == 1:
            print("rank 1 says something")
            raise OwnError("of rank", rank)
        assert rank == 5

    with pytest.raises(WorldError) as caught:
        world.run(fail)
    message = str(caught.value)
    assert "OwnError: ('of rank', 1)" in message
    assert "assert 0 == 5" in message, "assertions are explained in a worker too"
    assert "rank 1 says something" in message
    assert "test_world.py" in message
    errors = caught.value.errors
    assert (type(errors[0]), type(errors[1]), errors[1].args) == (AssertionError, OwnError, ("of rank", 1))
    expect_a_new_world(world, old)


@pytest.mark.world(2)
def test_other_ranks_fail_with_first(world: World) -> None:
    def wait_for_the_other() -> None:
        dist.barrier()  # both have connected
        if dist.get_rank() == 1:
            raise OwnError
        dist.barrier()

    with pytest.raises(WorldError, match=r"(?s)^rank 1 of 2 failed.*rank 0 of 2 failed.*dist.barrier"):
        world.run(wait_for_the_other)


@pytest.mark.world(2, timeout=2)
def test_hanging_rank_shows_stack_and_ends(world: World) -> None:
    old = pids(world)

    def hang_here() -> None:
        if dist.get_rank() == 0:
            time.sleep(1000)

    with pytest.raises(WorldError, match=r"(?s)rank 0 of 2 has not come back in time.*in hang_here"):
        world.run(hang_here)
    expect_a_new_world(world, old)


def test_unfinished_stacks_are_waited_for() -> None:
    whole = 'Thread 1:\n  File "a.py", line 1 in f\nThread 2:\n  File "<frozen runpy>", line 1 in _run_module_as_main\n'

    class Slow(Worker):
        def __init__(self) -> None:
            self._seen = 0

        def signal(self, number: signal.Signals) -> None:
            pass

        def stacks(self) -> str:
            self._seen += 10
            return whole[: self._seen]

    assert dump_stacks([Slow(), Slow()]) == [whole, whole]


@pytest.mark.world(2, timeout=2)
def test_stopped_rank_is_ended(world: World) -> None:
    old = pids(world)
    with pytest.raises(WorldError, match="rank 1 of 2 has not come back in time"):
        world.run(lambda: os.kill(os.getpid(), signal.SIGSTOP) if dist.get_rank() == 1 else None)
    expect_a_new_world(world, old)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("end", "says"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 of 2 died of SIGKILL"),
        (lambda: os._exit(3), "rank 1 of 2 ended its process with exit code 3"),
        (lambda: sys.exit(4), "(?s)rank 1 of 2 failed.*SystemExit: 4"),
    ],
)
def test_ended_rank_reports_its_status(world: World, end: object, says: str) -> None:
    old = pids(world)

    def run() -> None:
        if dist.get_rank() == 1:
            end()  # type: ignore[operator]

    with pytest.raises(WorldError, match=says):
        world.run(run)
    expect_a_new_world(world, old)


@pytest.mark.world(1)
def test_crash_shows_its_place(world: World) -> None:
    def crash() -> None:
        import faulthandler

        faulthandler._sigsegv()  # type: ignore[attr-defined]

    with pytest.raises(WorldError, match=r"(?s)died of SIGSEGV.*in crash"):
        world.run(crash)


@pytest.mark.world(1)
def test_returning_forked_child_is_reported(world: World) -> None:
    def fork() -> None:
        child = os.fork()
        if child != 0:
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)

    with pytest.raises(WorldError, match=r"left behind:\n  a forked child returned"):
        world.run(fork)
    assert world.run(dist.get_rank) == [0]


@pytest.mark.world(1)
def test_exiting_forked_child_is_ignored(world: World) -> None:
    def fork() -> int:
        child = os.fork()
        if child == 0:
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert world.run(fork) == [7]


# Its parent is gone at once; it says so by closing its stdout, and goes on.
ORPHAN = """
import os, sys, time
if os.fork(): os._exit(0)
open(sys.argv[1], "w").write(str(os.getpid()))
os.close(1)
time.sleep(1000)
"""


@pytest.mark.world(2)
@pytest.mark.parametrize("own_session", [False, True])
def test_abandoned_process_is_reported_and_ended(world: World, own_session: bool, tmp_path: Path) -> None:
    def leak() -> None:
        if dist.get_rank() == 0:
            command = [sys.executable, "-c", ORPHAN, str(tmp_path / "pid")]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=own_session)
            process.communicate()  # ends when the grandchild has closed its stdout

    with pytest.raises(WorldError, match=r"(?s)rank 0 of 2 left behind:\n  process \d+: .*time.sleep"):
        world.run(leak)
    assert not runs(int((tmp_path / "pid").read_text()))
    assert world.run(dist.get_rank) == [0, 1]


@pytest.mark.world(2)
def test_unpicklable_result_fails_function(world: World) -> None:
    with pytest.raises(WorldError, match="cannot pickle"):
        world.run(lambda: (i for i in range(3)))
    with pytest.raises(TypeError, match="cannot pickle"):
        world.run(print, (i for i in range(3)))
    assert world.run(dist.get_rank) == [0, 1]


def test_world_has_rank() -> None:
    with pytest.raises(ValueError, match="1 rank or more"):
        World(0)


OUTSIDE = """
import pytest
import torch
import torch.distributed as dist

@pytest.mark.world(2)
def test_passes(world):
    def total():
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    assert world.run(total) == [2.0, 2.0]

@pytest.mark.world(2)
def test_fails(world):
    def check():
        assert dist.get_rank() == 0, "a wrong rank"

    world.run(check)

@pytest.mark.world(1)
def test_skips(world):
    world.run(lambda: pytest.skip("not here"))

def test_has_no_marker(world):
    pass
"""


def test_other_project_uses_world(tmp_path: Path) -> None:
    (tmp_path / "test_outside.py").write_text(OUTSIDE)
    command = [sys.executable, "-m", "pytest", "-p", "cudafuture.testing.plugin", "-p", "no:cacheprovider", "-rA"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    run = subprocess.run([*command, "--strict-markers"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 failed, 1 passed, 1 skipped, 1 error" in run.stdout, run.stdout
    assert "a wrong rank" in run.stdout
    assert "not here" in run.stdout
    assert "@pytest.mark.world(2)" in run.stdout


def test_example_passes(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "test_ring.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "cudafuture.testing.plugin", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "-c/dev/null", str(example)],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert "2 passed" in run.stdout, run.stdout


def test_workers_end_with_killed_run(tmp_path: Path) -> None:
    """A forked child of the test has copies of its sockets, which then stay open."""
    (tmp_path / "test_outside.py").write_text(
        textwrap.dedent("""
        import os, signal, pytest

        @pytest.mark.world(2)
        def test_dies(world):
            pids = world.run(os.getpid) + world.run(os.getppid)
            child = os.fork()
            if child == 0:
                signal.pause()
            print(*pids, child, file=open("pids", "w"), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "cudafuture.testing.plugin", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    assert run.returncode == -signal.SIGKILL
    *workers_and_server, child = map(int, (tmp_path / "pids").read_text().split())
    try:
        gone = [p for p in map(_process, workers_and_server) if p is not None]
        _, alive = psutil.wait_procs(gone, timeout=30)
        assert alive == []
    finally:
        os.kill(child, signal.SIGKILL)


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None
