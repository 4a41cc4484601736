"""Signals get through to a main thread that waits: Ctrl-C ends the wait, a handler that returns does not."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest

from support.child import Child

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("interrupt")]  # one process for all of them

# The thread says "waiting" only when the main thread gave up the GIL, which it does nowhere but inside the wait: the
# switch interval keeps the GIL from being taken away from it.
SCRIPT = """
import asyncio, contextlib, os, signal, sys, threading
import cudafuture
from cudafuture import CUDAFuture, as_completed, collect_all, gather, wait, wait_all

pending = other = None
handled = []

# To make an event loop gives up the GIL, so the other thread begins from inside. A signal that comes right before it
# sleeps wakes no thread, unless it writes to the loop's own pipe: asyncio does so for the handlers that it knows.
@contextlib.contextmanager
def inside_the_loop():
    signal.set_wakeup_fd(asyncio.get_running_loop()._csock.fileno())
    begin.set()
    try: yield
    finally: signal.set_wakeup_fd(-1)

async def awaited():
    with inside_the_loop(): return await pending
async def first_of_many():
    with inside_the_loop():
        async for future in as_completed([pending, other]):
            return future.value()

def in_a_callback():
    start = CUDAFuture()
    start.add_done_callback(lambda f: pending.wait())
    start.set_result(None)

def iterated():
    for future in as_completed([pending, other]):
        return future.value()

WAYS = {
    "wait": lambda: pending.wait(),
    "wait without blocking on devices": lambda: pending.wait(non_blocking=True),
    "wait with a timeout": lambda: pending.wait(timeout=1000),
    "result": lambda: pending.result(),
    "exception": lambda: pending.exception(),
    "gather": lambda: gather(pending, other).wait(),
    "collect_all": lambda: collect_all([pending, other]).wait(),
    "a child": lambda: pending.then(lambda f: f.value()).wait(),
    "wait_all": lambda: wait_all([pending, other]),
    "wait for all of a set": lambda: wait([pending, other]),
    "wait for the first of a set": lambda: wait([pending, other], return_when="FIRST_COMPLETED"),
    "wait for the first failure of a set": lambda: wait([pending, other], return_when="FIRST_EXCEPTION"),
    "as_completed": iterated,
    "await": lambda: asyncio.run(awaited()),
    "async for": lambda: asyncio.run(first_of_many()),
    "a callback that waits": in_a_callback,
}

def handler(number, frame):
    handled.append(number)
    say("handled")

def complete(number, frame):
    pending.set_result("by the handler")

def fail(number, frame):
    raise TimeoutError("by the handler")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets jobs in the background ignore it
signal.signal(signal.SIGUSR1, handler)
signal.signal(signal.SIGUSR2, complete)
signal.signal(signal.SIGALRM, fail)
sys.setswitchinterval(1000)

def announce(begin, finish):
    begin.wait()
    say("waiting")
    if hear() == "complete":
        pending.set_result("by another thread")
        if not other.done(): other.set_result("too")
    finish.set()

while (way := hear()) != "end":
    pending, other = CUDAFuture(name="pending"), CUDAFuture()
    begin, finish = threading.Event(), threading.Event()
    thread = threading.Thread(target=announce, args=(begin, finish))
    thread.start()
    try:
        if way not in ("await", "async for"): begin.set()
        say("ended with %r" % (WAYS[way](),))
    except BaseException as e:
        say(type(e).__name__)
    finish.wait()
    thread.join()
    assert not handled or len(handled) == 3, handled
    handled.clear()
"""

WAYS = [
    "wait",
    "wait without blocking on devices",
    "wait with a timeout",
    "result",
    "exception",
    "gather",
    "collect_all",
    "a child",
    "wait_all",
    "wait for all of a set",
    "wait for the first of a set",
    "wait for the first failure of a set",
    "as_completed",
    "await",
    "async for",
    "a callback that waits",
]
NATIVE = [way for way in WAYS if way not in ("await", "async for")]


Waiting = Callable[[str], AbstractContextManager[Child]]


@pytest.fixture(scope="module")
def waiting() -> Iterator[Waiting]:
    """Return a context manager: a process whose main thread waits in the named way. They share one until one fails."""
    idle: list[Child] = []

    @contextmanager
    def waiting(way: str) -> Iterator[Child]:
        child = idle.pop() if idle else Child(SCRIPT)
        with ExitStack() as broken:
            broken.push(child)
            child.say(way)
            assert child.hear() == "waiting"
            yield child
            broken.pop_all()
            idle.append(child)

    yield waiting
    for child in idle:
        with child:
            child.say("end")
            assert child.end() == 0
            assert child.errors() == ""


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_ends_wait(waiting: Waiting, way: str) -> None:
    with waiting(way) as child:
        child.send(signal.SIGINT)
        assert child.hear() == "KeyboardInterrupt"
        child.say("go on")


@pytest.mark.parametrize("way", NATIVE)
def test_returning_handler_continues_wait(waiting: Waiting, way: str) -> None:
    with waiting(way) as child:
        for _ in range(3):
            child.send(signal.SIGUSR1)
            assert child.hear() == "handled"
        child.say("complete")
        assert child.hear().startswith("ended with ")


@pytest.mark.parametrize("way", ["wait", "wait with a timeout", "a child", "wait for the first of a set"])
def test_handler_may_complete_awaited_future(waiting: Waiting, way: str) -> None:
    with waiting(way) as child:
        child.send(signal.SIGUSR2)
        assert child.hear().startswith("ended with ")
        child.say("go on")


@pytest.mark.parametrize("way", ["wait", "gather", "wait_all"])
def test_handler_error_leaves_wait(waiting: Waiting, way: str) -> None:
    with waiting(way) as child:
        child.send(signal.SIGALRM)
        assert child.hear() == "TimeoutError"
        child.say("go on")


def test_default_signal_action_ends_waiting_process() -> None:
    with Child(SCRIPT) as child:
        child.say("wait")
        assert child.hear() == "waiting"
        child.send(signal.SIGTERM)
        assert child.end() == -signal.SIGTERM
        assert child.errors() == ""
