"""Everything at once, by many threads, on futures that they share: no crash, no deadlock, no error but the expected."""

from __future__ import annotations

import pytest

from support.child import Child
from support.soak import soak_count

# In a process of its own: a crash would take the other tests with it.
SCRIPT = """
import gc, logging, random, sys, threading
import torch
from cudafuture import AllFailedError, CancelledError, CUDAFuture, InvalidStateError
from cudafuture import collect_all, collect_any, executors, gather

shared = [CUDAFuture() for _ in range(64)]
errors = []

def put(future):
    shared[chance.randrange(64)] = future

def pick():
    return shared[chance.randrange(64)]

def wait(future):
    future.wait(timeout=1e-4)

STEPS = [
    lambda f: put(CUDAFuture()),
    lambda f: put(CUDAFuture(name="named")),
    lambda f: f.set_result(chance.random()),
    lambda f: f.set_result({"tensor": torch.ones(1), "future": pick()}),
    lambda f: f.set_exception(ValueError("expected")),
    lambda f: f.cancel(),
    lambda f: put(f.then(lambda g: g.value())),
    lambda f: put(f.then(lambda g: [g, f], executor=executors.callback_thread)),
    lambda f: put(f.then_async(lambda g, inner=pick(): inner)),
    lambda f: put(gather(f, pick(), cancel_parts=chance.random() < 0.5)),
    lambda f: put(collect_any([f, pick()])),
    lambda f: put(collect_all([f, pick()])),
    lambda f: f.add_done_callback(lambda g: f),
    lambda f: f.add_done_callback(lambda g: put(CUDAFuture()), executor=executors.callback_thread),
    lambda f: put(CUDAFuture.from_torch(f.to_torch())),
    lambda f: (repr(f), f.done(), f.ready(), f.events, f.devices),
    lambda f: gc.collect() if chance.random() < 0.01 else None,
    wait,
]

def work(count):
    try:
        for _ in range(count):
            try:
                chance.choice(STEPS)(pick())
            except (InvalidStateError, TimeoutError, ValueError, CancelledError, AllFailedError):
                pass
    except BaseException as e:
        errors.append(e)
        raise

chance = random.Random(int(sys.argv[1]))
logging.disable()
gc.collect()
gc.freeze()
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work, args=(int(sys.argv[2]),)) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
say("all done" if not errors else repr(errors))
"""


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("seed", range(3))
def test_shared_futures_survive_concurrent_use(seed: int) -> None:
    with Child(SCRIPT, str(seed), str(soak_count(30_000))) as child:
        assert child.hear(patience=100) == "all done"
        assert child.end() == 0
        assert child.errors() == ""
