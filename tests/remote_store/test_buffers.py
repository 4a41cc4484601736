"""Buffers of requests and replies: writes wait for one without a thread, and no client delays another."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from cudafuture import CUDAFuture, executors, wait_all
from cudafuture.errors import ChecksumError, NotFoundError
from cudafuture.io import Engine
from remote_store import messages as wire
from remote_store.messages import PACK, PART
from remote_store.seams import Kept, change_of, handler_of, make_idle_engine, release_at_end, send, spoil
from rpc_ext import Session, rpc_sync, serve_store, statistics
from rpc_ext.store import _session
from rpc_ext.store.client import RemoteStore
from rpc_ext.store.service import StoreService
from support.child import run_script
from support.patience import PATIENCE
from support.rpc_callees import ME, alone, wait_for

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("remote-store")]

SMALL = 64 << 10  # bytes of a tensor, of which many travel together
IN_PACK = PACK // SMALL
HOUR = 3600.0
BUFFERS = 8  # that a client has for packs


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage before the test, and none during the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make_small(i: int) -> torch.Tensor:
    return torch.full((SMALL,), i % 251, dtype=torch.uint8)


def pack_of(name: str) -> dict[str, torch.Tensor]:
    """Return as many tensors as fit into one request, so that the client sends it at once."""
    return {f"{name}/{i}": make_small(i) for i in range(IN_PACK)}


class NoBuffers:
    """Writes that hold all buffers of a client: the service keeps their requests until the end of the block."""

    def __init__(self, remote: RemoteStore) -> None:
        self._remote = remote
        self.kept = Kept("put")

    def __enter__(self) -> NoBuffers:
        self.kept.__enter__()
        self.writes = [self._remote.writev(pack_of(f"first {i}")) for i in range(BUFFERS)]
        self._requests = [self.kept.next() for _ in self.writes]
        return self

    def __exit__(self, *error: object) -> None:
        self.kept.__exit__(*error)  # type: ignore[arg-type]
        for request in self._requests:
            request.set_result(None)


def test_writes_wait_for_buffers_without_thread(remote: RemoteStore) -> None:
    """The worker has one thread. A client that needs more buffers than exist still completes its other requests."""
    remote.write("there", make_small(1)).wait(timeout=PATIENCE)
    with NoBuffers(remote) as held:
        later = [remote.writev(pack_of(f"later {i}")) for i in range(3)]
        assert torch.equal(remote.read("there").wait(timeout=PATIENCE), make_small(1))
        assert not held.kept.has_more()
        assert not any(write.done() for write in (*held.writes, *later))
        assert remote.statistics().in_flight == (BUFFERS + len(later)) * PACK
    wait_all([*held.writes, *later], timeout=PATIENCE)
    expected = pack_of("later 2")
    read = remote.readv(expected).wait(timeout=PATIENCE)
    assert all(map(torch.equal, read, expected.values()))


def test_waiting_write_fails_at_deadline(service: StoreService) -> None:
    """Also where it waits together with one that has more time, and is written in the end."""
    tensors = list(pack_of("x").items())
    with RemoteStore(ME, namespace="kept", timeout=HOUR) as remote:
        with NoBuffers(remote) as held:
            brief = remote.writev(pack_of("brief"))
            first = remote.writev(dict(tensors[: IN_PACK // 2]))
            remote._window.seconds = 3 * HOUR
            second = remote.writev(dict(tensors[IN_PACK // 2 :]))  # with which the request is full
            assert remote.statistics().in_flight == (BUFFERS + 2) * PACK
            remote._window.look(time.perf_counter() + 2 * HOUR)
            for late in (*held.writes, brief, first):
                assert isinstance(late.exception(timeout=PATIENCE), TimeoutError)
            assert not second.done()
        assert second.wait(timeout=PATIENCE) == PACK // 2
        keys = remote.keys()
        assert {key for key in keys if not key.startswith("first ")} == {key for key, _ in tensors[IN_PACK // 2 :]}
        wait_all([remote.writev(pack_of(f"{i}")) for i in range(BUFFERS)], timeout=PATIENCE)


def test_kept_errors_hold_no_buffer(remote: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("not sent")

    with monkeypatch.context() as patch:
        patch.setattr(remote._window, "channel", SimpleNamespace(send=fail))
        writes = [remote.writev(pack_of(f"{i}")) for i in range(2 * BUFFERS)]
        errors = [write.exception(timeout=PATIENCE) for write in writes]
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert remote.writev(pack_of("x")).wait(timeout=PATIENCE) == PACK


def test_blocked_callback_thread_delays_no_write(remote: RemoteStore) -> None:
    waits: CUDAFuture[None] = CUDAFuture()
    blocked = CUDAFuture.completed(None)
    blocked.add_done_callback(lambda _: waits.wait(timeout=PATIENCE), executor=executors.callback_thread)
    try:
        with NoBuffers(remote) as held:
            later = remote.writev(pack_of("later"))
        wait_all([*held.writes, later], timeout=PATIENCE)
    finally:
        waits.set_result(None)


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, StoreService]]:
    """A service with one buffer for the replies to each client, whose disk completes nothing yet, with two tensors."""
    monkeypatch.setattr(_session, "_MOST_BUFFERED", SMALL)
    with alone(tmp_path / "rendezvous"):
        with serve_store(tmp_path / "served", durable=True), RemoteStore(ME, namespace="kept") as remote:
            remote.writev({"x": make_small(1), "y": make_small(2)}).wait(timeout=PATIENCE)
        with (
            make_idle_engine() as engine,
            serve_store(tmp_path / "served", durable=True, engine=engine) as service,
            release_at_end(engine),
        ):
            yield engine, service


def ask_for(remote: RemoteStore, key: str) -> CUDAFuture[wire.Answer]:
    """Read a key past the client's window, and past the read that its later reads wait for."""
    return send(remote, wire.GET, [change_of(key)])


def test_unsent_replies_delay_only_their_client(idle: tuple[Engine, StoreService]) -> None:
    engine, service = idle
    with (
        RemoteStore(ME, namespace="kept") as one,
        RemoteStore(ME, namespace="kept") as other,
        release_at_end(engine),
    ):
        first = ask_for(one, "x")
        wait_for(lambda: engine.statistics().pending == 1)
        second = ask_for(one, "y")
        wait_for(lambda: service.statistics().in_flight == 2 * SMALL)
        theirs = ask_for(other, "y")
        wait_for(lambda: service.statistics().in_flight == 3 * SMALL and engine.statistics().pending == 2)
        engine._native.release_held()
        assert torch.equal(first.wait(timeout=PATIENCE).data, make_small(1))
        for read in (second, theirs):
            assert torch.equal(read.wait(timeout=PATIENCE).data, make_small(2))


def test_session_end_fails_waiting_reads(idle: tuple[Engine, StoreService]) -> None:
    engine, service = idle
    with RemoteStore(ME, namespace="kept") as remote, release_at_end(engine):
        first = ask_for(remote, "x")
        wait_for(lambda: engine.statistics().pending == 1)
        second = ask_for(remote, "y")
        wait_for(lambda: service.statistics().in_flight == 2 * SMALL)
        handler_of(service).end(remote._token)
        assert "session has ended" in str(second.wait(timeout=PATIENCE).errors[0])
        assert not first.done()
        engine._native.release_held()
        assert torch.equal(first.wait(timeout=PATIENCE).data, make_small(1))


def test_scarce_calls_and_buffers_cause_no_deadlock(tmp_path: Path) -> None:
    """Requests that have their buffers wait for calls, and calls wait for buffers: both on one worker."""
    with (
        alone(tmp_path / "rendezvous", num_worker_threads=1, max_in_flight=2),
        serve_store(tmp_path / "served", memory=4 * PART, clients=2),
        RemoteStore(ME, namespace="shared") as one,
        RemoteStore(ME, namespace="shared") as other,
    ):
        large = {f"large {i}": torch.full((PART + 100,), i, dtype=torch.uint8) for i in range(2)}
        packs = {key: tensor for i in range(2 * BUFFERS) for key, tensor in pack_of(f"{i}").items()}
        wait_all([one.writev({**packs, **large}), other.writev({**packs, **large})], timeout=PATIENCE)
        mixed = [client.writev(pack_of(f"{i}")) for i in range(BUFFERS) for client in (one, other)]
        reads = [client.readv({**packs, **large}) for client in (one, other)]
        wait_all(mixed, timeout=PATIENCE)
        for read in reads:
            assert all(map(torch.equal, read.wait(timeout=PATIENCE), (*packs.values(), *large.values())))


def test_service_copies_no_tensor(worker: Session, tmp_path: Path) -> None:
    with (
        Engine() as engine,
        serve_store(tmp_path / "served", engine=engine) as service,
        RemoteStore(ME) as remote,
    ):
        if not service.store.is_direct:
            pytest.skip("goes through the page cache")
        tensor = torch.full((6 << 20,), 3, dtype=torch.uint8)
        remote.write("x", tensor).wait(timeout=PATIENCE)
        assert torch.equal(remote.read("x").wait(timeout=PATIENCE), tensor)
        assert engine.statistics().staged == 0


@pytest.mark.usefixtures("no_garbage_collection")
def test_partly_failed_replies_return_buffers(worker: Session, tmp_path: Path) -> None:
    """The session has buffers for four replies. The fifth read gets one only if the first reads left no garbage."""
    with (
        serve_store(tmp_path / "served", memory=2 * PART, clients=1),
        RemoteStore(ME, timeout=10) as remote,
    ):
        remote.write("x", torch.zeros(PART, dtype=torch.uint8)).wait(timeout=PATIENCE)
        for _ in range(6):
            assert isinstance(remote.readv(["x", "missing"]).exception(timeout=PATIENCE), NotFoundError)
        assert remote.read("x").wait(timeout=PATIENCE).nbytes == PART


@pytest.mark.usefixtures("no_garbage_collection")
def test_disk_errors_return_reply_buffers(worker: Session, tmp_path: Path) -> None:
    """The session has buffers for four replies. Each read is of two tensors together, then of each alone."""
    with (
        serve_store(tmp_path / "served", memory=2 * PART, clients=1),
        RemoteStore(ME, timeout=10) as remote,
    ):
        half = PART // 2
        tensors = {key: torch.full((half,), i, dtype=torch.uint8) for i, key in enumerate("xy")}
        remote.writev(tensors).wait(timeout=PATIENCE)
        repair = spoil(tmp_path / "served", tensors["y"])
        for _ in range(6):
            good, bad = remote.read("x"), remote.read("y")
            many = remote.readv(["x", "y"])
            assert good.wait(timeout=PATIENCE).nbytes == half
            for failed in (bad, many):
                assert isinstance(failed.exception(timeout=PATIENCE), ChecksumError)
        repair()
        assert torch.equal(remote.read("y").wait(timeout=PATIENCE), tensors["y"])


def refuse(tensor: torch.Tensor) -> NoReturn:
    raise ValueError(f"{tensor.nbytes} bytes")


@pytest.mark.usefixtures("worker", "no_garbage_collection")
def test_failed_calls_return_received_memory() -> None:
    """All calls together have more bytes than the pool of received tensors."""
    before = statistics().received_outside
    tensor = torch.zeros(PART, dtype=torch.uint8)
    for _ in range(36):
        with pytest.raises(ValueError, match=f"{PART} bytes"):
            rpc_sync(ME, refuse, (tensor,), timeout=PATIENCE)
    assert statistics().received_outside == before


EXHAUSTED = """
import sys, torch, rpc_ext
from support.patience import PATIENCE
from support.rpc_callees import ME, alone, wait_for

size = 1 << 20
tensor = torch.full((size,), 7, dtype=torch.uint8)
outside = lambda: rpc_ext.statistics().received_outside

def fetched():
    return rpc_ext.rpc_sync(ME, torch.clone, (tensor,), timeout=PATIENCE)

with alone(sys.argv[1] + "/rendezvous", receive_memory=2 * size), rpc_ext.serve_store(sys.argv[1] + "/served"):
    kept = [fetched() for _ in range(8)]
    assert outside() >= 6 * size, outside()
    assert all(torch.equal(each, tensor) and each.data_ptr() % 4096 == 0 for each in kept)
    with rpc_ext.RemoteStore(ME) as remote:
        remote.write("x", tensor).wait(timeout=PATIENCE)
        assert torch.equal(remote.read("x").wait(timeout=PATIENCE), tensor)
"""


def test_kept_received_tensors_block_no_client(tmp_path: Path) -> None:
    """In a separate process that has a small pool and keeps all of its tensors."""
    done = run_script(EXHAUSTED, str(tmp_path), patience=2 * PATIENCE)
    assert done.returncode == 0, done.stderr


def test_statistics_count_tensors_outside_pool(remote: RemoteStore) -> None:
    before = statistics().received_outside
    remote.write("x", torch.ones(PART, dtype=torch.uint8)).wait(timeout=PATIENCE)
    assert statistics().received_outside == before
