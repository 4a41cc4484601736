"""The pool of `submit`: its threads, waits that fill it, and the end of a process whose functions block."""

from __future__ import annotations

import contextlib
import signal
import textwrap
import threading

import pytest

from cudafuture._submit_pool import SubmitPool
from support.child import Child, run_script

PROLOGUE = """
import threading
from cudafuture import *
from cudafuture import executors

def expect_exhaustion(outer):
    try:
        outer.wait(timeout=60)
    except InvalidStateError as e:
        assert "this wait would never end: all 2 threads of submit wait for functions of submit" in str(e), e
        assert "CUDAFUTURE_SUBMIT_THREADS" in str(e), e
    else:
        raise AssertionError("it did not fail")

both = threading.Barrier(2)  # each thread of the pool has begun

def nested(wait):
    both.wait()
    return wait()

def run(*waits):
    return [submit(nested, wait) for wait in waits]
"""


def expect_success(program: str) -> None:
    done = run_script(PROLOGUE + textwrap.dedent(program), environment={"CUDAFUTURE_SUBMIT_THREADS": "2"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""


def test_waits_that_fill_pool_are_refused() -> None:
    expect_success(
        """
        for blocks in (
            lambda: submit(int).wait(),
            lambda: submit(int).result(),
            lambda: submit(int).then(lambda f: f.value()).wait(),
            lambda: CUDAFuture.completed(0).then_async(lambda f: submit(int)).wait(),
            lambda: CUDAFuture.completed(0).then(lambda f: 0, executor=executors.default_executor()).wait(),
            lambda: submit(int).then_async(lambda f: CUDAFuture.completed(f.value())).wait(),
            lambda: gather(submit(int), submit(int)).wait()[0],
            lambda: gather(submit(int), submit(int)).then(lambda f: 0).wait(),
            lambda: collect_any([submit(int), submit(int)]).wait()[1],
            lambda: wait_all([submit(int)])[0],
            lambda: wait([submit(int)])[0].pop().value(),
            lambda: wait([submit(int)], return_when="FIRST_COMPLETED")[0].pop().value(),
            lambda: next(as_completed([submit(int), submit(int)])).value(),
        ):
            failed, other = as_completed(run(blocks, blocks), timeout=60)
            expect_exhaustion(failed)
            assert other.wait() == 0  # the thread of the one that failed has run its function
        """
    )


def test_mutual_waits_are_refused() -> None:
    expect_success(
        """
        futures = []
        begun = threading.Event()
        def other(i):
            begun.wait()
            return nested(futures[1 - i].wait)
        futures += [submit(other, 0), submit(other, 1)]
        begun.set()
        for future in futures:
            expect_exhaustion(future)  # the one that sees it, and the one that waits for that one
        """
    )


def test_timeout_says_pool_is_full() -> None:
    expect_success(
        """
        waiting = threading.Barrier(3)
        never = submit(nested, lambda: [inner := submit(int), waiting.wait(), inner.wait(timeout=1)][-1])
        other = submit(nested, lambda: [inner := submit(int), waiting.wait(), inner.wait(timeout=1)][-1])
        waiting.wait()
        errors = [str(future.exception(timeout=60)) for future in (never, other)]
        assert any("still pending" in e and "Now all 2 threads of submit wait" in e for e in errors), errors
        """
    )


def test_waits_ended_by_others_are_allowed() -> None:
    expect_success(
        """
        ends = [CUDAFuture() for _ in range(4)]
        outer = run(
            lambda: gather(submit(int, executor=executors.callback_thread), ends[0]).wait()[1],
            lambda: collect_any([submit(int), ends[1]]).wait()[1],
        )
        more = [submit(int) for _ in range(3)]  # nothing runs them meanwhile
        for i, end in enumerate(ends):
            end.set_result(i)
        assert wait_all(outer, timeout=60) == [0, 1]
        assert wait_all(more, timeout=60) == [0, 0, 0]
        inside = run(
            lambda: submit(int).then_async(lambda f: ends[2]).wait(),
            lambda: 5,
        )
        assert wait_all(inside, timeout=60) == [2, 5]
        """
    )


def test_exit_names_blocking_functions() -> None:
    script = """
from cudafuture import CUDAFuture, submit
import threading
def block():
    begun.set()
    threading.Event().wait()
begun = threading.Event()
submit(block)
begun.wait()
"""
    done = run_script(script, environment={"CUDAFUTURE_SUBMIT_EXIT_SECONDS": "1"})
    assert done.returncode == 0, done.stderr
    assert "the process ends while functions of submit block" in done.stderr
    assert "in block" in done.stderr


def test_ctrl_c_ends_waiting_exit() -> None:
    script = """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
from cudafuture import submit
begun = threading.Event()
submit(lambda: begun.set() or threading.Event().wait())
begun.wait()
say("exiting")
"""
    with Child(script) as process:
        assert process.hear() == "exiting"
        ended = False
        while not ended:  # again and again: the first one may come before the exit waits
            process.send(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                process.end(patience=0.1)
                ended = True
        assert "KeyboardInterrupt" in process.errors()


def test_exit_runs_queued_functions() -> None:
    script = """
from cudafuture import submit
import os
for i in range(20): submit(os.write, 1, b"ran\\n")  # one call: print() writes the end of a line separately
"""
    done = run_script(script, environment={"CUDAFUTURE_SUBMIT_THREADS": "2"})
    assert done.stdout == "ran\n" * 20
    assert done.stderr == ""


def test_functions_end_before_atexit_handlers() -> None:
    script = """
from cudafuture import submit
import atexit, threading, torch
submit(int).wait()
from cudafuture.store import DiskStore  # it closes its stores at exit
store = DiskStore("left")
exiting = threading.Event()
threading._register_atexit(exiting.set)
atexit.register(say, "closed")
submit(lambda: exiting.wait() and say(store.write("key", torch.ones(5)).wait()))
"""
    with Child(script) as process:
        assert [process.hear(), process.hear()] == ["20", "closed"]
        assert (process.end(), process.errors()) == (0, "")


def test_thread_outliving_main_can_make_pool() -> None:
    script = """
from cudafuture import submit
import threading
def use_pool():
    exiting.wait()
    submit(say, "ran")
exiting = threading.Event()
threading._register_atexit(exiting.set)
threading.Thread(target=use_pool).start()
"""
    with Child(script) as process:
        assert process.hear() == "ran"
        assert (process.end(), process.errors()) == (0, "")


def test_unseen_failure_at_exit_is_logged_once() -> None:
    script = """
from cudafuture import CUDAFuture, gather
failed = CUDAFuture(name="kept")
failed.set_exception(ValueError("unseen"))
seen = CUDAFuture.failed(ValueError("seen"))
seen.exception()
class Holder: pass
holder = Holder(); holder.self = holder; holder.future = gather(*[CUDAFuture.failed(KeyError(i)) for i in range(9)])
"""
    done = run_script(script, environment={"CUDAFUTURE_DEBUG": ""})
    assert done.returncode == 0
    assert done.stderr.count("the exception of CUDAFuture 'kept' was never retrieved\n") == 1
    assert done.stderr.count("never retrieved") == 2
    assert "seen')" not in done.stderr.replace("unseen", "")


def test_pool_is_concurrent_futures_executor() -> None:
    pool = SubmitPool(2, 30)
    assert pool.submit(divmod, 7, 2).result() == (3, 1)
    assert list(pool.map(abs, [-1, -2])) == [1, 2]
    assert isinstance(pool.submit(int, "x").exception(), ValueError)
    begun, end = threading.Barrier(3), threading.Event()
    running = [pool.submit(lambda: (begun.wait(), end.wait())[1]) for _ in range(2)]
    queued = pool.submit(int)
    begun.wait()
    pool.shutdown(wait=False, cancel_futures=True)
    assert queued.cancelled()
    end.set()
    pool.shutdown()
    assert [f.result() for f in running] == [True, True]
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(int)


def test_pool_grows_only_for_waiting_functions() -> None:
    pool = SubmitPool(3, 30)
    names: set[str] = set()
    for _ in range(20):
        names.add(pool.submit(lambda: threading.current_thread().name).result())
        with pool._ended:
            pool._ended.wait_for(lambda: pool._left == 0)
    assert names == {"cudafuture-submit_0"}
    pool.shutdown()
