"""Stream captures: streams may wait for a future that was completed inside one, the host may not ask about it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, as_completed
from cudafuture.errors import InvalidStateError
from cudafuture.storage import File
from support.harness import Device

Future = CUDAFuture[torch.Tensor]


async def awaited(future: Future) -> torch.Tensor:
    return await future


QUESTIONS: dict[str, Callable[[Device, Future], Any]] = {
    "ready": lambda _, future: future.ready(),
    "wait": lambda _, future: future.wait(),
    "exception": lambda _, future: future.exception(),
    "await": lambda _, future: asyncio.run(awaited(future)),
    "a blocking callback": lambda _, future: future.then(lambda done: done.value(), non_blocking=False).value(),
    "query": lambda device, future: future.events[device.at()].query(),
    "synchronize": lambda device, future: future.events[device.at()].synchronize(),
}


@contextlib.contextmanager
def captured(accelerator: Device) -> Iterator[Future]:
    """Give a future that was completed inside a capture, which goes on to the end of the scope."""
    x = accelerator.empty()
    accelerator.finish()
    with accelerator.capture():
        yield CUDAFuture.completed(x.fill_(1.0))


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_what_the_host_cannot_know_is_refused_and_the_capture_goes_on(
    accelerator: Device, ask: Callable[[Device, Future], Any]
) -> None:
    with captured(accelerator) as future, pytest.raises(InvalidStateError, match="capture"):
        ask(accelerator, future)


def test_the_same_is_refused_after_the_capture(accelerator: Device) -> None:
    with captured(accelerator) as future:
        pass
    for ask in QUESTIONS.values():
        with pytest.raises(InvalidStateError, match="capture"):
            ask(accelerator, future)


def test_a_callback_that_waits_for_the_device_fails_when_the_future_completes_in_a_capture(accelerator: Device) -> None:
    x = accelerator.empty()
    accelerator.finish()
    future: Future = CUDAFuture()
    child = future.then(lambda done: done.value(), non_blocking=False)
    with accelerator.capture():
        future.set_result(x.fill_(1.0))
        with pytest.raises(InvalidStateError, match="non_blocking=True"):
            child.value()


def test_streams_are_ordered_after_a_captured_future(accelerator: Device) -> None:
    with captured(accelerator) as future:
        doubled = future.then(lambda done: done.value() * 2)
        side = accelerator.stream()
        future.events[accelerator.at()].wait(side)
        doubled.wait(non_blocking=True)
        accelerator.current().wait_stream(side)  # a stream that joined the capture comes back to its first stream
        assert "captured" in repr(doubled.events[accelerator.at()])


def test_await_of_a_future_that_completes_in_a_capture_raises(accelerator: Device) -> None:
    x = accelerator.empty()
    accelerator.finish()
    future: Future = CUDAFuture()

    async def wait_and_complete() -> None:
        task = asyncio.ensure_future(awaited(future))
        await asyncio.sleep(0)  # it waits from here on
        with accelerator.capture():
            future.set_result(x.fill_(1.0))
        with pytest.raises(InvalidStateError, match="capture"):
            await asyncio.wait_for(task, 60)

    asyncio.run(wait_and_complete())


def test_as_completed_gives_a_future_that_completes_in_a_capture(accelerator: Device) -> None:
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


def test_a_capture_does_not_hide_the_error_of_a_callback(accelerator: Device) -> None:
    with captured(accelerator) as future:
        child = future.then(lambda _: 1 // 0, stream="caller")
        for ask in (child.wait, child.exception, child.value):
            with contextlib.suppress(ZeroDivisionError):
                assert isinstance(ask(), ZeroDivisionError)
    assert isinstance(child.exception(), ZeroDivisionError)


def test_a_file_is_not_written_or_read_inside_a_capture(accelerator: Device, tmp_path: Path) -> None:
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


def test_showing_a_captured_future_asks_nothing(accelerator: Device) -> None:
    with captured(accelerator) as future:
        assert "captured" in repr(future.events[accelerator.at()])
        assert "completed" in repr(future)


def test_questions_about_earlier_work_do_not_end_a_capture_of_another_thread(accelerator: Device) -> None:
    futures = [accelerator.completed(2.0) for _ in range(3)]
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
