"""The store of tensors by name: what was written is what is read, one version or another, never half of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cudafuture import gather, wait
from cudafuture.errors import InvalidStateError, NotFoundError, QuotaError
from cudafuture.storage import Engine, Entry, Offloader
from unit.storing import KINDS, LARGE, PATIENCE, SMALL, get, held, numbered

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.fixture
def plain(engine: Engine, tmp_path: Path) -> Iterator[Offloader]:
    with Offloader(tmp_path / "store", engine=engine) as store:
        yield store


# ---- what goes in comes out


@pytest.mark.parametrize("size", [0, 1, 7, 1023, 1024, 1025, 16384, 32767, 32768, 65536, LARGE, LARGE + 1])
def test_a_tensor_comes_back(store: Offloader, size: int) -> None:
    tensor = numbered(size)
    assert store.write("tensor", tensor).wait(timeout=PATIENCE) == tensor.nbytes
    assert torch.equal(get(store, "tensor"), tensor)
    out = torch.zeros_like(tensor)
    assert store.read("tensor", out).wait(timeout=PATIENCE) is out
    assert torch.equal(out, tensor)


def test_many_tensors_of_all_sizes_come_back(store: Offloader) -> None:
    sizes = [1, 15, 16, 17, 1000, 1024, 5000, 20000, 32768, 40000, 100000, 0] * 8
    tensors = {f"tensor {i}": numbered(size, i) for i, size in enumerate(sizes)}
    whole = sum(t.nbytes for t in tensors.values())
    assert store.writev(tensors).wait(timeout=PATIENCE) == whole
    assert store.keys() == list(tensors)
    order = sorted(tensors, key=lambda key: hash(key[::-1]))
    for key, got in zip(order, store.readv(order).wait(timeout=PATIENCE), strict=True):
        assert torch.equal(got, tensors[key]), key
    outs = [torch.zeros_like(tensors[key]) for key in order]
    for got, out in zip(store.readv(order, outs).wait(timeout=PATIENCE), outs, strict=True):
        assert got is out
    assert all(torch.equal(out, tensors[key]) for key, out in zip(order, outs, strict=True))
    assert all(torch.equal(get(store, key), tensors[key]) for key in order)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (5, 1, 7)], ids=str)
def test_dtype_and_shape_are_kept(plain: Offloader, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    plain.write("tensor", tensor).wait(timeout=PATIENCE)
    got = get(plain, "tensor")
    assert (got.dtype, got.shape) == (dtype, tensor.shape)
    assert torch.equal(got, tensor)
    assert plain.stat("tensor") == Entry("tensor", dtype, tensor.shape, tensor.nbytes)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "with gaps": lambda t: t[:, ::3],
    "a part": lambda t: t[7:200],
    "expanded": lambda t: t[:1].expand(100, -1),
    "a leaf": lambda t: t.clone().requires_grad_(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
@pytest.mark.parametrize("rows", [16, 600])
def test_views_are_stored_as_they_look(plain: Offloader, view: Callable[..., torch.Tensor], rows: int) -> None:
    tensor = view(numbered(rows * 300).reshape(rows, 300))
    plain.write("view", tensor).wait(timeout=PATIENCE)
    assert torch.equal(get(plain, "view"), tensor)
    target = torch.zeros(tensor.shape[1], tensor.shape[0]).t()
    plain.read("view", target).wait(timeout=PATIENCE)
    assert torch.equal(target, tensor)


def test_small_ones_go_together(plain: Offloader) -> None:
    tensors = {f"{i}": numbered(1024, i) for i in range(640)}
    plain.writev(tensors).wait(timeout=PATIENCE)
    assert plain.statistics().transfers <= 11  # of 256 KiB each
    plain.readv(list(tensors)).wait(timeout=PATIENCE)
    assert plain.statistics().transfers <= 23


def test_small_ones_of_many_calls_go_together_while_the_disk_is_busy(tmp_path: Path) -> None:
    engine, store = held(tmp_path)
    with engine, store:
        tensors = [numbered(16, i) for i in range(1000)]
        writes = [store.write(f"{i}", tensor) for i, tensor in enumerate(tensors)]
        engine._native.let_go()
        assert gather(*writes).wait(timeout=PATIENCE) == [64] * 1000
        assert store.statistics().transfers == 2  # the first by itself, the others when it was done
        assert torch.equal(get(store, "789"), tensors[789])


def test_a_large_new_tensor_needs_no_staging(tmp_path: Path) -> None:
    with Engine("threads", block_size=1 << 18) as engine, Offloader(tmp_path, engine=engine) as store:
        tensor = numbered(2 << 20)
        store.write("tensor", tensor).wait(timeout=PATIENCE)
        before = engine.statistics().staged
        got = get(store, "tensor")
        assert engine.statistics().staged == before
        assert torch.equal(got, tensor)
        got.untyped_storage().resize_(0)  # as of any other tensor
        got.untyped_storage().resize_(4)


# ---- versions


def test_a_key_is_replaced(store: Offloader) -> None:
    for size in (SMALL, LARGE, 0, LARGE + 5, SMALL, 1):
        tensor = numbered(size, size)
        store.write("tensor", tensor).wait(timeout=PATIENCE)
        assert torch.equal(get(store, "tensor"), tensor)
    assert (len(store), store.statistics().bytes, store.statistics().used) == (1, 4, 4)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_who_reads_while_a_key_is_replaced_gets_the_old_or_the_new(tmp_path: Path, size: int) -> None:
    engine, store = held(tmp_path)
    with engine, store:
        first = store.write("tensor", numbered(size, 1))
        engine._native.let_go()
        first.wait(timeout=PATIENCE)
        old = [store.read("tensor") for _ in range(20)]
        store.write("tensor", numbered(size, 2))
        both = [store.read("tensor") for _ in range(20)]
        store.flush().wait(timeout=PATIENCE)
        new = [store.read("tensor") for _ in range(20)]
        assert all(torch.equal(f.wait(timeout=PATIENCE), numbered(size, 1)) for f in old)
        assert {float(f.wait(timeout=PATIENCE)[0]) for f in both} <= {1.0, 2.0}
        assert all(torch.equal(f.wait(timeout=PATIENCE), numbered(size, 2)) for f in new)
        store.flush().wait(timeout=PATIENCE)
        assert store.statistics().used == store.statistics().bytes == 4 * size


def test_the_write_that_was_asked_for_last_wins(store: Offloader) -> None:
    for number in range(20):
        sizes = [LARGE, SMALL] if number % 2 else [SMALL, LARGE]  # the small one is done first
        writes = [store.write("tensor", numbered(size, number)) for size in sizes]
        wait(writes, timeout=PATIENCE)
        assert torch.equal(get(store, "tensor"), numbered(sizes[1], number))


def test_what_is_deleted_while_it_is_written_does_not_come_back(tmp_path: Path) -> None:
    engine, store = held(tmp_path)
    with engine, store:
        written = [store.write("a", numbered(LARGE)), store.write("b", numbered(SMALL))]
        deleted = [store.delete("a"), store.delete("b")]
        missing = store.delete("b")
        engine._native.let_go()
        wait([*written, *deleted], timeout=PATIENCE)
        assert [f.exception() for f in (*written, *deleted)] == [None] * 4
        assert isinstance(missing.exception(timeout=PATIENCE), NotFoundError)
        assert store.keys() == []
        assert store.statistics().used == 0
        store.write("a", numbered(3)).wait(timeout=PATIENCE)
        assert torch.equal(get(store, "a"), numbered(3))


def test_the_memory_is_released_when_it_is_not_needed(store: Offloader) -> None:
    tensors = {"small": numbered(SMALL), "large": numbered(LARGE), "empty": numbered(0)}
    for key, tensor in tensors.items():
        expected = tensor.clone()
        write = store.write(key, tensor)
        assert write.released is not None
        write.released.wait(timeout=PATIENCE)
        tensor.zero_()
        write.wait(timeout=PATIENCE)
        assert torch.equal(get(store, key), expected)


# ---- keys


@pytest.mark.parametrize(
    "key", ["k", "a/../b", "/etc/passwd", "key with spaces", "クダ", "\n", "x" * 1024, "é" * 512, "%"]
)
def test_any_name_will_do(store: Offloader, key: str, tmp_path: Path) -> None:
    store.write(key, numbered(3)).wait(timeout=PATIENCE)
    assert torch.equal(get(store, key), numbered(3))
    assert store.keys() == [key]
    assert key in store
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("key", ["", "x" * 1025, "é" * 513, "a\0b", "\0", "\ud800"])
def test_what_is_no_name_is_refused(plain: Offloader, key: str) -> None:
    for call in (lambda: plain.write(key, numbered(1)), lambda: plain.read(key), lambda: plain.delete(key)):
        with pytest.raises(ValueError, match=r"key|surrogates"):
            call()
    with pytest.raises(ValueError, match=r"key|surrogates"):
        plain.writev({"good": numbered(1), key: numbered(1)})
    assert len(plain) == 0


def test_a_tensor_has_1024_dimensions_at_most(tmp_path: Path) -> None:
    with Offloader(tmp_path, durable=True) as store:
        store.write("most", numbered(3).view([1] * 1023 + [3])).wait(timeout=PATIENCE)
        with pytest.raises(ValueError, match="1024 dimensions"):
            store.write("more", numbered(3).view([1] * 1024 + [3]))
    with Offloader(tmp_path, durable=True) as store:
        assert get(store, "most").shape == (1,) * 1023 + (3,)


def test_what_is_no_text_is_no_name(plain: Offloader) -> None:
    for key in (b"bytes", 3, None):
        with pytest.raises(TypeError, match="a key is a str"):
            plain.write(key, numbered(1))  # type: ignore[arg-type]


def test_a_key_that_is_not_there(store: Offloader) -> None:
    store.write("there", numbered(1)).wait(timeout=PATIENCE)
    for future in (store.read("nowhere"), store.readv(["there", "nowhere"]), store.delete("nowhere")):
        error = future.exception(timeout=PATIENCE)
        assert isinstance(error, NotFoundError)
        assert isinstance(error, KeyError)
        assert "nowhere" in str(error)
    with pytest.raises(NotFoundError, match="nowhere"):
        store.stat("nowhere")
    assert "nowhere" not in store
    both = store.deletev(["there", "nowhere"])
    assert isinstance(both.exception(timeout=PATIENCE), NotFoundError)
    assert store.keys() == []
    store.close()
    with pytest.raises(InvalidStateError, match="closed"):
        store.read("nowhere")


def test_keys_are_in_the_order_in_which_they_were_written_last(store: Offloader) -> None:
    for key in "abcab":
        store.write(key, numbered(1)).wait(timeout=PATIENCE)
    assert store.keys() == ["c", "a", "b"]
    store.deletev(["a", "c"]).wait(timeout=PATIENCE)
    assert store.keys() == ["b"]


# ---- what does not fit


def test_another_dtype_or_shape_is_refused(plain: Offloader) -> None:
    plain.write("tensor", numbered(6)).wait(timeout=PATIENCE)
    for out in (torch.zeros(5), torch.zeros(2, 3), torch.zeros(6, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"tensor of Float \[6\]"):
            plain.read("tensor", out)
    with pytest.raises(ValueError, match="to be filled"):
        plain.readv(["tensor"], [torch.zeros(6), torch.zeros(6)])
    with pytest.raises(ValueError, match="give it, or a device"):
        plain.read("tensor", torch.zeros(6), "cpu")
    with pytest.raises(TypeError, match=r"torch\.Tensor is wanted"):
        plain.write("tensor", [1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["ephemeral", "durable"])
def test_the_capacity_is_kept(engine: Engine, tmp_path: Path, kind: str) -> None:
    with Offloader(tmp_path, engine=engine, capacity=1 << 20, **KINDS[kind]) as store:
        tensors = {f"{i}": torch.full((1 << 15,), float(i)) for i in range(9)}  # 128 KiB each
        futures = [store.write(key, tensor) for key, tensor in tensors.items()]
        wait(futures, timeout=PATIENCE)
        assert [type(f.exception()) for f in futures] == [type(None)] * 8 + [QuotaError]
        assert store.keys() == list("01234567")  # nothing was evicted
        assert isinstance(store.write("0", tensors["8"]).exception(timeout=PATIENCE), QuotaError)
        assert torch.equal(get(store, "0"), tensors["0"])
        store.delete("3").wait(timeout=PATIENCE)
        store.write("0", tensors["8"]).wait(timeout=PATIENCE)  # both versions fit now
        assert torch.equal(get(store, "0"), tensors["8"])
        both = store.writev({"8": tensors["8"], "9": tensors["8"]})
        assert isinstance(both.exception(timeout=PATIENCE), QuotaError)
        assert (len(store), store.statistics().pending) == (7, 0)
        assert store.statistics().slab_bytes <= 1 << 20


def test_the_files_keep_within_the_capacity(engine: Engine, tmp_path: Path) -> None:
    with Offloader(tmp_path, engine=engine, capacity=1 << 20) as store:
        error = None
        for number in range(300):  # each by itself, which takes a page
            error = store.write(f"{number}", numbered(1)).exception(timeout=PATIENCE)
        assert isinstance(error, QuotaError)
        assert (len(store), store.statistics().slab_bytes, store.statistics().slabs) == (256, 1 << 20, 1)


def test_files_in_which_nothing_is_make_way_within_the_capacity(engine: Engine, tmp_path: Path) -> None:
    with Offloader(tmp_path, engine=engine, capacity=40 << 20) as store:
        store.write("small", numbered(1)).wait(timeout=PATIENCE)
        store.delete("small").wait(timeout=PATIENCE)
        assert store.statistics().slab_bytes == 16 << 20  # too little for what comes now, and what is left, too
        large = numbered(9 << 20)
        store.write("large", large).wait(timeout=PATIENCE)
        assert torch.equal(get(store, "large"), large)
        assert store.statistics().slab_bytes <= 40 << 20


def test_extents_are_used_again(store: Offloader) -> None:
    def fill(seed: int) -> None:
        store.writev({f"{i}": numbered(size, seed) for i, size in enumerate([1, 500, 3000, LARGE, 70000, 9])}).wait(
            timeout=PATIENCE
        )

    fill(0)
    fill(1)
    size = store.statistics().slab_bytes
    for seed in range(2, 30):
        fill(seed)
    assert store.statistics().slab_bytes == size
    assert store.statistics().used == store.statistics().bytes
    store.deletev(store.keys()).wait(timeout=PATIENCE)
    assert store.statistics().used == 0
    assert store.trim() == size
    assert store.statistics().slab_bytes == 0


@pytest.mark.filterwarnings("ignore:.*quantized tensor")
def test_a_quantized_tensor_is_refused(plain: Offloader) -> None:
    with pytest.raises(TypeError, match="quantized"):
        plain.write("tensor", torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8))
