"""Exit and fork of a process with storage: an exit finishes what was started, and a forked child is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from cudafuture.errors import StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from support.child import Child
from support.storing import BACKENDS, get

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_the_host")]

IMPORTS = """
import os, sys, torch
from cudafuture.compat.tensornvme import AsyncFileWriter, DiskOffloader
from cudafuture.errors import InvalidStateError
from cudafuture.io import Engine, File
from cudafuture.store import DiskStore
folder, path = sys.argv[1], sys.argv[1] + "/file"
"""


def skip_without(backend: str) -> None:
    try:
        Engine(backend).close()  # type: ignore[arg-type]
    except StorageError as e:
        pytest.skip(str(e))


# ---- exit


def expect_numbered_blocks(folder: Path) -> None:
    assert (folder / "file").read_bytes() == b"".join(bytes([i % 251]) * 8192 for i in range(200))


def expect_all_keys(folder: Path) -> None:
    with DiskStore(folder, durable=True) as store:
        assert store.keys() == [f"{i}" for i in range(2000)]
        assert float(get(store, "1999")[0]) == 1999.0


def expect_nothing(folder: Path) -> None:
    assert [p.name for p in folder.iterdir()] == []


class Exit(NamedTuple):
    """Operations that a process starts before it exits, and a check of their result."""

    operations: str
    check: Callable[[Path], None]


FILE_BLOCKS = """
file = File(path, "w", engine=Engine({backend!r}, queue_depth=2, block_size=4096))
for i in range(200):
    file.write(torch.full((8192,), i % 251, dtype=torch.uint8), i * 8192)
"""
STORE_KEYS = """
store = DiskStore(folder, durable={durable})
writes = [store.write(f"{{i}}", torch.full((1000,), float(i))) for i in range(2000)]
"""
WRITER_BLOCKS = """
writer = AsyncFileWriter(path, n_entries=64)
for i in range(200):
    writer.write_tensor(torch.full((8192,), i % 251, dtype=torch.uint8))
"""
OFFLOADED = """
offloader = DiskOffloader(folder)
tensors = [torch.ones(100_000) for _ in range(20)]
for tensor in tensors:
    offloader.async_write(tensor)
"""
EXITS = {
    "file, io_uring": Exit(FILE_BLOCKS.format(backend="io_uring"), expect_numbered_blocks),
    "file, threads": Exit(FILE_BLOCKS.format(backend="threads"), expect_numbered_blocks),
    "ephemeral store": Exit(STORE_KEYS.format(durable=False), expect_nothing),
    "durable store": Exit(STORE_KEYS.format(durable=True), expect_all_keys),
    "AsyncFileWriter": Exit(WRITER_BLOCKS, expect_numbered_blocks),
    "DiskOffloader": Exit(OFFLOADED, expect_nothing),
}


@pytest.mark.parametrize("name", EXITS)
def test_process_exit_finishes_operations(name: str, tmp_path: Path) -> None:
    for backend in BACKENDS:
        if backend in name:
            skip_without(backend)
    with Child(IMPORTS + EXITS[name].operations, str(tmp_path)) as child:
        assert (child.end(), child.errors()) == (0, "")
    EXITS[name].check(tmp_path)


# ---- fork


class Fork(NamedTuple):
    """Objects that a process has when it forks, and their use in the child and later in the parent."""

    objects: str
    refused: tuple[str, ...]  # calls of the child
    dropped: str  # by the child, which may do that
    result: str  # of the parent


FILE_OBJECTS = """
engine = Engine({backend!r})
file = File(path, "w+", engine=engine)
file.write(torch.ones(4)).wait()
out = torch.zeros(4)
"""
FILE_CALLS = ("file.read(out)", "Engine({backend!r})")
STORE_OBJECTS = """
store = DiskStore(folder, durable={durable})
store.writev({{"large": torch.arange(1_000_000), "small": torch.arange(10)}}).wait()
store.delete("large").wait()  # now trim() would have something to remove
"""
STORE_CALLS = (
    'store.write("more", torch.ones(1))',
    'store.writev({"more": torch.ones(1)})',
    'store.read("small")',
    'store.readv(["small"])',
    'store.delete("small")',
    'store.deletev(["small"])',
    "store.flush()",
    "store.trim()",
    'DiskStore(folder + "/another")',
    'DiskStore(folder + "/durable", durable=True)',
)
MULTIPART = """
store = DiskStore(folder)
write = store.begin_write("x", torch.uint8, [10])
store.write("y", torch.ones(3)).wait()
(snapshot,) = store.snapshots(["y"])
part = torch.ones(10, dtype=torch.uint8)
"""
MULTIPART_CALLS = (
    'store.begin_write("z", torch.uint8, [10])',
    "write.put(0, part)",
    "write.commit()",
    'store.snapshots(["y"])',
    "store.read_parts([(snapshot, 0, torch.empty(12, dtype=torch.uint8))])",
)
WRITER = """
writer = AsyncFileWriter(path)
writer.write(b"parent")
"""
WRITER_CALLS = ('writer.write(b"child")', "writer.synchronize()", "writer.sync_before_step()", "writer.close()")
OFFLOADER = """
offloader = DiskOffloader(folder)
x = torch.arange(4)
offloader.sync_write(x)
"""
OFFLOADER_CALLS = ("offloader.sync_read(x)", "offloader.async_read(x)", "offloader.synchronize()", "offloader.close()")


def fork_of_file(backend: str) -> Fork:
    calls = tuple(call.format(backend=backend) for call in FILE_CALLS)
    return Fork(
        FILE_OBJECTS.format(backend=backend), calls, "engine.close(); del engine, file", "file.read(out).wait()"
    )


def fork_of_store(durable: bool) -> Fork:
    result = 'torch.equal(store.read("small").wait(), torch.arange(10))'
    return Fork(STORE_OBJECTS.format(durable=durable), STORE_CALLS, "del store", result)


FORKS = {
    "file, io_uring": (fork_of_file("io_uring"), "16"),
    "file, threads": (fork_of_file("threads"), "16"),
    "ephemeral store": (fork_of_store(False), "True"),
    "durable store": (fork_of_store(True), "True"),
    "multipart write": (
        Fork(
            MULTIPART,
            MULTIPART_CALLS,
            "write.abort(); del write, snapshot",
            "(write.put(0, part), write.commit().wait())[1]",
        ),
        "10",
    ),
    "AsyncFileWriter": (Fork(WRITER, WRITER_CALLS, "del writer", "(writer.close(), open(path).read())[1]"), "parent"),
    "DiskOffloader": (
        Fork(OFFLOADER, OFFLOADER_CALLS, "del offloader", "(offloader.sync_read(x), x.tolist())[1]"),
        "[0, 1, 2, 3]",
    ),
}

IN_A_FORK = """
child = os.fork()
if child == 0:
    for call in {refused!r}:
        try:
            say(repr(eval(call)))
        except Exception as e:
            say(type(e).__name__)
    {dropped}
    sys.exit()
say(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
say(str({result}))
"""


@pytest.mark.parametrize("name", FORKS)
def test_forked_child_is_refused(name: str, tmp_path: Path) -> None:
    for backend in BACKENDS:
        if backend in name:
            skip_without(backend)
    fork, result = FORKS[name]
    script = IMPORTS + fork.objects + IN_A_FORK.format(**fork._asdict())
    with Child(script, str(tmp_path)) as child:
        said = {call: child.hear() for call in fork.refused}
        assert said == dict.fromkeys(fork.refused, "InvalidStateError")
        assert [child.hear(), child.hear()] == ["0", result]
        assert (child.end(), child.errors()) == (0, "")
