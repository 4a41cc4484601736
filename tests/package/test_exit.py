"""The end of the interpreter, whatever is going on: the right exit code, and nothing on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from package.endings import SCENARIOS, WAYS
from support.child import FORK_WARNING, TESTS, Child
from support.patience import PATIENCE
from support.soak import soak_count

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.usefixtures("on_the_host")]

# Handlers of atexit run last in, first out: this one comes after the library's own.
SCRIPT = """
import atexit, sys

sys.setswitchinterval(1e-4)  # with ten busy threads, each start of a thread would take 50 ms

def last():
    from package.endings import late
    for use in late: use()

atexit.register(last)
from package.endings import end_amid, end_in_forks
end_amid(*sys.argv[1:]) if len(sys.argv) > 1 else end_in_forks(hear, say)
"""

# They do not go with others, or slowly.
APART = (
    "a_callback_that_posts_itself",
    "a_callback_that_waits",
    "sends_just_done",
    "failing_threads",
    "devices_at_work",
    "readers_at_work",
)
EVERYTHING = [name for name in SCENARIOS if name not in APART]


class Forker:
    """Process that has imported the library, and whose forked children end. A failed test ends it, too."""

    def __init__(self) -> None:
        self._process: Child | None = None

    def expect_endings(self, way: str, count: int, *scenarios: str) -> None:
        """Let `count` forked children end one after another, and check their exit codes and outputs."""
        if self._process is None:
            self._process = Child(SCRIPT)
        try:
            self._process.say(" ".join((str(count), way, *scenarios)))
            for _ in range(count):
                ending = json.loads(self._process.hear())
                expect_ending(way, ending["code"], ending["errors"])
        except BaseException as e:
            process, self._process = self._process, None
            process.__exit__(type(e), e, e.__traceback__)
            raise

    def end(self) -> None:
        if self._process is not None:
            with self._process as process:
                process.say("")
                expect_ending("end", process.end(), process.errors())


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.end()


def expect_ending(way: str, code: int, errors: str) -> None:
    assert code == WAYS[way][1], errors
    if way == "exception":
        assert errors.startswith("Traceback"), errors
        assert errors.endswith("ValueError: the way this process ends\n"), errors
    else:
        assert errors == ""


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_process_ends_well_amid(forker: Forker, scenario: str) -> None:
    forker.expect_endings("end", soak_count(30), scenario)


@pytest.mark.parametrize("way", WAYS)
def test_process_ends_amid_everything_by(forker: Forker, way: str) -> None:
    forker.expect_endings(way, soak_count(100 if way == "end" else 20), *EVERYTHING)


@pytest.mark.parametrize("way", WAYS)
def test_unforked_process_ends_amid_everything_by(way: str) -> None:
    command = [sys.executable, "-W", FORK_WARNING, "-c", SCRIPT, way, *EVERYTHING]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE)
    expect_ending(way, done.returncode, done.stderr)


# With a collective in flight Gloo's own thread can be the last owner of a tensor and ask for the GIL at the very end,
# which torch does not survive: it aborts. That is not ours to mend, but it must not become a process that never ends,
# as it would if that thread were stopped where it holds Gloo's lock.
COLLECTIVE = """
import datetime as dt, sys, threading
import torch, torch.distributed as dist
import cudafuture

store, groups, options = dist.HashStore(), [None, None], dist.AllreduceOptions()

def make(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2, dt.timedelta(seconds=60))

other = threading.Thread(target=make, args=(1,))
other.start()
make(0)
other.join()
for last in [False] * 20 + [True]:
    size = int(sys.argv[1]) if last else 2
    works = [group.allreduce([torch.ones(size)], options) for group in groups]
    futures = [cudafuture.CUDAFuture.from_torch(work) for work in works]
    del works
    if not last: cudafuture.wait_all(futures)
"""


@pytest.mark.parametrize("size", [2, 20_000])  # the second is in flight for longer
def test_process_ends_with_collective_in_flight(size: int) -> None:
    for _ in range(soak_count(20)):
        with Child(COLLECTIVE, str(size)) as process:
            assert process.end() in (0, -signal.SIGABRT)


TOO_LATE = """
import atexit

def late():
    import torch
    from cudafuture import CUDAFuture
    source = torch.futures.Future()
    future = CUDAFuture.from_torch(source)
    source.set_result(1)
    try: future.wait()
    except RuntimeError as e: say(f"{type(e).__name__}: {e}")

atexit.register(late)  # runs after the library's own
import cudafuture
"""


def test_late_work_at_exit_is_abandoned() -> None:
    with Child(TOO_LATE) as process:
        assert process.hear() == (
            "InvalidStateError: the process is exiting: the completion of this future, or of another, came too late"
        )
        assert process.end() == 0


BLOCKED = """
import signal, threading
from cudafuture import CUDAFuture, executors

signal.signal(signal.SIGINT, signal.default_int_handler)
blocked, never = threading.Event(), threading.Event()
CUDAFuture.completed(1).add_done_callback(lambda f: blocked.set() or never.wait(), executor=executors.callback_thread)
blocked.wait()
import atexit
atexit.register(say, "exiting")  # runs before the library's own
"""


def test_ctrl_c_ends_exit_behind_callback() -> None:
    with Child(BLOCKED) as process:
        assert process.hear() == "exiting"
        ended = False
        while not ended:  # again and again: the first ones may reach handlers that run before the library's
            process.send(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                process.end(patience=0.1)
                ended = True
        assert "KeyboardInterrupt" in process.errors()
