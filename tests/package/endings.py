"""Work that goes on in a process when it ends, one function each; see test_exit."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import gc
import json
import logging
import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from cudafuture import (
    CUDAFuture,
    InvalidStateError,
    as_completed,
    collect_any,
    executors,
    gather,
    prefetch,
    submit,
    wait,
)

keep: list[Any] = []  # objects that live until Python takes modules apart
late: list[Callable[[], None]] = []  # called when the library has joined its threads already


def daemon(target: Callable[..., object], *args: object) -> None:
    """Start a daemon thread, and come back when it runs."""
    running = threading.Event()

    def run() -> None:
        running.set()
        target(*args)

    threading.Thread(target=run, daemon=True).start()
    running.wait()


def pending_futures() -> None:
    for _ in range(20):
        future: CUDAFuture[int] = CUDAFuture(name="pending")
        child = future.then(lambda f: f.value())
        nested = future.then_async(lambda f: f)
        future.add_done_callback(print)
        keep.extend([future, child, nested, gather(future, child), collect_any([child, nested])])
        cycle: CUDAFuture[int] = CUDAFuture()
        cycle.add_done_callback(lambda f, cycle=cycle: print(cycle))  # type: ignore[misc]
    keep.append(keep)


def unseen_failures() -> None:
    silence_the_log()
    keep.extend(CUDAFuture.failed(ValueError(i)) for i in range(20))
    keep.extend(CUDAFuture.failed(ValueError(i)).then(lambda f: f.value()) for i in range(20))
    cancelled: CUDAFuture[int] = CUDAFuture()
    cancelled.cancel()
    keep.append(cancelled)


def silence_the_log() -> None:
    logging.getLogger("cudafuture").addHandler(logging.NullHandler())
    logging.getLogger("cudafuture").propagate = False


def callbacks_in_flight() -> None:
    """Leave callbacks on the callback thread that run, and that post more, while the process goes away."""

    def work(future: CUDAFuture[int]) -> int:
        if future.value() > 0:
            CUDAFuture.completed(future.value() - 1).then(work, executor=executors.callback_thread)
        return sum(range(1000))

    begun = threading.Event()
    CUDAFuture.completed(0).then(lambda f: begun.set(), executor=executors.callback_thread)
    keep.extend(CUDAFuture.completed(5).then(work, executor=executors.callback_thread) for _ in range(200))
    begun.wait()


def a_callback_that_posts_itself() -> None:
    def again(future: CUDAFuture[int]) -> None:
        future.add_done_callback(again, executor=executors.callback_thread)

    again(CUDAFuture.completed(1))


def a_callback_that_waits() -> None:
    """Leave the callback thread in a wait for a future that never completes."""
    forever: CUDAFuture[int] = CUDAFuture()
    begun = threading.Event()

    def block(_: CUDAFuture[None]) -> int:
        begun.set()
        return forever.wait()

    keep.append(CUDAFuture.completed(None).then(block, executor=executors.callback_thread))
    begun.wait()


def waiting_threads() -> None:
    """Leave daemon threads in every kind of wait, half of which end just now."""
    futures: list[CUDAFuture[int]] = [CUDAFuture() for _ in range(10)]
    keep.extend(futures)
    for f in futures:
        daemon(f.wait)
        daemon(f.exception, 1000)
        daemon(wait, [f])
        daemon(lambda f: f.wait(timeout=1000, non_blocking=True), f)
        daemon(lambda f: list(as_completed([f], timeout=1000)), f)
        daemon(lambda f: gather(f, f).wait(), f)
    for f in futures[::2]:
        f.set_result(1)


def impatient_threads() -> None:
    """Leave daemon threads that come back from a wait all the time."""
    never: CUDAFuture[int] = CUDAFuture()

    def retry() -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                never.wait(timeout=1e-4)

    for _ in range(4):
        daemon(retry)


def busy_threads() -> None:
    """Leave daemon threads that make, chain, complete and drop futures, with callbacks inline."""

    def chain() -> None:
        while True:
            first: CUDAFuture[int] = CUDAFuture()
            last = first.then(lambda f: f.value()).then(lambda f: f.value() + 1)
            first.add_done_callback(lambda f: sum(range(100)))
            first.set_result(1)
            last.wait()

    for _ in range(3):
        daemon(chain)


def threads_in_pairs() -> None:
    """Leave daemon threads that wait for one another's futures."""

    def make(handed: queue.SimpleQueue[CUDAFuture[int]]) -> None:
        while True:
            future: CUDAFuture[int] = CUDAFuture()
            handed.put(future)
            future.wait()

    def complete(handed: queue.SimpleQueue[CUDAFuture[int]]) -> None:
        while True:
            handed.get().set_result(1)

    for _ in range(2):
        handed: queue.SimpleQueue[CUDAFuture[int]] = queue.SimpleQueue()
        daemon(make, handed)
        daemon(complete, handed)


def busy_executors() -> None:
    pool = ThreadPoolExecutor(2)
    keep.append(pool)
    for _ in range(50):
        keep.append(CUDAFuture.completed(1).then(lambda f: sum(range(10_000)), executor=pool))
        keep.append(submit(sum, range(10_000)))
        keep.append(submit(sum, range(10_000), executor=executors.callback_thread))


def torch_futures() -> None:
    for _ in range(10):
        source = torch.futures.Future[int]()
        future = CUDAFuture.from_torch(source)
        keep.extend([source, future, future.then(lambda f: f.value()), future.to_torch()])
        CUDAFuture.from_torch(torch.futures.Future[int]()).add_done_callback(print)
        keep.append(CUDAFuture().to_torch())


def two_gloo_groups() -> list[Any]:
    """Make the two ends of a Gloo group in this process, and keep them."""
    store = dist.HashStore()
    patience = dt.timedelta(seconds=1000)
    groups: list[Any] = [None, None]

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, patience)

    makers = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    keep.append(groups)
    return groups


def collectives() -> None:
    """Leave a collective that lacks a rank, a receive without a send, and callbacks of Gloo's threads in flight."""
    groups = two_gloo_groups()
    options = dist.AllreduceOptions()
    for _ in range(20):
        works = [group.allreduce([torch.ones(1)], options) for group in groups]
        keep.extend(CUDAFuture.from_torch(work).then(lambda f: sum(range(1000))) for work in works)
    keep.append(CUDAFuture.from_torch(groups[0].recv([torch.ones(1)], 1, 7)).then(lambda f: f.value()))
    keep.append(CUDAFuture.from_torch(groups[0].allreduce([torch.ones(1)], options)).then(lambda f: f.value()))


def sends_just_done() -> None:
    """End sends whose threads are the last owners of the tensors, and drop these while the process goes away."""
    groups = two_gloo_groups()
    inboxes = [torch.empty(1) for _ in range(50)]
    received = [CUDAFuture.from_torch(groups[1].recv([t], 0, tag)) for tag, t in enumerate(inboxes)]
    sent = [CUDAFuture.from_torch(groups[0].send([torch.ones(1)], 1, tag)) for tag in range(50)]
    keep.extend([inboxes, received])
    wait(sent)


def failing_threads() -> None:
    """Leave daemon threads that make errors, log them and drop failures all the time."""
    silence_the_log()

    def loop(step: Callable[[], object]) -> None:
        while True:
            step()

    def note_error() -> None:
        future: CUDAFuture[int] = CUDAFuture(name="noted")
        future.set_exception(ValueError())

    def all_failed() -> None:
        collect_any([CUDAFuture.failed(ValueError()), CUDAFuture.failed(KeyError())]).exception()

    daemon(loop, lambda: CUDAFuture.completed(1).add_done_callback(lambda f: 1 / 0))
    daemon(loop, lambda: CUDAFuture.failed(ValueError()))
    daemon(loop, note_error)
    daemon(loop, all_failed)


class NeverDone(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        while True:
            threading.Event().wait(1e-4)


def works_in_python() -> None:
    keep.extend(CUDAFuture.from_torch(NeverDone()) for _ in range(5))


def event_loops() -> None:
    never: CUDAFuture[int] = CUDAFuture()

    async def many() -> None:
        await asyncio.gather(*(_await_future(never) for _ in range(10)))

    for _ in range(2):
        daemon(asyncio.run, many())


async def _await_future(future: CUDAFuture[int]) -> int:
    return await future


def late_use() -> None:
    """Use futures when the library's own threads have been joined already: in a handler that was registered first."""

    def use() -> None:
        future: CUDAFuture[int] = CUDAFuture()
        child = future.then(lambda f: f.value() + 1)
        future.set_result(1)
        assert child.wait() == 2
        call: Callable[[], int]
        for call in (
            lambda: future.then(lambda f: 3, executor=executors.callback_thread).wait(),
            lambda: submit(int, executor=executors.callback_thread).wait(),
            lambda: submit(int).wait(),
        ):
            try:
                call()
            except InvalidStateError as e:
                keep.append(e)

    late.append(use)


def devices_at_work() -> None:
    """Leave callbacks and waits behind device work that never ends: they fail instead of holding up the end."""
    from cudafuture.testing import sim

    sim.enable()
    keep.append(sim.hold())
    future = CUDAFuture.completed(torch.ones(1, device="sim"))
    child = future.then(lambda f: f.value(), non_blocking=False)
    keep.extend([future, child, child.then(lambda f: f.value()), gather(child, future)])
    daemon(child.exception)
    daemon(future.wait)
    begun = threading.Event()

    def block() -> None:
        begun.set()
        child.wait()

    keep.append(submit(block, executor=executors.callback_thread))
    begun.wait()

    def look() -> None:
        for failed in (child, future.then(lambda f: f.value(), non_blocking=False)):
            assert isinstance(failed.exception(timeout=10), InvalidStateError)
            assert "the process is exiting" in str(failed.exception())

    late.append(look)


class UsedByAFinalizer:
    def __del__(self) -> None:
        future: CUDAFuture[int] = CUDAFuture()
        child = future.then(lambda f: f.value() + 1)
        future.set_result(1)
        assert child.value() == 2


def finalizers() -> None:
    keep.append(UsedByAFinalizer())
    UsedByAFinalizer.cycle = UsedByAFinalizer()  # type: ignore[attr-defined]


def a_reader_inside_its_iterable() -> None:
    """Leave a prefetcher whose iterable never comes back: the end of the process does not wait for it."""
    inside = threading.Event()

    def read() -> Iterator[int]:
        yield 0
        inside.set()
        threading.Event().wait()

    epoch = iter(prefetch(read(), "cpu"))
    keep.append(epoch)
    assert next(epoch) == 0
    inside.wait()


def readers_at_work() -> None:
    """Leave prefetchers that wait for their consumer, and that are copying."""
    from cudafuture.testing import sim

    if not sim.is_enabled():
        sim.enable()
    batches = [[torch.ones(100) for _ in range(10)]] * 1000
    for depth in (1, 2, 20):
        epoch = iter(prefetch(batches, "sim", depth=depth, transform=list))
        keep.extend([epoch, next(epoch)])
    keep.append(iter(prefetch(batches, "cpu", futures=True)))


SCENARIOS = {
    f.__name__: f
    for f in (
        pending_futures,
        unseen_failures,
        callbacks_in_flight,
        a_callback_that_posts_itself,
        a_callback_that_waits,
        waiting_threads,
        impatient_threads,
        busy_threads,
        threads_in_pairs,
        busy_executors,
        torch_futures,
        collectives,
        sends_just_done,
        failing_threads,
        works_in_python,
        event_loops,
        late_use,
        devices_at_work,
        finalizers,
        a_reader_inside_its_iterable,
        readers_at_work,
    )
}


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise ValueError("the way this process ends")


WAYS: dict[str, tuple[Callable[[], object], int]] = {
    "end": (lambda: None, 0),
    "sys.exit": (lambda: sys.exit(3), 3),
    "exception": (fail, 1),
    "SIGTERM": (terminate, -signal.SIGTERM),
    "os._exit": (lambda: os._exit(4), 4),
}


def end_amid(way: str, *scenarios: str) -> None:
    """Begin the scenarios and end this process in the way named."""
    for scenario in scenarios:
        SCENARIOS[scenario]()
    WAYS[way][0]()


def end_in_forks(hear: Callable[[], str], report: Callable[[str], None]) -> None:
    """Take requests for `end_amid` in forked children of this process, which has only imported the library.

    A request is a line of a count, a way and scenarios; an empty line is the last. The answer is a line for each child:
    a JSON object of its exit code and of its output to stderr.
    """
    gc.freeze()  # the objects that torch has made need not be searched at every end
    while request := hear():
        count, way, *scenarios = request.split(" ")
        if _is_in_a_fork(int(count), report):
            end_amid(way, *scenarios)
            return


def _is_in_a_fork(count: int, report: Callable[[str], None]) -> bool:
    for _ in range(count):
        with tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                os.dup2(errors.fileno(), 2)
                return True
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            errors.seek(0)
            report(json.dumps({"code": code, "errors": errors.read()}))
    return False
