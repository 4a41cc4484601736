"""Lives of futures, one function for each kind; see test_leaks."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from cudafuture import (
    AllFailedError,
    CUDAFuture,
    InvalidStateError,
    as_completed,
    collect_all,
    collect_any,
    executors,
    gather,
    submit,
    wait,
    wait_all,
)


class Probe:
    """Something to look for afterwards: a value, a cell, a callback."""

    __slots__ = ("__weakref__",)

    def __call__(self, *_: object) -> Probe:
        return self


probe = Probe()  # its reference count says how many hold it


def error() -> ValueError:
    return ValueError(probe)


def raising(_: object) -> None:
    raise error()


# ---- one of each kind


def complete() -> None:
    CUDAFuture.completed(probe)


def make_and_drop() -> None:
    CUDAFuture(["cpu"], name="dropped")


def complete_and_wait() -> None:
    future: CUDAFuture[Probe] = CUDAFuture(name="waited for")
    future.set_result(probe)
    assert future.wait() is future.result() is future.value() is probe


def fail_and_look() -> None:
    future: CUDAFuture[Probe] = CUDAFuture(name="looked at")
    future.set_exception(error())
    with suppress(ValueError):
        future.wait()
    assert isinstance(future.exception(), ValueError)


def fail_with_traceback() -> None:
    """Fail with a traceback whose frame holds the future that holds the exception."""
    future: CUDAFuture[Probe] = CUDAFuture()
    held = probe
    try:
        raise KeyError(held)
    except KeyError as e:
        future.set_exception(e)
    with suppress(KeyError):
        future.wait()


def fail_in_callback() -> None:
    child = CUDAFuture.completed(probe).then(raising)
    assert child.exception() is not None


def cancel() -> None:
    future: CUDAFuture[Probe] = CUDAFuture()
    future.add_done_callback(probe)
    child = future.then(probe)
    future.cancel()
    with suppress(ValueError, RuntimeError):
        future.value()
    assert child.value() is probe


def cancel_child() -> None:
    future: CUDAFuture[Probe] = CUDAFuture()
    future.then(probe).cancel()
    future.set_result(probe)


def complete_twice() -> None:
    future = CUDAFuture.completed(probe)
    with suppress(InvalidStateError):
        future.set_result(probe)
    with suppress(InvalidStateError):
        future.set_exception(error())


def time_out() -> None:
    with suppress(TimeoutError):
        CUDAFuture().wait(timeout=0)


def chain() -> None:
    first: CUDAFuture[Probe] = CUDAFuture()
    last = first.then(lambda f: f.value()).then(probe).then_async(lambda f: CUDAFuture.completed(f.value()))
    first.add_done_callback(probe)
    first.set_result(probe)
    assert last.value() is probe


def chain_and_drop() -> None:
    first: CUDAFuture[Probe] = CUDAFuture()
    first.add_done_callback(probe)
    last = first.then(probe).then(probe)
    del first
    assert isinstance(last.exception(), InvalidStateError)


def then_async_and_dropped() -> None:
    inner: CUDAFuture[Probe] = CUDAFuture()
    inner.then(probe)
    CUDAFuture.completed(probe).then_async(lambda f: inner)


def gather_parts() -> None:
    parts: list[CUDAFuture[Probe]] = [CUDAFuture(), CUDAFuture.completed(probe), CUDAFuture()]
    wholes: list[CUDAFuture[Any]] = [gather(*parts), collect_all(parts), collect_any(parts)]
    child = wholes[0].then(lambda f: f.value()[0])
    parts[0].set_result(probe)
    parts[2].set_result(probe)
    assert child.value() is probe


def gather_and_fail() -> None:
    parts: list[CUDAFuture[Probe]] = [CUDAFuture(), CUDAFuture()]
    whole, anything = gather(*parts), collect_any(parts)
    parts[0].set_exception(error())
    assert whole.exception() is not None
    parts[1].set_exception(error())
    assert isinstance(anything.exception(), AllFailedError)


def gather_and_cancel() -> None:
    parts: list[CUDAFuture[Probe]] = [CUDAFuture(), CUDAFuture()]
    gather(*parts, cancel_parts=True).cancel()
    gather(CUDAFuture(), CUDAFuture.completed(probe)).cancel()


def gather_and_drop() -> None:
    parts: list[CUDAFuture[Probe]] = [CUDAFuture(), CUDAFuture()]
    gather(*parts).add_done_callback(probe)
    collect_any(parts).then(probe)
    collect_all(parts)


def wait_together() -> None:
    done, pending = CUDAFuture.completed(probe), CUDAFuture[Probe]()
    wait([done, pending], return_when="FIRST_COMPLETED")
    wait([pending], timeout=0, return_when="FIRST_COMPLETED")
    next(iter(as_completed([done, pending])))
    wait_all([done])


def on_an_executor() -> None:
    CUDAFuture.completed(probe).then(probe, executor=executors.callback_thread).wait()


def tensors() -> None:
    future: CUDAFuture[Any] = CUDAFuture(["cpu"])
    child = future.then(lambda f: f.value()["x"])
    future.set_result({"x": torch.empty(4, device="cpu"), "probe": probe})
    child.wait()


# ---- cycles: only the collector ends them


def callback_over_its_own_future() -> None:
    future: CUDAFuture[Probe] = CUDAFuture()
    future.add_done_callback(lambda f: (future, probe))


def callback_over_its_child() -> None:
    future: CUDAFuture[Probe] = CUDAFuture()
    child = future.then(lambda f: (child, probe))


def callback_over_a_gather_of_itself() -> None:
    future: CUDAFuture[Probe] = CUDAFuture()
    whole = gather(future, CUDAFuture())
    future.add_done_callback(lambda f: (whole, probe))
    whole.add_done_callback(probe)


def async_child_that_waits_for_itself() -> None:
    future: CUDAFuture[Probe] = CUDAFuture()
    child = future.then_async(lambda f: child)
    child.add_done_callback(probe)
    future.set_result(probe)


def value_that_is_the_future() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    future.set_result([future, probe])
    other: CUDAFuture[Any] = CUDAFuture()
    other.set_result(other)


def attribute_that_holds_the_future() -> None:
    class Holder:
        held = probe

    holder = Holder()
    holder.future = CUDAFuture.completed(holder)  # type: ignore[attr-defined]


def callbacks_of_each_other() -> None:
    one, two = CUDAFuture[Probe](), CUDAFuture[Probe]()
    one.add_done_callback(lambda f: (two, probe))
    two.add_done_callback(lambda f: (one, probe))
    one.then(lambda f: two.then(lambda f: one))


# ---- bridges


def to_torch_done() -> None:
    CUDAFuture.completed(probe).to_torch().wait()


def to_torch_dropped() -> None:
    future: CUDAFuture[Probe] = CUDAFuture()
    future.to_torch()
    future.add_done_callback(probe)


def from_torch_done() -> None:
    source = torch.futures.Future[Probe]()
    future = CUDAFuture.from_torch(source)
    future.add_done_callback(probe)
    source.set_result(probe)
    assert future.wait() is probe


def from_torch_failed() -> None:
    source = torch.futures.Future[Probe]()
    future = CUDAFuture.from_torch(source)
    source.set_exception(error())  # type: ignore[arg-type]
    assert future.exception() is not None


def from_torch_dropped() -> None:
    source = torch.futures.Future[Probe]()
    CUDAFuture.from_torch(source).add_done_callback(probe)


def collective() -> None:
    """Complete a future in a thread of Gloo's, which knows nothing of Python."""
    work = group().allreduce([torch.ones(1, device="cpu")], dist.AllreduceOptions())  # type: ignore[attr-defined]
    assert CUDAFuture.from_torch(work).then(probe).wait() is probe


@functools.cache
def group() -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, dt.timedelta(seconds=100))


def fail_unseen() -> None:
    CUDAFuture.failed(error())


# ---- many at once, 100 of them


def await_many() -> None:
    async def main() -> None:
        futures: list[CUDAFuture[Probe]] = [CUDAFuture() for _ in range(100)]
        waiting = asyncio.gather(*(_await_future(f) for f in futures))
        loop = asyncio.get_running_loop()
        for f in futures:
            loop.call_soon(f.set_result, probe)
        assert await waiting == [probe] * 100

    asyncio.run(main())


def await_and_give_up() -> None:
    never: CUDAFuture[Probe] = CUDAFuture()

    async def main() -> None:
        tasks = [asyncio.ensure_future(_await_future(never)) for _ in range(100)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    never.set_result(probe)


async def _await_future(future: CUDAFuture[Probe]) -> Probe:
    return await future


def submit_many() -> None:
    with ThreadPoolExecutor(1) as pool:
        futures = [submit(probe, executor=pool) for _ in range(50)]
        futures += [CUDAFuture.completed(probe).then(probe, executor=pool) for _ in range(50)]
        assert wait_all(futures) == [probe] * 100


def complete_in_thread() -> None:
    futures: list[CUDAFuture[Probe]] = [CUDAFuture() for _ in range(100)]
    children = [f.then(probe) for f in futures]
    thread = threading.Thread(target=lambda: [f.set_result(probe) for f in futures])  # type: ignore[func-returns-value]
    thread.start()
    assert wait_all(children) == [probe] * 100
    thread.join()


KINDS = [
    complete,
    make_and_drop,
    complete_and_wait,
    fail_and_look,
    fail_with_traceback,
    fail_in_callback,
    cancel,
    cancel_child,
    complete_twice,
    time_out,
    chain,
    chain_and_drop,
    then_async_and_dropped,
    gather_parts,
    gather_and_fail,
    gather_and_cancel,
    gather_and_drop,
    wait_together,
    on_an_executor,
    tensors,
    fail_unseen,
    callback_over_its_own_future,
    callback_over_its_child,
    callback_over_a_gather_of_itself,
    async_child_that_waits_for_itself,
    value_that_is_the_future,
    attribute_that_holds_the_future,
    callbacks_of_each_other,
    to_torch_done,
    to_torch_dropped,
    from_torch_done,
    from_torch_failed,
    from_torch_dropped,
    collective,
]
BATCHES = [await_many, await_and_give_up, submit_many, complete_in_thread]
