"""Processes that end, fork or are interrupted while there is RPC in them: no crash, no hang, the right exit code."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpc.endings import SCENARIOS, SLOW, WAYS
from support.child import Child
from support.rpc_workers import LONG
from support.soak import in_soak_alone

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("rpc-endings")]


@pytest.fixture(scope="module")
def endings() -> Iterator[Child]:
    with Child("from rpc.endings import main\nmain(say, hear)") as process:
        yield process
        process.say("over")
        assert process.end() == 0


def end_amid(process: Child, folder: Path, scenario: str, way: str) -> None:
    process.say(json.dumps([scenario, way, str(folder)]))
    ending = json.loads(process.hear(2 * LONG))
    assert ending["code"] == WAYS[way][1], ending["errors"]
    assert "terminate called" not in ending["errors"], ending["errors"]
    if way == "exception":
        assert "ValueError: the way this process ends" in ending["errors"]


@pytest.mark.parametrize("way", WAYS)
def test_process_with_pending_calls_ends_by(endings: Child, tmp_path: Path, way: str) -> None:
    end_amid(endings, tmp_path, "pending_calls", way)


@pytest.mark.parametrize("scenario", SCENARIOS | SLOW)
def test_process_ends_amid(endings: Child, tmp_path: Path, scenario: str) -> None:
    end_amid(endings, tmp_path, scenario, "end")


@pytest.mark.soak
@in_soak_alone
@pytest.mark.parametrize("way", WAYS)
def test_process_ends_amid_everything_by(endings: Child, tmp_path: Path, way: str) -> None:
    for scenario in SCENARIOS:
        end_amid(endings, tmp_path, scenario, way)


ENDS_FIRST = """
import sys
from support.rpc_workers import *
begin(int(sys.argv[1]), 2, sys.argv[2])
me, peer = int(sys.argv[1]), 1 - int(sys.argv[1])
futures = [rpc_ext.rpc_async(peer, hold) for _ in range(20)]
while rpc_ext.rpc_sync(peer, count_held) < 20: pass
say("ready")
hear()
if me == 0:
    for future in futures: say(blame(future.exception(timeout=LONG)))
"""


def test_sudden_end_of_worker_fails_calls(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with Child(ENDS_FIRST, "0", store) as stays, Child(ENDS_FIRST, "1", store) as goes:
        for child in (stays, goes):
            assert child.hear(LONG) == "ready"
        goes.say("go")
        assert goes.end(LONG) == 0
        stays.say("look")
        assert [stays.hear(LONG) for _ in range(20)] == ["WorkerLostError"] * 20
        assert stays.end(LONG) == 0


FORKS = """
import os, sys
from support.rpc_workers import *
from cudafuture import InvalidStateError
from rpc_ext._channel import channel
session = begin(0, 1, sys.argv[1])
opened = channel(session, session.destinations[0], 9, "a service")
pending = rpc_ext.rpc_async(0, hold)
child = os.fork()
uses = [
    lambda: rpc_ext.rpc_async(0, same, (1,)), lambda: rpc_ext.rpc_sync(0, same, (1,)), rpc_ext.shutdown,
    lambda: rpc_ext.remote(0, same, (1,)), lambda: begin(0, 1, sys.argv[1] + "child"), rpc_ext.statistics,
    lambda: rpc_ext.RRef(1), lambda: rpc_ext.batch(0), lambda: opened.send(b"", [], 1, None),
]
if child == 0:
    for use in uses:
        try: use()
        except InvalidStateError as e: assert "forked" in str(e), e
        else: os._exit(98)
    sys.exit(7)
say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
say(rpc_ext.rpc_sync(0, same, ("still here",)))
"""


def test_forked_child_makes_no_calls(tmp_path: Path) -> None:
    with Child(FORKS, str(tmp_path / "store")) as process:
        assert process.hear(LONG) == "7"
        assert process.hear() == "still here"
        assert process.end(LONG) == 0


INTERRUPTED = """
import signal, sys, threading, time
from support.rpc_workers import *
signal.signal(signal.SIGINT, signal.default_int_handler)
store = sys.argv[1]
session = begin(0, 1, store, max_in_flight=3)

def waiting_function():
    release.clear()
    say("waiting")
    release.wait()

def when(condition):
    def watch():
        while not condition(): time.sleep(0.001)
        say("waiting")
    threading.Thread(target=watch, daemon=True).start()

def wait_for_room():
    when(lambda: rpc_ext.statistics().destinations["caller"].waiting)
    for _ in range(4): held.append(rpc_ext.rpc_async(0, hold))

def shut_down():
    when(lambda: session.is_ending)
    rpc_ext.shutdown()

def begin_alone():
    say("waiting")
    begin(0, 2, store + "2")

def leave_the_body():
    with begin(0, 1, store + "3"): rpc_ext.rpc_sync(0, waiting_function)

WAYS = {
    "rpc_sync": lambda: rpc_ext.rpc_sync(0, waiting_function),
    "to_here": lambda: rpc_ext.remote(0, waiting_function).to_here(),
    "room": wait_for_room, "shutdown": shut_down, "init_rpc": begin_alone, "body": leave_the_body,
}
while (way := hear()) != "over":
    try: WAYS[way]()
    except KeyboardInterrupt: say("interrupted")
    release.set()  # for who runs it still
    if way == "body": say(rpc_ext.session._session)
"""


# A signal that comes just before its thread goes to sleep, or to another thread, does not wake it.
INTERRUPTED_ASLEEP = "import _thread\n" + INTERRUPTED.replace(
    'say("waiting")\n    threading', "time.sleep(0.1)\n        _thread.interrupt_main()\n    threading"
)


def test_silent_interrupt_is_noticed(tmp_path: Path) -> None:
    with Child(INTERRUPTED_ASLEEP, str(tmp_path / "store")) as process:
        for way in ("room", "shutdown"):
            process.say(way)
            assert process.hear() == "interrupted", way
        process.say("over")
        assert process.end(LONG) == 0


def test_interrupt_ends_every_wait(tmp_path: Path) -> None:
    with Child(INTERRUPTED, str(tmp_path / "store")) as process:
        for way in ("rpc_sync", "to_here", "room", "shutdown", "init_rpc", "body"):
            process.say(way)
            assert process.hear(LONG) == "waiting", way
            process.send(signal.SIGINT)
            assert process.hear() == "interrupted", way
        assert process.hear(LONG) == "None"
        process.say("over")
        assert process.end(LONG) == 0
