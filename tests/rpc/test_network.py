"""Calls between two hosts whose network fails, comes back, or is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

import pytest

from support.child import Child
from support.namespaces import BE_A_HOST, Cable, Relay, skip_unless_possible, skip_without_tun
from support.rpc_workers import LONG

T = TypeVar("T")

pytestmark = [pytest.mark.root, pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("rpc-network")]

# Both workers: they meet at a TCPStore on the first host, run commands, and print the results.
WORKER = (
    BE_A_HOST
    + """
import sys, torch
from support.rpc_workers import *
from rpc_ext import rpc_async, rpc_sync

rank = int(sys.argv[1])
session = rpc_ext.init_rpc(
    NAMES[rank], rank=rank, world_size=2, init_method="tcp://10.231.77.1:29500", secret=SECRET, start_timeout=60
)
assert not rpc_ext.session._listeners.host().startswith("127.")
futures = {}
peer = NAMES[1 - rank]

def call(name, count, timeout):
    futures[name] = [rpc_async(peer, same, (i,), timeout=timeout) for i in range(count)]

def call_with_tensors(name, count, size):
    tensors = [torch.arange(size, dtype=torch.int32) + i for i in range(count)]
    futures[name] = [rpc_async(peer, same, (tensor,), timeout=60) for tensor in tensors]
    for sent, future in zip(tensors, futures[name]):
        assert torch.equal(future.wait(), sent)

def tell(name):
    say(sorted({blame(f.exception(timeout=LONG)).replace("answered", "yes") for f in futures[name]}))

def leave(graceful, timeout):
    try: rpc_ext.shutdown(graceful, timeout=timeout)
    except Exception as e: say(type(e).__name__)
    else: say("left")

say("ready")
while (line := hear()) != "over":
    exec(line)
    say("done")
"""
)


class Workers:
    """The caller, on the first host, and the callee, on the second."""

    def __init__(self, caller: Child, callee: Child) -> None:
        self.caller, self.callee = self._both = (caller, callee)

    def do(self, line: str, *, by: Child | None = None) -> str:
        """Let the caller do something, or another, and return the last that it has said of it."""
        child = by or self.caller
        child.say(line)
        said = ""
        while (heard := child.hear(LONG)) != "done":
            said = heard
        return said

    def leave(self, graceful: bool) -> list[str]:
        """End both, at the same time, and return how they fared."""
        for child in self._both:
            child.say(f"leave({graceful}, {LONG if graceful else 1})")
        said = []
        for child in self._both:
            said.append(child.hear(LONG))
            assert child.hear() == "done"
            self.end(child)
        return said

    def end(self, child: Child) -> None:
        child.say("over")
        assert child.end(LONG) == 0


@contextmanager
def workers_with(between: Callable[[int, int], AbstractContextManager[T]]) -> Iterator[tuple[T, Workers]]:
    """Start both, with something between them."""
    with Child(WORKER, "0") as caller, Child(WORKER, "1") as callee:
        for child in (caller, callee):
            assert child.hear() == "host"
        with between(caller.process.pid, callee.process.pid) as line:
            for child in (caller, callee):
                child.say("connected")
            for child in (caller, callee):
                assert child.hear(LONG) == "ready"
            yield line, Workers(caller, callee)


@pytest.fixture(autouse=True, scope="module")
def namespaces() -> None:
    skip_unless_possible()


@pytest.fixture
def tun() -> None:
    skip_without_tun()


def test_calls_survive_five_second_cut() -> None:
    with workers_with(Cable) as (cable, workers):
        workers.do("call('at first', 100, 60)")
        assert workers.do("tell('at first')") == "['yes']"
        workers.do("futures['before'] = [rpc_async(peer, hold, timeout=60) for _ in range(100)]")
        workers.do("while rpc_sync(peer, count_held) < 100: pass")
        cable.cut()
        workers.do("call('patient', 100, 60)")
        workers.do("call('impatient', 100, 1)")
        workers.do("complete_held(1)", by=workers.callee)
        assert workers.do("tell('impatient')") == "['TimeoutError']"
        workers.do("import time; time.sleep(4)")  # five seconds in all, of which a second has passed
        assert workers.do("say(any(f.done() for f in futures['before'] + futures['patient']))") == "False"
        cable.mend()
        workers.do("call('after', 100, 60)")
        for name in ("before", "patient", "after"):
            assert workers.do(f"tell('{name}')") == "['yes']"
        assert workers.leave(graceful=True) == ["left", "left"]


@pytest.mark.parametrize("graceful", [False, True])
def test_permanent_cut_ends_every_call(graceful: bool) -> None:
    with workers_with(Cable) as (cable, workers):
        workers.do("futures['before'] = [rpc_async(peer, hold, timeout=3) for _ in range(100)]")
        workers.do("there = rpc_ext.remote(peer, same, (1,)); there.to_here()")
        cable.cut()
        workers.do("call('after', 900, 2)")
        workers.do("with rpc_ext.batch(peer): call('batched', 100, 2)")
        workers.do("futures['reference'] = [there.get_future(timeout=1)]")
        for name in ("before", "after", "batched", "reference"):
            assert workers.do(f"tell('{name}')") in ("['TimeoutError']", "['WorkerLostError']")
        if graceful:  # the callee's store is on the other side
            for child in (workers.caller, workers.callee):
                assert workers.do("leave(True, 2)", by=child) in ("TimeoutError", "WorkerLostError")
                workers.end(child)
        else:
            assert workers.leave(graceful=False) == ["left", "left"]


@pytest.mark.usefixtures("tun")
def test_slow_line_delivers_large_tensors() -> None:
    with workers_with(partial(Relay, rate=4e6)) as (relay, workers):
        before = relay.came
        workers.do("call_with_tensors('large', 4, 1 << 18)")
        workers.do("call('small', 100, 60)")
        assert workers.do("tell('small')") == "['yes']"
        assert relay.came - before > 2 * 4 * 4 * (1 << 18)  # there and back
        assert workers.leave(graceful=True) == ["left", "left"]


@pytest.mark.usefixtures("tun")
def test_cut_during_message_fails_call() -> None:
    with workers_with(partial(Relay, rate=16e6)) as (relay, workers):
        relay.limit = relay.came + (1 << 20)
        workers.do("futures['cut'] = [rpc_async(peer, same, (torch.ones(1 << 20),), timeout=3)]")
        workers.do("call('behind it', 100, 2)")
        for name in ("cut", "behind it"):
            assert workers.do(f"tell('{name}')") in ("['TimeoutError']", "['WorkerLostError']")
        assert relay.came > relay.limit
        assert workers.leave(graceful=False) == ["left", "left"]


def test_others_learn_of_lost_store() -> None:
    with workers_with(Cable) as (_, workers):
        workers.do("futures['pending'] = [rpc_async(peer, hold) for _ in range(10)]", by=workers.callee)
        workers.caller.say("os._exit(0)")
        assert workers.caller.end(LONG) == 0
        said = workers.do(
            "say({type(f.exception(timeout=LONG)).__name__ for f in futures['pending']})", by=workers.callee
        )
        assert said == "{'WorkerLostError'}"
        assert workers.do(f"leave(True, {LONG})", by=workers.callee) == "WorkerLostError"
        workers.end(workers.callee)
