"""Aligned memory: tensors that need no copy on the way to a disk, and pools of buffers."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.errors import InvalidStateError
from cudafuture.io import Buffer, BufferPool, Engine, File, empty
from cudafuture.testing import sim
from support.patience import PATIENCE
from support.soak import soak_count
from support.storing import MIB, contents, open_held_store

PAGE = 4096

pytestmark = pytest.mark.usefixtures("on_the_host")


# ---- empty


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 1000), (5, 1 << 17)])
def test_empty_tensor_begins_at_page(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = empty(shape, dtype)
    assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (dtype, torch.Size(shape), True)
    assert tensor.data_ptr() % (2 * MIB if tensor.nbytes >= 2 * MIB else PAGE) == 0
    tensor.fill_(1)
    assert tensor.eq(1).all()


def test_aligned_tensor_needs_no_staging(tmp_path: Path) -> None:
    with Engine(block_size=MIB) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        if not file.is_direct:
            pytest.skip("goes through the page cache")
        tensor = empty(4 * MIB, torch.uint8).copy_(contents(4 * MIB))
        file.write(tensor).wait(timeout=PATIENCE)
        assert engine.statistics().staged == 0
        file.read(out := empty(4 * MIB, torch.uint8)).wait(timeout=PATIENCE)
        assert torch.equal(out, tensor)
        assert engine.statistics().staged == 0


def test_empty_refuses_invalid_shape() -> None:
    with pytest.raises(ValueError, match="shape"):
        empty((2, -1))
    assert empty(3).dtype == torch.float32


# ---- pools


def wait_for(future: CUDAFuture[Buffer]) -> Buffer:
    return future.wait(timeout=PATIENCE)


def test_buffers_are_aligned_and_disjoint() -> None:
    pool = BufferPool(10 * PAGE, pin=False)
    sizes = [1, PAGE, 0, PAGE + 1, 3 * PAGE]
    buffers = [wait_for(pool.take(size)) for size in sizes]
    for i, buffer in enumerate(buffers):
        assert buffer.tensor.numel() == sizes[i]
        assert sizes[i] == 0 or buffer.tensor.data_ptr() % PAGE == 0
        buffer.tensor.fill_(i)
    assert all(buffer.tensor.eq(i).all() for i, buffer in enumerate(buffers))
    assert (pool.nbytes, pool.free) == (10 * PAGE, 3 * PAGE)
    for buffer in buffers[::2]:
        buffer.release()
        with pytest.raises(InvalidStateError, match="released"):
            _ = buffer.tensor
    assert pool.free == 3 * PAGE + 4 * PAGE
    del buffers, buffer
    assert pool.free == 10 * PAGE
    assert wait_for(pool.take(10 * PAGE)).tensor.numel() == 10 * PAGE  # it is one piece again


def test_requests_wait_in_order() -> None:
    pool = BufferPool(4 * PAGE, pin=False)
    first, second = wait_for(pool.take(3 * PAGE)), wait_for(pool.take(PAGE))
    large, small, last = pool.take(4 * PAGE), pool.take(PAGE), pool.take(PAGE)
    second.release()
    assert not large.done()
    assert not small.done(), "a small request has passed a large one"
    first.release()
    with wait_for(large) as buffer:
        assert buffer.tensor.numel() == 4 * PAGE
        assert not small.done()
        del buffer
    del large
    assert (small.done(), last.done()) == (True, True)


def test_cancelled_request_blocks_no_other() -> None:
    pool = BufferPool(2 * PAGE, pin=False)
    first = wait_for(pool.take(PAGE))
    cancelled, dropped, last = pool.take(2 * PAGE), pool.take(2 * PAGE), pool.take(2 * PAGE)
    assert cancelled.cancel()
    del dropped
    first.release()
    assert wait_for(last).tensor.numel() == 2 * PAGE
    del last
    assert pool.free == 2 * PAGE


def test_tensor_keeps_buffer_memory() -> None:
    pool = BufferPool(PAGE, pin=False)
    with wait_for(pool.take(PAGE)) as buffer:
        view = buffer.view((2, 3), torch.float64).fill_(5)
        with pytest.raises(ValueError, match="larger than the buffer"):
            buffer.view(PAGE + 1, torch.uint8)
    later = pool.take(PAGE)
    assert not later.done()
    del pool, buffer
    gc.collect()
    assert view.eq(5).all()
    del view
    assert wait_for(later).tensor.numel() == PAGE


def test_write_in_flight_keeps_buffer(tmp_path: Path) -> None:
    pool = BufferPool(MIB, pin=False)
    engine, store = open_held_store(tmp_path)
    with engine, store:
        with wait_for(pool.take(MIB)) as buffer:
            buffer.tensor.copy_(contents(MIB))
            write = store.write("key", buffer.tensor)
            del buffer
        later = pool.take(MIB)
        assert not later.done()
        engine._native.release_held()
        write.wait(timeout=PATIENCE)
        del write
        wait_for(later).tensor.zero_()
        assert torch.equal(store.read("key").wait(timeout=PATIENCE), contents(MIB))


def test_closed_pool_fails_waiting_requests() -> None:
    with BufferPool(PAGE, pin=False) as pool:
        buffer = wait_for(pool.take(PAGE))
        waiting, cancelled = pool.take(1), pool.take(1)
        cancelled.cancel()
    assert isinstance(waiting.exception(timeout=PATIENCE), InvalidStateError)
    with pytest.raises(InvalidStateError, match="closed"):
        pool.take(1)
    buffer.tensor.fill_(1)
    buffer.release()
    pool.close()


@pytest.mark.parametrize("make", [lambda: BufferPool(0), lambda: BufferPool(-1), lambda: BufferPool(1, pin="no")])  # type: ignore[arg-type]
def test_pool_refuses_invalid_arguments(make: Callable[[], BufferPool]) -> None:
    with pytest.raises(ValueError, match=r"nbytes|pin"):
        make()
    pool = BufferPool(1)
    assert pool.nbytes == PAGE
    for nbytes in (-1, PAGE + 1):
        with pytest.raises(ValueError, match="of a pool of 4096"):
            pool.take(nbytes)


def test_threads_share_pool_without_loss() -> None:
    pool = BufferPool(64 * PAGE, pin=False)
    wrong: list[float] = []

    def work(seed: int) -> None:
        numbers = random.Random(seed)
        kept: deque[Buffer] = deque()
        for _ in range(soak_count(5000)):
            buffer = wait_for(pool.take(numbers.randrange(1, 6 * PAGE)))
            buffer.tensor.fill_(seed)
            kept.append(buffer)
            del buffer
            if len(kept) > 2:
                wrong.extend(tensor.tensor.ne(seed).sum().item() for tensor in kept)
                kept.popleft().release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong)
    assert pool.free == 64 * PAGE


@pytest.mark.sim
def test_memory_is_pinned_for_devices() -> None:
    pool = BufferPool(MIB)
    assert pool.is_pinned
    buffer = wait_for(pool.take(1000 * 4))
    assert buffer.tensor.is_pinned()
    host = buffer.view(1000).fill_(3)
    with sim.hold():
        there = host.to("sim", non_blocking=True)  # would block if it were not pinned
    assert there.cpu().eq(3).all()
    assert not BufferPool(MIB, pin=False).is_pinned


def test_cancellation_unblocks_later_requests() -> None:
    pool = BufferPool(MIB, pin=False)
    held = pool.take(MIB // 2).wait()
    large, small = pool.take(MIB), pool.take(1000)
    assert not small.done()
    assert large.cancel()
    small.wait(timeout=PATIENCE).release()
    held.release()
    assert pool.free == MIB


@pytest.mark.parametrize("wrong", [100.5, "100", None])
def test_pool_refuses_non_integer_size(wrong: Any) -> None:
    pool = BufferPool(MIB, pin=False)
    with pytest.raises(TypeError):
        pool.take(wrong)
    with pytest.raises(TypeError):
        BufferPool(wrong)
    pool.take(MIB).wait(timeout=PATIENCE).release()
    assert pool.free == MIB


@pytest.mark.parametrize("shape", [-1, (2, -1), (-2, -3)])
def test_view_refuses_negative_size(shape: Any) -> None:
    buffer = BufferPool(MIB, pin=False).take(400).wait(timeout=PATIENCE)
    with pytest.raises(ValueError, match="shape"):
        buffer.view(shape)


class InterruptedAt:
    """A context that raises KeyboardInterrupt at a line of the pool's Python code, counted from its start.

    A signal's handler raises it between any two lines, in any function that the main thread is in.
    """

    def __init__(self, line: int) -> None:
        self._left = line
        self.is_over = False

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.endswith(("io/buffer_pool.py", "weakref.py")):
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0 and not self.is_over:
                self.is_over = True
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self) -> InterruptedAt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        sys.settrace(self._before)


def take_and_release(pool: BufferPool, held: Buffer) -> None:
    with wait_for(pool.take(PAGE)) as buffer:
        buffer.view(PAGE, torch.uint8).fill_(1)
    del buffer
    first, second = pool.take(4 * PAGE), pool.take(PAGE)
    held.release()
    wait_for(first).release()
    del first
    wait_for(second).release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("small_heap")
def test_interrupt_loses_no_memory() -> None:
    for line in itertools.count():
        pool = BufferPool(4 * PAGE, pin=False)
        held = wait_for(pool.take(2 * PAGE))
        with contextlib.suppress(KeyboardInterrupt), InterruptedAt(line) as interrupt:
            take_and_release(pool, held)
        held.release()
        gc.collect()
        wait_for(pool.take(4 * PAGE)).release()
        assert pool.free == 4 * PAGE, f"interrupted at line {line}"
        if not interrupt.is_over:
            break
    assert line > 10


def test_free_runs_are_joined_in_any_order() -> None:
    pool = BufferPool(2000 * PAGE, pin=False)
    buffers = [wait_for(pool.take(PAGE)) for _ in range(2000)]
    random.Random(0).shuffle(buffers)
    while buffers:
        buffers.pop().release()
        assert pool.free == (2000 - len(buffers)) * PAGE
    assert wait_for(pool.take(2000 * PAGE)).tensor.numel() == 2000 * PAGE


@pytest.mark.parametrize("granted", ["at once", "after a wait"])
def test_inference_mode_buffers_allow_training(granted: str) -> None:
    weight = torch.ones(4, requires_grad=True)
    with torch.inference_mode():
        pool = BufferPool(PAGE, pin=False)
        first = pool.take(PAGE).wait()
        assert not first.tensor.is_inference()
        if granted == "at once":
            first.release()
    taken = pool.take(16)
    with torch.inference_mode():
        first.release()  # serves the request that waits
    inputs = taken.wait().view(4, torch.float32).fill_(2.0)
    (inputs * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 4
