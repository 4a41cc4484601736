"""Futures and callbacks of a DiskOffloader, and the threads that run them."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture, executors, gather, wait_all
from cudafuture.compat.tensornvme import DiskOffloader
from cudafuture.compat.tensornvme._completions import PendingOperation
from cudafuture.compat.tensornvme._tensor_store import PendingRead
from cudafuture.io import Engine
from support.engines import equal, hold_engine, in_a_thread, make_tensors, size
from support.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.fixture(params=["uring", "aio", "pthread"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def offloader(tmp_path: Path) -> Iterator[DiskOffloader]:
    with DiskOffloader(tmp_path / "offload") as offloader:
        yield offloader


@pytest.fixture
def idle_engine() -> Iterator[Engine]:
    with hold_engine() as engine:
        yield engine


# ---- futures


def test_every_asynchronous_call_returns_future(offloader: DiskOffloader) -> None:
    (x, y), copies = make_tensors(2)
    written = offloader.async_writev([x, y])
    assert written.wait(timeout=PATIENCE) == 8000
    assert (size(x), size(y)) == (0, 0)
    read = offloader.async_readv([x, y]).wait(timeout=PATIENCE)
    assert read[0] is x
    assert read[1] is y
    assert equal(read, copies)
    doubled = (
        offloader.async_write(x)
        .then_async(lambda written: offloader.async_read(x))
        .then(lambda read: read.value().mul_(2))
        .wait(timeout=PATIENCE)
    )
    assert torch.equal(doubled, 2 * copies[0])


def test_synchronize_completes_futures(offloader: DiskOffloader) -> None:
    tensors, _ = make_tensors(4)
    for _ in range(50):
        futures = [*map(offloader.async_write, tensors)]
        offloader.sync_write_events()
        assert all(future.done() for future in futures)
        reads = [*map(offloader.async_read, tensors)]
        offloader.synchronize()
        assert all(read.done() for read in reads)


def test_submitted_operation_cannot_be_cancelled(idle_engine: Engine, tmp_path: Path) -> None:
    offloader = DiskOffloader(tmp_path, engine=idle_engine)
    (x,), copies = make_tensors(1)
    future = offloader.async_write(x)
    assert future.released is not None
    assert not future.cancel()
    assert not future.done()
    idle_engine._native.release_held()
    offloader.synchronize()
    assert future.wait(timeout=PATIENCE) == 4000
    assert future.released.done()
    assert size(x) == 0
    offloader.sync_read(x)
    assert equal([x], copies)


def test_futures_overlap_up_to_limit(backend: str, tmp_path: Path) -> None:
    offloader = DiskOffloader(tmp_path, 4, backend)
    tensors, copies = make_tensors(40)
    assert gather(*map(offloader.async_write, tensors)).wait(timeout=PATIENCE) == [4000] * 40
    assert not any(size(tensor) for tensor in tensors)
    read = gather(*map(offloader.async_read, tensors)).wait(timeout=PATIENCE)
    assert equal(read, copies)


def test_full_offloader_waits_for_oldest(idle_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = DiskOffloader(tmp_path, 2, engine=idle_engine)
    tensors, _ = make_tensors(3)
    futures = [offloader.async_write(tensor) for tensor in tensors[:2]]
    assert [size(tensor) for tensor in tensors] == [4000] * 3
    end = offloader._completions.end

    def end_when_released(operation: PendingOperation) -> None:
        idle_engine._native.release_held()
        end(operation)

    monkeypatch.setattr(offloader._completions, "end", end_when_released)
    futures.append(offloader.async_write(tensors[2]))
    assert size(tensors[0]) == 0
    assert wait_all(futures, timeout=PATIENCE) == [4000] * 3


def test_done_operation_is_released(idle_engine: Engine, tmp_path: Path) -> None:
    offloader = DiskOffloader(tmp_path, engine=idle_engine)
    (x,), _ = make_tensors(1)
    future = offloader.async_write(x)
    (operation,) = offloader._completions._pending
    idle_engine._native.release_held()
    future.wait(timeout=PATIENCE)
    assert operation.ended.wait(PATIENCE)  # the future completes first
    assert not offloader._completions._pending


def test_operations_on_one_tensor_are_ordered(offloader: DiskOffloader) -> None:
    (x, y), copies = make_tensors(2)
    for _ in range(50):
        offloader.async_write(x)
        offloader.async_read(x)
        offloader.async_writev([y, x])
        future = offloader.async_readv([y, x])
    assert equal(future.wait(timeout=PATIENCE), copies[::-1])


def test_callback_thread_may_wait_for_operation(offloader: DiskOffloader) -> None:
    (x,), copies = make_tensors(1)

    def write_and_read(_: CUDAFuture[None]) -> bool:
        offloader.sync_write(x)
        offloader.async_read(x)
        offloader.synchronize()
        return True

    done = CUDAFuture.completed(None).then(write_and_read, executor=executors.callback_thread)
    assert done.wait(timeout=PATIENCE)
    assert equal([x], copies)


def test_tensor_may_be_dropped_during_write(idle_engine: Engine, tmp_path: Path) -> None:
    offloader = DiskOffloader(tmp_path, engine=idle_engine)
    view = torch.arange(1000)
    whole = view.untyped_storage()
    future = offloader.async_write(view)
    del view
    gc.collect()
    assert whole.size() == 8000
    idle_engine._native.release_held()
    assert future.wait(timeout=PATIENCE) == 8000
    assert whole.size() == 0
    again = torch.empty(0, dtype=torch.int64).set_(whole, 0, (1000,))  # type: ignore[call-overload]
    offloader.sync_read(again)
    assert torch.equal(again, torch.arange(1000))


# ---- callbacks


def test_callback_runs_in_calling_thread(offloader: DiskOffloader) -> None:
    (x, y), copies = make_tensors(2)
    seen: list[object] = []
    offloader.async_write(x, lambda: seen.append((threading.get_ident(), size(x), offloader.statistics().keys)))
    offloader.async_read(x, lambda: seen.append((x.tolist() == copies[0].tolist(), offloader.statistics().keys)))
    offloader.async_writev([x, y], lambda: seen.append((size(x), size(y))))
    offloader.async_readv([x, y], callback=lambda: seen.append(equal([x, y], copies)))
    assert seen == [(threading.get_ident(), 0, 1), (True, 0), (0, 0), True]


def test_callbacks_use_full_offloader(backend: str, tmp_path: Path) -> None:
    offloader = DiskOffloader(tmp_path, 1, backend)
    tensors, copies = make_tensors(5)
    order: list[int] = []

    def read(i: int) -> None:
        def then() -> None:
            order.append(i)
            tensors[i].add_(1)
            if i + 1 < len(tensors):
                read(i + 1)
            offloader.async_write(tensors[i], lambda: order.append(-i))
            offloader.sync_read(tensors[i])

        offloader.async_read(tensors[i], then)

    for tensor in tensors:
        offloader.async_write(tensor)
    read(0)
    offloader.synchronize()
    assert order == [0, 1, 2, 3, 4, -4, -3, -2, -1, 0]
    assert equal(tensors, [copy + 1 for copy in copies])


def test_endless_callbacks_use_no_stack(offloader: DiskOffloader) -> None:
    x, rounds = torch.zeros(1), itertools.count(1)

    def write_and_read_on() -> None:
        x.add_(1)
        if next(rounds) < 1000:
            offloader.async_write(x)
            offloader.async_read(x, write_and_read_on)

    offloader.sync_write(x)
    offloader.async_read(x, write_and_read_on)
    assert x.item() == 1000


def test_call_raises_callback_exception(offloader: DiskOffloader) -> None:
    (x,), copies = make_tensors(1)
    with pytest.raises(ZeroDivisionError):
        offloader.async_write(x, lambda: 1 // 0)
    assert size(x) == 0
    offloader.synchronize()
    offloader.sync_read(x)
    assert equal([x], copies)


def test_synchronize_finishes_all_before_raising(idle_engine: Engine, tmp_path: Path) -> None:
    offloader = DiskOffloader(tmp_path, engine=idle_engine)
    (x, y), _ = make_tensors(2)
    submitted, ran = threading.Event(), threading.Event()

    def write_with_callbacks() -> None:
        original = offloader._completions.collect
        offloader._completions.collect = lambda last: submitted.set()  # type: ignore[method-assign]
        offloader.async_write(x, lambda: 1 // 0)
        offloader.async_write(y, ran.set)
        offloader._completions.collect = original  # type: ignore[method-assign]

    in_a_thread(write_with_callbacks).join(PATIENCE)
    idle_engine._native.release_held()
    with pytest.raises(ZeroDivisionError):
        offloader.synchronize()
    assert ran.is_set()
    assert (size(x), size(y)) == (0, 0)
    offloader.synchronize()


def test_threads_share_offloader(tmp_path: Path, frequent_switches: None) -> None:
    offloader = DiskOffloader(tmp_path, 3)
    tensors, copies = make_tensors(8)
    callers, callees = set(), set()
    barrier = threading.Barrier(4)

    def work(mine: list[torch.Tensor]) -> None:
        callers.add(threading.get_ident())
        barrier.wait(PATIENCE)
        for _ in range(25):
            for tensor in mine:
                offloader.async_write(tensor)
            for tensor in mine:

                def double(tensor: torch.Tensor = tensor) -> None:
                    callees.add(threading.get_ident())
                    tensor.mul_(2).div_(2)
                    offloader.async_write(tensor)
                    offloader.async_read(tensor, lambda: tensor.add_(1))

                offloader.async_read(tensor, double)
            offloader.synchronize()

    threads = [in_a_thread(lambda i=i: work(tensors[2 * i : 2 * i + 2])) for i in range(4)]  # type: ignore[misc]
    for thread in threads:
        thread.join(PATIENCE)
    assert equal(tensors, [copy + 25 for copy in copies])
    assert callees <= callers
    assert offloader.statistics().keys == 0


def test_synchronize_waits_for_other_threads_callback(offloader: DiskOffloader) -> None:
    (x, y), _ = make_tensors(2)
    running, go_on = threading.Event(), threading.Event()

    def callback() -> None:
        running.set()
        assert go_on.wait(PATIENCE)
        offloader.async_write(y)

    thread = in_a_thread(lambda: offloader.async_write(x, callback))
    assert running.wait(PATIENCE)
    synchronizing = in_a_thread(offloader.synchronize)
    go_on.set()
    synchronizing.join(PATIENCE)
    assert (size(x), size(y)) == (0, 0)
    thread.join(PATIENCE)


class Noticed(threading.Event):
    """An event that records when a thread begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.set()
        return super().wait(timeout)


def test_another_thread_may_run_callback(offloader: DiskOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    (x,), _ = make_tensors(1)
    ended, waiting, taken = Noticed(), threading.Event(), threading.Event()
    end, here = offloader._completions.end, threading.get_ident()
    order: list[str] = []

    def end_later(operation: PendingOperation) -> None:
        if threading.get_ident() != here:
            operation.ended = ended
            waiting.set()
            assert taken.wait(PATIENCE)
        end(operation)

    def callback() -> None:
        taken.set()
        assert ended.begun.wait(PATIENCE)
        order.append("called back")

    def write() -> None:
        offloader.async_write(x, callback)
        order.append("returned")

    monkeypatch.setattr(offloader._completions, "end", end_later)
    thread = in_a_thread(write)
    assert waiting.wait(PATIENCE)
    offloader.synchronize()
    thread.join(PATIENCE)
    assert order == ["called back", "returned"]


# ---- devices


@pytest.mark.sim(devices=2, schedule="lazy")
def test_device_tensors_follow_stream_order(tmp_path: Path) -> None:
    offloader = DiskOffloader(tmp_path, 3)
    tensors = [torch.full((100_000,), float(i), device=f"sim:{i % 2}") for i in range(6)]
    assert gather(*map(offloader.async_write, tensors)).wait(timeout=PATIENCE) == [400_000] * 6
    assert not any(size(tensor) for tensor in tensors)
    for tensor in tensors:

        def double_then_offload() -> None:
            tensor.mul_(2)  # noqa: B023 (see test_disk_offloader)
            offloader.async_write(tensor)  # noqa: B023

        offloader.async_read(tensor, double_then_offload)
    offloader.synchronize()
    for tensor, read in zip(tensors, [offloader.async_read(tensor) for tensor in tensors], strict=True):
        read.wait(non_blocking=True, timeout=PATIENCE)
        tensor.add_(1)
    assert [tensor.sum().item() for tensor in tensors] == [100_000.0 * (2 * i + 1) for i in range(6)]
    mixed = [torch.ones(5, device="sim:1"), torch.ones(3)]
    offloader.sync_writev(mixed)
    offloader.sync_readv(mixed)
    assert [tensor.sum().item() for tensor in mixed] == [5, 3]


# ---- completions that fail


@pytest.mark.parametrize("called", [False, True], ids=["no callback", "callback"])
def test_value_error_fails_future(offloader: DiskOffloader, monkeypatch: pytest.MonkeyPatch, called: bool) -> None:
    (x,), _ = make_tensors(1)
    offloader.sync_write(x)
    calls: list[int] = []
    error = MemoryError("no memory for a value")

    def refuse(_: object) -> None:
        raise error

    monkeypatch.setattr(PendingRead, "value", refuse)
    future = offloader.async_read(x, (lambda: calls.append(1)) if called else None)
    assert future.exception(timeout=PATIENCE) is error
    with pytest.raises(MemoryError, match="no memory for a value"):
        offloader.synchronize()
    offloader.synchronize()  # it was told
    assert not calls
