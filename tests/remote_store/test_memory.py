"""Tensors without memory, or made in inference mode, on the way to another worker's disk and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import rpc_ext
from cudafuture import wait_all
from cudafuture.errors import ChecksumError
from cudafuture.io import digest
from remote_store.seams import Kept, expect_idle, make_idle_engine, release_at_end
from rpc_ext.store._wire import PART
from rpc_ext.store.client import RemoteStore
from rpc_ext.store.service import StoreService, serve_store
from support.patience import PATIENCE
from support.rpc_callees import ME, alone

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.xdist_group("remote-store")]

SIZES = pytest.mark.parametrize("size", [3, 20_000, 1 << 19, PART // 4 + 10], ids=["a few", "small", "alone", "parts"])


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_ext.Session]:
    with alone(tmp_path_factory.mktemp("rpc") / "rendezvous", num_worker_threads=4) as session:
        yield session


def make_numbers(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)


# ---- memory


def make_truncated(size: int, left: int, first: int = 0) -> torch.Tensor:
    """Return a tensor that begins at an element of its storage, and truncate the storage to `left` bytes."""
    tensor = make_numbers(first + size)[first:]
    tensor.untyped_storage().resize_(left)
    return tensor


def expect_refused(
    remote: RemoteStore,
    service: StoreService,
    size: int,
    make_bad: Callable[[], torch.Tensor],
    error: type[Exception],
    why: str,
) -> None:
    """Check that a tensor is neither sent nor filled, and that the client sends no request.

    It is made here: pytest prints the arguments of what fails, and a tensor without memory cannot be printed.
    """
    bad = make_bad()
    remote.write("there", make_numbers(size)).wait(timeout=PATIENCE)
    expect_idle(remote)
    requests, operations = service.statistics().requests, remote.statistics().operations
    for ask in (
        lambda: remote.write("bad", bad),
        lambda: remote.writev({"good": make_numbers(size), "bad": bad}),
        lambda: remote.read("there", bad),
        lambda: remote.readv(["there", "there"], [make_numbers(size), bad]),
    ):
        with pytest.raises(error, match=why):
            ask()
    assert (service.statistics().requests, remote.statistics().operations) == (requests, operations)
    assert remote.statistics().pending == 0
    assert remote.keys() == ["there"]


@SIZES
@pytest.mark.parametrize("kind", ["nothing", "a part", "all but a byte", "what is before it"])
def test_truncated_tensor_is_refused_before_sending(
    remote: RemoteStore, service: StoreService, size: int, kind: str
) -> None:
    make_bad = {
        "nothing": lambda: make_truncated(size, 0),
        "a part": lambda: make_truncated(size, 4),
        "all but a byte": lambda: make_truncated(size, 4 * size - 1),
        "what is before it": lambda: make_truncated(size, 4 * size, first=size),
    }[kind]
    expect_refused(remote, service, size, make_bad, ValueError, "storage of the tensor has")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1).expand(20_000),
        make_truncated(0, 0),
        torch.empty(0, 3),
        torch.empty(0, 5)[:, 4],
        make_numbers(100)[:10],
        make_numbers(100)[3:50:7],
        make_numbers(60).reshape(3, 4, 5).permute(2, 0, 1),
        make_numbers(50).as_strided((20, 3), (2, 1)),
    ],
    ids=["expanded", "empty", "of no rows", "of no rows at an offset", "a part", "strided", "permuted", "overlapping"],
)
def test_minimal_storage_is_accepted(remote: RemoteStore, tensor: torch.Tensor) -> None:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in sizes)
    if tensor.numel():
        tensor.untyped_storage().resize_(4 * (last + 1))
    assert remote.write("x", tensor).wait(timeout=PATIENCE) == tensor.nbytes
    assert torch.equal(remote.read("x").wait(timeout=PATIENCE), tensor)
    if tensor.is_contiguous():
        assert torch.equal(remote.read("x", tensor).wait(timeout=PATIENCE), tensor)


@SIZES
def test_fake_tensor_is_refused(remote: RemoteStore, service: StoreService, size: int) -> None:
    def make_fake() -> torch.Tensor:
        with FakeTensorMode():
            return torch.ones(size)

    expect_refused(remote, service, size, make_fake, TypeError, "memory")


@pytest.mark.parametrize("kind", ["fake", "cut off"])
def test_refused_tensor_spares_waiting_requests(tmp_path: Path, kind: str) -> None:
    if kind == "fake":
        with FakeTensorMode():
            bad = torch.ones(1000)
    else:
        bad = make_truncated(1000, 4)
    with (
        make_idle_engine() as engine,
        serve_store(tmp_path / "served", engine=engine),
        RemoteStore(ME) as remote,
        release_at_end(engine),
    ):
        writes = [remote.write("in flight", make_numbers(1000)), remote.write("waits", make_numbers(1000))]
        with pytest.raises((TypeError, ValueError)):
            remote.writev({"with the bad one": make_numbers(1000), "bad": bad})
        writes.append(remote.write("waits, too", make_numbers(1000)))
        assert not any(write.done() for write in writes)
        engine._native.release_held()
        assert wait_all(writes, timeout=PATIENCE) == [4000] * 3
        keys = ["in flight", "waits", "waits, too"]
        assert sorted(remote.keys()) == keys
        assert all(torch.equal(read, make_numbers(1000)) for read in remote.readv(keys).wait(timeout=PATIENCE))


# ---- inference mode


@SIZES
@pytest.mark.parametrize("made", [False, True], ids=["made outside", "made inside"])
@pytest.mark.parametrize("asked", [False, True], ids=["asked outside", "asked inside"])
def test_inference_tensors_can_be_filled(remote: RemoteStore, size: int, made: bool, asked: bool) -> None:
    remote.write("x", make_numbers(size)).wait(timeout=PATIENCE)
    with torch.inference_mode(made):
        outs = [torch.zeros(size) for _ in range(8)]
        strided = torch.zeros(size, 2)[:, 0]
    with torch.inference_mode(asked):
        reads = [remote.read("x", out) for out in (*outs[:5], strided)]
        many = remote.readv(["x"] * 3, outs[5:])
    for read, out in zip(reads, (*outs[:5], strided), strict=True):
        assert read.wait(timeout=PATIENCE) is out
    assert list(map(id, many.wait(timeout=PATIENCE))) == list(map(id, outs[5:]))
    for out in (*outs, strided):
        assert torch.equal(out, make_numbers(size))
        assert out.is_inference() == made


@SIZES
def test_inference_mode_writes_are_stored(remote: RemoteStore, size: int) -> None:
    with torch.inference_mode():
        writes = [remote.write(f"{i}", make_numbers(size) + i) for i in range(3)]
    writes.append(remote.write("outside", make_numbers(size)))
    wait_all(writes, timeout=PATIENCE)
    with torch.inference_mode():
        writes.append(remote.write("0", make_numbers(size) + 7))
    wait_all(writes, timeout=PATIENCE)
    for key, more in {"0": 7, "1": 1, "2": 2, "outside": 0}.items():
        assert torch.equal(remote.read(key).wait(timeout=PATIENCE), make_numbers(size) + more)


@SIZES
def test_reads_outside_inference_mode_return_normal_tensors(remote: RemoteStore, size: int) -> None:
    """Also tensors in one request with reads that were started inside of inference mode."""
    filler = torch.zeros(250_000)  # four of it fill a request
    remote.writev({"x": make_numbers(size), "filler": filler}).wait(timeout=PATIENCE)
    with Kept("get") as kept:
        with torch.inference_mode():
            inside = [remote.read("x")]
        goes_on = kept.next()
    outside = [remote.read("x"), remote.read("x", torch.empty(size))]
    many = remote.readv(["x", "x"])
    outs = [torch.empty_like(filler) for _ in range(5)]
    with torch.inference_mode():
        inside += [remote.read("x")]
        filled = [remote.read("filler", out) for out in outs]
    goes_on.set_result(None)
    wait_all(filled, timeout=PATIENCE)
    for tensor in [*wait_all(outside, timeout=PATIENCE), *many.wait(timeout=PATIENCE)]:
        assert not tensor.is_inference()
        assert torch.equal(tensor, make_numbers(size))
        (2 * tensor.requires_grad_()).sum().backward()
        assert tensor.grad is not None
    for tensor in wait_all(inside, timeout=PATIENCE):
        assert torch.equal(tensor, make_numbers(size))


# ---- digests


@SIZES
def test_tensor_changed_in_waiting_write_is_refused(tmp_path: Path, size: int) -> None:
    tensor, before = make_numbers(size), make_numbers(2 * PART // 4)
    with (
        serve_store(tmp_path / "store", name="narrow", memory=2 * PART, clients=1) as service,
        RemoteStore(ME, name="narrow") as remote,
    ):
        with Kept("put") as kept:
            first = remote.write("x", before)
            parts = kept.next(), kept.next()  # more bytes do not fit into the window
            write = remote.writev({"y": make_numbers(4), "x": tensor}, digests={"x": digest(tensor)})
            tensor[-1] += 1
            assert not kept.has_more()
        for part in parts:
            part.set_result(None)
        first.wait(timeout=PATIENCE)
        with pytest.raises(ChecksumError, match="write x"):
            write.wait(timeout=PATIENCE)
        assert torch.equal(remote.read("x").wait(timeout=PATIENCE), before)
        assert torch.equal(remote.read("y").wait(timeout=PATIENCE), make_numbers(4))
        assert service.statistics().refused == 0


@SIZES
def test_tensor_changed_in_transit_is_never_torn(remote: RemoteStore, size: int) -> None:
    tensor = make_numbers(size)
    remote.write("x", make_numbers(5)).wait(timeout=PATIENCE)
    with Kept("put") as kept:
        write = remote.writev({"x": tensor}, digests={"x": digest(tensor)})
        parts = [kept.next() for _ in range(math.ceil(tensor.nbytes / PART))]
        tensor[-1] += 1
    for part in parts:
        part.set_result(None)
    error = write.exception(timeout=PATIENCE)
    assert error is None or isinstance(error, ChecksumError)
    tensor[-1] -= 1
    assert torch.equal(remote.read("x").wait(timeout=PATIENCE), tensor if error is None else make_numbers(5))


def test_tensor_changed_between_parts_is_refused(tmp_path: Path) -> None:
    tensor = make_numbers(2 * PART // 4 + 10)
    expected = digest(tensor)
    with (
        serve_store(tmp_path / "store", name="narrow", memory=2 * PART, clients=1) as service,
        RemoteStore(ME, name="narrow") as remote,
    ):
        with Kept("put") as kept:
            write = remote.writev({"x": tensor}, digests={"x": expected})
            first, second = kept.next(), kept.next()  # more bytes do not fit into the window
            tensor[-1] += 1
        first.set_result(None)
        second.set_result(None)
        with pytest.raises(ChecksumError, match="write x"):
            write.wait(timeout=PATIENCE)
        assert "x" not in remote
        tensor[-1] -= 1
        remote.writev({"x": tensor}, digests={"x": expected}).wait(timeout=PATIENCE)
        assert torch.equal(remote.read("x").wait(timeout=PATIENCE), tensor)
        assert service.statistics().refused == 0
