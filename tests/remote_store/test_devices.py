"""Tensors on devices in a remote store: copied through pinned memory, in stream order, without a race."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cudafuture import _C, gather, pool_stream, wait
from cudafuture.errors import ChecksumError
from cudafuture.io import digest
from cudafuture.testing import World, sim
from cudafuture.testing.sim import RaceError
from remote_store import messages as wire
from remote_store.seams import change_one_reply
from rpc_ext import RemoteStore, serve_store
from rpc_ext.store._wire import PART
from support.device_calls import LONG, calling, only, start_fill
from support.simulated import SCHEDULES

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("remote-store-devices")]

ME = "worker0"
SMALL, LARGE = 1000, PART // 4 + 100  # float32s: in a batch; in two parts


def read_to_host(remote: RemoteStore, size: int) -> None:
    remote.write("x", start_fill(1.0, size=size)).wait(timeout=LONG)
    back = remote.read("x").wait(timeout=LONG)
    assert back.is_cpu
    assert torch.equal(back, torch.ones(size))


def read_to_device(remote: RemoteStore, size: int) -> None:
    remote.write("x", start_fill(2.0, size=size)).wait(timeout=LONG)
    back = remote.read("x", device="sim:1").wait(timeout=LONG, non_blocking=True)
    assert str(back.device) == "sim:1"
    assert (only(back), back.shape) == (2.0, (size,))


def repeat_corrupted_read(remote: RemoteStore, size: int) -> None:
    remote.write("x", torch.full((size,), 5.0)).wait(timeout=LONG)
    verbs = [wire.GET] if size == SMALL else [wire.GET, wire.FETCH]
    for out, verb in itertools.product((None, start_fill(-1.0, size=size)), verbs):
        with change_one_reply(remote, verb):
            read = remote.read("x", out, None if out is not None else "sim:1")
            assert only(read.wait(timeout=LONG, non_blocking=True)) == 5.0


def read_into_pending_tensor(remote: RemoteStore, size: int) -> None:
    remote.write("x", torch.full((size,), 3.0)).wait(timeout=LONG)
    out = start_fill(-1.0, size=size)  # still being written when the read is asked for
    assert remote.read("x", out).wait(timeout=LONG, non_blocking=True) is out
    assert only(out) == 3.0


def overwrite_released_tensor(remote: RemoteStore, size: int) -> None:
    tensor = start_fill(4.0, size=size)
    write = remote.write("x", tensor)
    assert write.released is not None
    write.released.wait(timeout=LONG)
    tensor.fill_(-1.0)
    write.wait(timeout=LONG)
    assert only(remote.read("x", device="sim").wait(timeout=LONG, non_blocking=True)) == 4.0


def move_many_at_once(remote: RemoteStore, size: int) -> None:
    tensors = {f"{i}": start_fill(float(i), i % 2, size) for i in range(4)}
    remote.writev(tensors, priority=-1).wait(timeout=LONG)
    outs = [torch.empty_like(tensor) for tensor in tensors.values()]
    gather(*(remote.read(key, out, priority=-1) for key, out in zip(tensors, outs, strict=True))).wait(
        timeout=LONG, non_blocking=True
    )
    assert [only(out) for out in outs] == [0.0, 1.0, 2.0, 3.0]


def compare_digests(remote: RemoteStore, size: int) -> None:
    due = {"x": digest(torch.full((size,), 4.0, device="cpu")), "y": 1}
    tensors = {key: start_fill(4.0, size=size) for key in due}
    written = torch.zeros(2, dtype=torch.bool, device="cpu")
    write = remote.writev(tensors, digests=due, written=written)
    assert write.released is not None
    write.released.wait(timeout=LONG)
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    assert isinstance(write.exception(timeout=LONG), ChecksumError)
    assert (written.tolist(), remote.keys()) == ([True, False], ["x"])
    told = torch.zeros(1, dtype=torch.uint64, device="cpu")
    (back,) = remote.readv(["x"], [torch.empty(size, device="sim:1")], digests=told).wait(timeout=LONG)
    assert (only(back), told.tolist()) == (4.0, [due["x"]])


def move_many_in_one_call(remote: RemoteStore, size: int) -> None:
    tensors = {f"{i}": start_fill(float(i), i % 2, size) for i in range(4)}
    write = remote.writev(tensors)
    assert write.released is not None
    write.released.wait(timeout=LONG)
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    write.wait(timeout=LONG)
    outs = [start_fill(-1.0, (i + 1) % 2, size) for i in range(3)] + [torch.zeros(size)]
    assert remote.readv(list(tensors), outs).wait(timeout=LONG, non_blocking=True) == outs
    assert [only(out) for out in outs[:3]] == [0.0, 1.0, 2.0]
    assert torch.equal(outs[3], torch.full((size,), 3.0))
    assert [only(t) for t in remote.readv(["3", "1"], device="sim:1").wait(timeout=LONG, non_blocking=True)] == [3, 1]


def move_transposed(remote: RemoteStore, size: int) -> None:
    tensor = start_fill(5.0, size=2 * size).view(2, size).t()
    remote.write("x", tensor).wait(timeout=LONG)
    out = start_fill(-1.0, size=2 * size).view(2, size).t()
    assert remote.read("x", out).wait(timeout=LONG, non_blocking=True).shape == (size, 2)
    assert only(out) == 5.0


@contextlib.contextmanager
def cut_edge(edge: str) -> Iterator[None]:
    """Remove a sync edge in a block, and ignore wrong values there."""
    _C.cut_sync_edge(edge)
    try:
        with contextlib.suppress(AssertionError):
            yield
    finally:
        _C.cut_sync_edge(None)


SCENARIOS = [
    read_to_host,
    read_to_device,
    repeat_corrupted_read,
    read_into_pending_tensor,
    overwrite_released_tensor,
    move_many_at_once,
    compare_digests,
    move_many_in_one_call,
    move_transposed,
]


@pytest.fixture(scope="module")
def process() -> Iterator[World]:
    """Start a process for this module, which computes no gradient before it simulates devices."""
    with World(1) as world:
        yield world


@contextlib.contextmanager
def serve_on_devices(schedule: str, folder: Path) -> Iterator[RemoteStore]:
    """Serve a store to this process itself, on simulated devices; afterwards raise if a race was found."""
    with (
        calling(schedule, folder / "meeting"),
        serve_store(folder / "served"),
        RemoteStore(ME) as remote,
        torch.Stream("sim:0"),
    ):
        yield remote


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "pieces"])
def test_device_tensors_cause_no_race(
    process: World, tmp_path: Path, scenario: Callable[[RemoteStore, int], None], size: int, schedule: str
) -> None:
    def run() -> None:
        with serve_on_devices(schedule, tmp_path) as remote:
            scenario(remote, size)

    process.run(run)


@pytest.mark.parametrize(
    ("scenario", "edge"),
    [
        (read_to_device, "io.read_record"),
        (read_into_pending_tensor, "io.target_wait"),
        (overwrite_released_tensor, "io.source_wait"),
    ],
    ids=["device", "out", "released"],
)
def test_missing_sync_edge_is_reported(
    process: World, tmp_path: Path, scenario: Callable[[RemoteStore, int], None], edge: str
) -> None:
    def run() -> None:
        with (
            pytest.raises(RaceError, match="nothing orders the two"),
            serve_on_devices("lazy", tmp_path) as remote,
            cut_edge(edge),
        ):
            scenario(remote, SMALL)

    process.run(run)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "parts"])
def test_copies_keep_priority_and_use_pinned_memory(process: World, tmp_path: Path, size: int) -> None:
    """All pool streams of one priority are held. A copy of memory that is not pinned would block the host meanwhile."""

    def run() -> None:
        with serve_on_devices("lazy", tmp_path) as remote:
            tensor = start_fill(1.0, size=size)
            remote.write("x", tensor).wait(timeout=LONG)
            streams = {pool_stream("sim:0", -1) for _ in range(16)}
            assert {sim.priority(stream) for stream in streams} == {-1}
            holds = [sim.hold(stream) for stream in streams]
            urgent = remote.write("urgent", tensor, priority=-1)
            remote.write("y", tensor).wait(timeout=LONG)
            late = remote.read("x", device="sim:0", priority=-1)
            assert wait([late], timeout=LONG) == ({late}, set())  # it is complete, and orders no stream after it
            assert only(remote.read("x", device="sim:0").wait(timeout=LONG, non_blocking=True)) == 1.0
            assert not late.ready()
            assert not urgent.done()
            for hold in holds:
                hold.open()
            assert only(late.wait(timeout=LONG)) == 1.0
            urgent.wait(timeout=LONG)

    process.run(run)


def test_tensor_without_memory_or_streams_is_refused(process: World, tmp_path: Path) -> None:
    def run() -> None:
        with serve_on_devices("lazy", tmp_path) as remote:
            for wrong in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
                with pytest.raises(TypeError, match="no memory of its own"):
                    remote.write("x", wrong)
            with pytest.raises(ValueError, match="no streams on meta"):
                remote.read("x", device="meta")
            assert remote.keys() == []
            assert sim.races() == []

    process.run(run)
