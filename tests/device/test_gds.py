"""GPUDirect Storage: with KvikIO on CUDA, and on the simulated accelerator with a stand-in for it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudafuture import InvalidStateError
from cudafuture.errors import StorageError
from cudafuture.io import File, gds
from cudafuture.io.gds import GDSFile
from cudafuture.testing import fakecuda
from support.harness import SIZE, Device
from support.patience import PATIENCE


class CuFile:
    """Stand-in for KvikIO's class of that name: it moves bytes on a thread, when the test asks for it."""

    threads = ThreadPoolExecutor(2)
    moved = 0

    def __init__(self, path: str, flags: str) -> None:
        self.file = os.open(path, os.O_RDONLY if flags == "r" else os.O_RDWR)

    def __del__(self) -> None:
        os.close(self.file)

    def pread(self, buffer: torch.Tensor, size: int, file_offset: int) -> Any:
        return self.future(buffer, lambda: self.read(buffer, size, file_offset))

    def pwrite(self, buffer: torch.Tensor, size: int, file_offset: int) -> Any:
        return self.future(buffer, lambda: os.pwrite(self.file, bytes(buffer.cpu().tolist()), file_offset))

    def future(self, buffer: torch.Tensor, function: Callable[[], int]) -> Any:
        def run() -> int:
            with torch.accelerator.device_index(buffer.get_device()):  # and no context on another device
                return function()

        CuFile.moved += 1
        future: Future[int] = self.threads.submit(run)
        return SimpleNamespace(get=future.result)

    def read(self, buffer: torch.Tensor, size: int, offset: int) -> int:
        got = os.pread(self.file, size, offset)
        buffer[: len(got)].copy_(torch.tensor(list(got), dtype=torch.uint8))
        torch.accelerator.synchronize(buffer.device)
        return len(got)


@pytest.fixture
def direct(accelerator: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Yield an accelerator whose memory KvikIO reaches, or a stand-in for it."""
    if accelerator.name == "cuda" and not fakecuda.is_active():
        pytest.importorskip("kvikio")
    else:
        monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace(CuFile=CuFile))
        monkeypatch.setattr(gds, "_DEVICES", {accelerator.name})
    return accelerator


def test_written_data_is_read(direct: Device, tmp_path: Path) -> None:
    with GDSFile(tmp_path / "file", "w+") as file:
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
            tensor = torch.arange(1000).remainder(7).to(dtype)
            there = torch.zeros(1000, dtype=dtype, device=direct.at())
            assert file.write(tensor.to(direct.at()), 13).wait(timeout=PATIENCE) == tensor.nbytes
            assert file.read(there, 13).wait(timeout=PATIENCE) == tensor.nbytes
            assert torch.equal(there.cpu(), tensor)
        parts = [torch.full((i,), i, dtype=torch.uint8, device=direct.at()) for i in range(5)]
        assert file.writev(parts, 5).wait(timeout=PATIENCE) == 10
        outs = [torch.zeros_like(part) for part in parts]
        assert file.readv(outs, 5).wait(timeout=PATIENCE) == 10
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(outs, parts, strict=True))


def test_unsupported_transfer_uses_plain_file(direct: Device, tmp_path: Path) -> None:
    with GDSFile(tmp_path / "file", "w+") as file:
        before = CuFile.moved
        source = torch.arange(12.0).reshape(3, 4)
        file.write(source.to(direct.at()).t()).wait(timeout=PATIENCE)
        host = torch.zeros(4, 3)
        file.read(host).wait(timeout=PATIENCE)
        assert torch.equal(host, source.t())
        assert CuFile.moved == before
        with File(tmp_path / "file") as plain, pytest.raises(OSError, match="for reading only"):
            plain.write(host)
        with pytest.raises(ValueError, match="negative"):
            file.read(torch.zeros(3, device=direct.at()), -1)


def test_streams_are_in_order(direct: Device, tmp_path: Path) -> None:
    with GDSFile(tmp_path / "file", "w+") as file:
        with direct.on(direct.stream()):
            written = file.write(direct.produce(3.0))
            assert written.released is not None
            written.released.wait(timeout=PATIENCE)
            written.wait(timeout=PATIENCE)
            target = direct.produce(1.0)
            read = file.read(target)
        read.wait(non_blocking=True, timeout=PATIENCE)
        assert direct.read(target) == 3.0
        host = torch.zeros(SIZE)
        file.read(host).wait(timeout=PATIENCE)
        assert host.unique().tolist() == [3.0]


def test_errors(direct: Device, tmp_path: Path) -> None:
    with GDSFile(tmp_path / "file", "w+") as file:
        file.write(torch.zeros(10, dtype=torch.uint8, device=direct.at())).wait(timeout=PATIENCE)
        x = torch.zeros(100, dtype=torch.uint8, device=direct.at())
        error = file.read(x, 4).exception(timeout=PATIENCE)
        assert isinstance(error, StorageError)
        assert (error.wanted, error.got, error.offset) == (100, 6, 4)
    with GDSFile(tmp_path / "file") as file:
        with pytest.raises(OSError, match="for reading only"):
            file.write(x)
        if direct.name != "cuda":
            error = file._transfer(False, [x], 0, 0).exception(timeout=PATIENCE)
            assert isinstance(error, StorageError)
            assert error.errno == errno.EBADF
    assert isinstance(file.read(x).exception(timeout=PATIENCE), InvalidStateError)


def test_missing_kvikio_is_reported(accelerator: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ImportError, match="pip install kvikio-cu13"):
        GDSFile(tmp_path / "file", "w")
