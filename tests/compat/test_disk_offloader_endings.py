"""Errors, start and end of a DiskOffloader."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture, InvalidStateError, executors
from cudafuture.compat.tensornvme import DiskOffloader, get_backends, probe_backend
from cudafuture.compat.tensornvme._completions import PendingOperation
from cudafuture.errors import StorageError
from cudafuture.io import Engine
from support.child import Child
from support.engines import equal, failing, hold_engine, make_tensors, size
from support.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.fixture
def idle_engine() -> Iterator[Engine]:
    with hold_engine() as engine:
        yield engine


def stores(folder: Path) -> int:
    """Return the number of stores in the folder."""
    return len(list(folder.glob("store-*")))


# ---- errors


def test_failed_write_changes_nothing(tmp_path: Path) -> None:
    (x,), copies = make_tensors(1)
    with DiskOffloader(tmp_path, engine=failing(io_error=1.0)) as offloader:
        with pytest.raises(StorageError) as caught:
            offloader.sync_write(x)
        assert caught.value.errno == errno.EIO
        assert equal([x], copies)
        assert offloader.statistics().keys == 0
        with pytest.raises(RuntimeError, match="nothing is stored"):
            offloader.sync_read(x)


def test_future_and_synchronize_raise_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors, copies = make_tensors(3)
    called: list[int] = []
    with DiskOffloader(tmp_path, engine=failing(no_space=1.0)) as offloader:
        futures = [offloader.async_write(tensor, lambda: called.append(1)) for tensor in tensors]
        error = futures[0].exception(PATIENCE)
        assert isinstance(error, StorageError)
        assert error.errno == errno.ENOSPC
        offloader.sync_read_events()  # it was no read
        with pytest.raises(StorageError) as caught:
            offloader.sync_write_events()
        assert caught.value is error
        if hasattr(error, "add_note"):
            assert "2 more failed:\n  StorageError: " in error.__notes__[-1]  # type: ignore[attr-defined]
        offloader.synchronize()
        offloader.async_write(tensors[0])
        with pytest.raises(StorageError):
            offloader.synchronize()
    assert not called
    assert equal(tensors, copies)
    del futures, error, caught
    gc.collect()
    assert not caplog.records


def test_failed_list_write_keeps_all_tensors(tmp_path: Path) -> None:
    tensors, copies = make_tensors(20, 300_000)
    with DiskOffloader(tmp_path, engine=failing(io_error=0.5)) as offloader:
        with pytest.raises(StorageError):
            offloader.sync_writev(tensors)
        assert equal(tensors, copies)
        assert offloader.statistics().keys == 0


def test_close_and_drop_report_errors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    offloader = DiskOffloader(tmp_path, engine=failing(io_error=1.0))
    offloader.async_write(torch.ones(4))
    with pytest.raises(StorageError):
        offloader.close()
    assert stores(tmp_path) == 0
    offloader = DiskOffloader(tmp_path, engine=failing(io_error=1.0))
    error = offloader.async_write(torch.ones(4)).exception(PATIENCE)
    assert error is not None
    assert error.__traceback__ is None  # its frames would keep the offloader
    CUDAFuture.completed(None).then(lambda _: None, executor=executors.callback_thread).wait(timeout=PATIENCE)
    with caplog.at_level(logging.ERROR, "cudafuture.compat.tensornvme"):
        del offloader
        gc.collect()
    assert "was freed before a call raised its error" in caplog.text


def test_interrupted_call_keeps_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = failing(io_error=1.0, held=True)
    offloader = DiskOffloader(tmp_path, engine=engine)

    def interrupt(operation: PendingOperation) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(offloader._completions, "end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            offloader.sync_write(torch.ones(4))
    engine._native.release_held()
    with pytest.raises(StorageError):
        offloader.synchronize()
    offloader.close()


def test_failed_read_can_be_retried(tmp_path: Path) -> None:
    x = torch.arange(20_000)
    copy = x.clone()
    with DiskOffloader(tmp_path) as offloader:
        offloader.sync_write(x)
        files = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        for file in files:
            os.truncate(file, 0)
        with pytest.raises(StorageError):
            offloader.sync_read(x)
        assert size(x) == 0
        future = offloader.async_read(x)
        assert isinstance(future.exception(PATIENCE), StorageError)
        assert size(x) == 0
        for file, data in files.items():
            with file.open("r+b") as f:
                f.write(data)
        with pytest.raises(StorageError):
            offloader.synchronize()
        offloader.sync_read(x)
        assert torch.equal(x, copy)


# ---- beginning and end


def test_close_empties_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    first, second = DiskOffloader(folder), DiskOffloader(str(folder))
    assert stores(folder) == 2
    x = torch.ones(1000)
    first.async_write(x)
    first.close()
    first.close()
    assert size(x) == 0
    assert stores(folder) == 1
    for use in (first.sync_write, first.async_read, first.sync_read):
        with pytest.raises(InvalidStateError, match="closed"):
            use(torch.ones(4))
    first.synchronize()
    del second
    gc.collect()
    assert stores(folder) == 0


def test_dropped_offloader_finishes_its_writes(idle_engine: Engine, tmp_path: Path) -> None:
    offloader = DiskOffloader(tmp_path, engine=idle_engine)
    x = torch.ones(1000)
    future = offloader.async_write(x)
    del offloader
    gc.collect()
    idle_engine._native.release_held()
    assert future.wait(timeout=PATIENCE) == 4000
    assert size(x) == 0


def test_offloader_refuses_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="aio, pthread, uring"):
        DiskOffloader(tmp_path, backend="tape")
    with pytest.raises(ValueError, match="n_entries"):
        DiskOffloader(tmp_path, 0)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        DiskOffloader(tmp_path / "file")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_backends_can_be_probed() -> None:
    assert get_backends() == {"uring", "aio", "pthread"}
    assert probe_backend("aio")
    assert probe_backend("pthread")
    assert not probe_backend("tape")
    try:
        Engine("io_uring").close()
        assert probe_backend("uring")
    except StorageError:
        assert not probe_backend("uring")


INTERRUPTED = """
import signal, sys, threading, torch
from cudafuture.io import Engine
from cudafuture.compat.tensornvme import DiskOffloader
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets jobs in the background ignore it
sys.setswitchinterval(1000)
engine = Engine("threads", threads=2, _faults={"held": True})
offloader = DiskOffloader(sys.argv[1], 1, engine=engine)
x, y = torch.ones(10), torch.ones(10)
future = offloader.async_write(x)
ways = [offloader.synchronize, lambda: offloader.async_write(y), lambda: offloader.sync_read(x)]
for way in ways:
    begin = threading.Event()
    threading.Thread(target=lambda: begin.wait() and say("waiting")).start()
    begin.set()  # the other thread goes on when this one gives up the GIL, which it does inside the wait
    try:
        way()
    except KeyboardInterrupt:
        say("interrupted")
engine._native.release_held()
offloader.synchronize()
offloader.sync_read(x)
say(str(x.sum().item()))
"""


@pytest.mark.slow
def test_ctrl_c_ends_wait_without_loss(tmp_path: Path) -> None:
    with Child(INTERRUPTED, str(tmp_path)) as child:
        for _ in range(3):
            assert child.hear() == "waiting"
            child.send(signal.SIGINT)
            assert child.hear() == "interrupted"
        assert child.hear() == "10.0"
        assert (child.end(), child.errors()) == (0, "")
