"""Signals get through to a main thread that waits for a simulated device, and what it waited for can still be had."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from support.child import Child

pytestmark = pytest.mark.xdist_group("interrupt")  # one process for all of them

# The thread says "waiting" only when the main thread gave up the GIL, which it does nowhere but inside the wait: the
# switch interval keeps the GIL from being taken away from it.
SCRIPT = """
import signal, sys, threading
import torch
from cudafuture.testing import sim

WAYS = {
    "Tensor.item": lambda: total.item(),
    "Tensor.cpu": lambda: total.cpu(),
    "sim.synchronize": lambda: sim.synchronize(),
    "torch.accelerator.synchronize": lambda: torch.accelerator.synchronize(),
    "Stream.synchronize": lambda: torch.accelerator.current_stream().synchronize(),
    "Event.synchronize": lambda: event.synchronize(),
}
error = TimeoutError("by the handler")

def open_the_hold(number, frame):
    held.open()
def say_so(number, frame):
    say("handled")
def fail(number, frame):
    raise error

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets jobs in the background ignore it
signal.signal(signal.SIGUSR1, open_the_hold)
signal.signal(signal.SIGUSR2, say_so)
signal.signal(signal.SIGALRM, fail)
sys.setswitchinterval(1000)
sim.enable(schedule="lazy")

def announce(held, begin):
    begin.wait()
    say("waiting")
    if hear() == "open": held.open()

while (way := hear()) != "end":
    held = sim.hold()
    total = torch.ones(4, device="sim").sum()
    event = torch.Event("sim")
    event.record()
    begin = threading.Event()
    thread = threading.Thread(target=announce, args=(held, begin))
    thread.start()
    raised = None
    try:
        begin.set()
        WAYS[way]()
        say("returned")
    except BaseException as e:
        raised = e
        say(type(e).__name__)
    thread.join()
    assert raised is error or not isinstance(raised, TimeoutError)
    held.open()
    sim.synchronize()
    say("found %r" % total.item())
"""

WAYS = [
    "Tensor.item",
    "Tensor.cpu",
    "sim.synchronize",
    "torch.accelerator.synchronize",
    "Stream.synchronize",
    "Event.synchronize",
]


@pytest.fixture(scope="module")
def waiter() -> Iterator[Child]:
    """Yield a process that waits in the requested ways."""
    with Child(SCRIPT) as child:
        yield child
        child.say("end")
        assert child.end() == 0
        assert child.errors() == ""


@pytest.fixture(params=WAYS)
def waiting(request: pytest.FixtureRequest, waiter: Child) -> Child:
    """Return the process while its main thread waits behind a hold."""
    waiter.say(request.param)
    assert waiter.hear() == "waiting"
    return waiter


def test_ctrl_c_ends_wait(waiting: Child) -> None:
    waiting.send(signal.SIGINT)
    assert waiting.hear() == "KeyboardInterrupt"
    waiting.say("go on")
    assert waiting.hear() == "found 4.0"


def test_handler_error_leaves_wait_unchanged(waiting: Child) -> None:
    waiting.send(signal.SIGALRM)
    assert waiting.hear() == "TimeoutError"
    waiting.say("go on")
    assert waiting.hear() == "found 4.0"


def test_handler_may_open_hold(waiting: Child) -> None:
    waiting.send(signal.SIGUSR1)
    assert waiting.hear() == "returned"
    waiting.say("go on")
    assert waiting.hear() == "found 4.0"


def test_returning_handler_continues_wait(waiting: Child) -> None:
    for _ in range(3):
        waiting.send(signal.SIGUSR2)
        assert waiting.hear() == "handled"
    waiting.say("open")
    assert waiting.hear() == "returned"
    assert waiting.hear() == "found 4.0"
