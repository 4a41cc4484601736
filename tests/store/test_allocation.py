"""Allocation of slabs: it can take long, blocks no other operation, and runs in no thread of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.shims import compile_shim
from support.child import Child

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_the_host")]

# Notes which threads allocate, and lets an allocation wait at a FIFO, where there is one.
SHIM = r"""
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

int posix_fallocate(int file, off_t offset, off_t size) {
  char name[20] = "";
  int log = open(getenv("THREADS"), O_WRONLY | O_CREAT | O_APPEND, 0666);
  prctl(PR_GET_NAME, name);
  strcat(name, "\n");
  if (write(log, name, strlen(name)) < 0) abort();
  close(log);
  int gate = open(getenv("GATE"), O_RDONLY);
  if (gate >= 0 && read(gate, name, 1) != 0) abort();  // until the other end is closed
  if (gate >= 0) close(gate);
  return ((int (*)(int, off_t, off_t))dlsym(RTLD_NEXT, "posix_fallocate"))(file, offset, size);
}
"""

WHILE_IT_TAKES_LONG = """
import os, sys, threading, torch
from cudafuture.io import Engine
from cudafuture.store import DiskStore
backend, durable, folder = sys.argv[1:]
with Engine(backend) as engine, DiskStore(folder, engine=engine, durable=durable == "True") as store:
    store.write("first", torch.ones(1000)).wait()
    os.mkfifo(os.environ["GATE"])
    large = []
    thread = threading.Thread(target=lambda: large.append(store.write("large", torch.ones(5_000_000))))
    thread.start()
    gate = os.open(os.environ["GATE"], os.O_WRONLY)  # returns when the allocation waits at the other end
    os.unlink(os.environ["GATE"])
    say(store.read("first").wait().sum().item())
    say(store.write("second", torch.ones(10)).wait())
    say(store.delete("first").wait())
    say(store.statistics().keys)
    os.close(gate)
    thread.join()
    say(large[0].wait())
"""

# The last page of a slab is written; what is written meanwhile goes when that has ended, and has no room.
BEYOND_A_SLAB = """
import sys, torch
from cudafuture import wait_all
from cudafuture.io import Engine
from cudafuture.store import DiskStore
backend, durable, folder = sys.argv[1:]
with Engine(backend) as engine:
    for number in range(20):
        with DiskStore(f"{folder}/{number}", engine=engine, durable=durable == "True") as store:
            store.write("all but one page", torch.ones((16 << 20) - 4096, dtype=torch.uint8)).wait()
            wait_all([store.write(f"{i}", torch.full((1000,), float(i))) for i in range(10)])
            is_right = [store.read(f"{i}").wait()[0].item() for i in range(10)] == list(range(10))
            say(f"{store.statistics().slabs} {is_right}")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_shim(SHIM, tmp_path_factory.mktemp("shim"))


@pytest.fixture
def threads(shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the file to which the shim writes the names of allocating threads."""
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    monkeypatch.setenv("THREADS", str(tmp_path / "threads"))
    return tmp_path / "threads"


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_allocation_blocks_no_operation(backend: str, durable: bool, threads: Path, tmp_path: Path) -> None:
    with Child(WHILE_IT_TAKES_LONG, backend, str(durable), str(tmp_path / "store")) as child:
        assert [child.hear() for _ in range(5)] == ["1000.0", "40", "None", "1", "20000000"]
        assert (child.end(), child.errors()) == (0, "")
    assert len(threads.read_text().splitlines()) == 2


def test_engine_threads_allocate_no_slab(durable: bool, threads: Path, tmp_path: Path) -> None:
    with Child(BEYOND_A_SLAB, "threads", str(durable), str(tmp_path / "store")) as child:
        assert [child.hear() for _ in range(20)] == ["2 True"] * 20
        assert (child.end(), child.errors()) == (0, "")
    names = threads.read_text().splitlines()
    assert len(names) == 40
    assert "cudafuture-io" not in names
