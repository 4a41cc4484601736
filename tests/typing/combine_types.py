"""Types that a type checker infers for many futures. Read by mypy, never run."""

from __future__ import annotations

from typing_extensions import reveal_type

from cudafuture import CUDAFuture, as_completed, collect_all, collect_any, gather, wait, wait_all


def gathering(i: CUDAFuture[int], s: CUDAFuture[str], b: CUDAFuture[bytes]) -> None:
    reveal_type(gather(i))  # R: CUDAFuture[list[int]]
    reveal_type(gather(i, i))  # R: CUDAFuture[list[int]]
    reveal_type(gather(i, s))  # R: CUDAFuture[list[int | str]]
    reveal_type(gather(i, s, b, cancel_parts=True))  # R: CUDAFuture[list[int | str | bytes]]
    reveal_type(gather(i, i, i, i, i))  # R: CUDAFuture[list[int]]
    reveal_type(gather(*[i, i]))  # R: CUDAFuture[list[int]]
    reveal_type(gather(*(i.then(lambda f: str(f.value())) for _ in range(3))))  # R: CUDAFuture[list[str]]
    reveal_type(gather(i, i).then(lambda f: sum(f.value())))  # R: CUDAFuture[int]


def collecting(futures: list[CUDAFuture[int]]) -> None:
    reveal_type(collect_all(futures))  # R: CUDAFuture[list[CUDAFuture[int]]]
    reveal_type(collect_all(tuple(futures)).wait()[0].value())  # R: int
    reveal_type(collect_any(futures))  # R: CUDAFuture[tuple[int, int]]
    reveal_type(collect_any(f.then(lambda f: str(f.value())) for f in futures))  # R: CUDAFuture[tuple[int, str]]


def waiting(futures: list[CUDAFuture[int]]) -> None:
    reveal_type(wait_all(futures))  # R: list[int]
    reveal_type(wait_all(iter(futures), timeout=1))  # R: list[int]
    reveal_type(wait(futures))  # R: tuple[set[CUDAFuture[int]], set[CUDAFuture[int]]]
    done, not_done = wait(futures, 0.5, "FIRST_COMPLETED")
    reveal_type(done)  # R: set[CUDAFuture[int]]
    reveal_type(not_done)  # R: set[CUDAFuture[int]]


def in_order(futures: set[CUDAFuture[int]]) -> None:
    for future in as_completed(futures, timeout=1):
        reveal_type(future)  # R: CUDAFuture[int]
    reveal_type(next(iter(as_completed(futures))).value())  # R: int


async def in_order_without_blocking(futures: set[CUDAFuture[int]]) -> None:
    async for future in as_completed(futures):
        reveal_type(await future)  # R: int
    reveal_type([await f async for f in as_completed(futures)])  # R: list[int]
