"""Stream captures: streams may wait for a future that was completed inside one, the host may not ask about it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, as_completed, copy, own_stream, prefetch, submit, wait
from cudafuture.compat.torchgpipe.microbatch import Batch
from cudafuture.compat.torchgpipe.worker import Task, spawn_workers
from cudafuture.errors import InvalidStateError
from cudafuture.io import File
from cudafuture.pipeline.workers import Workers
from support.harness import Device
from support.patience import PATIENCE

Future = CUDAFuture[torch.Tensor]


async def await_future(future: Future) -> torch.Tensor:
    return await future


QUESTIONS: dict[str, Callable[[Device, Future], Any]] = {
    "ready": lambda _, future: future.ready(),
    "wait": lambda _, future: future.wait(),
    "exception": lambda _, future: future.exception(),
    "await": lambda _, future: asyncio.run(await_future(future)),
    "a blocking callback": lambda _, future: future.then(lambda done: done.value(), non_blocking=False).value(),
    "query": lambda device, future: future.events[device.at()].query(),
    "synchronize": lambda device, future: future.events[device.at()].synchronize(),
}


@contextlib.contextmanager
def complete_in_capture(accelerator: Device) -> Iterator[Future]:
    """Give a future that was completed inside a capture, which goes on to the end of the scope."""
    x = accelerator.empty()
    accelerator.finish()
    with accelerator.capture():
        yield CUDAFuture.completed(x.fill_(1.0))


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_capture_refuses_host_questions(accelerator: Device, ask: Callable[[Device, Future], Any]) -> None:
    with complete_in_capture(accelerator) as future, pytest.raises(InvalidStateError, match="capture"):
        ask(accelerator, future)


def test_refusal_outlasts_capture(accelerator: Device) -> None:
    with complete_in_capture(accelerator) as future:
        pass
    for ask in QUESTIONS.values():
        with pytest.raises(InvalidStateError, match="capture"):
            ask(accelerator, future)


def test_blocking_callback_in_capture_fails(accelerator: Device) -> None:
    x = accelerator.empty()
    accelerator.finish()
    future: Future = CUDAFuture()
    child = future.then(lambda done: done.value(), non_blocking=False)
    with accelerator.capture():
        future.set_result(x.fill_(1.0))
        with pytest.raises(InvalidStateError, match="non_blocking=True"):
            child.value()


def test_streams_follow_captured_future(accelerator: Device) -> None:
    with complete_in_capture(accelerator) as future:
        doubled = future.then(lambda done: done.value() * 2)
        side = accelerator.stream()
        future.events[accelerator.at()].wait(side)
        doubled.wait(non_blocking=True)
        accelerator.current().wait_stream(side)  # a stream that joined the capture comes back to its first stream
        assert "captured" in repr(doubled.events[accelerator.at()])


def test_await_in_capture_raises(accelerator: Device) -> None:
    x = accelerator.empty()
    accelerator.finish()
    future: Future = CUDAFuture()

    async def wait_and_complete() -> None:
        task = asyncio.ensure_future(await_future(future))
        await asyncio.sleep(0)  # it waits from here on
        with accelerator.capture():
            future.set_result(x.fill_(1.0))
        with pytest.raises(InvalidStateError, match="capture"):
            await asyncio.wait_for(task, 60)

    asyncio.run(wait_and_complete())


def test_as_completed_yields_captured_future(accelerator: Device) -> None:
    x = accelerator.empty()
    accelerator.finish()
    future: Future = CUDAFuture()

    async def first() -> Future:
        asyncio.get_running_loop().call_soon(complete)
        async for done in as_completed([future], timeout=60):
            return done
        raise AssertionError

    def complete() -> None:
        with accelerator.capture():
            future.set_result(x.fill_(1.0))

    assert asyncio.run(first()) is future


def test_capture_shows_callback_error(accelerator: Device) -> None:
    with complete_in_capture(accelerator) as future:
        child = future.then(lambda _: 1 // 0, stream="caller")
        for ask in (child.wait, child.exception, child.value):
            with contextlib.suppress(ZeroDivisionError):
                assert isinstance(ask(), ZeroDivisionError)
    assert isinstance(child.exception(), ZeroDivisionError)


def test_capture_refuses_file_transfers(accelerator: Device, tmp_path: Path) -> None:
    x = accelerator.empty()
    accelerator.finish()
    with File(tmp_path / "file", "w+") as file:
        with accelerator.capture():
            for begin in (file.write, file.read):
                with pytest.raises(InvalidStateError, match="capture"):
                    begin(x)
        file.write(x.fill_(2.0)).wait(timeout=60)
        assert accelerator.read(x.fill_(0.0)) == 0.0
        file.read(x).wait(timeout=60)
        assert accelerator.read(x) == 2.0


def test_repr_of_captured_future_queries_nothing(accelerator: Device) -> None:
    with complete_in_capture(accelerator) as future:
        assert "captured" in repr(future.events[accelerator.at()])
        assert "completed" in repr(future)


def test_questions_spare_other_thread_capture(accelerator: Device) -> None:
    futures = [accelerator.complete(2.0) for _ in range(3)]
    x = accelerator.empty()
    accelerator.finish()
    asked: list[Any] = []

    def ask() -> None:
        asked.append(futures[0].ready())
        asked.append(futures[1].events[accelerator.at()].query())
        futures[2].events[accelerator.at()].synchronize()

    with accelerator.capture():
        x.fill_(1.0)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert asked == [True, True]


def use_pinned_memory(accelerator: Device) -> None:
    """Leave freed pinned blocks behind whose events the next allocation queries.

    Tensors of earlier tests must not be freed during the capture that follows: torch's allocator frees what was used on
    the capturing stream with an event on it, and a later query of that event raises cudaErrorCapturedEvent.
    """
    gc.collect()
    for value in range(4):
        accelerator.make_pinned(value).to(accelerator.at(), non_blocking=True)


def copy_both_ways(x: torch.Tensor) -> torch.Tensor:
    on_host = copy(x, "cpu").wait(timeout=PATIENCE)
    return copy(on_host, x.device).wait(timeout=PATIENCE)


@pytest.mark.parametrize("thread", ["executor", "callback"])
def test_copies_spare_other_thread_capture(accelerator: Device, thread: str) -> None:
    x = accelerator.empty().fill_(2.0)
    use_pinned_memory(accelerator)
    accelerator.finish()
    done = threading.Event()
    first: CUDAFuture[None] = CUDAFuture()
    with accelerator.capture():
        if thread == "executor":
            copied = submit(copy_both_ways, x)
        else:
            # To the host: memory of a device that a thread of the program allocates ends a capture, with any library.
            copied = first.then(lambda _: copy(x, "cpu").wait(timeout=PATIENCE))
            completing = threading.Thread(target=first.set_result, args=(None,))
            completing.start()
            completing.join()
        copied.add_done_callback(lambda _: done.set())
        assert done.wait(PATIENCE)
    assert accelerator.read(copied.value()) == 2.0


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("pack", [True, False])
def test_prefetching_does_not_end_capture(accelerator: Device, pin: bool, pack: bool) -> None:
    captured, loaded = threading.Event(), threading.Event()

    def batches() -> Iterator[torch.Tensor]:
        for value in range(12):
            if value == 3:
                assert captured.wait(PATIENCE)
            if value == 7:  # the batches before have been sent
                loaded.set()
            yield torch.full(((value + 1) << 20,), float(value))  # each needs device memory of its own

    use_pinned_memory(accelerator)
    arriving = iter(prefetch(batches(), accelerator.at(), depth=8, pin=pin, pack=pack))
    values = [accelerator.read(next(arriving)) for _ in range(2)]
    accelerator.finish()
    with accelerator.capture():
        captured.set()
        assert loaded.wait(PATIENCE)
    values += [accelerator.read(batch) for batch in arriving]
    assert values == [float(value) for value in range(12)]


def submit_to_workers(device: torch.device, task: Callable[[], torch.Tensor]) -> torch.Tensor:
    with Workers([device]) as workers:
        future = workers.submit(device, task, stream=own_stream(device))
        wait([future], timeout=PATIENCE)
        return future.value()


def run_in_a_worker_of_torchgpipe(device: torch.device, task: Callable[[], torch.Tensor]) -> torch.Tensor:
    with spawn_workers([device]) as ([tasks], [results]):
        tasks.put(Task(None, compute=lambda: Batch(task()), finalize=None))
        _, outcome = results.get(timeout=PATIENCE)
        assert outcome is not None
        assert isinstance(outcome[1], Batch), outcome
        return outcome[1].tensor


@pytest.mark.parametrize("run", [submit_to_workers, run_in_a_worker_of_torchgpipe])
def test_worker_tasks_spare_capture(
    accelerator: Device, run: Callable[[torch.device, Callable[[], torch.Tensor]], torch.Tensor]
) -> None:
    def make_pinned() -> torch.Tensor:
        return torch.full((1 << 22,), 3.0).pin_memory()  # more than the allocator has kept

    use_pinned_memory(accelerator)
    accelerator.finish()
    with accelerator.capture():
        value = run(accelerator.at(), make_pinned)
    assert value.sum() == 3 * 2**22


def test_file_transfers_spare_capture(accelerator: Device, tmp_path: Path) -> None:
    tensors = [accelerator.empty().fill_(float(value)) for value in range(10)]
    targets = [accelerator.empty() for _ in tensors]
    accelerator.finish()
    use_pinned_memory(accelerator)
    errors: list[BaseException] = []

    def write_and_read(index: int) -> None:
        try:
            with File(tmp_path / str(index), "w+") as file:
                for _ in range(3):
                    file.write(tensors[index]).wait(timeout=PATIENCE)
                    file.read(targets[index]).wait(timeout=PATIENCE)
        except BaseException as error:
            errors.append(error)

    with accelerator.capture():
        threads = [threading.Thread(target=write_and_read, args=(index,)) for index in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert [accelerator.read(target) for target in targets] == [float(value) for value in range(10)]
