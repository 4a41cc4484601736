"""What every store does, wherever its tensors are: here, on several disks, with another worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc_ext
from cudafuture import CUDAFuture, wait_all
from cudafuture.errors import ChecksumError, InvalidStateError, NotFoundError
from cudafuture.storage import Entry, Offloader, ShardedOffloader, Store, digest
from rpc_ext import RemoteOffloader, serve_offload
from unit.storing import BACKENDS, KINDS, LARGE, SMALL, engine_on, numbered
from world.rpc_callees import ME, PATIENCE, alone

pytestmark = pytest.mark.xdist_group("store-contract")

PIECE = 16 << 20  # bytes that travel at once

LOCAL = [f"{kind}, {backend}" for kind in KINDS for backend in BACKENDS]
ELSEWHERE = ["sharded", "remote", "remote, durable", "sharded, here and elsewhere"]


@pytest.fixture(autouse=True, scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc_ext.Session]:
    with alone(tmp_path_factory.mktemp("rpc") / "rendezvous", num_worker_threads=4) as session:
        yield session


@pytest.fixture(params=LOCAL + ELSEWHERE)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, tmp_path: Path) -> Iterator[Store]:
    with contextlib.ExitStack() as stack:

        def local(name: str, **options: Any) -> Offloader:
            return stack.enter_context(Offloader(tmp_path / name, **options))

        def remote(**options: Any) -> RemoteOffloader:
            stack.enter_context(serve_offload(tmp_path / "served", **options))
            return stack.enter_context(RemoteOffloader(ME))

        made: Store
        if kind in LOCAL:
            options, backend = kind.split(", ")
            made = local("store", engine=stack.enter_context(engine_on(backend)), **KINDS[options])
        elif kind == "sharded":
            made = ShardedOffloader([local("one"), local("another"), local("third")])
        elif kind == "sharded, here and elsewhere":
            made = ShardedOffloader({"here": local("here"), "there": remote()})
        else:
            made = remote(durable="durable" in kind)
        yield made


def get(store: Store, key: str) -> torch.Tensor:
    return store.read(key).wait(timeout=PATIENCE)


# ---- what goes in comes out

SIZES = [
    0,
    1,
    7,
    1023,
    1024,
    1025,
    16384,
    32767,
    32768,
    65536,
    LARGE,
    LARGE + 1,
    PIECE // 4,
    PIECE // 4 + 1,
]  # float32s


@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_comes_back(store: Store, size: int) -> None:
    tensor = numbered(size)
    assert store.write("tensor", tensor).wait(timeout=PATIENCE) == tensor.nbytes
    assert torch.equal(get(store, "tensor"), tensor)
    out = torch.full_like(tensor, -1)
    assert store.read("tensor", out).wait(timeout=PATIENCE) is out
    assert torch.equal(out, tensor)
    assert torch.equal(store.read("tensor", device="cpu", priority=-1).wait(timeout=PATIENCE), tensor)
    assert store.stat("tensor") == Entry("tensor", torch.float32, torch.Size([size]), 4 * size)


def test_many_tensors_of_all_sizes_come_back(store: Store) -> None:
    sizes = [1, 15, 16, 17, 1000, 1024, 5000, 20000, 32768, 40000, 100000, 0] * 8
    tensors = {f"tensor {i}": numbered(size, i) for i, size in enumerate(sizes)}
    assert store.writev(tensors).wait(timeout=PATIENCE) == sum(t.nbytes for t in tensors.values())
    assert sorted(store.keys()) == sorted(tensors)
    assert len(store) == len(tensors)
    order = sorted(tensors, key=lambda key: key[::-1])
    for key, got in zip(order, store.readv(order).wait(timeout=PATIENCE), strict=True):
        assert torch.equal(got, tensors[key]), key
    outs = [torch.zeros_like(tensors[key]) for key in order]
    for got, out in zip(store.readv(order, outs).wait(timeout=PATIENCE), outs, strict=True):
        assert got is out
    assert all(torch.equal(out, tensors[key]) for key, out in zip(order, outs, strict=True))
    assert [t.tolist() for t in store.readv([order[0]] * 2).wait(timeout=PATIENCE)] == [tensors[order[0]].tolist()] * 2
    store.deletev(order[::2]).wait(timeout=PATIENCE)
    assert sorted(store.keys()) == sorted(order[1::2])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.uint16], ids=str
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (5, 1, 7)], ids=str)
def test_dtype_and_shape_are_kept(store: Store, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).remainder(2).view(shape).to(dtype)
    store.write("tensor", tensor).wait(timeout=PATIENCE)
    got = get(store, "tensor")
    assert (got.dtype, got.shape) == (dtype, tensor.shape)
    assert torch.equal(got, tensor)
    assert store.stat("tensor") == Entry("tensor", dtype, tensor.shape, tensor.nbytes)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "with gaps": lambda t: t[:, ::3],
    "a part": lambda t: t[7:200],
    "expanded": lambda t: t[:1].expand(100, -1),
    "a leaf": lambda t: t.clone().requires_grad_(),
    "conjugate": lambda t: torch.complex(t, t + 1).conj(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
@pytest.mark.parametrize("rows", [16, 600])
def test_views_are_stored_as_they_look(store: Store, view: Callable[..., torch.Tensor], rows: int) -> None:
    tensor = view(numbered(rows * 300).reshape(rows, 300))
    store.write("view", tensor).wait(timeout=PATIENCE)
    assert torch.equal(get(store, "view"), tensor)
    target = torch.zeros(tensor.shape[1], tensor.shape[0], dtype=tensor.dtype).t()
    store.read("view", target).wait(timeout=PATIENCE)
    assert torch.equal(target, tensor)


def test_a_key_is_replaced(store: Store) -> None:
    for size in (SMALL, LARGE, 0, LARGE + 5, SMALL, PIECE // 4 + 5, 1):
        tensor = numbered(size, size)
        store.write("tensor", tensor).wait(timeout=PATIENCE)
        assert torch.equal(get(store, "tensor"), tensor)
    assert (len(store), store.keys()) == (1, ["tensor"])


def test_the_write_that_was_asked_for_last_wins(store: Store) -> None:
    for number in range(20):
        sizes = [LARGE, SMALL] if number % 2 else [SMALL, LARGE]  # the small one is done first
        writes = [store.write("tensor", numbered(size, number)) for size in sizes]
        wait_all(writes, timeout=PATIENCE)
        assert torch.equal(get(store, "tensor"), numbered(sizes[-1], number))
        wait_all([store.write("tensor", numbered(LARGE)), store.delete("tensor")], timeout=PATIENCE)
        assert "tensor" not in store


@pytest.mark.parametrize("size", [3, LARGE, PIECE // 4 + 1])
def test_the_memory_is_released_when_it_is_not_needed(store: Store, size: int) -> None:
    tensor = numbered(size)
    write = store.write("tensor", tensor)
    assert write.released is not None
    write.released.wait(timeout=PATIENCE)
    tensor.zero_()
    write.wait(timeout=PATIENCE)
    assert torch.equal(get(store, "tensor"), numbered(size))
    assert store.read("tensor").released is None


# ---- digests and outcomes


def test_a_tensor_is_written_only_with_the_digest_that_it_must_have(store: Store) -> None:
    sizes = [0, 1, 1000, LARGE, PIECE // 4 + 1]
    tensors = {f"{i}": numbered(sizes[i % 5], i) for i in range(15)}
    expected = {key: digest(tensor) for key, tensor in tensors.items()}
    written = torch.zeros(15, dtype=torch.bool)
    store.writev(tensors, digests=expected, written=written).wait(timeout=PATIENCE)
    assert written.all()
    others = {key: tensor + 1 for key, tensor in tensors.items()}
    sums = {key: digest(others[key]) for key in ("0", "5", "7")} | {key: expected[key] for key in ("2", "3", "4")}
    failed = store.writev(others, digests=sums, written=written)
    assert isinstance(failed.exception(timeout=PATIENCE), ChecksumError)
    assert failed.released is not None
    failed.released.wait(timeout=PATIENCE)
    assert written.tolist() == [i not in (2, 3, 4) for i in range(15)]
    for i, (key, tensor) in enumerate(tensors.items()):
        assert torch.equal(get(store, key), tensor if i in (2, 3, 4) else others[key]), key


def test_of_what_is_read_digests_are_told(store: Store) -> None:
    tensors = {f"{i}": numbered(size, i) for i, size in enumerate([0, 1, 1000, LARGE, PIECE // 4 + 1] * 2)}
    store.writev(tensors).wait(timeout=PATIENCE)
    keys = sorted(tensors, reverse=True)
    for outs in (None, [torch.zeros_like(tensors[key]) for key in keys]):
        told = torch.zeros(len(keys), dtype=torch.uint64)
        store.readv(keys, outs, digests=told).wait(timeout=PATIENCE)
        assert told.tolist() == [digest(tensors[key]) for key in keys]


def test_tensors_for_digests_and_outcomes_have_to_fit(store: Store) -> None:
    tensors = {"a": numbered(1), "b": numbered(2)}
    with pytest.raises(ValueError, match="not written: 'c'"):
        store.writev(tensors, digests={"c": 1})
    for written in (torch.zeros(3, dtype=torch.bool), torch.zeros(2), torch.zeros((2, 1), dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"outcomes go into a tensor of .*ool"):
            store.writev(tensors, written=written)
    assert len(store) == 0
    store.writev(tensors).wait(timeout=PATIENCE)
    for told in (torch.zeros(1, dtype=torch.uint64), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"digests go into a tensor of .*(UInt64|uint64)"):
            store.readv(["a", "b"], digests=told)


# ---- keys


@pytest.mark.parametrize(
    "key", ["k", "a/../b", "/etc/passwd", "key with spaces", "クダ", "\n", "x" * 1024, "é" * 512, "%", "."]
)
def test_any_name_will_do(store: Store, key: str) -> None:
    store.write(key, numbered(3)).wait(timeout=PATIENCE)
    assert torch.equal(get(store, key), numbered(3))
    assert store.keys() == [key]
    assert key in store
    store.delete(key).wait(timeout=PATIENCE)
    assert store.keys() == []


@pytest.mark.parametrize("key", ["", "x" * 1025, "é" * 513, "a\0b", "\0", "\ud800"])
def test_what_is_no_name_is_refused(store: Store, key: str) -> None:
    asked: list[Callable[[], object]] = [
        lambda: store.write(key, numbered(1)),
        lambda: store.writev({"good": numbered(1), key: numbered(1)}),
        lambda: store.read(key),
        lambda: store.readv(["good", key]),
        lambda: store.delete(key),
        lambda: store.deletev(["good", key]),
        lambda: store.stat(key),
        lambda: store.find([key]),
        lambda: key in store,
    ]
    for call in asked:
        with pytest.raises(ValueError, match=r"key|NUL|surrogates"):
            call()
    for other in (b"bytes", 3, None):
        with pytest.raises(TypeError, match="a key is a str"):
            store.write(other, numbered(1))  # type: ignore[arg-type]
    assert len(store) == 0


def test_a_key_that_is_not_there(store: Store) -> None:
    store.write("there", numbered(1)).wait(timeout=PATIENCE)
    asked: list[CUDAFuture[Any]] = [
        store.read("nowhere"),
        store.readv(["there", "nowhere"]),
        store.delete("nowhere"),
        store.deletev(["there", "nowhere"]),
    ]
    for future in asked:
        error = future.exception(timeout=PATIENCE)
        assert isinstance(error, NotFoundError)
        assert isinstance(error, KeyError)
        assert "'nowhere'" in str(error)
    with pytest.raises(NotFoundError, match="'nowhere'"):
        store.stat("nowhere")
    assert "nowhere" not in store
    assert store.keys() == []  # what was there is deleted


def test_many_keys_are_found_and_listed_without_waiting(store: Store) -> None:
    keys = [f"{i}" for i in range(5000)]  # more than go into one request
    store.writev({key: torch.ones(1, i % 3, dtype=torch.int16) for i, key in enumerate(keys)}).wait(timeout=PATIENCE)
    entries = store.find([*keys, "nowhere", "7"]).wait(timeout=PATIENCE)
    assert entries[:-2] == [Entry(k, torch.int16, torch.Size([1, i % 3]), 2 * (i % 3)) for i, k in enumerate(keys)]
    assert entries[-2:] == [None, entries[7]]
    assert store.list_keys().wait(timeout=PATIENCE) == store.keys()
    assert sorted(store.keys()) == sorted(keys)
    assert store.find([]).wait(timeout=PATIENCE) == []


def test_keys_are_in_the_order_in_which_they_were_written_last(store: Store, kind: str) -> None:
    if "sharded" in kind:
        pytest.skip("it lists the keys of one shard after those of the other")
    for key in "abcab":
        store.write(key, numbered(1)).wait(timeout=PATIENCE)
    assert store.keys() == ["c", "a", "b"]
    store.deletev(["a", "c"]).wait(timeout=PATIENCE)
    assert store.keys() == ["b"]


def test_files_in_which_nothing_is_are_removed(store: Store, tmp_path: Path) -> None:
    store.write("large", numbered(LARGE * 8)).wait(timeout=PATIENCE)
    assert [*tmp_path.rglob("slab-*")]
    store.delete("large").wait(timeout=PATIENCE)
    assert store.trim() >= 4 * LARGE * 8
    assert [*tmp_path.rglob("slab-*")] == []
    assert store.trim() == 0


# ---- what does not fit


def test_another_dtype_or_shape_is_refused(store: Store) -> None:
    store.write("tensor", numbered(6)).wait(timeout=PATIENCE)
    for out in (torch.zeros(5), torch.zeros(2, 3), torch.zeros(6, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"tensor of .*loat.*\[6\]"):  # at the call, or when the bytes have come
            store.read("tensor", out).wait(timeout=PATIENCE)
    with pytest.raises(ValueError, match="1 keys, and 2 tensors"):
        store.readv(["tensor"], [torch.zeros(6), torch.zeros(6)])
    for call in (
        lambda: store.read("tensor", torch.zeros(6), "cpu"),
        lambda: store.readv(["tensor"], [torch.zeros(6)], "cpu"),
    ):
        with pytest.raises(ValueError, match="give it, or a device"):
            call()
    with pytest.raises(TypeError, match=r"torch\.Tensor is wanted"):
        store.write("tensor", [1, 2])  # type: ignore[arg-type]


# ---- its end


def test_flush_waits_for_what_was_asked_before_it(store: Store) -> None:
    writes = [store.write(f"{i}", numbered(LARGE, i)) for i in range(10)]
    store.flush().wait(timeout=PATIENCE)
    assert all(write.done() for write in writes)


@pytest.mark.parametrize("wrong", [None, -1, 1 << 64, 1.5, "7"], ids=str)
def test_a_digest_that_is_no_number_of_64_bits_is_refused(store: Store, wrong: Any) -> None:
    tensors = {"a": numbered(3), "b": numbered(4)}
    with pytest.raises(ValueError, match="'b'"):
        store.writev(tensors, digests={"a": digest(tensors["a"]), "b": wrong})
    assert store.list_keys().wait(timeout=PATIENCE) == []


def test_outcomes_and_digests_go_into_inference_tensors(store: Store) -> None:
    tensors = {f"{i}": numbered(100 * i + 1, i) for i in range(6)} | {"large": numbered(LARGE)}
    with torch.inference_mode():
        written = torch.zeros(len(tensors), dtype=torch.bool)
        found = torch.zeros(len(tensors), dtype=torch.uint64)
    store.writev(tensors, written=written).wait(timeout=PATIENCE)
    assert written.all()
    store.readv(tensors, digests=found).wait(timeout=PATIENCE)
    assert found.tolist() == [digest(tensor) for tensor in tensors.values()]


def test_a_closed_store_takes_nothing_more(store: Store) -> None:
    write = store.write("tensor", numbered(LARGE))
    with store as entered:
        assert entered is store
    assert write.done()
    asked: list[Callable[[], object]] = [
        lambda: store.write("tensor", numbered(1)),
        lambda: store.read("tensor"),
        lambda: store.delete("tensor"),
        store.flush,
        store.keys,
        lambda: "tensor" in store,
        lambda: len(store),
        lambda: store.stat("tensor"),
        lambda: store.find(["tensor"]),
        lambda: store.find([]),
        store.list_keys,
        store.trim,
    ]
    for call in asked:
        with pytest.raises(InvalidStateError, match="closed"):
            call()
    store.close()
