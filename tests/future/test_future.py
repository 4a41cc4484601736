"""The states of a future, its outcome, waiting for it, and what it says about itself."""

from __future__ import annotations

import gc
import inspect
import re
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, get_origin

import pytest
import torch

from cudafuture import (
    CancelledError,
    CUDAFuture,
    CUDAFutureError,
    DeviceMismatchError,
    InvalidStateError,
    collect_all,
    collect_any,
    executors,
    gather,
    submit,
)


def test_pending_then_completed() -> None:
    future: CUDAFuture[str] = CUDAFuture()
    assert not future.done()
    assert not future.ready()
    future.set_result("value")
    assert future.done()
    assert future.ready()
    assert not future.cancelled()
    assert future.wait() == future.result() == future.value() == "value"
    assert future.exception() is None


@pytest.mark.parametrize("value", [None, 0, "", (), (1, 2), [torch.ones(1)], ValueError("as a value"), CUDAFuture])
def test_value_keeps_its_identity(value: object) -> None:
    future = CUDAFuture.completed(value)
    assert future.value() is value
    assert future.wait() is value


@pytest.mark.parametrize("finish", ["set_result", "set_exception", "cancel"])
def test_done_is_for_ever(finish: str) -> None:
    future: CUDAFuture[int] = CUDAFuture(name="once")
    future.cancel() if finish == "cancel" else getattr(future, finish)(OSError("first"))
    with pytest.raises(InvalidStateError, match=r"'once' is (completed|failed|cancelled) already"):
        future.set_result(2)
    with pytest.raises(InvalidStateError, match=r"set_exception\(\): 'once' is"):
        future.set_exception(ValueError())
    future.exception() if finish != "cancel" else None


def test_value_of_pending_future_raises() -> None:
    with pytest.raises(InvalidStateError, match="pending"):
        CUDAFuture().value()


@pytest.mark.parametrize("error", [KeyError("k"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_failure_keeps_its_object(error: BaseException) -> None:
    future = CUDAFuture.failed(error)
    assert future.exception() is error
    for look in (future.wait, future.result, future.value):
        with pytest.raises(type(error)) as caught:
            look()
        assert caught.value is error


def test_failure_note_names_future_once() -> None:
    error = ValueError("v")
    first: CUDAFuture[Any] = CUDAFuture(name="bucket 3")
    first.set_exception(error)
    second: CUDAFuture[Any] = CUDAFuture(name="bucket 3")
    second.set_exception(error)
    assert error.__notes__ == ["in CUDAFuture 'bucket 3'"]  # type: ignore[attr-defined]
    first.exception()
    second.exception()


def test_repeated_wait_keeps_traceback_short() -> None:
    def producer() -> None:
        raise ValueError("deep")

    future: CUDAFuture[Any] = CUDAFuture()
    try:
        producer()
    except ValueError as e:
        future.set_exception(e)

    def depth() -> int | None:
        try:
            future.wait()
        except ValueError as e:
            return len(traceback.extract_tb(e.__traceback__))
        return None

    depths = [depth() for _ in range(5)]
    assert len(set(depths)) == 1
    error = future.exception()
    assert error is not None
    assert "producer" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_wait_timeout_keeps_future_usable() -> None:
    future: CUDAFuture[int] = CUDAFuture(name="late")
    with pytest.raises(TimeoutError, match="'late' is still pending"):
        future.wait(timeout=0.001)
    with pytest.raises(TimeoutError):
        future.result(0)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0)
    future.set_result(1)
    assert future.wait(timeout=0) == 1


_REFUSED_CALLS: dict[str, Callable[[Any], object]] = {
    "was given 1 argument without a name, but takes 0: wait(non_blocking=False, timeout=None)": lambda f: f.wait(5),
    "was given 2 arguments without a name, but takes 1: then(fn, priority=None, ": lambda f: f.then(print, -1),
    "then() was given fn twice: then(fn, ": lambda f: f.then(print, fn=print),
    "then() needs the argument 'fn': then(fn, ": lambda f: f.then(priority=-1),
    "result() has no argument 'timeoout': result(timeout=None)": lambda f: f.result(timeoout=1),
    "done() was given 2 arguments without a name, but takes 0: done()": lambda f: f.done(1, 2),
    "value() is a method of a CUDAFuture, not of 3": lambda f: type(f).value(3),
    "wait() is a method of a CUDAFuture, not of nothing": lambda f: type(f).wait(),
}


@pytest.mark.parametrize("message", _REFUSED_CALLS)
def test_wrong_call_names_argument(message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        _REFUSED_CALLS[message](CUDAFuture.completed(1))


def test_methods_have_signatures() -> None:
    assert str(inspect.signature(CUDAFuture.wait)) == "(self, /, *, non_blocking=False, timeout=None)"
    assert str(inspect.signature(CUDAFuture.completed(1).cancel)) == "(msg=None)"


@pytest.mark.parametrize("how", ["by descriptor", "by position", "by name"])
def test_method_accepts_each_call_form(how: str) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    seen: list[Any] = []
    if how == "by descriptor":
        CUDAFuture.add_done_callback(future, seen.append)
        child = CUDAFuture.then(future, CUDAFuture.value)
        CUDAFuture.set_result(future, 3)
    elif how == "by position":
        future.add_done_callback(seen.append)
        child = future.then(CUDAFuture.value)
        future.set_result(3)
    else:
        future.add_done_callback(fn=seen.append, executor=None)
        child = future.then(fn=CUDAFuture.value, stream="pool")
        future.set_result(value=3, stream=None)
    assert (child.wait(), child.result(), CUDAFuture.wait(child), child.wait(timeout=1)) == (3, 3, 3, 3)
    assert seen == [future]
    with pytest.raises(InvalidStateError, match="completed already"):
        future.set_result(4)
    with pytest.raises(TypeError, match="takes a callable"):
        future.then(4)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), -float("inf")])
def test_done_future_refuses_negative_timeout(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout is None"):
        CUDAFuture.completed(1).wait(timeout=timeout)


def test_non_numeric_timeout_is_refused() -> None:
    with pytest.raises(TypeError):
        CUDAFuture.completed(1).wait(timeout="soon")  # type: ignore[arg-type]


def test_infinite_timeout_waits() -> None:
    future: CUDAFuture[int] = CUDAFuture()
    thread = threading.Thread(target=lambda: future.set_result(9))
    thread.start()
    assert future.wait(timeout=float("inf")) == 9
    thread.join()


def test_many_threads_wait_for_one_future() -> None:
    future: CUDAFuture[str] = CUDAFuture()
    started = threading.Barrier(9)
    seen = []

    def waiter() -> None:
        started.wait()
        seen.append(future.wait())

    threads = [threading.Thread(target=waiter) for _ in range(8)]
    for thread in threads:
        thread.start()
    started.wait()
    future.set_result("all")
    for thread in threads:
        thread.join()
    assert seen == ["all"] * 8


def test_cancel_is_outcome() -> None:
    future: CUDAFuture[Any] = CUDAFuture(name="job")
    ran: list[CUDAFuture[Any]] = []
    future.add_done_callback(ran.append)
    assert future.cancel()
    assert not future.cancel()
    assert future.cancelled()
    assert future.done()
    assert ran == [future]
    for look in (future.wait, future.value, future.exception):
        with pytest.raises(CancelledError, match="'job' was cancelled"):
            look()


def test_done_future_cannot_be_cancelled() -> None:
    future = CUDAFuture.completed(1)
    assert not future.cancel()
    assert future.value() == 1


def test_cancelled_error_is_of_concurrent_futures() -> None:
    import concurrent.futures

    assert issubclass(CancelledError, concurrent.futures.CancelledError)
    assert issubclass(CancelledError, CUDAFutureError)


@pytest.mark.parametrize("exc", [None, "text", int, 3])
def test_set_exception_refuses_other_objects(exc: Any) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    with pytest.raises(TypeError, match="exception"):
        future.set_exception(exc)
    with pytest.raises(TypeError):
        CUDAFuture.failed(exc)
    assert not future.done()


def test_unseen_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    future: CUDAFuture[Any] = CUDAFuture(name="forgotten")
    future.set_exception(ValueError("lost?"))
    del future
    gc.collect()
    assert [r.name for r in caplog.records] == ["cudafuture.future"]
    assert "'forgotten'" in caplog.text
    assert "ValueError: lost?" in caplog.text


@pytest.mark.parametrize("look", ["exception", "wait", "value", "result"])
def test_seen_failure_is_not_logged(caplog: pytest.LogCaptureFixture, look: str) -> None:
    future = CUDAFuture.failed(ValueError("seen"))
    if look == "exception":
        future.exception()
    else:
        with pytest.raises(ValueError, match="seen"):
            getattr(future, look)()
    del future
    gc.collect()
    assert not caplog.records


def test_cancelled_future_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    CUDAFuture().cancel()
    gc.collect()
    assert not caplog.records


def test_repr_shows_name_state_and_age() -> None:
    future: CUDAFuture[int] = CUDAFuture(name="read 7")
    assert repr(future).startswith("<CUDAFuture 'read 7' pending, ")
    assert repr(future).endswith("s old>")
    future.set_result(1)
    assert "completed" in repr(future)
    assert repr(CUDAFuture()).startswith("<CUDAFuture pending, ")


@pytest.mark.usefixtures("without_origins")
def test_repr_shows_error_without_retrieving_it(caplog: pytest.LogCaptureFixture) -> None:
    future = CUDAFuture.failed(ValueError("lost " * 100))
    assert repr(future).startswith("<CUDAFuture failed with ValueError('lost lost ")
    assert len(repr(future)) < 300
    del future
    assert "never retrieved" in caplog.text
    native: CUDAFuture[Any] = CUDAFuture()
    child = native.then(lambda f: f)
    del native
    assert 'failed with InvalidStateError("the future that this one waits for was dropped' in repr(child)
    umlauts = CUDAFuture.failed(ValueError("\u00fc" * 300))
    assert "\u00fc..." in repr(umlauts)
    umlauts.exception()


def test_repr_survives_hostile_error_repr() -> None:
    class Bad(Exception):
        def __repr__(self) -> str:
            raise OSError

    bad = CUDAFuture.failed(Bad())
    assert repr(bad).startswith("<CUDAFuture failed with Bad, ")
    bad.exception()
    cyclic: CUDAFuture[Any] = CUDAFuture()
    cyclic.set_exception(ValueError(cyclic))
    assert repr(cyclic).startswith("<CUDAFuture failed with ValueError(<CUDAFuture failed with ValueError, ")
    cyclic.exception()


class Unencodable(Exception):
    """An object whose text UTF-8 cannot encode."""

    def __repr__(self) -> str:
        return "lone \udcff"


def test_messages_escape_unencodable_text() -> None:
    failed: CUDAFuture[Any] = CUDAFuture.failed(Unencodable())
    assert r"lone \udcff" in repr(failed)
    failed.exception()
    calls: list[Callable[[Any], object]] = [
        CUDAFuture[Any]().set_exception,
        CUDAFuture.failed,
        gather,
        CUDAFuture.completed(1).then,
        lambda o: submit(int, executor=o),
        lambda o: CUDAFuture.completed(1).then_async(lambda _: o).wait(),
        lambda o: CUDAFuture(devices=[o]),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"lone \\udcff"):
            call(type("Other", (), {"__repr__": Unencodable.__repr__})())


def test_repr_shows_operation_and_parents() -> None:
    a, b, unnamed = CUDAFuture[int](name="a"), CUDAFuture[int](name="b"), CUDAFuture[int]()
    for future, shown in (
        (a.then(repr), "<CUDAFuture 'a' pending, then of 'a', "),
        (unnamed.then_async(lambda f: f), "<CUDAFuture pending, then_async of an unnamed future, "),
        (gather(a, b), "<CUDAFuture pending, gather of 'a', 'b', "),
        (collect_any([a, unnamed]), "<CUDAFuture pending, collect_any of 'a', an unnamed future, "),
        (collect_all([a] * 9), "<CUDAFuture pending, collect_all of 'a', 'a', 'a', 'a' and 5 more, "),
        (gather(), "<CUDAFuture completed, gather, "),
        (gather(CUDAFuture.completed(1)), "<CUDAFuture completed, gather of an unnamed future, "),
        (submit(int, executor=executors.inline), "<CUDAFuture 'int' completed, submit, "),
    ):
        assert repr(future).startswith(shown)


@pytest.mark.usefixtures("without_origins")
def test_timeout_names_the_operations_behind_a_combination() -> None:
    reads = [CUDAFuture[int](name=f"read {n}") for n in range(7)]
    reads[0].set_result(0)
    both = gather(*reads[:2])
    whole = gather(both, both.then(repr), *reads)
    with pytest.raises(TimeoutError) as raised:
        whole.wait(timeout=0)
    age = r"[\d.e-]+ s old"
    names = ", ".join(rf"future 'read {n}', {age}" for n in (1, 2, 3, 4)) + " and more"
    assert re.search(f"still pending; .* It waits for {names}$", str(raised.value))


@pytest.mark.usefixtures("without_origins")
def test_timeout_of_a_deep_combination_ends() -> None:
    last = CUDAFuture[int](name="last")
    whole: CUDAFuture[Any] = gather(last)
    for _ in range(20_000):
        whole = gather(whole, whole)
    with pytest.raises(TimeoutError, match=r"It waits for future 'last', [^,]*$"):
        whole.wait(timeout=0)
    last.cancel()


def test_facts() -> None:
    future: CUDAFuture[Any] = CUDAFuture(priority=-1, name="n")
    assert (future.priority, future.name, future.devices, dict(future.events)) == (-1, "n", (), {})
    assert future.late_error is None
    assert future.released is None
    with pytest.raises(AttributeError):
        future.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        future.events[torch.device("cpu")] = None  # type: ignore[index]


def test_begun_future_refuses_cancel() -> None:
    future: CUDAFuture[int] = CUDAFuture()
    assert future.set_running_or_notify_cancel()
    assert not future.cancel()
    future.set_result(1)
    assert not future.set_running_or_notify_cancel()


def test_cancelled_future_refuses_to_begin() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    assert future.cancel()
    assert not future.set_running_or_notify_cancel()


def test_producer_reports_release_of_source() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    released = future.released = CUDAFuture()
    assert future.released is released
    with pytest.raises(TypeError):
        future.released = 1  # type: ignore[assignment]


def test_future_is_generic_weakref_hashable_final() -> None:
    assert get_origin(CUDAFuture[int]) is CUDAFuture
    future: CUDAFuture[Any] = CUDAFuture()
    assert weakref.ref(future)() is future
    assert len({future, future, CUDAFuture()}) == 2
    with pytest.raises(TypeError):
        type("Sub", (CUDAFuture,), {})


def test_bounding_set_always_contains_cpu() -> None:
    assert CUDAFuture(devices=["cpu"]).devices == ()
    future: CUDAFuture[Any] = CUDAFuture(devices=[])
    future.set_result(torch.ones(2, device="cpu"))
    assert future.wait().tolist() == [1, 1]


def test_devices_of_several_types_are_refused() -> None:
    with pytest.raises(DeviceMismatchError, match=r"cuda:0 and xpu:0.*gather") as caught:
        CUDAFuture(devices=["cuda:0", "xpu:0"])
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("devices", ["cuda:0", [1.5], [None], 3])
def test_devices_of_none_are_refused(devices: Any) -> None:
    with pytest.raises(TypeError):
        CUDAFuture(devices=devices)


def test_devices_are_sorted_without_duplicates() -> None:
    future: CUDAFuture[Any] = CUDAFuture(devices=["cuda:1", torch.device("cuda", 0), "cuda:1", "cpu"])
    assert future.devices == (torch.device("cuda", 0), torch.device("cuda", 1))


def test_unknown_lifetime_is_refused() -> None:
    CUDAFuture(lifetime="hold")
    with pytest.raises(ValueError, match="'record' or 'hold'"):
        CUDAFuture(lifetime="borrow")  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", ["pool", 3, object()])
def test_stream_of_none_is_refused(stream: Any) -> None:
    future: CUDAFuture[int] = CUDAFuture()
    with pytest.raises(TypeError, match=r"a stream is a torch\.Stream"):
        future.set_result(1, stream=stream)
    assert not future.done()


def test_tensors_of_none_are_refused() -> None:
    future: CUDAFuture[int] = CUDAFuture()
    with pytest.raises(TypeError, match=r"tensors= names torch\.Tensors"):
        future.set_result(1, tensors=[3])  # type: ignore[list-item]
    future.set_result(1, tensors=[torch.ones(1)])
    assert future.wait() == 1


def test_callback_over_own_future_is_freed() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    future.add_done_callback(lambda _, keep=future: keep)  # type: ignore[misc]
    alive = weakref.ref(future)
    del future
    gc.collect()
    assert alive() is None


def test_future_in_own_value_is_freed() -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    future.set_result([future])
    alive = weakref.ref(future)
    del future
    gc.collect()
    assert alive() is None


def test_cycle_through_grandchild_is_freed_silently(caplog: pytest.LogCaptureFixture) -> None:
    future: CUDAFuture[Any] = CUDAFuture()
    child = future.then(lambda f: f)
    grandchild = child.then(lambda f, keep=(future, child): keep)  # type: ignore[misc]
    alive = [weakref.ref(f) for f in (future, child, grandchild)]
    del future, child, grandchild
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    assert not caplog.records


@pytest.mark.usefixtures("without_origins")
def test_unseen_failure_in_cycle_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def produce() -> None:
        future: CUDAFuture[Any] = CUDAFuture(name="cyclic")
        try:
            raise ValueError("in its own traceback")
        except ValueError as e:
            future.set_exception(e)

    produce()
    gc.collect()
    assert caplog.text.count("'cyclic' was never retrieved") == 1
