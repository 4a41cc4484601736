"""Workers: threads of devices that run tasks and return futures."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import gc
import itertools
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, own_stream, timer
from cudafuture.errors import CancelledError, CUDAFutureError, InvalidStateError
from cudafuture.pipeline import _worker_thread
from cudafuture.pipeline import workers as workers_module
from cudafuture.pipeline.stream import CPUStream
from cudafuture.pipeline.workers import Workers, WorkersStatistics
from support.child import run_script
from support.interrupts import interrupt_at
from support.soak import soak_count

CPU = torch.device("cpu")


class FakeDevice:
    """Every one is a device of its own."""

    type = "fake"
    index = None

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("worker-", "cudafuture-overdue"))}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threads()
    yield
    assert threads() <= before


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers([CPU]) as workers:
        yield workers


class Blocker:
    """A task that runs until it is released."""

    def __init__(self, workers: Workers, device: Any = CPU, **options: Any) -> None:
        self.began, self._release = threading.Event(), threading.Event()
        self.future = workers.submit(device, self._run, **options)
        assert self.began.wait(10)

    def _run(self) -> str:
        self.began.set()
        assert self._release.wait(10)
        return "released"

    def release(self) -> None:
        self._release.set()
        with contextlib.suppress(TimeoutError):
            self.future.wait()


# ---- results


def test_task_runs_in_thread_of_device() -> None:
    devices: list[Any] = [CPU, FakeDevice("fake")]
    with Workers(devices, name="worker-of-test") as workers:
        assert workers.devices == tuple(devices)
        found = [workers.submit(device, threading.current_thread).wait() for device in (*devices, "cpu", "cpu:0")]
    assert found[0] is found[2] is found[3] is not found[1]
    assert [thread.name for thread in found[:2]] == ["worker-of-test-cpu", "worker-of-test-fake"]
    assert all(thread.daemon for thread in found)


@pytest.mark.sim(devices=2)
def test_device_without_number_is_current(sim: ModuleType) -> None:
    with torch.accelerator.device_index(1), Workers(["sim", "sim:1", "sim:0"]) as workers:
        assert workers.devices == (torch.device("sim:1"), torch.device("sim:0"))
        threads = [workers.submit(device, threading.get_ident).wait() for device in ("sim", "sim:1", "sim:0")]
    assert threads[0] == threads[1] != threads[2]


def test_device_without_worker_is_refused(workers: Workers) -> None:
    with pytest.raises(ValueError, match="no worker for meta: there are cpu"):
        workers.submit("meta", int)


def test_wrong_arguments_are_refused(workers: Workers) -> None:
    with pytest.raises(ValueError, match="at least one device"):
        Workers([])
    with pytest.raises(ValueError, match="-1"):
        Workers([CPU], queue=-1)
    with pytest.raises(ValueError, match="positive"):
        workers.submit(CPU, int, timeout=0)


def test_failing_constructor_leaves_no_thread() -> None:
    def devices() -> Iterator[torch.device]:
        yield CPU
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        Workers(devices())
    assert not threads()


def test_finalize_precedes_completion_in_same_thread(workers: Workers) -> None:
    seen: list[object] = []

    def finalize(value: int) -> str:
        seen.extend((value, threading.get_ident(), future[0].done()))
        return "dropped"

    future: list[CUDAFuture[int]] = []
    blocker = Blocker(workers)
    future.append(workers.submit(CPU, lambda: 3, finalize))
    blocker.release()
    assert future[0].wait() == 3
    assert seen == [3, workers.submit(CPU, threading.get_ident).wait(), False]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration])
@pytest.mark.parametrize("part", ["compute", "finalize"])
def test_task_error_fails_future_only(error: type[BaseException], part: str, workers: Workers) -> None:
    def explode(*value: object) -> None:
        raise error("in the task")

    future = workers.submit(CPU, *([explode] if part == "compute" else [int, explode]), name="forward of stage 1")
    with pytest.raises(error, match="in the task") as raised:
        future.wait()
    assert raised.traceback[-1].name == "explode"
    assert "forward of stage 1" in str(raised.value.__notes__)  # type: ignore[attr-defined]
    assert workers.submit(CPU, lambda: "alive").wait() == "alive"


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


def settings() -> tuple[object, ...]:
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        variable.get(),
    )


def test_caller_settings_reach_compute_and_finalize(workers: Workers) -> None:
    def submit_and_check() -> tuple[object, ...]:
        in_finalize: list[object] = []
        future = workers.submit(CPU, settings, lambda _: in_finalize.append(settings()))
        here = settings()
        with torch.set_grad_enabled(not torch.is_grad_enabled()):
            assert future.wait() == in_finalize[0] == here
        return here

    seen = {submit_and_check()}
    token = variable.set("of the caller")
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        seen.add(submit_and_check())
    variable.reset(token)
    with torch.no_grad():
        seen.add(submit_and_check())
    assert len(seen) == 3
    assert submit_and_check() in seen


def test_ended_task_keeps_nothing_alive(workers: Workers) -> None:
    class Value:
        pass

    value = Value()
    kept = weakref.ref(value)
    future = workers.submit(CPU, lambda value=value: value, timeout=100)  # type: ignore[misc]
    del value
    future.wait()
    workers.wait()
    del future
    gc.collect()
    assert kept() is None


# ---- devices and streams


@pytest.mark.sim(devices=2, schedule="lazy")
def test_future_follows_stream_of_task(sim: ModuleType) -> None:
    device = torch.device("sim:1")
    stream = own_stream(device)

    def compute() -> torch.Tensor:
        assert torch.accelerator.current_device_index() == 1
        assert torch.accelerator.current_stream() == stream
        sim.sleep(ms=5)
        return torch.ones(8, device="sim")

    with Workers(["sim:0", device]) as workers:
        future = workers.submit(device, compute, lambda value: value.add_(1), stream)
        value = future.wait()
        assert list(future.events) == [device]
        assert (value + 1).sum().item() == 24
        value.record_stream(torch.accelerator.current_stream(device))
        assert torch.accelerator.current_device_index() == 0


@pytest.mark.sim(schedule="lazy")
def test_tensorless_value_has_stream_event(sim: ModuleType) -> None:
    stream = own_stream("sim:0")
    x = torch.zeros(8, device="sim")
    stream.wait_stream(torch.accelerator.current_stream())

    def compute() -> None:
        sim.sleep(ms=5)
        x.fill_(2)

    with Workers(["sim"]) as workers:
        future = workers.submit("sim", compute, stream=stream)
        future.wait()
        assert list(future.events) == [torch.device("sim:0")]
        assert x.sum().item() == 16


@pytest.mark.sim(schedule="lazy")
def test_task_without_stream_follows_caller(sim: ModuleType) -> None:
    with Workers(["sim"]) as workers:
        for stream in (own_stream("sim:0"), own_stream("sim:0"), torch.accelerator.current_stream()):
            with stream:
                sim.sleep(ms=2)
                x = torch.ones(8, device="sim")
                future = workers.submit("sim", lambda x=x: (x + 1, torch.accelerator.current_stream()))  # type: ignore[misc]
                y, current = future.wait()
                assert current == stream
                assert y.sum().item() == 16


@pytest.mark.sim(devices=2)
def test_stream_of_other_device_is_refused(sim: ModuleType) -> None:
    with Workers(["sim:0", "cpu"]) as workers:
        for device, stream in (("sim:0", own_stream("sim:1")), ("sim:0", CPUStream), ("cpu", own_stream("sim:0"))):
            with pytest.raises(ValueError, match=r"sim:0|cpu"):
                workers.submit(device, int, stream=stream)
        assert workers.submit("cpu", int, stream=CPUStream).wait() == 0


@pytest.mark.sim(devices=2, schedule="jitter")
@pytest.mark.parametrize("seed", range(soak_count(600)))
def test_random_tasks_run_without_race(seed: int, sim: ModuleType) -> None:
    choose = random.Random(seed)
    sim.disable()
    sim.enable(devices=2, schedule=choose.choice(("lazy", "jitter", "free")), seed=seed)
    devices = ["sim:0", "sim:1", "cpu"]
    streams: dict[str, list[Any]] = {d: [None] if d == "cpu" else [None, own_stream(d), own_stream(d)] for d in devices}

    def step(sources: list[CUDAFuture[torch.Tensor]], device: str, ms: int) -> torch.Tensor:
        parts = [source.wait() for source in sources]
        sim.sleep(ms=ms)
        for part in parts:
            if part.device.type == "sim":
                part.record_stream(torch.accelerator.current_stream(part.device))
        return sum((part.to(device) for part in parts), torch.ones(8, device=device))

    with Workers(devices, queue=choose.choice((0, 2))) as first, Workers(devices) as second:
        futures: list[CUDAFuture[torch.Tensor]] = []
        owners: list[Workers] = []
        expected: list[float] = []
        for _ in range(choose.randint(3, 12)):
            chosen = [choose.randrange(len(futures)) for _ in range(choose.randint(0, 2))] if futures else []
            workers, device = choose.choice((first, second)), choose.choice(devices)
            for i in chosen:
                if workers is first or owners[i] is second:  # tasks of `second` wait, for those of `first` only
                    futures[i].exception()
            call = functools.partial(step, [futures[i] for i in chosen], device, choose.choice((0, 1, 5)))
            owners.append(workers)
            futures.append(workers.submit(device, call, stream=choose.choice(streams[device])))
            expected.append(1 + sum(expected[i] for i in chosen))
        for future, value in zip(futures, expected, strict=True):
            assert future.wait().sum().item() == 8 * value


# ---- order, priorities, back-pressure


def test_lower_priorities_run_first(workers: Workers) -> None:
    ran: list[tuple[int, int]] = []
    blocker = Blocker(workers)
    priorities = [0, 5, -1, 0, -3, 5, -1, 0, 2, -3]
    for i, priority in enumerate(priorities):
        workers.submit(CPU, lambda entry=(priority, i): ran.append(entry), priority=priority)  # type: ignore[misc]
    blocker.release()
    workers.wait()
    assert ran == sorted(ran)
    assert len(ran) == len(priorities)


@pytest.mark.parametrize("priority", ["a", None, True, 1.5])
def test_non_integer_priority_is_refused(priority: Any, workers: Workers) -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match="priority is an int, not"):
            workers.submit(CPU, int, priority=priority)
    workers.wait(timeout=10)
    assert workers.submit(CPU, lambda: 1, priority=signal.SIGINT).wait() == 1
    assert workers.statistics().submitted == 1


def test_full_queue_blocks_submit() -> None:
    with Workers([CPU], queue=2) as workers:
        blocker = Blocker(workers)
        for _ in range(2):
            workers.submit(CPU, int)
        began = threading.Event()
        submitted: list[CUDAFuture[int]] = []

        def submit_one_more() -> None:
            began.set()
            submitted.append(workers.submit(CPU, lambda: 7))

        thread = threading.Thread(target=submit_one_more)
        thread.start()
        began.wait()
        assert not submitted
        assert workers.statistics().waiting == 2
        blocker.release()
        thread.join()
        assert submitted[0].wait() == 7


def test_cancelled_tasks_leave_full_queue() -> None:
    with Workers([CPU], queue=1) as workers:
        blocker = Blocker(workers)
        for _ in range(5):
            assert workers.submit(CPU, int).cancel()
        last = workers.submit(CPU, lambda: "last")
        blocker.release()
        assert last.wait() == "last"
        assert workers.statistics().cancelled == 5


def test_ctrl_c_interrupts_blocked_submit() -> None:
    with Workers([CPU], queue=1) as workers:
        blocker = Blocker(workers)
        workers.submit(CPU, int)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                workers.submit(CPU, int)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert workers.statistics().waiting == 1
        blocker.release()


def test_close_ends_blocked_submit() -> None:
    workers = Workers([CPU], queue=1)
    blocker = Blocker(workers)
    workers.submit(CPU, int)
    errors: list[BaseException] = []

    def submit() -> None:
        try:
            workers.submit(CPU, int)
        except InvalidStateError as error:
            errors.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    with pytest.raises(TimeoutError, match="running"):
        workers.close(timeout=0.01)
    thread.join()
    assert "close() was called" in str(errors[0])
    blocker.release()
    workers.close()


# ---- cancelling


def test_cancelled_future_skips_task(workers: Workers) -> None:
    ran: list[int] = []
    blocker = Blocker(workers)
    future = workers.submit(CPU, lambda: ran.append(1))
    assert not blocker.future.cancel()
    assert future.cancel()
    blocker.release()
    workers.wait()
    assert not ran


def test_cancel_waiting_spares_begun_tasks(workers: Workers) -> None:
    blocker = Blocker(workers)
    futures = [workers.submit(CPU, int, priority=i - 1) for i in range(3)]
    assert workers.cancel_waiting() == 3
    assert all(future.cancelled() for future in futures)
    assert workers.cancel_waiting() == 0
    blocker.release()
    assert blocker.future.wait() == "released"
    assert workers.submit(CPU, lambda: 1).wait() == 1


def test_cancel_waiting_uses_given_error(workers: Workers) -> None:
    blocker = Blocker(workers)
    futures = [workers.submit(CPU, int) for _ in range(2)]
    error = LookupError("the first error")
    workers.cancel_waiting(error)
    assert [future.exception() for future in futures] == [error, error]
    blocker.release()


# ---- ends


def test_close_finishes_waiting_and_refuses_new() -> None:
    workers = Workers([CPU, FakeDevice("fake")])
    futures = [workers.submit(CPU, lambda i=i: i) for i in range(50)]  # type: ignore[misc]
    workers.close()
    assert [future.value() for future in futures] == list(range(50))
    assert not threads()
    with pytest.raises(InvalidStateError, match=r"close\(\) was called"):
        workers.submit(CPU, int)
    workers.close()
    assert "ended" in workers.table()


def test_error_in_block_cancels_waiting_tasks() -> None:
    futures: list[CUDAFuture[Any]] = []

    def program() -> None:
        with Workers([CPU]) as workers:
            blocker = Blocker(workers)
            futures.extend((blocker.future, workers.submit(CPU, int)))
            workers.submit(CPU, int).add_done_callback(lambda _: blocker._release.set())
            raise LookupError("in the block")

    with pytest.raises(LookupError, match="in the block"):
        program()
    assert futures[0].wait() == "released"
    with pytest.raises(CancelledError):
        futures[1].wait()
    assert not threads()


def test_dropped_workers_end_threads() -> None:
    workers = Workers([CPU, FakeDevice("fake")])
    future = workers.submit(CPU, lambda: 1, timeout=100)
    own = threads()
    assert len(own) == 2
    del workers
    gc.collect()
    for thread in own:
        thread.join(10)
        assert not thread.is_alive()
    assert future.wait() == 1


def test_wait_returns_when_idle(workers: Workers) -> None:
    blocker = Blocker(workers)
    future = workers.submit(CPU, lambda: 1)
    with pytest.raises(TimeoutError, match="running"):
        workers.wait(timeout=0.01)
    blocker.release()
    workers.wait()
    assert future.done()
    workers.wait(timeout=0)


def test_task_waiting_for_all_is_error(workers: Workers) -> None:
    for call in (workers.close, workers.wait):
        with pytest.raises(InvalidStateError, match="deadlock"):
            workers.submit(CPU, call).wait()
    assert workers.submit(CPU, lambda: 1).wait() == 1


def test_is_inside_recognizes_worker_threads() -> None:
    with Workers([CPU]) as first, Workers([CPU]) as second:
        assert not first.is_inside()
        assert first.submit(CPU, lambda: (first.is_inside(), second.is_inside())).wait() == (True, False)
        blocker, seen = Blocker(first), CUDAFuture[bool]()
        blocker.future.add_done_callback(lambda _: seen.set_result(first.is_inside()))
        blocker.release()
        assert seen.wait(timeout=10)


def test_close_in_overdue_callback_is_error(workers: Workers) -> None:
    blocker, seen = Blocker(workers), CUDAFuture[bool]()
    late = workers.submit(CPU, int, timeout=0.01)
    late.add_done_callback(lambda _: seen.set_result(_is_refused(workers.close)))
    assert seen.wait(timeout=10)
    blocker.release()


def kill(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread that waits for tasks, when it runs next."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


@pytest.mark.usefixtures("caplog")
def test_dying_thread_fails_its_futures() -> None:
    with Workers([CPU]) as workers:
        thread = workers.submit(CPU, threading.current_thread).wait()
        workers.wait()
        kill(thread)
        futures = []
        with contextlib.suppress(CUDAFutureError):
            futures += [workers.submit(CPU, int)]
            futures += [workers.submit(CPU, int) for _ in range(3)]
        for future in futures:
            with pytest.raises(CUDAFutureError, match=r"worker thread of cpu died of SystemExit\(\)"):
                future.wait()
        thread.join()
        with pytest.raises(CUDAFutureError, match="create new Workers"):
            workers.submit(CPU, int)
        assert "dead" in workers.table()
        assert workers.statistics().waiting == 0


# ---- Ctrl-C


FILES = (_worker_thread.__file__, workers_module.__file__, timer.__file__)


def interrupt_body(line: int, body: Callable[[], object]) -> bool:
    """Interrupt `body` at that line of the workers."""

    def run() -> None:
        with contextlib.suppress(TimeoutError):
            body()

    return interrupt_at(line, FILES, run)


BODIES: dict[str, Callable[[Workers], object]] = {
    "submit": lambda workers: workers.submit(CPU, int),
    "submit with a priority": lambda workers: workers.submit(CPU, int, priority=3),
    "submit with a timeout": lambda workers: workers.submit(CPU, int, timeout=1000),
    "submit to a full queue": lambda workers: [workers.submit(CPU, int, timeout=1000).cancel() for _ in range(4)],
    "wait": lambda workers: workers.wait(timeout=0.001),
    "cancel_waiting": lambda workers: workers.cancel_waiting(),
    "cancel_waiting with an error": lambda workers: workers.cancel_waiting(LookupError()),
}


@pytest.mark.parametrize("body", BODIES)
def test_ctrl_c_anywhere_leaves_workers_usable(body: str) -> None:
    for line in itertools.count(1):
        workers = Workers([CPU], queue=4)
        blocker = Blocker(workers)
        earlier = [workers.submit(CPU, int), workers.submit(CPU, int, priority=2, timeout=1000)]
        was_interrupted = interrupt_body(line, functools.partial(BODIES[body], workers))
        late = workers.submit(CPU, int, timeout=0.001)
        assert isinstance(late.exception(), TimeoutError), line
        blocker.release()
        ran = [workers.submit(CPU, lambda: "ran", priority=priority).wait(timeout=10) for priority in (-1, 0, 3)]
        assert ran == ["ran"] * 3, line
        workers.wait(timeout=10)
        assert all(future.done() for future in (blocker.future, *earlier)), line
        statistics = workers.statistics()
        assert (statistics.waiting, statistics.running, statistics.failed) == (0, 0, 0), line
        workers.close(timeout=10)
        if not was_interrupted:
            break
    assert line > 15


def test_ctrl_c_in_close_allows_second_close() -> None:
    for line in itertools.count(1):
        workers = Workers([CPU, FakeDevice("fake")])
        blocker = Blocker(workers, timeout=1000)
        waiting = workers.submit(CPU, lambda: "ran")
        was_interrupted = interrupt_body(line, functools.partial(workers.close, timeout=0.001))
        blocker.release()
        workers.close(timeout=10)
        assert waiting.wait(timeout=10) == "ran"
        assert not threads(), line
        if not was_interrupted:
            break
    assert line > 15


# ---- deadlines


def test_overdue_task_fails_with_table(workers: Workers) -> None:
    blocker = Blocker(workers, name="forward 3", timeout=0.02)
    waiting = workers.submit(CPU, int, name="forward 4", timeout=0.03)
    patient = workers.submit(CPU, lambda: "patient", name="forward 5", timeout=100)
    with pytest.raises(TimeoutError, match=r"'forward 3' on cpu did not end within 0\.02 s") as raised:
        blocker.future.wait()
    lines = str(raised.value).splitlines()
    assert lines[1].split() == ["worker", "task", "state", "seconds"]
    assert lines[2].split()[:4] == ["cpu", "forward", "3", "running"]
    assert lines[4].split()[:4] == ["cpu", "forward", "5", "waiting"]
    with pytest.raises(TimeoutError, match="forward 4"):
        waiting.wait()
    blocker.release()
    assert patient.wait() == "patient"
    workers.wait()
    statistics = workers.statistics()
    assert (statistics.completed, statistics.failed, statistics.cancelled) == (2, 0, 1)


def test_sooner_deadline_wakes_watch(workers: Workers) -> None:
    assert workers.submit(CPU, lambda: 1, timeout=50).wait() == 1
    blocker = Blocker(workers, timeout=60)
    late = workers.submit(CPU, int, timeout=0.01)
    with pytest.raises(TimeoutError):
        late.wait()
    blocker.release()
    assert blocker.future.wait() == "released"


def test_blocking_callback_delays_no_other_deadline(workers: Workers) -> None:
    blocker, end = Blocker(workers), threading.Event()
    first = workers.submit(CPU, int, timeout=0.01)
    first.add_done_callback(lambda _: end.wait(10) and None)
    assert isinstance(first.exception(timeout=10), TimeoutError)
    second = workers.submit(CPU, int, timeout=0.01)
    assert isinstance(second.exception(timeout=10), TimeoutError)
    assert not end.is_set()
    end.set()
    blocker.release()


def test_deadline_keeps_no_ended_workers_alive() -> None:
    device: Any = FakeDevice("fake")
    kept = weakref.ref(device)
    with Workers([device]) as workers:
        assert workers.submit(device, lambda: 1, timeout=1000).wait() == 1
    del workers, device
    gc.collect()
    assert kept() is None


# ---- nested use


def test_task_may_submit_elsewhere_and_wait() -> None:
    other = FakeDevice("fake")
    with Workers([CPU, other], queue=1) as workers:
        blocker = Blocker(workers, other)
        workers.submit(other, int)  # full, yet a task may add to it
        outer = workers.submit(CPU, lambda: [workers.submit(other, lambda i=i: i).wait() for i in range(3)])  # type: ignore[misc]
        blocker.release()
        assert outer.wait() == [0, 1, 2]


def test_task_for_own_device_runs_immediately(workers: Workers) -> None:
    def outer() -> list[object]:
        token = variable.set("outer")
        inner = workers.submit(CPU, lambda: (variable.get(), threading.get_ident()), timeout=100)
        variable.reset(token)
        failing = workers.submit(CPU, lambda: 1 / 0)
        assert inner.done()
        return [inner.wait(), type(failing.exception())]

    ident = workers.submit(CPU, threading.get_ident).wait()
    assert workers.submit(CPU, outer).wait() == [("outer", ident), ZeroDivisionError]
    workers.wait()
    assert workers.statistics().completed == 3
    assert workers.statistics().failed == 1


def test_callback_task_waits_for_turn(workers: Workers) -> None:
    ran: list[str] = []
    blocker = Blocker(workers)
    blocker.future.add_done_callback(lambda _: workers.submit(CPU, lambda: ran.append("late"), priority=1) and None)
    blocker.future.add_done_callback(lambda _: workers.submit(CPU, lambda: ran.append("soon"), priority=-1) and None)
    workers.submit(CPU, lambda: ran.append("waiting"))
    blocker.release()
    workers.wait()
    assert ran == ["soon", "waiting", "late"]


def test_long_callback_chain_never_blocks() -> None:
    with Workers([CPU], queue=1) as workers:
        end: CUDAFuture[int] = CUDAFuture()

        def step(i: int) -> None:
            if i == 3000:
                end.set_result(i)
            else:
                workers.submit(CPU, lambda: None).add_done_callback(lambda _: step(i + 1))

        workers.submit(CPU, int).add_done_callback(lambda _: step(0))
        assert end.wait(timeout=30) == 3000


def test_task_waiting_for_itself_fails(workers: Workers) -> None:
    blocker = Blocker(workers)
    own: list[CUDAFuture[Any]] = []
    own.append(workers.submit(CPU, lambda: own[0].wait()))
    blocker.release()
    with pytest.raises(InvalidStateError):
        own[0].wait()


def test_two_workers_share_no_threads() -> None:
    with Workers([CPU]) as first, Workers([CPU]) as second:
        outer = first.submit(CPU, lambda: second.submit(CPU, threading.get_ident).wait())
        assert outer.wait() != first.submit(CPU, threading.get_ident).wait()


# ---- table and statistics


def test_table_shows_running_and_waiting(workers: Workers) -> None:
    assert workers.table().splitlines()[1].split() == ["cpu", "-", "idle", "-"]
    blocker = Blocker(workers)
    workers.submit(CPU, int, priority=1)
    workers.submit(CPU, int, name="urgent", priority=-1)
    rows = [line.split() for line in workers.table().splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        ["cpu", "Blocker._run", "running"],
        ["cpu", "urgent", "waiting"],
        ["cpu", "int", "waiting"],
    ]
    assert all(float(row[3]) >= 0 for row in rows)
    blocker.release()


def test_statistics_count_every_task(workers: Workers) -> None:
    blocker = Blocker(workers)
    futures = [workers.submit(CPU, call) for call in (int, lambda: 1 / 0, int)]
    futures[2].cancel()
    now = workers.statistics()
    assert isinstance(now, WorkersStatistics)
    assert (now.submitted, now.waiting, now.running) == (4, 3, 1)
    blocker.release()
    futures[1].exception()
    workers.wait()
    end = workers.statistics()
    assert (end.submitted, end.completed, end.failed, end.cancelled, end.waiting, end.running) == (4, 2, 1, 1, 0, 0)
    assert end.busy[CPU] > 0


def test_task_counts_with_its_future(workers: Workers) -> None:
    for i in range(1, 100):
        workers.submit(CPU, int).wait()
        assert workers.statistics().completed == i


def test_many_threads_submit_at_once() -> None:
    with Workers([CPU, FakeDevice("fake")], queue=3) as workers:
        results: list[list[int]] = []

        def program(offset: int) -> None:
            choose = random.Random(offset)
            futures = [
                workers.submit(choose.choice(workers.devices), lambda i=i: i + offset, priority=choose.randint(-1, 1))  # type: ignore[misc]
                for i in range(100)
            ]
            results.append([future.wait() - offset for future in futures])

        programs = [threading.Thread(target=program, args=(i,)) for i in range(4)]
        for thread in programs:
            thread.start()
        for thread in programs:
            thread.join()
        assert results == [list(range(100))] * 4


# ---- processes


def test_forked_child_fails_and_closes() -> None:
    workers = Workers([CPU])
    blocker = Blocker(workers)
    child = os.fork()
    if child == 0:  # no pytest in here
        code = 1
        with contextlib.suppress(BaseException):
            code = 2 + sum(
                _is_refused(call) for call in (lambda: workers.submit(CPU, int), workers.wait, workers.table)
            )
            workers.close()
            with workers:
                pass
            del workers, blocker
            code += 10
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 15
    blocker.release()
    workers.close()


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except InvalidStateError:
        return True
    return False


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), signal.SIGINT)"])
def test_interpreter_exits_during_task(ending: str) -> None:
    program = f"""
import os, signal, sys, threading, time
import cudafuture.pipeline.workers as module
module._PATIENCE = 0.05
workers = module.Workers(["cpu", "cpu"])
began = threading.Event()
def busy():
    began.set()
    while True:
        time.sleep(0.001)
running = workers.submit("cpu", busy, timeout=100)
waiting = workers.submit("cpu", int)
began.wait()
{ending}
"""
    result = run_script(program)
    assert result.returncode == (-signal.SIGINT if "SIGINT" in ending else 0), result.stderr
    assert "KeyboardInterrupt" in result.stderr if "SIGINT" in ending else not result.stderr


def test_interpreter_exits_with_idle_workers() -> None:
    program = """
from cudafuture.pipeline.workers import Workers
workers = Workers(["cpu"])
print(workers.submit("cpu", lambda: 42, timeout=100).wait())
"""
    result = run_script(program)
    assert (result.returncode, result.stdout, result.stderr) == (0, "42\n", "")
