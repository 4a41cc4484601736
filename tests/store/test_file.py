"""Files: a read returns the written bytes for every kind of tensor at every offset; and each kind of failure."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudafuture import CUDAFuture, InvalidStateError, gather
from cudafuture.errors import StorageError
from cudafuture.io import Engine, File
from cudafuture.store import DiskStore
from support.engines import hold_engine
from support.patience import PATIENCE
from support.storing import count_descriptors

BLOCK = 1 << 14

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Open an engine with small blocks, so that nearly every transfer takes several."""
    try:
        engine = Engine(request.param, queue_depth=4, block_size=BLOCK, threads=2)
    except StorageError as e:
        pytest.skip(str(e))
    with engine:
        yield engine


@pytest.fixture(params=["auto", False], ids=["direct", "cached"])
def file(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Iterator[File]:
    with File(tmp_path / "file", "w+", engine=engine, direct=request.param) as file:
        yield file


def finish(future: CUDAFuture[int]) -> int:
    return future.wait(timeout=PATIENCE)


def make_bytes(size: int, seed: int = 0) -> torch.Tensor:
    """Return bytes whose pattern repeats only after a long run."""
    return (torch.arange(size, dtype=torch.int64) * 2654435761 + seed).remainder(251).to(torch.uint8)


# ---- places and sizes


@pytest.mark.parametrize("offset", [0, 1, 511, 512, 4095, 4096, 4097, 3 * BLOCK - 7])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 4096, 4097, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 4095])
def test_any_range_is_written_and_read(file: File, offset: int, size: int) -> None:
    around = make_bytes(10 * BLOCK + 13, 1)
    assert finish(file.write(around)) == around.nbytes
    part = make_bytes(size, 2)
    assert finish(file.write(part, offset)) == size
    around[offset : offset + size] = part
    got = torch.zeros_like(around)
    assert finish(file.read(got)) == around.nbytes
    assert torch.equal(got, around)
    again = torch.zeros_like(part)
    assert finish(file.read(again, offset)) == size
    assert torch.equal(again, part)
    assert file.size == around.nbytes


@pytest.mark.parametrize("shift", [0, 1, 64, 512])
def test_memory_needs_no_alignment(file: File, shift: int) -> None:
    whole = make_bytes(4 * BLOCK + 2 * 4096)
    start = -whole.data_ptr() % 4096 + shift
    part = whole[start : start + 3 * BLOCK]
    assert finish(file.write(part, 4096)) == part.nbytes
    got = torch.zeros_like(whole)
    target = got[-got.data_ptr() % 4096 + shift :][: 3 * BLOCK]
    assert finish(file.read(target, 4096)) == part.nbytes
    assert torch.equal(target, part)
    assert int(got.count_nonzero()) == int(part.count_nonzero())


def test_aligned_transfer_is_not_staged(engine: Engine, file: File) -> None:
    if not file.is_direct:
        pytest.skip("goes through the page cache")
    whole = torch.zeros(4 * BLOCK + 4096, dtype=torch.uint8)
    aligned = whole[-whole.data_ptr() % 4096 :][: 4 * BLOCK]
    before = engine.statistics().staged
    finish(file.write(aligned))
    finish(file.read(aligned))
    assert engine.statistics().staged == before


def test_concurrent_writes_share_page(file: File) -> None:
    pieces = [make_bytes(700, seed) for seed in range(64)]
    gather(*(file.write(piece, 13 + 700 * i) for i, piece in enumerate(pieces))).wait(timeout=PATIENCE)
    for i, piece in enumerate(pieces):
        got = torch.zeros_like(piece)
        finish(file.read(got, 13 + 700 * i))
        assert torch.equal(got, piece), i


def test_several_tensors_form_one_range(file: File) -> None:
    parts = [make_bytes(size, size) for size in (1, 0, 4096, 5000, BLOCK, 3)]
    whole = torch.cat(parts)
    assert finish(file.writev(parts, 100)) == whole.nbytes
    got = torch.zeros_like(whole)
    assert finish(file.read(got, 100)) == whole.nbytes
    assert torch.equal(got, whole)
    back = [torch.zeros_like(part) for part in parts]
    assert finish(file.readv(back, 100)) == whole.nbytes
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))
    assert finish(file.writev([])) == finish(file.readv([])) == 0
    many = [torch.full((32,), i, dtype=torch.uint8) for i in range(200)]  # more than fit into one request
    assert finish(file.writev(many)) == 6400
    copies = [torch.zeros_like(part) for part in many]
    finish(file.readv(iter(copies)))
    assert torch.equal(torch.cat(copies), torch.cat(many))


# ---- tensors of every kind

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:BComplex32")  # of bcomplex32, which torch 2.15 has
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in QUANTIZED], ids=str)
def test_every_dtype_round_trips(file: File, dtype: torch.dtype) -> None:
    try:
        tensor = torch.empty(33, dtype=dtype)
        bits, got = tensor.view(torch.uint8), torch.empty(33, dtype=dtype)
    except (RuntimeError, NotImplementedError, TypeError):
        pytest.skip("torch makes no such tensor, or cannot show its bytes")
    bits.copy_(make_bytes(bits.nbytes))
    assert finish(file.write(tensor)) == finish(file.read(got)) == tensor.nbytes
    assert torch.equal(got.view(torch.uint8), bits)


@pytest.mark.filterwarnings("ignore:.*quantized tensor")
def test_quantized_tensor_is_stored_as_integers(file: File) -> None:
    tensor = torch.quantize_per_tensor(torch.randn(100), 0.1, 3, torch.qint8)
    got = torch.quantize_per_tensor(torch.zeros(100), 0.1, 3, torch.qint8)
    assert finish(file.write(tensor)) == finish(file.read(got)) == 100
    assert torch.equal(got.int_repr(), tensor.int_repr())


VIEWS = {
    "transposed": lambda t: t.t(),
    "every second row": lambda t: t[::2],
    "every second column": lambda t: t[:, ::2],
    "a block": lambda t: t[3:50, 5:60],
    "reversed": lambda t: t.flip(0).t(),
    "a row": lambda t: t[7],
    "a column": lambda t: t[:, 7],
    "permuted": lambda t: t.view(64, 16, 8).permute(2, 0, 1),
    "a channel last": lambda t: t.view(1, 8, 32, 32).to(memory_format=torch.channels_last),
    "a number": lambda t: t[3, 4],
    "with a gap": lambda t: t.as_strided((5, 6, 7), (1000, 3, 100)),
    "nothing": lambda t: t[:0],
    "nothing, strided": lambda t: t[:, :0].t(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
def test_views_are_stored_by_element(file: File, view: Any) -> None:
    source, target = torch.randn(64, 128), torch.zeros(64, 128)
    stored = view(source).contiguous()
    assert finish(file.write(view(source), 12)) == stored.nbytes
    plain = torch.zeros_like(stored)
    finish(file.read(plain, 12))
    assert torch.equal(plain, stored)
    expected = target.clone()
    there, wanted = view(target), view(expected)
    finish(file.read(there, 12))
    wanted.copy_(stored)
    assert torch.equal(there, wanted)
    assert torch.equal(target, expected)  # and nothing else


def test_large_views_are_gathered_by_block(file: File) -> None:
    source = torch.randn(300, 700)
    target = torch.zeros(300, 700)
    finish(file.write(source.t(), 5))
    finish(file.read(target.t(), 5))
    assert torch.equal(target, source)


def test_expanded_tensor_can_only_be_written(file: File) -> None:
    expanded = torch.arange(5.0).expand(1000, 5)
    finish(file.write(expanded))
    got = torch.zeros(1000, 5)
    finish(file.read(got))
    assert torch.equal(got, expanded)
    with pytest.raises(ValueError, match="share memory"):
        file.read(expanded)


def test_lazy_views_are_written_by_value(file: File) -> None:
    tensor = torch.randn(100, dtype=torch.complex64)
    for view in (tensor.conj(), tensor.conj().imag, tensor.conj().t()):
        got = torch.zeros(view.shape, dtype=view.dtype)
        finish(file.write(view))
        finish(file.read(got))
        assert torch.equal(got, view)
        with pytest.raises(ValueError, match="conjugates or negates"):
            file.read(view)


def test_autograd_detects_read_in_place(file: File) -> None:
    tensor = torch.ones(4)
    finish(file.write(tensor))
    leaf = torch.ones(4, requires_grad=True)
    middle = leaf * 1
    loss = (middle * middle).sum()
    finish(file.read(middle.detach()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    parameter = torch.nn.Parameter(torch.zeros(4))
    finish(file.read(parameter))
    assert parameter.tolist() == [1, 1, 1, 1]
    with torch.inference_mode():
        inference = torch.zeros(4)
        finish(file.read(inference))
    assert inference.tolist() == [1, 1, 1, 1]


def make_shrunk() -> torch.Tensor:
    """Return a tensor whose memory does not hold all elements."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(16)
    return tensor


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), TypeError),
        (lambda: torch.empty(3, device="meta"), TypeError),
        (lambda: [1.0, 2.0], TypeError),
        (lambda: None, TypeError),
        (make_shrunk, ValueError),
    ],
    ids=["sparse", "meta", "list", "None", "shrunk"],
)
def test_tensor_without_memory_is_refused(file: File, make: Any, kind: type[Exception]) -> None:
    for use in (file.read, file.write):
        with pytest.raises(kind):
            use(make())


# ---- failures


def test_short_file_error_names_sizes(file: File) -> None:
    finish(file.write(make_bytes(3 * BLOCK + 100)))
    with pytest.raises(StorageError, match=f"ended after {3 * BLOCK + 90}: there the file ends") as raised:
        finish(file.read(torch.zeros(10 * BLOCK, dtype=torch.uint8), 10))
    error = raised.value
    assert (error.path, error.offset, error.wanted, error.got) == (file.path, 10, 10 * BLOCK, 3 * BLOCK + 90)
    assert error.errno is None
    for offset in (3 * BLOCK + 100, 1 << 40):
        with pytest.raises(StorageError, match="ended after 0"):
            finish(file.read(torch.zeros(1), offset))
    file.truncate(5)
    with pytest.raises(StorageError, match="ended after 5"):
        finish(file.read(torch.zeros(2)))


@pytest.mark.parametrize("name", ["not \udcff UTF-8", "a \0 NUL"], ids=["surrogate", "NUL"])
@pytest.mark.parametrize("kind", [File, DiskStore])
def test_invalid_path_is_refused(tmp_path: Path, kind: Any, name: str) -> None:
    with pytest.raises(ValueError, match=r"the path '.*' (has a NUL|is not UTF-8)"):
        kind(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_mode_restricts_operations(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(StorageError, match="No such file") as raised:
        File(path, engine=engine)
    assert (raised.value.errno, raised.value.path) == (errno.ENOENT, str(path))
    with File(path, "w", engine=engine) as file:
        finish(file.write(torch.ones(4)))
        with pytest.raises(io.UnsupportedOperation, match="for writing only"):
            file.read(torch.ones(4))
    with File(path, engine=engine) as file:
        with pytest.raises(io.UnsupportedOperation, match="for reading only"):
            file.write(torch.ones(4))
        got = torch.zeros(4)
        assert finish(file.read(got)) == 16
    with File(path, "r+", engine=engine) as file:
        finish(file.write(torch.zeros(1), 4))
        finish(file.read(got))
    assert got.tolist() == [1, 0, 1, 1]
    with File(path, "w+", engine=engine) as file:
        assert file.size == 0
    with pytest.raises(ValueError, match="mode='a'"):
        File(path, "a", engine=engine)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="direct='yes'"):
        File(path, engine=engine, direct="yes")  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="Is a directory"):
        File(tmp_path, "r+", engine=engine)


def test_negative_offset_is_refused(file: File) -> None:
    with pytest.raises(ValueError, match="offset=-1"):
        file.read(torch.zeros(1), -1)


def test_offset_beyond_any_file_raises(file: File) -> None:
    was_direct = file.is_direct
    for size, place in ((1, (1 << 63) - 5), (1024, (1 << 63) - 8192)):
        with pytest.raises(StorageError) as raised:
            finish(file.write(torch.zeros(size), place))
        assert raised.value.errno in (errno.EFBIG, errno.EINVAL)
    for place in ((1 << 63) - 4, (1 << 63), (1 << 64) - 1):
        with pytest.raises(ValueError, match="beyond the end of the largest file"):
            file.write(torch.zeros(1), place)
    finish(file.write(torch.zeros(1024)))
    assert file.is_direct == was_direct  # it was not the file system that refused


def test_closed_file_refuses_operations(file: File) -> None:
    file.close()
    file.close()
    with pytest.raises(InvalidStateError, match="closed"):
        finish(file.write(torch.zeros(1)))


def test_last_operation_closes_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with hold_engine() as engine:
        file = File(path, "w+", engine=engine)
        assert count_descriptors(path) > 0
        in_flight = file.write(torch.ones(1000))
        while not path.stat().st_size:  # it has begun, and its result does not come yet
            pass
        file.close()
        for refused in (lambda: file.size, lambda: file.truncate(0), lambda: file.allocate(1)):
            with pytest.raises(InvalidStateError, match="the file is closed"):
                refused()
        assert isinstance(file.sync().exception(timeout=PATIENCE), InvalidStateError)
        assert count_descriptors(path) > 0
        engine._native.release_held()
        assert in_flight.wait(timeout=PATIENCE) == 4000
        assert count_descriptors(path) == 0


def test_allocate_reserves_blocks(file: File) -> None:
    file.allocate(1 << 20)
    assert file.size == 1 << 20
    assert Path(file.path).stat().st_blocks * 512 >= 1 << 20
    got = torch.ones(4)
    finish(file.read(got, 4096))
    assert not got.any()
    with pytest.raises(StorageError, match="cannot allocate"):
        file.allocate(1 << 60)


def test_sync_writes_to_disk(file: File) -> None:
    finish(file.write(torch.ones(1000)))
    assert file.sync().wait(timeout=PATIENCE) is None


def test_future_names_its_operation(file: File) -> None:
    future = file.write(torch.ones(4))
    assert file.path in repr(future)
    assert future.released is not None
    future.released.wait(timeout=PATIENCE)
    assert finish(future) == 16
    assert file.read(torch.ones(4)).released is None
    assert repr(file).startswith(f"<File '{file.path}', mode 'w+'")
