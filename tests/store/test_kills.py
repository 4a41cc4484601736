"""Processes killed at any moment: all writes that their futures acknowledged are whole, and no others exist.

The writers are forked from one process that has imported the library, and not used it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cudafuture import CUDAFuture, wait_all
from cudafuture.errors import NotFoundError
from cudafuture.io import Engine
from cudafuture.store import DiskStore
from support.child import Child
from support.patience import PATIENCE
from support.soak import soak_count
from support.storing import MIB, contents, engine_on, expect

pytestmark = [pytest.mark.usefixtures("on_the_host"), pytest.mark.soak, pytest.mark.slow]

Say = Callable[[object], None]


# ---- what is written


class Step(NamedTuple):
    """A write of a version of a key, or its deletion."""

    key: str
    version: int | None


class Plan(NamedTuple):
    """The steps of a writer in one round."""

    seed: int
    round: int

    def steps(self) -> list[Step]:
        numbers = random.Random(f"{self.seed} {self.round}")
        keys, count = [(KEYS, 100), (HOT_KEYS, 400), (TINY_KEYS, 2000), (HOT_KEYS, 400)][self.round % 4]
        steps: list[Step] = []
        for version in range(self.round * 10_000, self.round * 10_000 + count):
            if steps and numbers.random() < 0.4:  # at once again, while it is pending
                steps.append(Step(steps[-1].key, None if numbers.random() < 0.7 else version))
            else:
                steps.append(Step(numbers.choice(keys), None if numbers.random() < 0.1 else version))
        return steps


KEYS = [f"key {i}" for i in range(24)]
HOT_KEYS = [f"hot {i}" for i in range(8)]  # are of one size: each place is soon another one's
TINY_KEYS = [f"tiny {i} {'x' * 1000}" for i in range(40)]  # so many records that the journal is made anew meanwhile


def content_of(key: str, version: int) -> torch.Tensor:
    """Return the tensor of a version of a key: 1 byte to 1 MiB, on a logarithmic scale."""
    seed = zlib.crc32(f"{key} {version}".encode())
    most = 64 if key in TINY_KEYS else MIB
    return contents(5000 if key in HOT_KEYS else int(most ** random.Random(seed).random()), seed)


# ---- the processes that are killed


def serve(hear: Callable[[], str], say: Say) -> None:
    """Fork a process for each requested task, one after the other, and report the exit code of each."""
    while True:
        what, *arguments = json.loads(hear())
        pid = os.fork()
        if pid == 0:
            say(f"pid {os.getpid()}")
            WORK[what](say, *arguments)
            say("finished")
            signal.pause()
        say(f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")


def write_durably(say: Say, folder: str, backend: str, seed: int, number: int) -> None:
    """Run the steps of a plan, a few at a time, and report the start and the end of each."""
    store = DiskStore(folder, engine=engine_on(backend), durable=True)
    say("open")
    in_flight: deque[CUDAFuture[Any]] = deque()
    window = random.Random(f"{seed} {number}").choice([1, 4, 32])
    for i, (key, version) in enumerate(Plan(seed, number).steps()):
        if len(in_flight) == window:
            in_flight.popleft().exception()
        content = None if version is None else content_of(key, version)
        say(f"begun {i}")
        future: CUDAFuture[Any] = store.delete(key) if content is None else store.write(key, content)
        future.add_done_callback(partial(report, say, i))
        in_flight.append(future)
    store.flush().exception()


def write_atomically(say: Say, folder: str, backend: str, begin: int) -> None:
    store = DiskStore(folder, engine=engine_on(backend), durable=True)
    in_flight: deque[CUDAFuture[int]] = deque()
    for version in range(begin, begin + 10_000):
        if len(in_flight) == 3:  # with the one that is done and not yet reported, four versions may be there
            in_flight.popleft().wait()
            say(f"done {version - 3}")
        in_flight.append(store.writev({key: content_of(key, version) for key in HOT_KEYS + KEYS[:4]}, atomic=True))


def link_each_version(say: Say, folder: str, backend: str, begin: int) -> None:
    """Write a version of each key under another name, link the key to that, and delete the name."""
    store = DiskStore(folder, engine=engine_on(backend), durable=True)
    for version in range(begin, begin + 10_000):
        names = {f"{version} of {key}": key for key in HOT_KEYS}
        store.writev({name: content_of(key, version) for name, key in names.items()}).wait()
        store.link({key: name for name, key in names.items()}).wait()
        say(f"done {version}")
        store.deletev(names).wait()


def report(say: Say, i: int, future: CUDAFuture[Any]) -> None:
    error = future.exception()
    if error is None:
        say(f"done {i}")
    elif not isinstance(error, NotFoundError):  # it promises nothing
        say(f"failed {i}: {error!r}")


def keep_one_store(say: Say, folder: str, backend: str) -> None:
    store = DiskStore(folder, engine=engine_on(backend))
    store.writev({f"{i}": contents(10_000, i) for i in range(20)}).wait()
    say("open")
    signal.pause()


def make_stores(say: Say, folder: str, backend: str) -> None:
    engine = engine_on(backend)
    while True:
        with DiskStore(folder, engine=engine) as store:
            say("open")
            store.write("key", contents(10_000)).wait()
        say("closed")


WORK: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (write_durably, write_atomically, link_each_version, keep_one_store, make_stores)
}

SCRIPT = """
import sys
from store.test_kills import serve
serve(hear, say)
"""


class Killer:
    """A controller of processes that kills each one after a given number of reported lines."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.pid = 0

    def start(self, what: Callable[..., None], *arguments: object) -> None:
        self.child.say(json.dumps([what.__name__, *arguments]))
        line = self.child.hear()
        assert line.startswith("pid ")
        self.pid = int(line.split()[1])

    def listen(self, lines: int) -> list[str]:
        """Return the given number of lines, or fewer at the end of the output."""
        said: list[str] = []
        while len(said) < lines and said[-1:] != ["finished"]:
            said.append(self.child.hear())
            assert not said[-1].startswith("ended"), self.child.errors()
        return said

    def kill(self) -> list[str]:
        """Kill the process and return the lines that it reported before its death."""
        os.kill(self.pid, signal.SIGKILL)
        said = []
        while not (line := self.child.hear()).startswith("ended"):
            said.append(line)
        assert line == f"ended {-signal.SIGKILL}", self.child.errors()
        return said


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    with Child(SCRIPT) as child:
        yield Killer(child)


# ---- what is there afterwards


def find_possible_versions(steps: list[Step], said: list[str], before: dict[str, int]) -> dict[str, list[int | None]]:
    """Return the versions that each key may have now. None stands for a missing key."""
    assert not [line for line in said if line.startswith("failed")]
    states: dict[str, list[int | None]] = {key: [before.get(key)] for key in KEYS + HOT_KEYS + TINY_KEYS}
    begun = sum(line.startswith("begun") for line in said)
    places = []
    for step in steps[:begun]:
        states[step.key].append(step.version)
        places.append(len(states[step.key]) - 1)
    least = dict.fromkeys(states, 0)
    for line in said:
        if line.startswith("done"):
            i = int(line.split()[1])
            least[steps[i].key] = max(least[steps[i].key], places[i])
    return {key: versions[least[key] :] for key, versions in states.items()}


def check_versions(store: DiskStore, states: dict[str, list[int | None]]) -> dict[str, int]:
    """Return the version of each key, and check that it is whole and one of the possible versions."""
    assert set(store.keys()) <= set(states)
    there: dict[str, int] = {}
    for key, versions in states.items():
        if key not in store:
            assert None in versions, f"{key[:10]} is gone, and should be one of {versions}"
            continue
        got = store.read(key).wait(timeout=PATIENCE)
        same = [v for v in versions if v is not None and torch.equal(got, content_of(key, v))]
        assert same, f"{key[:10]} is none of {versions}"
        there[key] = same[-1]
    return there


def test_acknowledged_writes_survive_kill(engine: Engine, killer: Killer, tmp_path: Path) -> None:
    seed = 7
    moments = random.Random(seed)
    there: dict[str, int] = {}
    for number in range(soak_count(200)):
        plan = Plan(seed, number)
        steps = plan.steps()
        killer.start(write_durably, str(tmp_path), engine.backend, seed, number)
        lines = 0 if moments.random() < 0.1 else 1 + moments.randrange(2 * len(steps))  # 0: while it opens the store
        said = killer.listen(lines)
        said += killer.kill()
        with DiskStore(tmp_path, engine=engine, durable=True) as store:
            there = check_versions(store, find_possible_versions(steps, said, there))
            expect(store, {key: content_of(key, version) for key, version in there.items()})
            assert store.statistics().slab_bytes <= 128 * MIB, "what is free is not used again"


def test_kill_keeps_atomic_writes_whole(engine: Engine, killer: Killer, tmp_path: Path) -> None:
    moments, version = random.Random(3), -1
    for _ in range(soak_count(100)):
        killer.start(write_atomically, str(tmp_path), engine.backend, version + 1)
        said = killer.listen(moments.randrange(1, 12)) + killer.kill()
        done = max([version, *(int(line.split()[1]) for line in said if line.startswith("done"))])
        with DiskStore(tmp_path, engine=engine, durable=True) as store:
            first = store.read(HOT_KEYS[0]).wait(timeout=PATIENCE)
            (version,) = (v for v in range(done, done + 4) if torch.equal(first, content_of(HOT_KEYS[0], v)))
            expect(store, {key: content_of(key, version) for key in HOT_KEYS + KEYS[:4]})


def test_kill_keeps_linked_keys_whole(engine: Engine, killer: Killer, tmp_path: Path) -> None:
    moments, version = random.Random(5), -1
    for _ in range(soak_count(100)):
        killer.start(link_each_version, str(tmp_path), engine.backend, version + 1)
        said = killer.listen(moments.randrange(1, 12)) + killer.kill()
        done = max([version, *(int(line.split()[1]) for line in said if line.startswith("done"))])
        with DiskStore(tmp_path, engine=engine, durable=True) as store:
            first = store.read(HOT_KEYS[0]).wait(timeout=PATIENCE)
            (version,) = (v for v in (done, done + 1) if torch.equal(first, content_of(HOT_KEYS[0], v)))
            store.deletev({*store.keys()} - {*HOT_KEYS}).wait(timeout=PATIENCE)
            expect(store, {key: content_of(key, version) for key in HOT_KEYS})


def test_store_survives_kills_during_opening(engine: Engine, killer: Killer, tmp_path: Path) -> None:
    tensors = {key: content_of(key, 1) for key in KEYS} | {key: content_of(key, 1) for key in TINY_KEYS}
    with DiskStore(tmp_path, engine=engine, durable=True) as store:
        store.writev(tensors).wait(timeout=PATIENCE)
    in_time = 0
    for _ in range(soak_count(50)):
        killer.start(write_durably, str(tmp_path), engine.backend, 0, 0)
        said = killer.kill()
        with DiskStore(tmp_path, engine=engine, durable=True) as store:
            if "begun 0" in said:  # too late: it has begun to write
                store.deletev(store.keys()).wait(timeout=PATIENCE)
                store.writev(tensors).wait(timeout=PATIENCE)
            else:
                in_time += 1
                expect(store, tensors)
    assert in_time


def test_acknowledged_write_survives_pending_deletion(tmp_path: Path) -> None:
    """A copy of the files at that moment equals the state after a crash."""
    with Engine("threads", threads=2) as engine, DiskStore(tmp_path / "store", engine=engine, durable=True) as store:
        store.write("key", torch.tensor([1])).wait(timeout=PATIENCE)
    missing = ["missing"] * 2_000_000  # keep the deletion busy between the first key and the end
    with Engine("threads", threads=2, _faults={"held": True}) as engine:
        store = DiskStore(tmp_path / "store", engine=engine, durable=True)
        write = store.write("key", torch.tensor([2]))
        deletions: list[CUDAFuture[None]] = []
        thread = threading.Thread(target=lambda: deletions.append(store.deletev(["key", *missing])))
        thread.start()
        while "key" in store:
            os.sched_yield()
        engine._native.release_held()
        write.wait(timeout=PATIENCE)
        shutil.copytree(tmp_path / "store", tmp_path / "crashed")
        thread.join()
        assert isinstance(deletions[0].exception(timeout=PATIENCE), NotFoundError)
        store.close()
    with DiskStore(tmp_path / "crashed", durable=True) as store:
        found = store.read("key").wait(timeout=PATIENCE).item() if "key" in store else "deleted"
        assert found in (2, "deleted")
    with DiskStore(tmp_path / "store", durable=True) as store:
        assert store.keys() == []


def test_extents_are_reused_after_durable_deletion(engine: Engine, tmp_path: Path) -> None:
    """The copy of the files, made before the deletions are durable, equals the state after a crash."""
    old, new = contents(1 << 17, 1), contents(1 << 17, 2)
    names = [f"old {i}" for i in range(10_000)]
    keys = ["missing"] * 300_000 + names + ["missing"] * 5_000_000
    rounds, in_time = soak_count(60), 0
    for number in range(20 * rounds):
        if number >= rounds and in_time:
            break
        folder, crashed = tmp_path / f"{number}", tmp_path / "crashed"
        crashed.mkdir()
        store = DiskStore(folder, engine=engine, durable=True)
        store.write(names[0], old).wait(timeout=PATIENCE)
        deletions: list[CUDAFuture[None]] = []
        thread = threading.Thread(target=lambda s=store, d=deletions: d.append(s.deletev(keys)))
        thread.start()
        writes: list[CUDAFuture[int]] = []
        for name in names[1:]:  # some of these are being made durable just when they are deleted
            if names[0] not in store:
                break
            writes.append(store.write(name, old))
        wait_all([*writes, *(store.write(f"new {i}", new) for i in range(100))], timeout=PATIENCE)
        before = store.statistics().journal_bytes
        shutil.copy(folder / "journal", crashed)
        is_in_time = store.statistics().journal_bytes == before and not deletions
        thread.join()
        assert isinstance(deletions[0].exception(timeout=PATIENCE), NotFoundError)
        for slab in folder.glob("slab-*"):  # nothing was written to them since
            shutil.copy(slab, crashed)
        store.close()
        if is_in_time:
            in_time += 1
            with DiskStore(crashed, engine=engine, durable=True) as store:
                assert {f"new {i}" for i in range(100)} <= set(store.keys())
                there = store.keys()
                expect(store, {key: new if key.startswith("new") else old for key in there})
        shutil.rmtree(folder)
        shutil.rmtree(crashed)
    assert in_time


# ---- stores that are ephemeral


def homes(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("store-*")}


def test_only_stores_of_dead_processes_are_swept(engine: Engine, killer: Killer, tmp_path: Path) -> None:
    tensors = {f"{i}": contents(30_000, i) for i in range(10)}
    with DiskStore(tmp_path, engine=engine) as living:
        living.writev(tensors).wait(timeout=PATIENCE)
        mine = homes(tmp_path)
        killer.start(keep_one_store, str(tmp_path), engine.backend)
        assert killer.listen(1) == ["open"]
        (other,) = homes(tmp_path) - mine
        with DiskStore(tmp_path, engine=engine):
            assert other in homes(tmp_path)
            assert len(homes(tmp_path)) == 3
        killer.kill()
        assert homes(tmp_path) == mine | {other}
        with DiskStore(tmp_path, engine=engine):
            assert other not in homes(tmp_path)
        assert homes(tmp_path) == mine
        expect(living, tensors)
    assert homes(tmp_path) == set()


def test_incomplete_stores_are_swept(engine: Engine, killer: Killer, tmp_path: Path) -> None:
    moments = random.Random(3)
    with DiskStore(tmp_path, engine=engine) as living:
        living.write("key", contents(1000)).wait(timeout=PATIENCE)
        mine = homes(tmp_path)
        for _ in range(soak_count(100)):
            killer.start(make_stores, str(tmp_path), engine.backend)
            killer.listen(moments.randrange(12))
            killer.kill()
            DiskStore(tmp_path, engine=engine).close()
            assert homes(tmp_path) == mine
        expect(living, {"key": contents(1000)})


def test_foreign_folders_are_not_swept(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "store-front").mkdir()
    (tmp_path / "store-front" / "picture").write_bytes(b"not ours")
    with DiskStore(tmp_path / "store-7", engine=engine, durable=True) as durable:
        durable.write("key", contents(1000)).wait(timeout=PATIENCE)
        with DiskStore(tmp_path, engine=engine):
            pass
        assert (tmp_path / "store-front" / "picture").read_bytes() == b"not ours"
    with DiskStore(tmp_path / "store-7", engine=engine, durable=True) as durable:
        expect(durable, {"key": contents(1000)})
