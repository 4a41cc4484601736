"""AsyncFileWriter: the content of the file, the release of sources, and the calls that raise errors."""

from __future__ import annotations

import errno
import gc
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CancelledError, CUDAFuture, InvalidStateError, gather
from cudafuture.compat.tensornvme import AsyncFileWriter
from cudafuture.errors import StorageError
from cudafuture.io import Engine
from support.engines import failing, hold_engine, in_a_thread
from support.patience import PATIENCE
from support.storing import count_descriptors

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.fixture
def idle_engine() -> Iterator[Engine]:
    with hold_engine() as engine:
        yield engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def bytes_of(*tensors: torch.Tensor) -> bytes:
    return b"".join(bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).tolist()) for t in tensors)


# ---- what TensorNVMe's users do


@pytest.mark.parametrize("backend", [None, "uring", "aio", "pthread"])
@pytest.mark.parametrize("raw", [False, True])
def test_writer_stores_checkpoint_with_header(backend: str | None, raw: bool, path: Path) -> None:
    state = {f"layer{i}": torch.randn(100, i + 1) for i in range(20)}
    ends = torch.tensor([tensor.nbytes for tensor in state.values()]).cumsum(0).tolist()
    header = json.dumps(dict(zip(state, ends, strict=True))).encode()
    writer = AsyncFileWriter(str(path), 4, backend, 2 + len(state))  # the positions of TensorNVMe
    assert writer.comm_stream is None
    assert writer.write(len(header).to_bytes(8, "little")) == 8
    assert writer.write(header) == len(header)
    writer.register_h2d(len(state))
    writer.register_tasks(len(state))
    for tensor in state.values():
        if raw:
            writer.write_raw(tensor, tensor.data_ptr(), tensor.nbytes, writer.offset)
        else:
            writer.write_tensor(tensor)
    writer.flush()
    writer.sync_before_step()
    copies = [tensor.clone() for tensor in state.values()]
    for tensor in state.values():
        tensor.zero_()
    writer.synchronize()
    assert writer.offset == 8 + len(header) + ends[-1]
    assert path.read_bytes() == len(header).to_bytes(8, "little") + header + bytes_of(*copies)


def test_torch_save_accepts_writer(path: Path) -> None:
    state: dict[str, Any] = {"weights": torch.randn(1000, 100), "step": 7}
    with AsyncFileWriter(path) as writer:
        torch.save(state, writer)  # type: ignore[arg-type]
    loaded = torch.load(path)
    assert loaded["step"] == 7
    assert torch.equal(loaded["weights"], state["weights"])


def test_writer_continues_open_file(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"before ")
        writer = AsyncFileWriter(file)
        assert (writer.fp, writer.offset) == (file, 7)
        writer.write(b"after")
        writer.synchronize()
        writer.close()
        assert not file.closed
    assert path.read_bytes() == b"before after"
    with AsyncFileWriter(path) as writer:  # a path is begun anew
        assert (writer.fp, writer.offset) == (None, 0)
        writer.write(b"new")
    assert path.read_bytes() == b"new"


# ---- what can be written


def test_writer_accepts_any_bytes(path: Path) -> None:
    with AsyncFileWriter(path, 2) as writer:
        changing = bytearray(b"-bytearray")
        assert writer.write(b"bytes") == 5
        assert writer.write(changing) == 10
        assert writer.write(memoryview(changing)[::-1]) == 10
        assert writer.write(b"") == 0
        changing[:] = b"..........."
        with pytest.raises(TypeError):
            writer.write("text")  # type: ignore[arg-type]
        assert writer.offset == 25
    assert path.read_bytes() == b"bytes-bytearrayyarraetyb-"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int64], ids=str)
def test_writer_accepts_any_tensor(dtype: torch.dtype, path: Path) -> None:
    x = (torch.arange(60 * dtype.itemsize) % 2).to(torch.uint8).view(dtype).reshape(3, 4, 5)
    kinds = [x, x.transpose(0, 2), x[:, 1], x[0, 0, 0], x[:0], x.expand(2, 3, 4, 5)]
    with AsyncFileWriter(path) as writer:
        futures = [writer.write_tensor(kind) for kind in kinds]
        assert gather(*futures).wait(timeout=PATIENCE) == [kind.nbytes for kind in kinds]
    assert path.read_bytes() == bytes_of(*kinds)


def test_writer_refuses_wrong_arguments(path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with AsyncFileWriter(path) as writer:
        writer.write_tensor(parameter, pinned=torch.empty(3))
        for bad in (None, b"bytes", torch.eye(3).to_sparse()):
            with pytest.raises(TypeError):
                writer.write_tensor(bad)  # type: ignore[arg-type]
        for n_bytes, offset in ((-1, 0), (1, -1)):
            with pytest.raises(ValueError, match="negative"):
                writer.write_raw(parameter, parameter.data_ptr(), n_bytes, offset)
        assert writer.offset == 12
    assert path.read_bytes() == bytes_of(parameter)
    with pytest.raises(ValueError, match="backend='tape'"):
        AsyncFileWriter(path, backend="tape")
    with pytest.raises(ValueError, match="n_entries=0"):
        AsyncFileWriter(path, 0)
    with pytest.raises(StorageError, match="Not a directory"):
        AsyncFileWriter(path / "file")


def test_raw_memory_is_kept_until_written(idle_engine: Engine, path: Path) -> None:
    with AsyncFileWriter(path, engine=idle_engine) as writer:
        for place, value in ((8, 2), (0, 1), (0, 3)):
            tensor = torch.full((8,), value, dtype=torch.uint8)
            writer.write_raw(tensor, tensor.data_ptr(), 8, place)
            assert writer.offset == 16
            del tensor
            gc.collect()
            if value == 1:
                idle_engine._native.release_held()
                writer.synchronize()
        writer.write_raw(None, 0, 0, 20)
        assert writer.offset == 20
    assert path.read_bytes() == bytes([3] * 8 + [2] * 8)


# ---- when


def test_copied_source_may_change(idle_engine: Engine, path: Path) -> None:
    with AsyncFileWriter(path, engine=idle_engine) as writer:
        source = torch.zeros(64, 64).t()  # gathered into the engine's buffers
        writer.write(b"bytes")
        written = writer.write_tensor(source)
        writer.sync_before_step()
        assert not written.done()
        source.fill_(7)
        idle_engine._native.release_held()
    assert path.read_bytes() == b"bytes" + bytes(64 * 64 * 4)


def test_full_queue_blocks_writer(idle_engine: Engine, path: Path) -> None:
    writer = AsyncFileWriter(path, 3, engine=idle_engine)
    futures = [writer.write_tensor(torch.full((10,), i)) for i in range(3)]
    begun, ended = threading.Event(), threading.Event()

    def write_one_more() -> None:
        begun.set()
        futures.append(writer.write_tensor(torch.full((10,), 3)))
        ended.set()

    thread = in_a_thread(write_one_more)
    assert begun.wait(PATIENCE)
    assert idle_engine.statistics().pending == 3
    assert not ended.is_set()
    idle_engine._native.release_held()
    thread.join(PATIENCE)
    assert gather(*futures).wait(timeout=PATIENCE) == [80] * 4
    writer.close()
    assert path.read_bytes() == bytes_of(torch.arange(4).repeat_interleave(10))


def test_threads_append_in_turn(path: Path, frequent_switches: None) -> None:
    barrier = threading.Barrier(4)

    def work(i: int) -> None:
        barrier.wait(PATIENCE)
        for _ in range(50):
            writer.write(bytes([i]) * 7)

    with AsyncFileWriter(path, 5) as writer:
        threads = [in_a_thread(lambda i=i: work(i)) for i in range(4)]  # type: ignore[misc]
        for thread in threads:
            thread.join(PATIENCE)
    data = path.read_bytes()
    pieces = [data[i : i + 7] for i in range(0, len(data), 7)]
    assert sorted(pieces) == sorted(bytes([i]) * 7 for i in range(4) for _ in range(50))


# ---- devices


@pytest.mark.parametrize("given", ["nothing", "pinned", "stream", "both"])
@pytest.mark.sim(devices=2, schedule="lazy")
def test_copied_device_tensors_may_change(given: str, path: Path) -> None:
    stream = torch.Stream("sim:0") if given in ("stream", "both") else None
    with AsyncFileWriter(path, 3, comm_stream=stream) as writer:
        tensors = [torch.full((100, 10), float(i), device=f"sim:{i % 2}") for i in range(6)]
        tensors[3] = tensors[3].t()
        tensors[4] = tensors[4][::2]
        pinned = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        targets = pinned if given in ("pinned", "both") else [None] * 6
        futures = [writer.write_tensor(tensor, target) for tensor, target in zip(tensors, targets, strict=True)]
        writer.sync_before_step()
        for tensor in tensors:
            tensor.fill_(-1)
        assert gather(*futures).wait(timeout=PATIENCE) == [4000, 4000, 4000, 4000, 2000, 4000]
        with pytest.raises(ValueError, match=r"pinned is a torch\.float32 of shape"):
            writer.write_tensor(tensors[0], pinned[4])
        with pytest.raises(ValueError, match="on sim:1"):
            writer.write_tensor(tensors[0], tensors[1])
        with pytest.raises(TypeError, match="use write_tensor"):
            writer.write_raw(tensors[0], tensors[0].data_ptr(), 4000, 0)
        numbers = torch.arange(6.0).repeat_interleave(torch.tensor([1000, 1000, 1000, 1000, 500, 1000]))
    assert path.read_bytes() == bytes_of(numbers)


@pytest.mark.sim(schedule="lazy")
def test_device_tensor_may_be_dropped(path: Path) -> None:
    with AsyncFileWriter(path) as writer:
        for i in range(20):
            writer.write_tensor(torch.full((1000,), float(i), device="sim"))
            torch.full((1000,), -1.0, device="sim")
    assert path.read_bytes() == bytes_of(torch.arange(20.0).repeat_interleave(1000))


# ---- errors and the end


def test_synchronize_raises_errors(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = AsyncFileWriter(path, 2, engine=failing(no_space=1.0))
    writer.write(b"bytes")
    future = writer.write_tensor(torch.ones(10))
    writer.write(b"bytes")
    writer.sync_before_step()
    with pytest.raises(StorageError) as caught:
        writer.synchronize()
    assert caught.value.errno == errno.ENOSPC
    if hasattr(caught.value, "add_note"):
        assert "2 more failed" in caught.value.__notes__[-1]  # type: ignore[attr-defined]
    assert isinstance(future.exception(), StorageError)
    writer.synchronize()
    writer.write(b"bytes")
    with pytest.raises(StorageError):
        writer.close()
    writer.close()
    del future, writer
    gc.collect()
    assert not caplog.records


def test_dropped_writer_finishes_writes(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = AsyncFileWriter(path, backend="pthread")
    for i in range(20):
        writer.write_tensor(torch.full((10_000,), i))
    del writer
    gc.collect()
    assert path.read_bytes() == bytes_of(torch.arange(20).repeat_interleave(10_000))
    assert not caplog.records
    writer = AsyncFileWriter(path, engine=failing(io_error=1.0))
    writer.write(b"bytes")
    with caplog.at_level(logging.ERROR, "cudafuture.compat.tensornvme"):
        del writer
        gc.collect()
    assert "was freed before a call raised its error" in caplog.text


def test_closed_writer_refuses_writes(path: Path) -> None:
    writer = AsyncFileWriter(path)
    assert count_descriptors(path) > 0
    writer.close()
    assert count_descriptors(path) == 0  # a file that is removed gives its room back
    for use in (lambda: writer.write(b"x"), lambda: writer.write_tensor(torch.ones(1))):
        with pytest.raises(InvalidStateError, match="closed"):
            use()
    writer.synchronize()
    writer.sync_before_step()
    assert path.read_bytes() == b""


def test_synchronize_reports_cancelled_write(path: Path) -> None:
    one_at_a_time = Engine("threads", threads=1, queue_depth=1, _faults={"held": True})
    writer = AsyncFileWriter(path, engine=one_at_a_time)
    futures: list[CUDAFuture[int]] = [writer.write_tensor(torch.ones(10)) for _ in range(3)]
    assert futures[2].cancel()
    one_at_a_time._native.release_held()
    with pytest.raises(CancelledError):
        writer.synchronize()
    writer.close()
