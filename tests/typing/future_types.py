"""Types that a type checker infers for CUDAFuture itself. Read by mypy, never run: ``# R:`` has the type revealed."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable

import torch
from typing_extensions import reveal_type

from cudafuture import CUDAFuture, EventView, executors


def making() -> None:
    reveal_type(CUDAFuture[int]())  # R: CUDAFuture[int]
    reveal_type(CUDAFuture[str](["cuda:0", 1, torch.device("cpu")]))  # R: CUDAFuture[str]
    reveal_type(CUDAFuture[str](None, priority=-1, name="n", lifetime="hold"))  # R: CUDAFuture[str]
    reveal_type(CUDAFuture.completed(1))  # R: CUDAFuture[int]
    reveal_type(CUDAFuture.completed([1.5]))  # R: CUDAFuture[list[float]]
    reveal_type(CUDAFuture.completed(None))  # R: CUDAFuture[None]
    reveal_type(CUDAFuture.failed(KeyboardInterrupt()))  # R: CUDAFuture[Any]
    annotated: CUDAFuture[dict[str, torch.Tensor]] = CUDAFuture()
    reveal_type(annotated.value()["x"])  # R: Tensor


def consuming(future: CUDAFuture[int]) -> None:
    reveal_type(future.wait())  # R: int
    reveal_type(future.wait(non_blocking=True, timeout=1))  # R: int
    reveal_type(future.result())  # R: int
    reveal_type(future.result(0.5))  # R: int
    reveal_type(future.value())  # R: int
    reveal_type(future.exception(timeout=None))  # R: BaseException | None
    reveal_type(future.done())  # R: bool
    reveal_type(future.ready())  # R: bool
    reveal_type(future.cancel())  # R: bool
    reveal_type(future.cancelled())  # R: bool


def producing(future: CUDAFuture[torch.Tensor], stream: torch.Stream, value: torch.Tensor) -> None:
    future.set_result(value)
    future.set_result(value, stream=stream, tensors=[value])
    future.set_result(value, stream=[stream, stream], tensors={value})
    future.set_result(torch.nn.Parameter(value))
    future.set_exception(KeyError("k"))
    future.set_exception(SystemExit(1))


def facts(future: CUDAFuture[int]) -> None:
    reveal_type(future.devices)  # R: tuple[device, ...]
    reveal_type(future.events)  # R: Mapping[device, EventView]
    reveal_type(future.priority)  # R: int
    reveal_type(future.name)  # R: str
    reveal_type(future.late_error)  # R: BaseException | None
    reveal_type(future.released)  # R: CUDAFuture[None] | None


def events(event: EventView, stream: torch.Stream) -> None:
    reveal_type(event.device)  # R: device
    reveal_type(event.query())  # R: bool
    reveal_type(event.to_torch_event())  # R: Event
    event.synchronize()
    event.wait()
    event.wait(stream)


def length(future: CUDAFuture[str]) -> int:
    return len(future.value())


def chaining(future: CUDAFuture[str], stream: torch.Stream, pool: concurrent.futures.ThreadPoolExecutor) -> None:
    reveal_type(future.then(length))  # R: CUDAFuture[int]
    reveal_type(future.then(lambda f: f.value().encode()))  # R: CUDAFuture[bytes]
    reveal_type(future.then(lambda f: [f]))  # R: CUDAFuture[list[CUDAFuture[str]]]
    reveal_type(future.then(length).then(lambda f: f.value() / 2))  # R: CUDAFuture[float]
    reveal_type(future.then(length, priority=-1, stream="caller", non_blocking=False))  # R: CUDAFuture[int]
    reveal_type(future.then(length, stream=stream, executor=pool))  # R: CUDAFuture[int]
    reveal_type(future.then(length, stream=(stream, stream), executor=executors.inline))  # R: CUDAFuture[int]
    future.add_done_callback(length)
    future.add_done_callback(print, executor=executors.callback_thread)


def unwrapping(future: CUDAFuture[str], inner: CUDAFuture[int]) -> None:
    reveal_type(future.then_async(lambda _: inner))  # R: CUDAFuture[int]
    reveal_type(future.then_async(lambda f: f.then(length)))  # R: CUDAFuture[int]
    reveal_type(future.then(lambda _: inner))  # R: CUDAFuture[CUDAFuture[int]]
    reveal_type(future.then_async(lambda _: inner, executor=executors.inline).wait())  # R: int


def recovering(future: CUDAFuture[str]) -> None:
    def or_empty(f: CUDAFuture[str]) -> str | None:
        return None if f.exception() else f.value()

    reveal_type(future.then(or_empty))  # R: CUDAFuture[str | None]


async def awaiting(future: CUDAFuture[int], text: CUDAFuture[str]) -> None:
    reveal_type(await future)  # R: int
    reveal_type(await future.then(lambda f: str(f.value())))  # R: str
    reveal_type(await asyncio.gather(future, text))  # R: tuple[int, str]
    reveal_type(await asyncio.wait_for(future, timeout=1))  # R: int
    awaitable: Awaitable[int] = future
    reveal_type(await awaitable)  # R: int
