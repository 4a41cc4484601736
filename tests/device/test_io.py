"""Files of tensors on devices: read and written in the order of streams, by way of the engine's pinned buffers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from cudafuture import gather, wait
from cudafuture.errors import StorageError
from cudafuture.io import BufferPool, Engine, File
from support.harness import PRIORITIES, SIZE, Device
from support.patience import PATIENCE

BLOCK = 4096
LARGE = 40 * BLOCK + 12  # bytes: more than an engine of four blocks has at a time


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    try:
        engine = Engine(request.param, queue_depth=4, block_size=BLOCK, threads=2)
    except StorageError as e:
        pytest.skip(str(e))
    with engine:
        yield engine


@pytest.fixture
def file(engine: Engine, tmp_path: Path) -> Iterator[File]:
    with File(tmp_path / "file", "w+", engine=engine) as file:
        yield file


def open_file() -> tuple[Engine, File]:
    """Return a small engine and an empty file with it, for tests that get nothing else."""
    with TemporaryDirectory() as folder:
        engine = Engine(queue_depth=4, block_size=BLOCK, threads=2)
        return engine, File(Path(folder) / "file", "w+", engine=engine)


def numbers(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64).remainder(251).to(torch.uint8)


@pytest.mark.parametrize("offset", [0, 1, 4095, 2 * BLOCK])
@pytest.mark.parametrize("size", [0, 1, 4096, 4097, LARGE])
def test_any_part_moves_to_and_from_device(accelerator: Device, file: File, offset: int, size: int) -> None:
    tensor = numbers(size).to(accelerator.at())
    assert file.write(tensor, offset).wait(timeout=PATIENCE) == size
    on_host, there = torch.zeros(size, dtype=torch.uint8), torch.zeros_like(tensor)
    assert file.read(on_host, offset).wait(timeout=PATIENCE) == size
    assert torch.equal(on_host, numbers(size))
    assert file.read(there, offset).wait(timeout=PATIENCE) == size
    assert torch.equal(there.cpu(), numbers(size))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "with gaps": lambda x: x[:, ::2],
    "a part": lambda x: x[3:50],
    "a column": lambda x: x[:, 7],
    "nothing": lambda x: x[:0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_device_views_are_filled_in_place(
    accelerator: Device, file: File, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    source = torch.arange(6400.0).reshape(64, 100)
    file.write(view(source.to(accelerator.at())), 4).wait(timeout=PATIENCE)
    target, expected = torch.zeros(64, 100, device=accelerator.at()), torch.zeros(64, 100)
    file.read(view(target), 4).wait(timeout=PATIENCE)
    view(expected).copy_(view(source))
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64], ids=str)
def test_device_dtypes_round_trip(accelerator: Device, file: File, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    file.write(tensor.to(accelerator.at())).wait(timeout=PATIENCE)
    got = torch.empty_like(tensor, device=accelerator.at())
    file.read(got).wait(timeout=PATIENCE)
    assert torch.equal(got.cpu(), tensor)


def test_conjugate_is_written_by_value(accelerator: Device, file: File) -> None:
    z = torch.complex(torch.arange(4.0), torch.ones(4))
    file.write(z.to(accelerator.at()).conj()).wait(timeout=PATIENCE)
    got = torch.empty_like(z)
    file.read(got).wait(timeout=PATIENCE)
    assert torch.equal(got, z.conj())


def test_host_and_device_tensors_are_contiguous(accelerator: Device, file: File) -> None:
    places = [torch.device("cpu"), *(accelerator.at(i) for i in accelerator.indices())]
    tensors = [torch.full((100 + i,), i, dtype=torch.uint8).to(places[i % len(places)]) for i in range(100)]
    whole = torch.cat([x.cpu() for x in tensors])
    assert file.writev(tensors, 7).wait(timeout=PATIENCE) == whole.numel()
    got = [torch.zeros_like(x) for x in tensors]
    assert file.readv(got, 7).wait(timeout=PATIENCE) == whole.numel()
    assert torch.equal(torch.cat([x.cpu() for x in got]), whole)


@pytest.mark.parametrize("priority", PRIORITIES)
def test_write_follows_work_of_caller(accelerator: Device, priority: int) -> None:
    engine, file = open_file()
    with engine, file:
        x = accelerator.produce(3.0)
        written = file.write(x, priority=priority)
        got = torch.empty(SIZE)
        written.then_async(lambda _: file.read(got)).wait(timeout=PATIENCE)
        assert got.unique().tolist() == [3.0]


def test_busy_device_delays_no_other(accelerator: Device) -> None:
    engine, file = open_file()
    with engine, file:
        file.write(numbers(LARGE)).wait(timeout=PATIENCE)
        stream = accelerator.stream()
        with accelerator.on(stream):
            source, target = (torch.zeros(LARGE, dtype=torch.uint8, device=accelerator.at()) for _ in range(2))
        with accelerator.hold(stream):
            with accelerator.on(stream):
                reads = file.read(target.add_(1))
                writes = file.write(source.add_(2), LARGE)
            got = torch.zeros(LARGE, dtype=torch.uint8)
            assert file.read(got).wait(timeout=PATIENCE) == LARGE
            assert torch.equal(got, numbers(LARGE))
            assert not writes.done()
        gather(reads, writes).wait(timeout=PATIENCE)
        assert torch.equal(target.cpu(), numbers(LARGE))
        file.read(got, LARGE).wait(timeout=PATIENCE)
        assert got.unique().tolist() == [2]


def test_released_source_may_change(accelerator: Device, file: File) -> None:
    x = numbers(LARGE).to(accelerator.at())
    written = file.write(x)
    assert written.released is not None
    written.released.wait(timeout=PATIENCE)
    x.zero_()
    written.wait(timeout=PATIENCE)
    got = torch.zeros(LARGE, dtype=torch.uint8)
    file.read(got).wait(timeout=PATIENCE)
    assert torch.equal(got, numbers(LARGE))


def test_disk_waits_for_filled_buffer(accelerator: Device) -> None:
    engine, file = open_file()
    with engine, file:
        x = numbers(LARGE).to(accelerator.at())
        accelerator.finish()
        got = torch.zeros(LARGE, dtype=torch.uint8)
        file.write(x).wait(timeout=PATIENCE)
        file.read(got).wait(timeout=PATIENCE)
        assert torch.equal(got, numbers(LARGE))


def test_buffer_is_reused_after_device(accelerator: Device) -> None:
    engine, file = open_file()
    with engine, file:
        file.write(numbers(LARGE)).wait(timeout=PATIENCE)
        x = torch.empty(LARGE, dtype=torch.uint8, device=accelerator.at())
        file.read(x).wait(timeout=PATIENCE)
        assert torch.equal(x.cpu(), numbers(LARGE))


def test_read_follows_earlier_use_of_target(accelerator: Device) -> None:
    engine, file = open_file()
    with engine, file:
        file.write(torch.full((SIZE,), 5.0)).wait(timeout=PATIENCE)
        with accelerator.on(accelerator.stream()):
            x = accelerator.produce(1.0)
            read = file.read(x)
            read.wait(non_blocking=True, timeout=PATIENCE)
            assert accelerator.read(x) == 5.0


def test_waiter_follows_read(accelerator: Device) -> None:
    engine, file = open_file()
    with engine, file:
        file.write(torch.full((SIZE,), 5.0)).wait(timeout=PATIENCE)
        stream = accelerator.stream()
        with accelerator.on(stream):
            x = accelerator.empty()
        with accelerator.hold(stream):
            with accelerator.on(stream):
                read = file.read(x)
            with accelerator.on(accelerator.stream()):
                read.wait(non_blocking=True, timeout=PATIENCE)  # the device has not even begun
                doubled = x * 2
        torch.accelerator.synchronize()
        assert accelerator.read(doubled) == 10.0


def test_target_may_be_dropped_after_read(accelerator: Device) -> None:
    engine, file = open_file()
    with engine, file:
        file.write(torch.full((SIZE,), 5.0)).wait(timeout=PATIENCE)
        stream = accelerator.stream()
        with accelerator.on(stream):
            before = torch.accelerator.memory_allocated(accelerator.index())
            x = accelerator.empty()
            with accelerator.hold(stream):
                read = file.read(x)
                wait([read], timeout=PATIENCE)
                del x, read
                gc.collect()
                # The engine's thread drops its reference after it has completed the future.
                while torch.accelerator.memory_allocated(accelerator.index()) > before:
                    time.sleep(0)
                others = [accelerator.empty().fill_(9.0) for _ in range(8)]
            assert [accelerator.read(other) for other in others] == [9.0] * 8


def test_failure_handler_follows_partial_read(accelerator: Device) -> None:
    engine, file = open_file()
    with engine, file:
        file.write(torch.full((BLOCK // 4,), 5.0)).wait(timeout=PATIENCE)
        stream = accelerator.stream()
        with accelerator.on(stream):
            x = torch.zeros(2 * BLOCK, device=accelerator.at())
        with accelerator.hold(stream):
            with accelerator.on(stream):
                read = file.read(x)
            with accelerator.on(accelerator.stream()):
                with pytest.raises(StorageError, match="there the file ends"):
                    read.wait(non_blocking=True, timeout=PATIENCE)
                x.fill_(3.0)
        torch.accelerator.synchronize()
        assert accelerator.read(x) == 3.0


def test_failed_last_copy_keeps_other_events(accelerator: Device, tmp_path: Path) -> None:
    with Engine("threads", _faults={"held": True}) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        written = file.write(torch.full((8,), 5.0))
        x = torch.zeros(4, 4, device=accelerator.at())[:, ::2]  # filled from a dense tensor, in one copy at the end
        read = file.read(x)
        x.t_()  # another shape: that copy fails
        engine._native.release_held()
        written.wait(timeout=PATIENCE)
        assert isinstance(read.exception(timeout=PATIENCE), RuntimeError)
        assert list(read.events) == [accelerator.at()]


def test_pending_read_may_be_inspected(accelerator: Device) -> None:
    engine, file = open_file()
    with engine, file:
        file.write(torch.full((SIZE,), 5.0)).wait(timeout=PATIENCE)
        for _ in range(30):
            reads = [file.read(accelerator.empty()) for _ in range(4)]
            while not all(read.done() for read in reads):
                for read in reads:
                    assert len(read.devices) <= 1
                    assert len(read.events) <= 1
                    assert "CUDAFuture" in repr(read)
            assert all(read.devices == (accelerator.at(),) for read in reads)


def test_device_without_streams_is_refused(file: File) -> None:
    with pytest.raises(TypeError, match="on meta has no memory"):
        file.write(torch.empty(3, device="meta"))


def test_pool_memory_waits_for_device(accelerator: Device) -> None:
    size = 4 * SIZE  # bytes
    pool = BufferPool(size, pin=accelerator.has_streams)
    buffer = pool.take(size).wait(timeout=PATIENCE)
    source = buffer.view(SIZE).fill_(3.0)
    x = accelerator.empty()
    with accelerator.hold():
        x.copy_(source, non_blocking=True)
        del source
        buffer.release()
        later = pool.take(size)
        if later.done():
            later.wait().view(SIZE).fill_(9.0)
    later.wait(timeout=PATIENCE).view(SIZE).fill_(9.0)
    assert accelerator.read(x) == 3.0
    later.wait().release()
    del later
    accelerator.finish()
    pool.take(size).wait(timeout=PATIENCE).release()


def test_unused_pool_memory_is_free_immediately(accelerator: Device) -> None:
    pool = BufferPool(BLOCK, pin=accelerator.has_streams)
    accelerator.finish()
    for _ in range(3):
        pool.take(BLOCK).wait(timeout=PATIENCE).release()
    assert pool.take(BLOCK).wait(timeout=PATIENCE).tensor.numel() == BLOCK
