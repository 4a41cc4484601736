"""One future out of many, and waiting for several."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from cudafuture import (
    AllFailedError,
    CancelledError,
    CUDAFuture,
    as_completed,
    collect_all,
    collect_any,
    gather,
    wait,
    wait_all,
)


def futures(n: int) -> list[CUDAFuture[Any]]:
    return [CUDAFuture(name=f"part {i}") for i in range(n)]


def test_gather_keeps_order_of_values() -> None:
    parts = futures(3)
    whole = gather(*parts)
    for i in (2, 0, 1):
        assert not whole.done()
        parts[i].set_result(i * 10)
    assert whole.wait() == [0, 10, 20]
    assert whole.value() is whole.value()


def test_gather_of_done_futures_completes_immediately() -> None:
    assert gather().value() == []
    assert gather(CUDAFuture.completed(1), CUDAFuture.completed(2)).value() == [1, 2]


def test_gather_takes_same_future_twice() -> None:
    (part,) = futures(1)
    whole = gather(part, part)
    part.set_result("x")
    assert whole.wait() == ["x", "x"]


def test_gather_fails_first_and_spares_others() -> None:
    parts = futures(3)
    whole = gather(*parts)
    error = OSError("second")
    parts[1].set_exception(error)
    assert whole.exception() is error
    parts[0].set_exception(ValueError("late"))
    parts[2].set_result(1)
    assert whole.exception() is error
    assert isinstance(parts[0].exception(), ValueError)


def test_gather_counts_cancelled_part_as_failed() -> None:
    parts = futures(2)
    whole = gather(*parts)
    parts[0].cancel()
    assert isinstance(whole.exception(), CancelledError)
    assert not whole.cancelled()


@pytest.mark.parametrize("cancel_parts", [True, False])
def test_gather_cancels_parts_on_request(cancel_parts: bool) -> None:
    parts = futures(2)
    whole = gather(*parts, cancel_parts=cancel_parts)
    assert whole.cancel()
    assert whole.cancelled()
    assert [part.cancelled() for part in parts] == [cancel_parts] * 2
    for part in parts:
        if not cancel_parts:
            part.set_result(1)
    assert whole.cancelled()


def test_abandoned_iterator_in_cycle_is_collected() -> None:
    done, pending = CUDAFuture.completed(1), CUDAFuture[int]()
    iterator = as_completed([done, pending])
    assert next(iterator) is done
    pending.add_done_callback(lambda _, iterator=iterator: None)  # type: ignore[misc]
    gone = weakref.ref(pending)
    del iterator, done, pending
    gc.collect()
    assert gone() is None


def test_gather_has_most_urgent_priority() -> None:
    assert gather(CUDAFuture(priority=-1), CUDAFuture(priority=-2), CUDAFuture()).priority == -2
    assert gather(CUDAFuture(priority=-3)).priority == -3


def test_pending_gather_lets_parts_be_collected() -> None:
    import gc
    import weakref

    parts = futures(2)
    alive = [weakref.ref(p) for p in parts]
    whole = gather(*parts)
    parts[0].set_exception(ValueError("decided"))
    whole.exception()
    del parts
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize("combine", [lambda x: gather(x), lambda x: collect_all([x]), lambda x: collect_any([x])])
@pytest.mark.parametrize("part", [None, 3, "future"])
def test_other_objects_are_refused(combine: Callable[..., object], part: object) -> None:
    with pytest.raises(TypeError, match="takes CUDAFutures"):
        combine(part)


def test_collect_all_returns_futures_of_any_outcome() -> None:
    parts = futures(3)
    whole = collect_all(parts)
    parts[0].set_exception(ValueError("bad"))
    parts[1].cancel()
    assert not whole.done()
    parts[2].set_result(3)
    assert whole.wait() == parts
    assert isinstance(parts[0].exception(), ValueError)
    assert collect_all([]).value() == []


def test_collect_any_returns_first_completed() -> None:
    parts = futures(3)
    whole = collect_any(parts)
    parts[0].set_exception(ValueError("does not count"))
    assert not whole.done()
    parts[2].set_result("third")
    assert whole.wait() == (2, "third")
    parts[1].set_result("too late")
    assert whole.value() == (2, "third")
    parts[0].exception()


def test_collect_any_fails_with_all_errors() -> None:
    parts = futures(2)
    whole = collect_any(parts)
    errors = [ValueError("a"), OSError("b")]
    for part, failure in zip(reversed(parts), reversed(errors), strict=True):
        part.set_exception(failure)
    error = whole.exception()
    assert isinstance(error, AllFailedError)
    assert error.exceptions == tuple(errors)
    assert "ValueError: a" in str(error)


def test_collect_any_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        collect_any([])


def test_gather_counts_parts_from_many_threads() -> None:
    parts = futures(800)
    whole, every = gather(*parts), collect_all(parts)
    barrier = threading.Barrier(8)

    def complete(mine: list[CUDAFuture[Any]]) -> None:
        barrier.wait()
        for part in mine:
            part.set_result(part.name)

    threads = [threading.Thread(target=complete, args=(parts[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    assert whole.wait(timeout=60) == [part.name for part in parts]
    assert every.wait(timeout=60) == parts
    for thread in threads:
        thread.join()


def test_wait_all_returns_values_or_first_failure() -> None:
    assert wait_all([CUDAFuture.completed(i) for i in range(3)]) == [0, 1, 2]
    assert wait_all([]) == []
    error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        wait_all([CUDAFuture.completed(1), CUDAFuture.failed(error)])


def test_wait_all_has_one_timeout() -> None:
    with pytest.raises(TimeoutError):
        wait_all(futures(1000), timeout=0.01)
    with pytest.raises(ValueError, match="timeout"):
        wait_all([], timeout=-1)


def test_wait_separates_done_and_pending() -> None:
    a, b, c = futures(3)
    a.set_result(1)
    assert wait([a, b, c], timeout=0) == ({a}, {b, c})
    assert wait([a, b], return_when="FIRST_COMPLETED") == ({a}, {b})
    b.cancel()
    assert wait([a, b, c], return_when="FIRST_EXCEPTION") == ({a, b}, {c})
    c.set_result(3)
    assert wait([a, b, c]) == ({a, b, c}, set())
    assert wait([]) == (set(), set())


def test_wait_for_first_leaves_no_callbacks() -> None:
    pending: CUDAFuture[Any] = CUDAFuture()
    for _ in range(10):
        wait([pending, CUDAFuture.completed(1)], return_when="FIRST_EXCEPTION", timeout=0)
        wait([pending], return_when="FIRST_COMPLETED", timeout=0)
    assert gc.get_referents(pending) == [CUDAFuture]


def test_wait_neither_raises_nor_retrieves_errors(caplog: pytest.LogCaptureFixture) -> None:
    failed = CUDAFuture.failed(ValueError("still unseen"))
    done, _ = wait([failed])
    assert done == {failed}
    del failed, done
    assert "still unseen" in caplog.text


def test_wait_refuses_unknown_return_when() -> None:
    with pytest.raises(ValueError, match="'ALL_COMPLETED'"):
        wait([], return_when="SOME")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        wait([], timeout=-0.5)


def test_as_completed_yields_in_completion_order() -> None:
    parts = futures(3)
    came = []
    ready = threading.Event()

    def complete() -> None:
        for i in (2, 0, 1):
            parts[i].set_result(i)
            ready.wait(10)
            ready.clear()

    thread = threading.Thread(target=complete)
    thread.start()
    for part in as_completed(parts):
        came.append(part.value())
        ready.set()
    thread.join()
    assert came == [2, 0, 1]


def test_as_completed_timeout_keeps_futures_usable() -> None:
    done, pending = CUDAFuture.completed(1), CUDAFuture[int]()
    iterator = iter(as_completed([done, pending], timeout=0.01))
    assert next(iterator) is done
    with pytest.raises(TimeoutError, match=r"1 \(of 2\) futures unfinished"):
        next(iterator)
    pending.set_result(2)
    assert [f.value() for f in as_completed([pending])] == [2]


def test_as_completed_yields_each_future_once() -> None:
    part = CUDAFuture.completed(1)
    assert list(as_completed([part, part])) == [part]


def test_wait_in_callback_runs_later_callbacks() -> None:
    source: CUDAFuture[int] = CUDAFuture()
    result: list[object] = []
    children: list[CUDAFuture[int]] = []

    def look(_: object) -> None:
        result.append(wait(children, return_when="FIRST_COMPLETED", timeout=60)[0])
        result.append([f.value() for f in as_completed(children, timeout=60)])

    source.add_done_callback(look)
    children.append(source.then(lambda f: f.value() + 1))
    source.set_result(1)
    assert result == [{children[0]}, [2]]


def test_as_completed_yields_done_futures_first() -> None:
    pending, first, second = CUDAFuture[int](), CUDAFuture.completed(1), CUDAFuture.completed(2)
    iterator = as_completed([first, pending, second])
    assert [next(iterator), next(iterator)] == [first, second]


@pytest.mark.parametrize("timeout", [float("inf"), 1e10, 10**400])
def test_huge_timeout_means_no_limit(timeout: float) -> None:
    done = CUDAFuture.completed(1)
    assert wait([done], timeout=timeout, return_when="FIRST_COMPLETED") == ({done}, set())
    assert list(as_completed([done], timeout=timeout)) == [done]
    assert wait_all([done], timeout=timeout) == [1]
    assert done.wait(timeout=timeout) == 1


@pytest.mark.parametrize("how", [gather, lambda *fs: collect_any(fs), lambda *fs: collect_all(fs)])
def test_done_combination_detaches_from_pending_part(how: Callable[..., CUDAFuture[Any]]) -> None:
    pending: CUDAFuture[Any] = CUDAFuture()
    for _ in range(10):
        how(pending, CUDAFuture.completed(1)).cancel()
        gather(pending, CUDAFuture.failed(ValueError())).exception()
        collect_any([pending, CUDAFuture.completed(1)]).wait()
    assert gc.get_referents(pending) == [CUDAFuture]


def test_timed_out_wait_all_retrieves_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    slow: CUDAFuture[Any] = CUDAFuture(name="slow")
    with pytest.raises(TimeoutError):
        wait_all([slow], timeout=0)
    assert gc.get_referents(slow) == [CUDAFuture]
    slow.set_exception(ValueError("for later"))
    assert caplog.text == ""
    assert isinstance(slow.exception(), ValueError)


@pytest.mark.parametrize("how", [gather, lambda *fs: collect_any(fs)])
def test_decided_combination_skips_later_parts(
    how: Callable[..., CUDAFuture[Any]],
) -> None:
    pending: CUDAFuture[Any] = CUDAFuture()
    for _ in range(10):
        gather(CUDAFuture.failed(ValueError()), pending).exception()
        assert collect_any([CUDAFuture.completed(1), pending]).wait() == (0, 1)
    assert gc.get_referents(pending) == [CUDAFuture]


def test_nested_gather_cancellation_is_immediate() -> None:
    outer: CUDAFuture[None] = CUDAFuture()
    inner: CUDAFuture[None] = CUDAFuture()
    seen = []
    whole, nested = gather(outer, cancel_parts=True), gather(inner, cancel_parts=True)
    outer.add_done_callback(lambda f: seen.append((nested.cancel(), inner.cancelled())))
    whole.cancel()
    assert seen == [(True, True)]


def test_gather_of_list_suggests_unpacking() -> None:
    with pytest.raises(TypeError, match=r"gather\(\*futures\)"):
        gather([CUDAFuture()])  # type: ignore[call-overload]


@pytest.mark.usefixtures("without_origins")
@pytest.mark.parametrize("function", [wait, wait_all, as_completed, collect_all, collect_any])
def test_single_future_argument_is_named(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"futures is a list of CUDAFutures, not <CUDAFuture.*pass a list of one"):
        function(CUDAFuture())
    with pytest.raises(TypeError, match=r"\[<CUDAFuture.*\]"):
        function([[CUDAFuture()]])


def test_unstarted_as_completed_keeps_nothing_alive() -> None:
    future = CUDAFuture.completed([1])
    iterator = as_completed([future])
    alive = weakref.ref(future)
    gc.disable()
    del future, iterator
    gc.enable()
    assert alive() is None


class Payload:
    """Value that can be weakly referenced."""


def complete_payloads(count: int) -> tuple[list[CUDAFuture[Payload]], list[weakref.ref[Payload]]]:
    done = [CUDAFuture.completed(Payload()) for _ in range(count)]
    return done, [weakref.ref(future.value()) for future in done]


def test_as_completed_releases_yielded_futures() -> None:
    pending: CUDAFuture[Payload] = CUDAFuture()
    done, alive = complete_payloads(3)
    iterator = as_completed([pending, *done])
    del done
    for yielded in range(3):
        assert [ref() is not None for ref in alive] == [i >= yielded for i in range(3)]
        next(iterator)
    pending.set_result(Payload())
    last = weakref.ref(pending)
    del pending
    assert next(iterator).done()
    assert last() is None
    assert list(iterator) == []


def test_async_for_releases_yielded_futures() -> None:
    async def main() -> None:
        pending: CUDAFuture[Payload] = CUDAFuture()
        done, alive = complete_payloads(3)
        iterator = as_completed([pending, *done]).__aiter__()
        del done
        for yielded in range(3):
            assert [ref() is not None for ref in alive] == [i >= yielded for i in range(3)]
            await iterator.__anext__()
        asyncio.get_running_loop().call_soon(pending.set_result, Payload())
        last = weakref.ref(pending)
        del pending
        await iterator.__anext__()
        await asyncio.sleep(0)  # the loop drops the call
        assert last() is None

    asyncio.run(main())


def test_timeout_counts_unfinished_futures() -> None:
    done, *pending = [CUDAFuture.completed(1), *futures(3)]
    iterator = as_completed([done, *pending], timeout=0)
    next(iterator)
    with pytest.raises(TimeoutError, match=r"3 \(of 4\) futures unfinished"):
        next(iterator)
    assert list(iterator) == []
    with pytest.raises(TimeoutError, match=r"3 \(of 4\) futures unfinished"):
        wait_all([done, *pending], timeout=0)
    failed = CUDAFuture.failed(TimeoutError("of the part"))
    with pytest.raises(TimeoutError, match="of the part"):
        wait_all([failed, *pending], timeout=0)


# ---- one record for failures that are combined


def retrieve(whole: CUDAFuture[Any]) -> None:
    whole.exception()


def drop(whole: CUDAFuture[Any]) -> None: ...


@pytest.mark.parametrize("look", [retrieve, drop])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("combine", [gather, lambda *fs: gather(gather(*fs[:20]), gather(*fs[20:]))])
def test_gather_failures_are_logged_once(
    caplog: pytest.LogCaptureFixture,
    look: Callable[[CUDAFuture[Any]], None],
    early: bool,
    combine: Callable[..., CUDAFuture[Any]],
) -> None:
    parts = futures(40)
    whole = None if early else combine(*parts)
    for part in parts:
        part.set_exception(ValueError(part.name))
    look(whole or combine(*parts))
    del parts, part, whole
    gc.collect()
    assert len(caplog.records) == 1
    assert "was never retrieved; it was combined with futures whose exceptions are not logged" in caplog.text


def test_inherited_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    parent: CUDAFuture[int] = CUDAFuture()
    children = [parent.then(lambda done: done.value()).then(lambda done: done.value() + 1) for _ in range(40)]
    parent.set_exception(ValueError("the parent's"))
    del children, parent
    gc.collect()
    assert len(caplog.records) == 1


def test_failures_before_success_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    parts = futures(10)
    whole = collect_any(parts)
    parts[0].set_exception(ValueError("before"))
    parts[1].set_result("first")
    for part in parts[2:]:
        part.set_exception(ValueError("after"))
    assert whole.wait() == (1, "first")
    del parts, part, whole
    gc.collect()
    assert len(caplog.records) == 1


def test_separate_failures_are_all_logged(caplog: pytest.LogCaptureFixture) -> None:
    parts = [CUDAFuture.failed(ValueError("alone")) for _ in range(3)]
    collect_all(parts).wait()
    del parts
    gc.collect()
    assert len(caplog.records) == 3
