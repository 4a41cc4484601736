"""Engines: start and end, queued and cancelled operations, and callers that block on a full queue."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CancelledError, CUDAFuture, InvalidStateError, gather, wait_all
from cudafuture.errors import StorageError
from cudafuture.io import Engine, File, default_engine
from support.child import Child, run_script
from support.patience import PATIENCE

BLOCK = 4096

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.fixture(params=["io_uring", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    try:
        Engine(request.param).close()
    except StorageError as e:
        pytest.skip(str(e))
    return str(request.param)


def engine_of(backend: Any, **options: Any) -> Engine:
    return Engine(backend, **{"queue_depth": 4, "block_size": BLOCK, "threads": 2, **options})


def make_idle_engine(backend: str, **options: Any) -> Engine:
    """Return an engine that completes no operation before ``release_held``."""
    return engine_of(backend, _faults={"held": True}, **options)


def ones(blocks: int) -> torch.Tensor:
    return torch.ones(blocks * BLOCK, dtype=torch.uint8)


# ---- arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "aio"},
        {"queue_depth": 0},
        {"queue_depth": 4097},
        {"block_size": 0},
        {"block_size": 5000},
        {"block_size": 1 << 31},
        {"queue_depth": 4096, "block_size": 1 << 30},
        {"threads": 0},
        {"max_pending": 0},
    ],
    ids=str,
)
def test_engine_refuses_arguments_out_of_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Engine(**arguments)


def test_engine_describes_itself(backend: str) -> None:
    with engine_of(backend) as engine:
        assert (engine.backend, engine.queue_depth, engine.block_size) == (backend, 4, BLOCK)
        assert repr(engine) == f"<Engine on {backend}, 4 blocks of 4096 bytes>"
    assert default_engine() is default_engine()


# ---- what waits


# Lets the system call io_uring_setup fail with an errno, by a filter of seccomp.
WITHOUT_IO_URING = """
import ctypes, logging, struct, sys
from cudafuture.io import Engine
number, machine = 425, {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[__import__("platform").machine()]
load, equal, refuse, allow = 0x20, 0x15, 0x50000 | int(sys.argv[1]), 0x7FFF0000
program = b"".join(struct.pack("HBBI", *line) for line in [
    (load, 0, 0, 4), (equal, 0, 3, machine), (load, 0, 0, 0), (equal, 0, 1, number), (0x06, 0, 0, refuse),
    (0x06, 0, 0, allow)])
memory = ctypes.create_string_buffer(program)
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 6, ctypes.addressof(memory)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter) == 0, ctypes.get_errno()
logging.basicConfig(stream=sys.stdout, format="%(message)s")
print(Engine("auto").backend)
try: Engine("io_uring")
except OSError as e: print(e)
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.ENOSYS, "the kernel has none"), (errno.EPERM, "forbidden by a sandbox, or by the sysctl")],
)
def test_missing_io_uring_names_reason(code: int, reason: str) -> None:
    done = run_script(WITHOUT_IO_URING, str(code))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "threads"
    for line in (lines[0], lines[2]):
        assert f"io_uring: {os.strerror(code)} ({reason}" in line


def test_queued_operations_are_counted(backend: str, tmp_path: Path) -> None:
    with make_idle_engine(backend) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        writes = [file.write(ones(2), i * 2 * BLOCK) for i in range(10)]
        assert engine.statistics().pending == 10
        empty = file.write(ones(0))  # which waits for no block
        assert not any(write.done() for write in writes)
        engine._native.release_held()
        assert wait_all([*writes, empty], timeout=PATIENCE) == [2 * BLOCK] * 10 + [0]
        done = engine.statistics()
        assert (done.pending, done.writes, done.reads, done.bytes_written) == (0, 11, 0, 20 * BLOCK)
        assert done.blocks >= 20
        file.read(ones(1)).wait(timeout=PATIENCE)
        assert (engine.statistics().reads, engine.statistics().bytes_read) == (1, BLOCK)


def test_only_queued_operations_can_be_cancelled(backend: str, tmp_path: Path) -> None:
    with make_idle_engine(backend) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        first = file.write(ones(100))
        while not engine.statistics().blocks:
            pass
        waiting, last = file.write(ones(100)), file.write(ones(1), 100 * BLOCK)
        assert waiting.cancel()
        assert not first.cancel()
        with pytest.raises(CancelledError):
            waiting.wait()
        engine._native.release_held()
        assert first.wait(timeout=PATIENCE) == 100 * BLOCK
        assert last.wait(timeout=PATIENCE) == BLOCK
        assert waiting.released is not None
        waiting.released.wait(timeout=PATIENCE)
        assert engine.statistics().bytes_written == 101 * BLOCK


def test_full_queue_blocks_caller(backend: str, tmp_path: Path) -> None:
    with make_idle_engine(backend, max_pending=3) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        writes = [file.write(ones(1)) for _ in range(3)]
        begun, ended = threading.Event(), threading.Event()

        def write_one_more() -> None:
            begun.set()
            writes.append(file.write(ones(1)))
            ended.set()

        thread = threading.Thread(target=write_one_more)
        thread.start()
        assert begun.wait(PATIENCE)
        assert engine.statistics().pending == 3
        assert not ended.is_set()
        engine._native.release_held()
        thread.join(PATIENCE)
        assert wait_all(writes, timeout=PATIENCE) == [BLOCK] * 4


def test_callbacks_write_to_full_queue(backend: str, tmp_path: Path) -> None:
    with engine_of(backend, queue_depth=1, max_pending=1) as engine:
        file = File(tmp_path / "file", "w+", engine=engine)
        tensors = [torch.full((1000,), float(i)) for i in range(20)]
        for i, tensor in enumerate(tensors):
            file.write(tensor, i * 4000).wait(timeout=PATIENCE)

        def double(i: int) -> CUDAFuture[int]:
            read = file.read(tensors[i], i * 4000)
            return read.then_async(lambda done: file.write(tensors[i].mul_(2), i * 4000 * done.value() // 4000))

        gather(*(double(i) for i in range(20))).wait(timeout=PATIENCE)
        for i in range(20):
            got = torch.zeros(1000)
            file.read(got, i * 4000).wait(timeout=PATIENCE)
            assert got.eq(2 * i).all()


def test_staged_source_is_released_early(backend: str, tmp_path: Path) -> None:
    with make_idle_engine(backend) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        source = torch.zeros(64, 64).t()  # gathered into the buffers
        write = file.write(source)
        assert write.released is not None
        write.released.wait(timeout=PATIENCE)
        assert not write.done()
        source.fill_(7)
        whole = torch.zeros(4 * BLOCK + BLOCK, dtype=torch.uint8)
        aligned = file.write(whole[-whole.data_ptr() % BLOCK :][: 4 * BLOCK], 1 << 20)
        assert aligned.released is not None
        if file.is_direct:
            assert not aligned.released.done()
        engine._native.release_held()
        write.wait(timeout=PATIENCE)
        aligned.wait(timeout=PATIENCE)
        aligned.released.wait(timeout=PATIENCE)
        got = torch.ones(64, 64)
        file.read(got).wait(timeout=PATIENCE)
        assert not got.any()


def test_tensors_live_until_futures_are_done(backend: str, tmp_path: Path) -> None:
    with make_idle_engine(backend) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        writes = [file.write(torch.full((5000,), float(i)), i * 20000) for i in range(10)]
        engine._native.release_held()
        wait_all(writes, timeout=PATIENCE)
        for i in range(10):
            got = torch.zeros(5000)
            file.read(got, i * 20000).wait(timeout=PATIENCE)
            assert got.eq(i).all()


def test_read_can_be_awaited(backend: str, tmp_path: Path) -> None:
    async def both() -> list[int]:
        return [await file.write(ones(3)), await file.read(ones(2), BLOCK)]

    with engine_of(backend) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        assert asyncio.run(both()) == [3 * BLOCK, 2 * BLOCK]


# ---- the end


def test_close_waits_for_submitted_operations(backend: str, tmp_path: Path) -> None:
    engine = engine_of(backend)
    file = File(tmp_path / "file", "w+", engine=engine)
    writes = [file.write(ones(50), i * 50 * BLOCK) for i in range(10)]
    engine.close()
    assert all(write.done() for write in writes)
    assert wait_all(writes) == [50 * BLOCK] * 10
    engine.close()
    with pytest.raises(InvalidStateError, match="engine is closed"):
        file.write(ones(1))


def test_dropped_engine_finishes_operations(backend: str, tmp_path: Path) -> None:
    writes = [
        File(tmp_path / "file", "r+" if i else "w", engine=engine_of(backend)).write(ones(20), i * 20 * BLOCK)
        for i in range(5)
    ]
    assert wait_all(writes, timeout=PATIENCE) == [20 * BLOCK] * 5
    assert (tmp_path / "file").stat().st_size == 100 * BLOCK


def test_close_wakes_blocked_thread(backend: str, tmp_path: Path) -> None:
    engine = make_idle_engine(backend, max_pending=1)
    file = File(tmp_path / "file", "w+", engine=engine)
    first = file.write(ones(1))
    errors: list[BaseException] = []

    def write_one_more() -> None:
        try:
            file.write(ones(1))
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=write_one_more)
    thread.start()
    closing = threading.Thread(target=engine.close)
    closing.start()
    thread.join(PATIENCE)
    engine._native.release_held()
    closing.join(PATIENCE)
    assert first.wait(timeout=PATIENCE) == BLOCK
    assert isinstance(errors[0], InvalidStateError)


# ---- limits of the system


LIMITED = """
import resource, sys, torch
from cudafuture.errors import StorageError
from cudafuture.io import Engine, File
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with Engine(sys.argv[1], queue_depth=4, block_size=4096) as engine, File(sys.argv[2], "w+", engine=engine) as file:
    say(str(file.write(torch.ones(20_000)).wait()))
    error = file.write(torch.ones(100_000)).exception()
    say(f"{type(error).__name__} {error.errno} {error.got <= 100_000}")
    say(str(file.read(torch.ones(20_000)).wait()))
"""


def test_file_size_limit_raises_error(backend: str, tmp_path: Path) -> None:
    with Child(LIMITED, backend, str(tmp_path / "file")) as child:
        assert [child.hear() for _ in range(3)] == ["80000", "StorageError 27 True", "80000"]
        assert (child.end(), child.errors()) == (0, "")


LOCKED = """
import resource, sys, torch
from cudafuture.io import Engine, File
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
with Engine("auto", queue_depth=4, block_size=65536) as engine, File(sys.argv[1], "w+", engine=engine) as file:
    source, got = torch.randn(1000, 300).t(), torch.zeros(300, 1000)
    file.write(source).wait()
    file.read(got).wait()
    say(str(torch.equal(source, got)))
"""


def test_engine_works_without_locked_memory(tmp_path: Path) -> None:
    with Child(LOCKED, str(tmp_path / "file")) as child:
        assert child.hear() == "True"
        assert (child.end(), child.errors()) == (0, "")


def test_engine_memory_is_queue_times_block(backend: str, tmp_path: Path) -> None:
    """Staged transfers use only this memory, whatever the size of the tensors."""
    with Engine(backend, queue_depth=4, block_size=1 << 16) as engine:  # type: ignore[arg-type]
        file = File(tmp_path / "file", "w+", engine=engine)
        source = torch.zeros(1 << 13, 1 << 11).t()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        file.write(source).wait(timeout=PATIENCE)
        file.read(source).wait(timeout=PATIENCE)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 16 << 10  # KiB; the tensor has 64 MiB


def test_small_write_overtakes_large_write(backend: str, tmp_path: Path) -> None:
    with make_idle_engine(backend) as engine, File(tmp_path / "file", "w+", engine=engine) as file:
        order: list[str] = []
        large = file.write(ones(200)).then(lambda done: order.append("large"))
        small = [file.write(ones(1), (200 + i) * BLOCK).then(lambda done: order.append("small")) for i in range(5)]
        engine._native.release_held()
        wait_all([large, *small], timeout=PATIENCE)
        assert order == ["small"] * 5 + ["large"]
