"""DiskOffloader: programs written for TensorNVMe run, and reads return the stored tensors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cudafuture.compat.tensornvme import DiskOffloader
from cudafuture.errors import TensorError
from support.engines import equal, make_tensors, size
from support.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.fixture(params=["uring", "aio", "pthread"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def offloader(tmp_path: Path) -> Iterator[DiskOffloader]:
    with DiskOffloader(tmp_path / "offload") as offloader:
        yield offloader


# ---- what TensorNVMe's users do


def test_synchronous_calls_run_in_turn(backend: str, tmp_path: Path) -> None:
    x, y = torch.rand(2, 2), torch.rand(4, 4, 4)
    copies = [x.clone(), y.clone()]
    offloader = DiskOffloader(str(tmp_path), backend=backend)
    offloader.sync_write(x)
    assert (size(x), size(y)) == (0, 256)
    offloader.sync_read(x)
    assert equal([x, y], copies)
    offloader.sync_writev([x, y])
    assert (size(x), size(y)) == (0, 0)
    offloader.sync_readv((x, y))
    assert equal([x, y], copies)


def test_asynchronous_calls_overlap(backend: str, tmp_path: Path) -> None:
    x, y = torch.rand(2, 2), torch.rand(4, 4, 4)
    copies = [x.clone(), y.clone()]
    offloader = DiskOffloader(str(tmp_path), backend=backend)
    offloader.async_write(x)
    offloader.sync_write_events()
    assert size(x) == 0
    offloader.async_read(x)
    offloader.sync_read_events()
    assert equal([x, y], copies)
    offloader.async_writev([x, y])
    offloader.synchronize()
    assert (size(x), size(y)) == (0, 0)
    offloader.async_readv([x, y])
    offloader.synchronize()
    assert equal([x, y], copies)


@pytest.mark.parametrize("n_entries", [1, 2, 16])
def test_next_read_overlaps_computation(backend: str, n_entries: int, tmp_path: Path) -> None:
    offloader = DiskOffloader(str(tmp_path), n_entries, backend)
    tensors, copies = make_tensors(10)
    for tensor in tensors:
        offloader.sync_write(tensor)
    offloader.sync_read(tensors[0])
    for i, tensor in enumerate(tensors):
        offloader.sync_read_events()
        if i + 1 < len(tensors):
            offloader.async_read(tensors[i + 1])
        tensor.mul_(2.0)
        offloader.sync_write_events()
        offloader.async_write(tensor)
    offloader.synchronize()
    assert not any(size(tensor) for tensor in tensors)
    for tensor in tensors:
        offloader.sync_read(tensor)
    assert equal(tensors, [2 * copy for copy in copies])


@pytest.mark.parametrize("n_entries", [1, 2, 16])
def test_read_callback_computes_and_writes(backend: str, n_entries: int, tmp_path: Path) -> None:
    offloader = DiskOffloader(str(tmp_path), n_entries, backend)
    tensors, copies = make_tensors(10)
    for tensor in tensors:
        offloader.sync_write(tensor)
    for tensor in tensors:

        def compute_then_offload() -> None:
            tensor.mul_(2.0)  # noqa: B023 (the loop variable is what this is about)
            offloader.async_write(tensor)  # noqa: B023

        offloader.async_read(tensor, callback=compute_then_offload)
    offloader.synchronize()
    for tensor in tensors:
        offloader.sync_read(tensor)
    assert equal(tensors, [2 * copy for copy in copies])


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(("n_entries", "ahead"), [(1, 0), (1, 2), (8, 2)])
def test_offloaded_optimizer_steps_like_plain_one(lists: bool, n_entries: int, ahead: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(30, 7, requires_grad=True) for _ in range(8)]
    copies = [w.detach().clone().requires_grad_() for w in weights]
    plain = torch.optim.Adam(copies, lr=0.1)
    offloader = DiskOffloader(tmp_path, n_entries)
    optimizer = torch.optim.Adam(weights, lr=0.1)

    def move(verb: str, weight: torch.Tensor) -> None:
        state = optimizer.state[weight]
        if lists:
            getattr(offloader, f"{verb}v")([state["exp_avg"], state["exp_avg_sq"]])
        else:
            getattr(offloader, verb)(state["exp_avg"])
            getattr(offloader, verb)(state["exp_avg_sq"])

    for step in range(4):
        for w, own in zip(weights, copies, strict=True):
            w.grad = torch.full_like(w, 0.1 * step - 0.2)
            own.grad = w.grad.clone()
        plain.step()
        if step == 0:
            optimizer.step()
        for i, w in enumerate(weights if step else ()):
            for later in weights[i : i + ahead + 1] if i == 0 else weights[i + ahead : i + ahead + 1]:
                move("async_read", later)
            offloader.sync_read_events()
            for other in weights:
                other.grad = torch.full_like(w, 0.1 * step - 0.2) if other is w else None
            optimizer.step()
            move("async_write", w)
        for w in weights if step == 0 else ():
            move("sync_write", w)
        offloader.synchronize()
    assert equal(weights, copies)


# ---- what is stored, and of what


def test_unstored_tensor_cannot_be_read(offloader: DiskOffloader) -> None:
    (x, y), copies = make_tensors(2)
    for read in (offloader.sync_read, offloader.async_read):
        with pytest.raises(RuntimeError, match="nothing is stored"):
            read(x)
    for readv in (offloader.sync_readv, offloader.async_readv):
        with pytest.raises(RuntimeError, match="nothing is stored"):
            readv([x, y])
    offloader.synchronize()
    assert equal([x, y], copies)


def test_tensor_is_read_once(offloader: DiskOffloader) -> None:
    (x,), copies = make_tensors(1)
    offloader.sync_write(x)
    future = offloader.async_read(x)
    with pytest.raises(RuntimeError, match="it can be read once"):
        offloader.async_read(x)
    assert future.wait(timeout=PATIENCE) is x
    with pytest.raises(RuntimeError, match="it can be read once"):
        offloader.sync_read(x)
    assert equal([x], copies)
    assert offloader.statistics().keys == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_list_is_read_as_written(offloader: DiskOffloader, mode: str) -> None:
    (x, y, z), copies = make_tensors(3)
    getattr(offloader, f"{mode}_writev")([x, y])
    offloader.synchronize()
    offloader.sync_write(z)
    readv = getattr(offloader, f"{mode}_readv")
    for other in ([y, x], [x], [x, y, z], [], [z]):
        with pytest.raises(RuntimeError, match="nothing is stored as a list"):
            readv(other)
    with pytest.raises(RuntimeError, match="not one tensor"):
        readv(x)
    for tensor in (x, y):
        with pytest.raises(RuntimeError, match="but as a list of tensors of 4000, 4000 bytes"):
            getattr(offloader, f"{mode}_read")(tensor)
    assert not any(size(t) for t in (x, y, z))
    readv([x, y])
    offloader.sync_read(z)
    offloader.synchronize()
    assert equal([x, y, z], copies)


def test_tensor_of_other_size_is_refused(offloader: DiskOffloader) -> None:
    x = torch.arange(8)
    offloader.sync_write(x)
    x.resize_(16).fill_(7)
    with pytest.raises(RuntimeError, match="a tensor of 128 bytes, but as a tensor of 64 bytes"):
        offloader.sync_read(x)
    assert x.eq(7).all()
    x.resize_(8)
    offloader.sync_read(x)
    assert torch.equal(x, torch.arange(8))


def test_non_contiguous_tensor_is_refused(offloader: DiskOffloader) -> None:
    x = torch.rand(4, 5)
    for bad in (x.t(), x[:, 1:], x[::2]):
        for move in (offloader.sync_write, offloader.async_write, offloader.sync_read, offloader.async_read):
            with pytest.raises(RuntimeError, match="contiguous"):
                move(bad)
        with pytest.raises(RuntimeError, match="contiguous"):
            offloader.sync_writev([torch.rand(2), bad])
    for other in (None, [x], "x", 1.0):
        with pytest.raises((TypeError, AttributeError)):
            offloader.sync_write([other])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callable without arguments"):
        offloader.async_write(x, callback=7)  # type: ignore[arg-type]
    assert size(x) == 80


def make_freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def make_shrunk() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(8)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (make_freed(), "the storage of the tensor has 0 bytes, but its elements need 16"),
        (make_shrunk(), "the storage of the tensor has 8 bytes, but its elements need 16"),
        (torch.ones(4, device="meta"), "on meta has no memory of its own"),
        (torch.ones(4).to_sparse(), "sparse_coo on cpu has no memory of its own"),
        (torch._efficientzerotensor((4,)), "on cpu has no memory of its own"),
    ],
    ids=["freed", "shrunk", "meta", "sparse", "zero"],
)
def test_tensor_without_memory_is_refused(offloader: DiskOffloader, tensor: torch.Tensor, message: str) -> None:
    for write in (offloader.sync_write, offloader.async_write, lambda t: offloader.sync_writev([t])):
        with pytest.raises(TensorError, match=message):
            write(tensor)


def test_offloaded_tensor_cannot_be_written(offloader: DiskOffloader) -> None:
    (x, y), copies = make_tensors(2)
    offloader.async_write(x)
    for write in (offloader.sync_write, offloader.async_write):
        with pytest.raises(RuntimeError, match="on disk already"):
            write(x)
    with pytest.raises(RuntimeError, match="on disk already"):
        offloader.sync_writev([y, x])
    assert size(y) == 4000
    offloader.sync_read(x)
    assert equal([x, y], copies)


def test_second_write_replaces_first(offloader: DiskOffloader) -> None:
    x = torch.zeros(1000)
    for i in range(20):
        x.untyped_storage().resize_(4000)
        x.fill_(i)
        offloader.sync_write(x)
        assert offloader.statistics().keys == 1
    offloader.sync_read(x)
    assert x.eq(19).all()
    assert offloader.statistics().keys == 0


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8, torch.complex64, torch.float8_e5m2],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (33, 5)], ids=str)
def test_any_dtype_and_shape_round_trips(offloader: DiskOffloader, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(torch.tensor(shape).prod())
    x = (torch.arange(count * dtype.itemsize) % 2).to(torch.uint8).view(dtype).reshape(shape)
    bits = x.clone().reshape(-1).view(torch.uint8)
    offloader.sync_write(x)
    assert size(x) == 0
    offloader.sync_read(x)
    assert (x.shape, x.dtype) == (shape, dtype)
    assert torch.equal(x.reshape(-1).view(torch.uint8), bits)
    y = torch.ones(3)
    offloader.sync_writev([x, y])
    offloader.sync_readv([x, y])
    assert torch.equal(x.reshape(-1).view(torch.uint8), bits)
    assert y.eq(1).all()


def test_lists_may_be_empty_or_repeat_tensors(offloader: DiskOffloader) -> None:
    offloader.sync_writev([])
    offloader.sync_readv([])
    (x,), copies = make_tensors(1)
    offloader.sync_writev([x, x])
    assert size(x) == 0
    offloader.sync_readv([x, x])
    assert equal([x], copies)


def test_view_write_leaves_other_elements(offloader: DiskOffloader) -> None:
    whole = torch.arange(100)
    part, other = whole[10:20], whole[20:40]
    offloader.sync_write(part)
    offloader.sync_write(other)
    assert size(whole) == 800
    whole.fill_(-1)
    offloader.sync_read(part)
    assert torch.equal(part, torch.arange(10, 20))
    assert whole.eq(-1).sum() == 90
    offloader.sync_write(whole)
    assert size(whole) == 0
    offloader.sync_read(whole)
    offloader.sync_read(other)
    assert torch.equal(whole[10:40], torch.arange(10, 40))
    assert whole.eq(-1).sum() == 70


def test_part_can_be_read_alone(offloader: DiskOffloader) -> None:
    whole = torch.arange(100)
    part = whole[10:20]
    offloader.sync_write(part)
    offloader.sync_write(whole)
    offloader.sync_read(part)
    assert torch.equal(part, torch.arange(10, 20))
    offloader.sync_read(whole)
    assert torch.equal(whole, torch.arange(100))


def test_foreign_memory_is_stored_and_kept(offloader: DiskOffloader) -> None:
    memory = bytearray(range(16))
    x = torch.frombuffer(memory, dtype=torch.uint8)
    offloader.sync_write(x)
    assert size(x) == 16
    memory[:] = bytes(16)
    offloader.sync_read(x)
    assert memory == bytes(range(16))


# ---- whose it is


def test_stored_content_belongs_to_memory(offloader: DiskOffloader) -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0))
    version = parameter._version
    offloader.sync_write(parameter.data)
    gc.collect()
    assert size(parameter) == 0
    offloader.sync_read(parameter)
    assert parameter.tolist() == [0, 1, 2, 3, 4, 5]
    assert parameter.requires_grad
    assert parameter._version == version
    parameter.data[0] = 7
    offloader.sync_write(parameter)
    offloader.sync_read(parameter.detach().view(2, 3))
    assert parameter.tolist() == [7, 1, 2, 3, 4, 5]


def test_unreachable_tensors_are_deleted(offloader: DiskOffloader) -> None:
    tensors, copies = make_tensors(6)
    gone = [threading.Event() for _ in tensors]
    for tensor, event in zip(tensors, gone, strict=True):  # before the offloader's: the first registered runs last
        weakref.finalize(tensor.untyped_storage(), event.set)
    for tensor in tensors[:3]:
        offloader.sync_write(tensor)
    offloader.sync_writev(tensors[3:])
    assert offloader.statistics().keys == 6
    del tensor, tensors[0]
    tensors.pop()
    gc.collect()
    assert gone[0].wait(PATIENCE)  # when the engine has released it, too
    assert gone[-1].wait(PATIENCE)
    offloader.sync_write(torch.ones(1))  # with the next operation
    assert offloader.statistics().keys == 3
    for tensor in tensors[:2]:
        offloader.sync_read(tensor)
    assert equal(tensors[:2], copies[1:3])


def test_new_tensor_reuses_no_old_content(offloader: DiskOffloader) -> None:
    for i in range(200):
        x = torch.full((10,), float(i))
        with pytest.raises(RuntimeError, match="nothing is stored"):
            offloader.sync_read(x)
        offloader.sync_write(x)
        del x
