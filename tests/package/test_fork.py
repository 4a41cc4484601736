"""Fork: in a child of a process that had used the library every call is refused, and none hangs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.child import Child
from support.soak import soak_count

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fork"), pytest.mark.usefixtures("on_the_host")]

# One forked child makes the refused calls, another the allowed ones. Each then ends as any process does.
FORK_EACH = """
import asyncio, faulthandler, gc, json, os
from concurrent.futures import ThreadPoolExecutor
import torch
import cudafuture
from cudafuture import CUDAFuture, as_completed, collect_all, collect_any, copy, executors, gather, submit
from cudafuture import wait, wait_all

pending, other, done = CUDAFuture(name="pending"), CUDAFuture(), CUDAFuture.completed(7)
child = pending.then(lambda f: f.value())
whole = gather(pending, other)
torch_future = torch.futures.Future()

async def awaited(): return await pending
async def awaited_when_done(): return await done
async def first_of_many():
    async for future in as_completed([pending]):
        return future.value()

REFUSED = {
    "CUDAFuture": lambda: CUDAFuture(),
    "completed": lambda: CUDAFuture.completed(1),
    "failed": lambda: CUDAFuture.failed(ValueError("unused")),
    "wait": lambda: pending.wait(),
    "wait with a timeout": lambda: pending.wait(timeout=0),
    "wait without blocking on devices": lambda: pending.wait(non_blocking=True),
    "result": lambda: pending.result(),
    "exception": lambda: pending.exception(),
    "wait for a child": lambda: child.wait(),
    "wait for a gather": lambda: whole.wait(),
    "then": lambda: pending.then(lambda f: f.value()),
    "then of a done future": lambda: done.then(lambda f: f.value()),
    "then_async": lambda: pending.then_async(lambda f: done),
    "then with an executor": lambda: done.then(lambda f: f.value(), executor=executors.callback_thread),
    "add_done_callback": lambda: pending.add_done_callback(print),
    "add_done_callback of a done future": lambda: done.add_done_callback(print),
    "set_result": lambda: pending.set_result(1),
    "set_exception": lambda: pending.set_exception(ValueError("unused")),
    "cancel": lambda: pending.cancel(),
    "gather": lambda: gather(pending, done),
    "gather of done futures": lambda: gather(done),
    "gather of nothing": lambda: gather(),
    "collect_all": lambda: collect_all([pending]),
    "collect_any": lambda: collect_any([pending]),
    "wait_all": lambda: wait_all([pending]),
    "wait for a set": lambda: wait([pending]),
    "wait for the first of a set": lambda: wait([pending, other], return_when="FIRST_COMPLETED"),
    "as_completed": lambda: next(iter(as_completed([pending]))),
    "submit": lambda: submit(int),
    "submit inline": lambda: submit(int, executor=executors.inline),
    "submit to the callback thread": lambda: submit(int, executor=executors.callback_thread),
    "submit to an executor": lambda: submit(int, executor=ThreadPoolExecutor(1)),
    "copy": lambda: copy(torch.ones(1), "cpu"),
    "from_torch": lambda: CUDAFuture.from_torch(torch_future),
    "to_torch": lambda: pending.to_torch(),
    "await": lambda: asyncio.run(awaited()),
    "async for": lambda: asyncio.run(first_of_many()),
}
ALLOWED = {
    "value of a done future": lambda: done.value(),
    "wait for a done future": lambda: done.wait(),
    "await of a done future": lambda: asyncio.run(awaited_when_done()),
    "done": lambda: 7 if done.done() and not pending.done() else 0,
    "ready": lambda: 7 if done.ready() and not pending.ready() else 0,
    "cancelled": lambda: 0 if pending.cancelled() else 7,
    "facts": lambda: 7 if pending.name == "pending" and not pending.devices and not pending.events else 0,
    "repr": lambda: 7 if "pending" in repr(pending) else 0,
    "garbage": lambda: gc.collect() * 0 + 7,
    "drop": lambda: globals().update(pending=None, other=None, child=None, whole=None) or 7,
}

def outcome(call):
    try:
        return {"value": repr(call())}
    except BaseException as e:
        return {"error": type(e).__module__ + "." + type(e).__name__, "message": str(e)}

CUDAFuture.completed(0).then(lambda f: 0, executor=executors.callback_thread).wait()
for calls in REFUSED, ALLOWED:
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(60, exit=True)
        for name, call in calls.items():
            say(json.dumps({"name": name, "parent": os.getppid()} | outcome(call)))
        break
    say(json.dumps({"name": "", "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}))
else:
    say("that is all")
"""

# The parent has only imported the library; its children, and their children, use it.
FORK_FIRST = """
import os, sys
import cudafuture
from cudafuture import CUDAFuture, InvalidStateError, executors, submit

def use():
    child = CUDAFuture.completed(1).then(lambda f: f.value() + 1, executor=executors.callback_thread)
    assert child.wait(timeout=30) == 2
    assert submit(divmod, 7, 2).wait(timeout=30) == (3, 1)
    return child

for _ in range(3):
    pid = os.fork()
    if pid == 0:
        used = use()
        grandchild = os.fork()
        if grandchild == 0:
            try:
                CUDAFuture()
            except InvalidStateError as e:
                assert str(os.getppid()) in str(e)
                sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 5
        break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
else:
    use()
    say("all ended well")
"""

# Threads make, complete, chain, wait for and drop futures all the time. Whatever they hold at the fork stays held in
# the child for ever, so nothing that the child does by itself may want it.
FORK_IN_THE_MIDDLE = """
import faulthandler, gc, os, queue, sys, threading
import cudafuture
from cudafuture import CUDAFuture, executors, gather

stop = threading.Event()
shared = [CUDAFuture() for _ in range(8)]
chains = [[f, f.then(lambda f: f.value()), gather(f, *shared)] for f in shared]
handed = queue.SimpleQueue()

def complete():
    while not stop.is_set():
        futures = [CUDAFuture() for _ in range(20)]
        children = [f.then(lambda f: f.value(), executor=executors.callback_thread) for f in futures]
        cycle = CUDAFuture(); cycle.add_done_callback(lambda f, cycle=cycle: cycle)
        handed.put(futures[0])
        for f in futures[1:]: f.set_result(f)
        gather(*children[1:]).wait()

def hand_over():
    while not stop.is_set():
        handed.get().set_result(None)

def wait():
    while not stop.is_set():
        for f in shared:
            try: f.wait(timeout=1e-5)
            except TimeoutError: pass

threads = [threading.Thread(target=t, daemon=True) for t in (complete, complete, hand_over, wait, wait, wait)]
for t in threads: t.start()
gc.freeze()  # torch's own objects need not be searched
for i in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(30, exit=True)
        gc.collect()
        del shared[::2]
        del chains
        gc.collect()
        if i % 10: os._exit(0)
        break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, code
    say(i)  # one at a time: the test waits for each, however busy the machine is
else:
    stop.set()
    handed.put(CUDAFuture())
    for t in threads: t.join()
    say("all ended well")
"""

Outcome = dict[str, Any]


REFUSED = [
    "CUDAFuture",
    "completed",
    "failed",
    "wait",
    "wait with a timeout",
    "wait without blocking on devices",
    "result",
    "exception",
    "wait for a child",
    "wait for a gather",
    "then",
    "then of a done future",
    "then_async",
    "then with an executor",
    "add_done_callback",
    "add_done_callback of a done future",
    "set_result",
    "set_exception",
    "cancel",
    "gather",
    "gather of done futures",
    "gather of nothing",
    "collect_all",
    "collect_any",
    "wait_all",
    "wait for a set",
    "wait for the first of a set",
    "as_completed",
    "submit",
    "submit inline",
    "submit to the callback thread",
    "submit to an executor",
    "copy",
    "from_torch",
    "to_torch",
    "await",
    "async for",
]
ALLOWED = [
    "value of a done future",
    "wait for a done future",
    "await of a done future",
    "done",
    "ready",
    "cancelled",
    "facts",
    "repr",
    "garbage",
    "drop",
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Return what became of every call in a forked child; under "" how the last child ended."""
    found: dict[str, Outcome] = {}
    with Child(FORK_EACH) as child:
        while (line := child.hear()) != "that is all":
            outcome = json.loads(line)
            assert outcome.get("code", 0) == 0, "a forked child did not end well"
            found[outcome["name"]] = outcome
        assert child.end() == 0
        assert child.errors() == ""
    return found


def test_forked_children_exit_cleanly(outcomes: dict[str, Outcome]) -> None:
    assert outcomes[""]["code"] == 0
    assert [*outcomes] == [*REFUSED, "", *ALLOWED]


@pytest.mark.parametrize("call", REFUSED)
def test_forked_child_is_refused_with_reason(outcomes: dict[str, Outcome], call: str) -> None:
    outcome = outcomes[call]
    assert outcome.get("error") == "cudafuture.errors.InvalidStateError", outcome
    assert f"was used in process {outcome['parent']} before it forked" in outcome["message"]
    assert "spawn" in outcome["message"]


@pytest.mark.parametrize("call", ALLOWED)
def test_forked_child_may_inspect_and_drop(outcomes: dict[str, Outcome], call: str) -> None:
    assert outcomes[call].get("value") == "7", outcomes[call]


def test_import_alone_allows_use_in_child() -> None:
    with Child(FORK_FIRST) as child:
        assert child.hear() == "all ended well"
        assert child.end() == 0
        assert child.errors() == ""


@pytest.mark.soak
def test_fork_amid_completions_never_hangs() -> None:
    count = soak_count(200)
    with Child(FORK_IN_THE_MIDDLE, str(count)) as child:
        assert [child.hear() for _ in range(count)] == [str(i) for i in range(count)]
        assert child.hear() == "all ended well"
        assert child.end() == 0
        assert child.errors() == ""
