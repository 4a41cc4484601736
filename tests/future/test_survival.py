"""Chains and values a million long or deep, and many threads at once."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cudafuture import AllFailedError, CUDAFuture, InvalidStateError, collect_all, collect_any, executors, gather
from support.child import Child
from support.soak import soak_count

pytestmark = pytest.mark.soak

DEPTH = soak_count(1_000_000)

Future = CUDAFuture[int]


@pytest.fixture(autouse=True)
def nothing_is_left(small_heap: None) -> Iterator[None]:
    """Check that nothing is left to be taken apart later."""
    yield
    gc.collect()


def chain(first: Future, links: int = DEPTH) -> Future:
    last = first
    for _ in range(links):
        last = last.then(lambda f: f.value() + 1)
    return last


def test_chain_completes_and_frees_without_recursion() -> None:
    first: Future = CUDAFuture()
    last = chain(first)
    first.set_result(0)
    assert last.wait() == DEPTH


def test_chain_fails_without_recursion() -> None:
    first: Future = CUDAFuture()
    last = chain(first)
    first.set_exception(error := OSError("at the head"))
    assert last.exception() is error


def test_chain_of_done_future_completes_stepwise() -> None:
    assert chain(CUDAFuture.completed(0)).wait() == DEPTH


def test_callback_thread_completes_long_chain() -> None:
    first: Future = CUDAFuture()
    last = first
    for _ in range(DEPTH):
        last = last.then(lambda f: f.value() + 1, executor=executors.callback_thread)
    first.set_result(0)
    assert last.wait() == DEPTH


def test_pending_chain_drops_from_head() -> None:
    first: Future = CUDAFuture()
    last = chain(first)
    del first
    with pytest.raises(InvalidStateError, match="dropped"):
        last.wait()


def test_pending_chain_drops_from_tail() -> None:
    first: Future = CUDAFuture()
    last = chain(first)
    ends = weakref.ref(first), weakref.ref(last)
    del last
    del first
    assert [end() for end in ends] == [None, None]


def test_pending_cyclic_chain_is_collected() -> None:
    first: Future = CUDAFuture()
    last = chain(first)
    last.add_done_callback(lambda f, first=first: first)  # type: ignore[misc]
    del first, last
    before = len(gc.get_objects())
    gc.collect()
    assert len(gc.get_objects()) <= before - DEPTH


def test_completing_inside_callbacks_does_not_recurse() -> None:
    futures: list[Future] = [CUDAFuture() for _ in range(DEPTH)]
    for future, following in itertools.pairwise(futures):
        future.add_done_callback(lambda f, following=following: following.set_result(f.value() + 1))  # type: ignore[misc]
    futures[0].set_result(0)
    assert futures[-1].value() == DEPTH - 1


def test_then_in_then_does_not_recurse() -> None:
    left = DEPTH

    def again(future: Future) -> None:
        nonlocal left
        left -= 1
        if left:
            future.then(again)

    CUDAFuture.completed(0).then(again)
    assert left == 0


def test_then_async_nests_without_recursion() -> None:
    innermost: Future = CUDAFuture()
    future = innermost
    for _ in range(DEPTH):
        future = CUDAFuture.completed(0).then_async(lambda _, inner=future: inner)  # type: ignore[misc]
    innermost.set_result(7)
    assert future.wait() == 7


def test_nested_then_async_drops_without_recursion() -> None:
    innermost: Future = CUDAFuture()
    future = innermost
    for _ in range(DEPTH):
        future = CUDAFuture.completed(0).then_async(lambda _, inner=future: inner)  # type: ignore[misc]
    del innermost
    assert isinstance(future.exception(), InvalidStateError)


def test_nested_future_values_free_without_recursion() -> None:
    value: CUDAFuture[Any] = CUDAFuture.completed(None)
    innermost = weakref.ref(value)
    for _ in range(DEPTH):
        value = CUDAFuture.completed(value)
    del value
    assert innermost() is None


def test_nested_failures_free_without_recursion() -> None:
    first: CUDAFuture[None] = CUDAFuture.completed(None)
    innermost = weakref.ref(first)
    error = ValueError(first)
    del first
    for _ in range(DEPTH // 10):
        future: Future = CUDAFuture()
        future.set_exception(error)
        future.exception()
        error = ValueError(future)
    del error, future
    assert innermost() is None


NESTS: dict[str, Callable[[CUDAFuture[Any]], CUDAFuture[Any]]] = {
    "gather": lambda f: gather(f),
    "collect_all": lambda f: collect_all([f]),
    "collect_any": lambda f: collect_any([f]),
}


def nest(how: str, innermost: CUDAFuture[Any]) -> CUDAFuture[Any]:
    future = innermost
    for _ in range(DEPTH):
        future = NESTS[how](future)
    return future


# In a process of its own: what recurses here takes the process with it.
NEST = """
import sys
from cudafuture import CUDAFuture, collect_all, collect_any, gather
how, depth = sys.argv[1], int(sys.argv[2])
nest = {
    "gather": lambda f: gather(f),
    "collect_all": lambda f: collect_all([f]),
    "collect_any": lambda f: collect_any([f]),
    "cancel": lambda f: gather(f, cancel_parts=True),
}[how]
innermost = outermost = CUDAFuture()
for _ in range(depth):
    outermost = nest(outermost)
if how == "cancel":
    assert outermost.cancel() and outermost.cancelled() and innermost.cancelled()
else:
    innermost.set_result("value")
    value = outermost.value()
    for _ in range(depth):
        value = value[-1].value() if how == "collect_all" else value[-1]
    assert value == "value", value
"""


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("how", [*NESTS, "cancel"])
def test_nest_completes_or_cancels_without_recursion(how: str) -> None:
    with Child(NEST, how, str(DEPTH)) as child:
        assert child.end() == 0, child.errors()


@pytest.mark.parametrize("how", NESTS)
def test_nest_drops_without_recursion(how: str) -> None:
    pending = weakref.ref(nest(how, CUDAFuture()))
    gc.collect()
    assert pending() is None
    innermost: CUDAFuture[object] = CUDAFuture()
    outermost = nest(how, innermost)
    innermost.set_result("value")
    done = weakref.ref(outermost)
    del outermost
    assert done() is None


@pytest.mark.parametrize("how", ["gather", "collect_any"])
def test_nest_fails_without_recursion(how: str) -> None:
    innermost: CUDAFuture[object] = CUDAFuture()
    outermost = nest(how, innermost)
    innermost.set_exception(OSError("innermost"))
    assert isinstance(outermost.exception(), OSError if how == "gather" else AllFailedError)


def test_large_gather_completes_in_any_order() -> None:
    parts: list[Future] = [CUDAFuture() for _ in range(DEPTH)]
    whole = gather(*parts)
    for i in [*range(0, DEPTH, 2), *range(1, DEPTH, 2)]:
        parts[i].set_result(i)
    assert whole.wait() == list(range(DEPTH))


# ---- many threads

THREADS = 8
FUTURES = soak_count(100_000)


def run_together(*targets: Callable[[], object]) -> None:
    """Run each target in a thread, begun at the same moment; raise what one of them raised."""
    barrier = threading.Barrier(len(targets))
    errors: list[BaseException] = []

    def run(target: Callable[[], object]) -> None:
        barrier.wait()
        try:
            target()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.usefixtures("frequent_switches")
def test_many_threads_call_each_callback_once() -> None:
    futures: list[Future] = [CUDAFuture() for _ in range(FUTURES)]
    called: list[tuple[str, int]] = []  # append is atomic
    children = []
    for i, future in enumerate(futures):
        future.add_done_callback(lambda f, i=i: called.append(("first", i)))  # type: ignore[misc]
        children.append(future.then(lambda f, i=i: called.append(("then", i)) or f.value()))  # type: ignore[func-returns-value, misc]
        future.add_done_callback(lambda f, i=i: called.append(("last", i)))  # type: ignore[misc]
    whole = gather(*children)

    def complete(mine: list[Future], first: int) -> Callable[[], None]:
        def run() -> None:
            for i, future in enumerate(mine):
                future.set_result(first + i * THREADS)

        return run

    run_together(*(complete(futures[k::THREADS], k) for k in range(THREADS)))
    assert whole.wait() == list(range(FUTURES))
    assert Counter(called) == Counter((what, i) for what in ("first", "then", "last") for i in range(FUTURES))
    order = {call: at for at, call in enumerate(called)}
    assert all(order["first", i] < order["then", i] < order["last", i] for i in range(FUTURES))


@pytest.mark.usefixtures("frequent_switches")
def test_one_of_many_completing_threads_succeeds() -> None:
    futures: list[Future] = [CUDAFuture() for _ in range(FUTURES // 10)]
    called: list[int] = []
    for i, future in enumerate(futures):
        future.add_done_callback(lambda f, i=i: called.append(i))  # type: ignore[misc]
    wins: Counter[int] = Counter()

    def complete(me: int) -> Callable[[], None]:
        def run() -> None:
            for future in futures:
                try:
                    if me % 3 == 0:
                        future.set_result(me)
                    elif me % 3 == 1:
                        future.set_exception(ValueError(me))
                    elif not future.cancel():
                        continue
                except InvalidStateError:
                    continue
                wins[me] += 1

        return run

    run_together(*(complete(me) for me in range(6)))
    cancelled = [f for f in futures if f.cancelled()]
    completed = Counter(f.value() for f in futures if not f.cancelled() and f.exception() is None)
    failed = Counter(f.exception().args[0] for f in futures if not f.cancelled() and f.exception() is not None)  # type: ignore[union-attr]
    assert sorted(called) == list(range(len(futures)))
    assert len(cancelled) + completed.total() + failed.total() == len(futures)
    assert all(wins[me] == (completed + failed)[me] for me in (0, 1, 3, 4))
    assert wins[2] + wins[5] >= len(cancelled)  # two that cancel at the same moment may both hear yes


@pytest.mark.usefixtures("frequent_switches")
def test_concurrent_callbacks_run_exactly_once() -> None:
    futures: list[Future] = [CUDAFuture() for _ in range(FUTURES // 10)]
    called: list[tuple[int, int]] = []

    def add(me: int) -> Callable[[], None]:
        def run() -> None:
            for i, future in enumerate(futures):
                future.add_done_callback(lambda f, i=i: called.append((me, i)))  # type: ignore[misc]

        return run

    def complete() -> None:
        for future in futures:
            future.set_result(0)

    run_together(complete, *(add(me) for me in range(4)))
    assert Counter(called) == Counter((me, i) for me in range(4) for i in range(len(futures)))


@pytest.mark.usefixtures("frequent_switches")
def test_many_threads_wait_for_each_other() -> None:
    futures: list[Future] = [CUDAFuture() for _ in range(FUTURES // 10)]

    def wait() -> None:
        assert [f.wait(timeout=100) for f in futures] == list(range(len(futures)))

    def complete() -> None:
        for i, future in enumerate(futures):
            future.set_result(i)

    run_together(complete, *[wait] * 7)
