"""Interruptions of remote operations: Ctrl-C, deadlines, garbage collections and invalid answers."""

from __future__ import annotations

import functools
import gc
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

import rpc_ext
from cudafuture import CUDAFuture, collect_all, gather, timer, wait_all
from cudafuture.errors import InvalidStateError
from remote_store import messages as wire
from remote_store.seams import HandledInPython, Kept, expect_idle, handler_of, set_timeout
from rpc_ext import RemoteStore, StoreService, rpc_async, serve_store
from rpc_ext import session as sessions
from rpc_ext._channel import Reply
from rpc_ext._destination import Destination
from rpc_ext.store import _calls as services
from rpc_ext.store._handler import RequestHandler
from rpc_ext.store._wire import PART
from support.patience import PATIENCE
from support.rpc_callees import ME, Gate, alone, pending, wait_for

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("remote-store")]

SIZES = {"small": 100, "alone": 1 << 19, "parts": PART // 4 + 10}  # elements


@pytest.fixture
def remote(service: StoreService) -> Iterator[RemoteStore]:
    """Yield a client, and check that no operation of it is pending at the end."""
    remote = RemoteStore(ME)
    yield remote
    expect_idle(remote)
    remote.close()
    assert service.statistics().clients == 0


def make_numbers(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)


def expect_works(remote: RemoteStore, *keys: str) -> None:
    """Check that keys of every size can be written, read and deleted."""
    for size in SIZES.values():
        for key in keys:
            remote.write(key, make_numbers(size)).wait(timeout=PATIENCE)
            assert torch.equal(remote.read(key).wait(timeout=PATIENCE), make_numbers(size))
    remote.deletev(keys).wait(timeout=PATIENCE)
    assert not {*keys} & {*remote.keys()}


# ---- Ctrl-C


def interrupt_once(monkeypatch: pytest.MonkeyPatch, remote: RemoteStore) -> None:
    """Raise KeyboardInterrupt when the client sends the next message."""

    def interrupt(*_: object, **__: object) -> NoReturn:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(remote._window, "channel", SimpleNamespace(send=interrupt))


def expect_interrupted(begin: Callable[[], CUDAFuture[Any]]) -> None:
    """Check that a call or its future raises KeyboardInterrupt."""
    try:
        error = begin().exception(timeout=PATIENCE)
    except KeyboardInterrupt as e:
        error = e
    assert isinstance(error, KeyboardInterrupt)


@pytest.mark.parametrize("size", SIZES)
def test_ctrl_c_in_write_leaves_nothing(remote: RemoteStore, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    tensor = make_numbers(SIZES[size])
    interrupt_once(monkeypatch, remote)
    expect_interrupted(lambda: remote.write("x", tensor))
    expect_idle(remote)
    interrupt_once(monkeypatch, remote)
    expect_interrupted(lambda: remote.writev({"x": tensor, "y": tensor}))
    expect_works(remote, "x", "y", "z")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("filled", [False, True], ids=["new", "filled"])
def test_ctrl_c_in_read_leaves_nothing(
    remote: RemoteStore, monkeypatch: pytest.MonkeyPatch, size: str, filled: bool
) -> None:
    tensor = make_numbers(SIZES[size])
    remote.write("x", tensor).wait(timeout=PATIENCE)
    interrupt_once(monkeypatch, remote)
    expect_interrupted(lambda: remote.read("x", torch.empty_like(tensor) if filled else None))
    expect_idle(remote)
    interrupt_once(monkeypatch, remote)
    expect_interrupted(
        lambda: remote.readv(["x"] * 3, [torch.empty_like(tensor) for _ in range(3)] if filled else None)
    )
    assert torch.equal(remote.read("x").wait(timeout=PATIENCE), tensor)
    expect_works(remote, "x", "y")


def test_ctrl_c_in_deletion_leaves_nothing(remote: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.write("x", make_numbers(3)).wait(timeout=PATIENCE)
    interrupt_once(monkeypatch, remote)
    expect_interrupted(lambda: remote.delete("x"))
    expect_works(remote, "x", "y")


@pytest.mark.parametrize("kind", ["put", "get"])
def test_ctrl_c_fails_only_interrupted_requests(
    remote: RemoteStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Requests that wait to travel together are sent by any thread that has made room for them."""
    keys = [f"{i}" for i in range(5)]
    remote.writev({key: make_numbers(3) for key in keys}).wait(timeout=PATIENCE)

    def ask(key: str) -> CUDAFuture[Any]:
        return remote.write(key, make_numbers(3)) if kind == "put" else remote.read(key)

    with Kept(kind) as kept:
        asked = [ask(key) for key in keys]
        first = kept.next()
    interrupt_once(monkeypatch, remote)
    first.set_result(None)
    asked[0].wait(timeout=PATIENCE)
    for future in asked[1:]:
        assert isinstance(future.exception(timeout=PATIENCE), KeyboardInterrupt)
        assert future.released is None or future.released.wait(timeout=PATIENCE) is None
    expect_works(remote, *keys)


def test_unsendable_requests_all_fail(remote: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fail one after the other in one thread, which has room for no call of a thousand others."""
    tensor, first_size = make_numbers(1 << 18), 2 * PART

    def refuse(*_: object) -> NoReturn:
        raise InvalidStateError("of the test")

    with Kept("put") as kept:
        first = remote.write("first", make_numbers(first_size // 4))  # and others, up to the window
        writes = [remote.write(f"{i}", tensor) for i in range(2000)]
        monkeypatch.setattr(remote._window, "channel", SimpleNamespace(send=refuse))
        sent = 2 + (remote.statistics().window - first_size) // tensor.nbytes  # `first` is sent in two parts
        for _ in range(sent):
            kept.next().set_result(None)
        assert first.wait(timeout=PATIENCE) == first_size
    errors = [write.exception(timeout=PATIENCE) for write in writes]
    assert isinstance(errors[-1], InvalidStateError)
    assert {type(error) for error in errors} <= {InvalidStateError, type(None)}
    monkeypatch.undo()
    expect_works(remote, "x", "y")


# ---- deadlines


@pytest.mark.parametrize("kind", ["put", "get"])
@pytest.mark.parametrize("order", [["short", "long"], ["short", "long", "longer"]], ids="-".join)
def test_batched_requests_keep_own_deadlines(remote: RemoteStore, kind: str, order: list[str]) -> None:
    """They have the same timeout. The test changes it between the calls instead of waiting."""
    remote.writev({key: make_numbers(3) for key in ("first", *order)}).wait(timeout=PATIENCE)
    times = {"first": 0.0, "short": 1.0, "long": 10.0 * PATIENCE, "longer": 0.0}  # 0: no limit

    def ask(key: str) -> CUDAFuture[Any]:
        set_timeout(remote, times[key])
        return remote.write(key, make_numbers(4)) if kind == "put" else remote.read(key)

    with Kept(kind) as kept:
        first = ask("first")
        goes_on = kept.next()
        asked = {key: ask(key) for key in order}
        goes_on.set_result(None)
        first.wait(timeout=PATIENCE)
        goes_on = kept.next()  # with all of them
        error = asked.pop("short").exception(timeout=PATIENCE)
        assert isinstance(error, TimeoutError)
        assert ME in str(error)
        assert not any(future.done() for future in asked.values())
        assert not kept.has_more()
    goes_on.set_result(None)
    wait_all(list(asked.values()), timeout=PATIENCE)
    set_timeout(remote, PATIENCE)
    expect_works(remote, "first", *order)


# ---- the end of a client


def test_closed_client_has_left_service(worker: rpc_ext.Session, tmp_path: Path) -> None:
    with serve_store(tmp_path / "served", clients=1) as service:
        for i in range(50):
            with RemoteStore(ME) as remote:
                write = remote.write("x", make_numbers(i))
            assert write.done()
            assert service.statistics().clients == 0


@pytest.mark.parametrize("released", ["while it is closed", "after that"])
def test_client_closes_while_rpc_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate, released: str
) -> None:
    refused = threading.Event()
    try_admit = Destination.try_admit

    def admit(destination: Destination, size: int) -> bool:
        is_admitted = try_admit(destination, size)
        if not is_admitted:
            refused.set()
        return is_admitted

    with (
        alone(tmp_path / "rendezvous", num_worker_threads=4, max_in_flight=1),
        serve_store(tmp_path / "served") as service,
    ):
        remote = RemoteStore(ME, timeout=PATIENCE)
        remote.write("x", make_numbers(3)).wait(timeout=PATIENCE)
        if released == "after that":
            remote._timeout = 0.1  # of the end of the session
        expect_idle(remote)
        call = rpc_async(ME, pending, (gate,), timeout=math.inf)
        assert gate.reached.wait(PATIENCE)
        monkeypatch.setattr(Destination, "try_admit", admit)
        closing = threading.Thread(target=remote.close)
        closing.start()
        if released == "while it is closed":
            assert refused.wait(PATIENCE)
        else:
            closing.join(PATIENCE)
            assert not closing.is_alive()
        gate.futures[0].set_result(1)
        assert call.wait(timeout=PATIENCE) == 1
        closing.join(PATIENCE)
        assert not closing.is_alive()
        wait_for(lambda: service.statistics().clients == 0)
        wait_for(lambda: not len(service.store))
        RemoteStore(ME).close()
        assert service.statistics().clients == 0


class Holder:
    """An object in a reference cycle, which only a garbage collection frees."""

    def __init__(self, remote: RemoteStore) -> None:
        self.remote, self.me = remote, self


@pytest.mark.parametrize("kind", ["alone", "in a cycle"])
def test_dropped_client_leaves_service(service: StoreService, kind: str) -> None:
    for _ in range(3):
        remote = RemoteStore(ME)
        remote.write("x", make_numbers(3)).wait(timeout=PATIENCE)
        if kind == "in a cycle":
            Holder(remote)
        del remote
    gc.collect()
    wait_for(lambda: service.statistics().clients == 0)
    wait_for(lambda: not len(service.store))


def test_outdated_client_makes_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bytes] = []
    end = services.end

    @functools.wraps(end)
    def note_end(service: str, token: bytes) -> None:
        ended.append(token)
        end(service, token)

    monkeypatch.setattr(services, "end", note_end)
    outlived = []
    with alone(tmp_path / "first"), serve_store(tmp_path / "served"):
        outlived += [RemoteStore(ME), RemoteStore(ME)]
    with alone(tmp_path / "second"), serve_store(tmp_path / "served") as service:
        outlived.pop().close()
        outlived.pop()
        gc.collect()
        RemoteStore(ME)  # its end is noted after that of the other
        wait_for(lambda: service.statistics().clients == 0)
        assert len(ended) == 1


@pytest.mark.parametrize("kind", ["destination", "services", "sessions", "session", "timer"])
def test_garbage_collection_causes_no_deadlock(worker: rpc_ext.Session, service: StoreService, kind: str) -> None:
    """A client that is dropped takes no lock that the thread may hold which collects it."""
    other = RemoteStore(ME)
    locks: dict[str, Any] = {
        "destination": worker.destination(ME)._lock,
        "services": services._lock,
        "sessions": handler_of(service)._sessions._lock,
        "session": sessions._lock,
        "timer": timer._timer._lock,
    }
    lock = locks[kind]

    def collect() -> None:
        with lock:
            gc.collect()
            collected.set()

    collected = threading.Event()
    gc.collect()
    gc.disable()
    try:
        Holder(RemoteStore(ME))
        collecting = threading.Thread(target=collect, daemon=True)
        collecting.start()
        has_come_back = collected.wait(PATIENCE / 2)
        if not has_come_back:
            lock.release()
        collecting.join(PATIENCE)
    finally:
        gc.enable()
    assert has_come_back
    other.close()
    wait_for(lambda: service.statistics().clients == 0)


# ---- answers that are none


ANSWERS: dict[str, tuple[bytes, list[torch.Tensor]]] = {
    "no bytes": (b"", []),
    "other bytes": (b"no answer", []),
    "an answer to more entries": wire.pack_answer(wire.PUT, 1 << 15),
    "errors that are none": (wire.ANSWER.pack(wire.VERSION, 1, 1) + wire.ERROR.pack(0, 77, 0, 0, 0, 0) + bytes(4), []),
    "an answer with a tensor": (wire.pack_answer(wire.PUT, 1)[0], [torch.zeros(3)]),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_invalid_answers_end_every_request(remote: RemoteStore, answer: str) -> None:
    for size, count in SIZES.items():
        remote.write(f"old {size}", make_numbers(count)).wait(timeout=PATIENCE)
    expect_idle(remote)

    def handle(handler: RequestHandler, body: bytes, tensors: list[torch.Tensor], reply: Reply) -> None:
        reply.send(*ANSWERS[answer])

    with HandledInPython(handle):
        writes = [remote.write(f"{size} {i}", make_numbers(SIZES[size])) for i in range(3) for size in SIZES]
        many = remote.writev({f"{i}": make_numbers(3) for i in range(3)})
        asked: list[CUDAFuture[Any]] = [*writes, many, remote.delete("x"), remote.deletev(["y", "z"])]
        asked += [remote.read(f"old {size}") for size in SIZES]
        asked += [remote.read(f"old {size}", torch.empty(count)) for size, count in SIZES.items()]
        for future in asked:
            assert isinstance(future.exception(timeout=PATIENCE), Exception)
        for write in writes:
            assert write.released is not None
            write.released.wait(timeout=PATIENCE)
    expect_works(remote, "small 0", "x")


# ---- other futures


def test_futures_of_several_services_combine(worker: rpc_ext.Session, tmp_path: Path) -> None:
    with (
        serve_store(tmp_path / "one", name="one"),
        serve_store(tmp_path / "other", name="other"),
        RemoteStore(ME, name="one") as one,
        RemoteStore(ME, name="other") as other,
        RemoteStore(ME, name="other", namespace="shared") as shared,
    ):
        remotes = one, other, shared
        for size in SIZES.values():
            tensors = [make_numbers(size) + i for i in range(3)]
            writes = [remote.write("x", tensor) for remote, tensor in zip(remotes, tensors, strict=True)]
            assert gather(*writes).wait(timeout=PATIENCE) == [4 * size] * 3
            reads = [remote.read("x") for remote in remotes]
            assert all(map(torch.equal, gather(*reads).wait(timeout=PATIENCE), tensors))
        parts = collect_all([one.read("x"), other.read("no"), shared.read("x")]).wait(timeout=PATIENCE)
        assert [part.exception() is None for part in parts] == [True, False, True]
        assert gather(one.read("x"), other.read("no")).exception(timeout=PATIENCE) is not None


@pytest.mark.parametrize("size", SIZES)
def test_write_continues_another_future(remote: RemoteStore, size: str) -> None:
    tensor = make_numbers(SIZES[size])
    called = rpc_async(ME, torch.neg, (tensor,))
    written = called.then_async(lambda done: remote.write("x", done.value()))
    read = written.then_async(lambda _: remote.read("x"))
    moved = read.then_async(lambda done: remote.write("y", 2 * done.value()))
    deleted = moved.then_async(lambda _: remote.delete("x"))
    deleted.then_async(lambda _: remote.flush()).wait(timeout=PATIENCE)
    assert torch.equal(read.wait(timeout=PATIENCE), -tensor)
    assert torch.equal(remote.read("y").wait(timeout=PATIENCE), -2 * tensor)
    assert remote.keys() == ["y"]
