"""Closing stores and engines: the operations that it waits for, and Ctrl-C, which leaves no lock held."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture, gather, wait_all
from cudafuture.errors import StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore, disk_store
from support.child import Child
from support.patience import PATIENCE
from support.soak import soak_count
from support.storing import SMALL, make_numbered

pytestmark = pytest.mark.usefixtures("on_the_host")


def test_close_logs_no_failed_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Engine("threads", block_size=1 << 18, _faults={"io_error": 1.0, "held": True}) as engine:
        store = DiskStore(tmp_path, engine=engine)
        write = store.write("a", make_numbered(SMALL))
        closing = threading.Thread(target=store.close)
        closing.start()
        engine._native.release_held()
        closing.join(PATIENCE)
        assert isinstance(write.exception(timeout=0), StorageError)
    del write
    gc.collect()
    assert not caplog.records


def test_next_store_gets_complete_journal(tmp_path: Path) -> None:
    """A long journal is rewritten, possibly by the last write before the close."""
    keys = [f"{i} {'k' * 1000}" for i in range(50)]
    for turn in range(soak_count(200)):
        with DiskStore(tmp_path, durable=True) as store:
            while store.statistics().journal_bytes < 1 << 20:  # from there on it is made anew
                wait_all([store.write(key, torch.tensor([turn])) for key in keys])
        with DiskStore(tmp_path, durable=True) as store:
            store.write("later", torch.tensor([turn])).wait(timeout=PATIENCE)
        with DiskStore(tmp_path, durable=True) as store:
            assert sorted(store.keys()) == sorted([*keys, "later"])
            assert all(int(t) == turn for t in store.readv([*keys, "later"]).wait(timeout=PATIENCE))


# The signal comes when the main thread has given up the GIL, which it does nowhere but inside the wait.
INTERRUPT = """
import os, signal, sys, threading
import torch
from cudafuture.io import Engine, File
from cudafuture.store import DiskStore
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.setswitchinterval(1000)
folder, way = sys.argv[1:]

engine = Engine("threads", block_size=1 << 18, max_pending=2 if "room" in way else None, _faults={"held": True})
store = DiskStore(folder, engine=Engine("threads", block_size=1 << 18), durable=True)
x = torch.ones(100_000)
store.write("x", x).wait()
store.close()
store = DiskStore(folder, engine=engine, durable=True)
pending = [store.read("x", torch.empty_like(x)) for _ in range(2)]
file = File(folder + "/file", "w+", engine=engine)

WAYS = {
    "close": store.close,
    "close an engine": engine.close,
    "write without room": lambda: store.write("y", x),
    "read without room": lambda: store.read("x"),
    "write to a file without room": lambda: file.write(x, 0),
}
begin = threading.Event()
def interrupt():
    begin.wait()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    begin.set()
    WAYS[way]()
    say("not interrupted")
except KeyboardInterrupt:
    say("interrupted")
engine._native.release_held()
store.close()
with DiskStore(folder, durable=True) as store: say(store.keys())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["close", "close an engine", "write without room", "read without room", "write to a file without room"]
)
def test_ctrl_c_interrupts_and_unlocks(way: str, tmp_path: Path) -> None:
    with Child(INTERRUPT, str(tmp_path), way) as child:
        assert [child.hear(), child.hear()] == ["interrupted", "['x']"]
        assert child.end() == 0


def test_interrupted_close_releases_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def close(self) -> None:
            raise KeyboardInterrupt

    store = DiskStore(tmp_path, durable=True)
    ending = store._end.detach()
    assert ending is not None
    native, home, pid = ending[2]
    native.close()
    with pytest.raises(KeyboardInterrupt):
        disk_store._end(Interrupted(), home, pid)  # type: ignore[arg-type]
    DiskStore(tmp_path, durable=True).close()


def test_full_engine_blocks_small_writes(tmp_path: Path) -> None:
    with DiskStore(tmp_path, durable=True) as store:
        store.write("x", make_numbered(SMALL)).wait(timeout=PATIENCE)
    with Engine("threads", queue_depth=1, block_size=1 << 18, max_pending=4, _faults={"held": True}) as engine:
        store = DiskStore(tmp_path, engine=engine, durable=True)
        reads: list[CUDAFuture[torch.Tensor]] = []
        through = threading.Event()

        def read() -> None:
            for _ in range(6):
                reads.append(store.read("x"))  # noqa: PERF401 (one is held up)
            through.set()

        reading = threading.Thread(target=read)
        reading.start()
        while engine.statistics().pending < 4:
            through.wait(0)
        assert not through.is_set()
        engine._native.release_held()
        assert through.wait(PATIENCE)
        reading.join()
        assert all(torch.equal(t, make_numbered(SMALL)) for t in gather(*reads).wait(timeout=PATIENCE))
        store.close()
