"""Types that a type checker infers for the sources of futures. Read by mypy, never run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future
from typing_extensions import reveal_type

from cudafuture import CUDAFuture, copy, current_streams, executors, pool_stream, submit, use_streams


def from_torch(work: Work, future: Future[int], ours: CUDAFuture[str], unknown: Any) -> None:
    reveal_type(CUDAFuture.from_torch(work))  # R: CUDAFuture[Any]
    reveal_type(CUDAFuture.from_torch(future))  # R: CUDAFuture[int]
    reveal_type(CUDAFuture.from_torch(ours))  # R: CUDAFuture[str]
    reveal_type(CUDAFuture.from_torch(unknown))  # R: CUDAFuture[Any]


def to_torch(future: CUDAFuture[int]) -> None:
    reveal_type(future.to_torch())  # R: Future[int]
    reveal_type(future.to_torch().wait())  # R: int


def half(number: int, *, rounded: bool = False) -> float:
    return number // 2 if rounded else number / 2


def submitting(pool: ThreadPoolExecutor) -> None:
    reveal_type(submit(half, 3))  # R: CUDAFuture[float]
    reveal_type(submit(half, 3, rounded=True))  # R: CUDAFuture[float]
    reveal_type(submit(half, 3, executor=pool, priority=-1))  # R: CUDAFuture[float]
    reveal_type(submit(lambda: "text", executor=executors.callback_thread))  # R: CUDAFuture[str]


def copying(tensor: torch.Tensor, label: int, batch: dict[str, torch.Tensor]) -> None:
    reveal_type(copy(tensor, "cuda:0"))  # R: CUDAFuture[Tensor]
    reveal_type(copy(batch, torch.device("cpu"), priority=-1))  # R: CUDAFuture[dict[str, Tensor]]
    reveal_type(copy((tensor, label), 0))  # R: CUDAFuture[tuple[Tensor, int]]


def streams() -> None:
    stream = pool_stream("cuda", -1)
    reveal_type(stream)  # R: Stream
    reveal_type(current_streams([0, "cuda:1", torch.device("cuda", 2)]))  # R: list[Stream]
    with use_streams(stream, pool_stream(1)) as entered:
        reveal_type(entered)  # R: None
    reveal_type(executors.default_executor())  # R: Executor
    reveal_type(executors.inline.name)  # R: str
