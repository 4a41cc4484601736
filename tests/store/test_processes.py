"""Many threads on one store, many processes in one folder, processes that compete for a store, and forks."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture import CUDAFuture
from cudafuture.errors import NotFoundError, StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from support.child import Child
from support.patience import PATIENCE
from support.soak import soak_count
from support.storing import contents, expect

THREADS = 16

pytestmark = pytest.mark.usefixtures("on_the_host")


# ---- threads


class Worker:
    """A thread that writes, reads and deletes its own keys at random, and checks each read."""

    def __init__(self, store: DiskStore, number: int, steps: int) -> None:
        self.store, self.steps = store, steps
        self.numbers = random.Random(number)
        self.keys = [f"thread {number} key {i}" for i in range(8)]
        self.there: dict[str, torch.Tensor] = {}
        self.written: dict[str, list[CUDAFuture[int]]] = {key: [] for key in self.keys}
        self.reads: list[tuple[CUDAFuture[torch.Tensor], torch.Tensor]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(self.steps):
                self.numbers.choice([self.write, self.write, self.write_many, self.read, self.read, self.delete])()
            for key in self.keys:
                self.settle(key)
            self.check_reads()
        except BaseException as e:
            self.error = e

    def settle(self, key: str) -> None:
        for write in self.written[key]:
            write.wait(timeout=PATIENCE)
        self.written[key] = []

    def content(self) -> torch.Tensor:
        return contents(int(300_000 ** self.numbers.random()), self.numbers.randrange(1 << 30))

    def write(self) -> None:
        key = self.numbers.choice(self.keys)
        self.there[key] = self.content()
        self.written[key].append(self.store.write(key, self.there[key]))

    def write_many(self) -> None:
        several = {key: self.content() for key in self.numbers.sample(self.keys, 3)}
        self.there |= several
        future = self.store.writev(several)
        for key in several:
            self.written[key].append(future)

    def read(self) -> None:
        """Start a read of the current tensor. The key may be replaced or deleted before the read ends."""
        key = self.numbers.choice(self.keys)
        self.settle(key)
        if key in self.there:
            self.reads.append((self.store.read(key), self.there[key]))
        else:
            assert isinstance(self.store.read(key).exception(timeout=PATIENCE), NotFoundError)
        if len(self.reads) > 4:
            self.check_reads()

    def check_reads(self) -> None:
        for read, expected in self.reads:
            assert torch.equal(read.wait(timeout=PATIENCE), expected)
        self.reads = []

    def delete(self) -> None:
        key = self.numbers.choice(self.keys)
        deletion = self.store.delete(key)
        if self.there.pop(key, None) is None:
            assert isinstance(deletion.exception(timeout=PATIENCE), NotFoundError)
        elif self.numbers.random() < 0.5:
            deletion.wait(timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.usefixtures("frequent_switches")
def test_threads_share_one_store(engine: Engine, durable: bool, tmp_path: Path) -> None:
    with DiskStore(tmp_path, engine=engine, durable=durable) as store:
        workers = [Worker(store, i, soak_count(500)) for i in range(THREADS)]
        threads = [threading.Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker in workers:
            if worker.error is not None:
                raise worker.error
        store.flush().wait(timeout=PATIENCE)
        there = {key: tensor for worker in workers for key, tensor in worker.there.items()}
        expect(store, there)
    if durable:
        with DiskStore(tmp_path, engine=engine, durable=True) as store:
            expect(store, there)


# ---- processes

# Does what it hears, one thing after the other.
PEER = """
import json, os, sys
import torch
from cudafuture import InvalidStateError
from cudafuture.errors import StorageError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
folder, number = sys.argv[1], int(sys.argv[2])
say("here")
while True: exec(json.loads(hear()))
"""


class Peers:
    """A group of child processes that run the same code."""

    def __init__(self, children: list[Child]) -> None:
        self.children = children

    def do(self, code: str) -> None:
        for child in self.children:
            child.say(json.dumps(code))

    def hear(self) -> list[str]:
        return [child.hear() for child in self.children]


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    children = [Child(PEER, str(tmp_path), str(number)) for number in range(4)]
    try:
        peers = Peers(children)
        assert peers.hear() == ["here"] * 4
        yield peers
    finally:
        for child in children:
            child.__exit__(None, None, None)


@pytest.mark.slow
def test_ephemeral_stores_share_folder_independently(peers: Peers, tmp_path: Path) -> None:
    for _ in range(3):  # each time they sweep while others make theirs, write, or remove theirs
        peers.do(
            """
store = DiskStore(folder)
store.writev({f"{i}": torch.full((20_000,), 100 * number + i) for i in range(20)}).wait()
store.write("large", torch.full((1_000_000,), float(number))).wait()
say(len(store))
"""
        )
        assert peers.hear() == ["21"] * 4
        assert len(list(tmp_path.glob("store-*"))) == 4
        peers.do(
            """
good = all(t.eq(100 * number + i).all() for i, t in enumerate(store.readv([f"{i}" for i in range(20)]).wait()))
say(bool(good and store.read("large").wait().eq(number).all()))
store.close()
say("closed")
"""
        )
        assert peers.hear() == ["True"] * 4
        assert peers.hear() == ["closed"] * 4
        assert list(tmp_path.glob("store-*")) == []


OPEN = """
try:
    store = DiskStore(folder + "/store", durable=True)
    say(f"have it, {os.getpid()}")
except StorageError as e:
    say(f"refused, {e.errno}, {e}")
"""


@pytest.mark.slow
def test_busy_durable_store_names_owner(peers: Peers, tmp_path: Path) -> None:
    children = list(peers.children)
    for turn in range(4):
        owner = children[0]
        owner.say(json.dumps(OPEN))
        pid = owner.process.pid
        assert owner.hear() == f"have it, {pid}"
        for child in children[1:]:
            child.say(json.dumps(OPEN))
            said = child.hear()
            assert said.startswith(f"refused, {errno.EBUSY}, ")
            assert f"process {pid} " in said
        with pytest.raises(StorageError, match=f"process {pid} ") as caught:
            DiskStore(tmp_path / "store", durable=True)
        assert caught.value.errno == errno.EBUSY
        code = f"store.write('turn {turn}', torch.tensor({turn})).wait(); say(sorted(store.keys()))"
        owner.say(json.dumps(code))
        assert owner.hear() == str([f"turn {i}" for i in range(turn + 1)])
        if turn % 2:
            owner.process.kill()
            owner.end()
        else:
            owner.say(json.dumps("store.close(); say('closed')"))
            assert owner.hear() == "closed"
        children.pop(0)
    with DiskStore(tmp_path / "store", durable=True) as store:
        expect(store, {f"turn {i}": torch.tensor(i) for i in range(4)})


FIGHT = """
won = refused = 0
while won < 8:
    try:
        store = DiskStore(folder + "/store", durable=True)
    except StorageError as e:
        assert "is a durable store that process" in str(e), e
        refused += 1
        continue
    os.close(os.open(folder + "/owner", os.O_CREAT | os.O_EXCL))  # fails when there are two
    won += 1
    count = store.read("count").wait().item() if "count" in store else 0
    store.writev({"count": torch.tensor(count + 1), f"{number} {won}": torch.tensor(count)}).wait()
    os.unlink(folder + "/owner")
    store.close()
say(won)
"""


@pytest.mark.slow
def test_competing_processes_open_store_in_turn(peers: Peers, tmp_path: Path) -> None:
    peers.do(FIGHT)
    assert peers.hear() == ["8"] * 4
    with DiskStore(tmp_path / "store", durable=True) as store:
        assert store.read("count").wait(timeout=PATIENCE).item() == 32
        turns = [store.read(f"{number} {won}").wait().item() for number in range(4) for won in range(1, 9)]
        assert sorted(turns) == [*range(32)]


# ---- forks

FORK = """
import json, os, sys, torch
from cudafuture import CUDAFuture, InvalidStateError
from cudafuture.errors import StorageError
from cudafuture.store import DiskStore
folder, durable = sys.argv[1], sys.argv[2] == "True"
store = DiskStore(folder, durable=durable)
store.writev({"large": torch.arange(1_000_000), "small": torch.arange(10)}).wait()

def refused(call):
    try:
        return repr(call())
    except BaseException as e:
        return type(e).__name__

def wait_for(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

FORK_AND_END = """
for end in "sys.exit()", "store.close(); sys.exit()", "del store; sys.exit()", "os._exit(0)":
    pid = os.fork()
    if pid == 0: exec(end)
    say(wait_for(pid))
    say(torch.equal(store.read("large").wait(), torch.arange(1_000_000)))
    store.write("more", torch.ones(3)).wait()
    say(sorted(store.keys()))
    if durable: say(refused(lambda: DiskStore(folder, durable=True)))  # it still has the lock
    else: say(len([name for name in os.listdir(folder) if name.startswith("store-")]))
store.close()
"""


@pytest.mark.slow
def test_forked_child_leaves_parent_store_open(durable: bool, tmp_path: Path) -> None:
    with Child(FORK + FORK_AND_END, str(tmp_path), str(durable)) as child:
        for _ in range(4):
            assert [child.hear() for _ in range(3)] == ["0", "True", "['large', 'more', 'small']"]
            assert child.hear() == ("StorageError" if durable else "1")
        assert (child.end(), child.errors()) == (0, "")
    assert (tmp_path / "journal").exists() == durable
    assert list(tmp_path.glob("store-*")) == []


FORK_TWICE = """
pid = os.fork()
if pid == 0:
    mine = [os.open(folder + f"/mine {i}", os.O_RDWR | os.O_CREAT) for i in range(20)]  # take every number that is free
    grandchild = os.fork()
    if grandchild == 0:
        say([refused(lambda: os.write(file, b"x")) for file in mine].count("1"))
        sys.exit()
    say(wait_for(grandchild))
    sys.exit()
say(wait_for(pid))
"""


@pytest.mark.slow
def test_forked_grandchild_keeps_its_files(durable: bool, tmp_path: Path) -> None:
    with Child(FORK + FORK_TWICE, str(tmp_path), str(durable)) as child:
        assert [child.hear() for _ in range(3)] == ["20", "0", "0"]
        assert (child.end(), child.errors()) == (0, "")


FORK_AND_LEAVE = """
there, here = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(here, b"x")
    hear()
    os._exit(0)
os.read(there, 1)
say(pid)
if sys.argv[3] == "close": store.close()
say("left")
if sys.argv[3] == "kill": os.kill(os.getpid(), 9)
say(wait_for(pid))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "kill"])
def test_forked_child_holds_no_parent_lock(durable: bool, how: str, tmp_path: Path) -> None:
    with Child(FORK + FORK_AND_LEAVE, str(tmp_path), str(durable), how) as child:
        forked = int(child.hear())
        assert child.hear() == "left"
        if how == "kill":
            child.end()
        os.kill(forked, 0)  # it is there
        with DiskStore(tmp_path, durable=durable) as store:
            assert sorted(store.keys()) == (["large", "small"] if durable else [])
            assert len(list(tmp_path.glob("store-*"))) == (0 if durable else 1)
        child.say("end")
        if how == "close":
            assert child.hear() == "0"
